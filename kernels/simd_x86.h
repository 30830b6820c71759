// simd_x86.h: what the AVX2 and the AVX-512 builds share. Included by both, inside their target pragma.
static inline void transpose8(const float *in, int ld, float *out) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(in + (size_t)i * (size_t)ld);
  for (int i = 0; i < 8; i += 2) t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44), r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44), r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(out + i * 16, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * 16, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
static inline void v_transpose(const float *in, int ld, float *out) {
  for (int r = 0; r < 16; r += 8)
    for (int c = 0; c < 16; c += 8) transpose8(in + (size_t)r * (size_t)ld + c, ld, out + c * 16 + r);
}
static inline void v_prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
