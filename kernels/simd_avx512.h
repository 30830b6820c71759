// simd_avx512.h: the 16-lane vector as one AVX-512 register. Needs AVX-512F only, beside AVX2 and FMA.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef __m512 v16;

static inline v16 v_set1(float x) { return _mm512_set1_ps(x); }
static inline v16 v_zero(void) { return _mm512_setzero_ps(); }
static inline v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
static inline v16 v_add(v16 x, v16 y) { return _mm512_add_ps(x, y); }
static inline v16 v_sub(v16 x, v16 y) { return _mm512_sub_ps(x, y); }
static inline v16 v_mul(v16 x, v16 y) { return _mm512_mul_ps(x, y); }
static inline v16 v_div(v16 x, v16 y) { return _mm512_div_ps(x, y); }
static inline v16 v_max(v16 x, v16 y) { return _mm512_max_ps(x, y); }
static inline v16 v_min(v16 x, v16 y) { return _mm512_min_ps(x, y); }
static inline v16 v_sqrt(v16 x) { return _mm512_sqrt_ps(x); }
static inline v16 v_fma(v16 x, v16 y, v16 z) { return _mm512_fmadd_ps(x, y, z); }
static inline v16 v_abs(v16 x) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
}
static inline v16 v_neg(v16 x) {
  return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0x80000000u)));
}
static inline v16 v_pow2(v16 n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(_mm512_add_ps(n, _mm512_set1_ps(12583039.0f))), 23));
}
static inline __m256 high_half(v16 x) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)); }
static inline float v_sum(v16 x) {
  __m256 s = _mm256_add_ps(_mm512_castps512_ps256(x), high_half(x));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float v_hmax(v16 x) {
  __m256 s = _mm256_max_ps(_mm512_castps512_ps256(x), high_half(x));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float v_first(v16 x) { return _mm512_cvtss_f32(x); }

static inline v16 v_pair_even(const void *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
static inline v16 v_pair_odd(const void *p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000u)));
}
static inline v16 v_load_bf16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
static inline v16 v_round_bf16(v16 x) {
  __m512i u = _mm512_castps_si512(x), top = _mm512_set1_epi32((int)0xffff0000u);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
  return _mm512_castsi512_ps(_mm512_and_si512(r, top));
}
static inline void v_store_bf16(uint16_t *p, v16 x) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16)));
}
#include "simd_x86.h"
