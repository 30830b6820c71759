// simd_avx2.h: the 16-lane vector as two AVX2 registers; lanes 0-7 in a, 8-15 in b.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef struct { __m256 a, b; } v16;
#define BOTH(f) (v16){f(x.a, y.a), f(x.b, y.b)}

static inline v16 v_set1(float x) { __m256 r = _mm256_set1_ps(x); return (v16){r, r}; }
static inline v16 v_zero(void) { return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline v16 v_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void v_store(float *p, v16 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
static inline v16 v_add(v16 x, v16 y) { return BOTH(_mm256_add_ps); }
static inline v16 v_sub(v16 x, v16 y) { return BOTH(_mm256_sub_ps); }
static inline v16 v_mul(v16 x, v16 y) { return BOTH(_mm256_mul_ps); }
static inline v16 v_div(v16 x, v16 y) { return BOTH(_mm256_div_ps); }
static inline v16 v_max(v16 x, v16 y) { return BOTH(_mm256_max_ps); }
static inline v16 v_min(v16 x, v16 y) { return BOTH(_mm256_min_ps); }
static inline v16 v_sqrt(v16 x) { return (v16){_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
static inline v16 v_fma(v16 x, v16 y, v16 z) { return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline v16 v_abs(v16 x) {
  __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return (v16){_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
static inline v16 v_neg(v16 x) {
  __m256 m = _mm256_set1_ps(-0.0f);
  return (v16){_mm256_xor_ps(x.a, m), _mm256_xor_ps(x.b, m)};
}
static inline __m256 half_pow2(__m256 n) {
  __m256i t = _mm256_castps_si256(_mm256_add_ps(n, _mm256_set1_ps(12583039.0f)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(t, 23));
}
static inline v16 v_pow2(v16 n) { return (v16){half_pow2(n.a), half_pow2(n.b)}; }
static inline float v_sum(v16 x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float v_hmax(v16 x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float v_first(v16 x) { return _mm256_cvtss_f32(x.a); }

static inline __m256 shl16(__m256i u) { return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16)); }
static inline v16 v_pair_even(const void *p) {
  return (v16){shl16(_mm256_loadu_si256(p)), shl16(_mm256_loadu_si256((const __m256i *)p + 1))};
}
static inline v16 v_pair_odd(const void *p) {
  __m256i m = _mm256_set1_epi32((int)0xffff0000u);
  return (v16){_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(p), m)),
               _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)p + 1), m))};
}
static inline v16 v_load_bf16(const uint16_t *p) {
  return (v16){shl16(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p))),
               shl16(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p + 1)))};
}
static inline __m256 half_round(__m256 x) {
  __m256i u = _mm256_castps_si256(x), top = _mm256_set1_epi32((int)0xffff0000u);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  r = _mm256_blendv_epi8(r, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  return _mm256_castsi256_ps(_mm256_and_si256(r, top));
}
static inline v16 v_round_bf16(v16 x) { return (v16){half_round(x.a), half_round(x.b)}; }
static inline void v_store_bf16(uint16_t *p, v16 x) {
  __m256i a = _mm256_srli_epi32(_mm256_castps_si256(x.a), 16), b = _mm256_srli_epi32(_mm256_castps_si256(x.b), 16);
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
}
#include "simd_x86.h"
