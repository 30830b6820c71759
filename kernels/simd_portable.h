// simd_portable.h: the 16-lane vector in plain C. The other simd_*.h give the same functions and the same bits.
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct { float f[16]; } v16;
#define LANES_DO for (int i = 0; i < 16; i++)

static inline v16 v_set1(float x) { v16 r; LANES_DO r.f[i] = x; return r; }
static inline v16 v_zero(void) { return v_set1(0); }
static inline v16 v_load(const float *p) { v16 r; memcpy(&r, p, sizeof r); return r; }
static inline void v_store(float *p, v16 a) { memcpy(p, &a, sizeof a); }
static inline v16 v_add(v16 a, v16 b) { LANES_DO a.f[i] += b.f[i]; return a; }
static inline v16 v_sub(v16 a, v16 b) { LANES_DO a.f[i] -= b.f[i]; return a; }
static inline v16 v_mul(v16 a, v16 b) { LANES_DO a.f[i] *= b.f[i]; return a; }
static inline v16 v_div(v16 a, v16 b) { LANES_DO a.f[i] /= b.f[i]; return a; }
static inline v16 v_sqrt(v16 a) { LANES_DO a.f[i] = sqrtf(a.f[i]); return a; }
static inline v16 v_fma(v16 a, v16 b, v16 c) { LANES_DO c.f[i] = fmaf(a.f[i], b.f[i], c.f[i]); return c; }
// b where the comparison is false, NaN included: the order of arguments decides what a NaN does.
static inline v16 v_max(v16 a, v16 b) { LANES_DO a.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i]; return a; }
static inline v16 v_min(v16 a, v16 b) { LANES_DO a.f[i] = a.f[i] < b.f[i] ? a.f[i] : b.f[i]; return a; }
static inline v16 v_abs(v16 a) { LANES_DO a.f[i] = fabsf(a.f[i]); return a; }
static inline v16 v_neg(v16 a) { LANES_DO a.f[i] = -a.f[i]; return a; }
// 2^n for an integer n in [-126, 127]: the sum's low mantissa bits are n + 127.
static inline v16 v_pow2(v16 n) {
  LANES_DO {
    float t = n.f[i] + 12583039.0f;
    uint32_t u;
    memcpy(&u, &t, 4);
    u <<= 23;
    memcpy(&n.f[i], &u, 4);
  }
  return n;
}
static inline float v_sum(v16 a) {
  for (int w = 8; w; w >>= 1)
    for (int i = 0; i < w; i++) a.f[i] += a.f[i + w];
  return a.f[0];
}
static inline float v_hmax(v16 a) {
  for (int w = 8; w; w >>= 1)
    for (int i = 0; i < w; i++) a.f[i] = a.f[i] > a.f[i + w] ? a.f[i] : a.f[i + w];
  return a.f[0];
}
static inline float v_first(v16 a) { return a.f[0]; }

// BF16: pairs [16][2] of a packed panel, plain rows, rounding to nearest even (NaN stays NaN).
static inline v16 bits_v(const uint32_t *u) { v16 r; memcpy(&r, u, sizeof r); return r; }
static inline v16 v_pair_even(const void *p) {
  uint32_t u[16];
  memcpy(u, p, 64);
  LANES_DO u[i] <<= 16;
  return bits_v(u);
}
static inline v16 v_pair_odd(const void *p) {
  uint32_t u[16];
  memcpy(u, p, 64);
  LANES_DO u[i] &= 0xffff0000u;
  return bits_v(u);
}
static inline v16 v_load_bf16(const uint16_t *p) {
  uint32_t u[16];
  LANES_DO u[i] = (uint32_t)p[i] << 16;
  return bits_v(u);
}
static inline v16 v_round_bf16(v16 a) {
  uint32_t u[16];
  memcpy(u, &a, 64);
  LANES_DO {
    uint32_t nan = (u[i] & 0x7fffffffu) > 0x7f800000u, r = (u[i] + 0x7fffu + (u[i] >> 16 & 1)) & 0xffff0000u;
    u[i] = nan ? (u[i] | 0x400000u) & 0xffff0000u : r;
  }
  return bits_v(u);
}
static inline void v_store_bf16(uint16_t *p, v16 a) {   // a is rounded already
  uint32_t u[16];
  memcpy(u, &a, 64);
  LANES_DO p[i] = (uint16_t)(u[i] >> 16);
}
// out[c*16 + r] = in[r*ld + c] for 16 rows and 16 columns.
static inline void v_transpose(const float *in, int ld, float *out) {
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < 16; c++) out[c * 16 + r] = in[(size_t)r * (size_t)ld + (size_t)c];
}
static inline void v_prefetch(const void *p) { __builtin_prefetch(p); }
