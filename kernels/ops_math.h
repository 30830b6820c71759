// ops_math.h: elementary functions and reductions on 16 lanes. Only add, mul, fma, div, sqrt and bit operations, so
// every instruction set gives the same bits.

// Partial vectors: lanes from n on are +0, which changes no sum.
static inline v16 v_load_part(const float *p, int n) {
  float t[16] = {0};
  memcpy(t, p, (size_t)n * sizeof *p);
  return v_load(t);
}
static inline void v_store_part(float *p, v16 a, int n) {
  float t[16];
  v_store(t, a);
  memcpy(p, t, (size_t)n * sizeof *p);
}
static inline v16 v_load_n(const float *p, int n) { return n >= 16 ? v_load(p) : v_load_part(p, n); }
static inline void v_store_n(float *p, v16 a, int n) {
  if (n >= 16) v_store(p, a);
  else v_store_part(p, a, n);
}

// Cache elements: FP32 or BF16 values.
static inline v16 v_load_elem(const void *p, size_t at, int n, int bf16) {
  if (!bf16) return v_load_n((const float *)p + at, n);
  if (n >= 16) return v_load_bf16((const uint16_t *)p + at);
  uint16_t t[16] = {0};
  memcpy(t, (const uint16_t *)p + at, (size_t)n * 2);
  return v_load_bf16(t);
}
static inline void v_store_elem(void *p, size_t at, v16 a, int n, int bf16) {   // a is rounded already
  if (!bf16) {
    v_store_n((float *)p + at, a, n);
  } else if (n >= 16) {
    v_store_bf16((uint16_t *)p + at, a);
  } else {
    uint16_t t[16];
    v_store_bf16(t, a);
    memcpy((uint16_t *)p + at, t, (size_t)n * 2);
  }
}
static inline v16 v_round_if(v16 a, int bf16) { return bf16 ? v_round_bf16(a) : a; }

// exp: n = round(x / ln 2), a Taylor polynomial of degree 7 on |r| <= ln2/2 (error 0.05 ulp), and 2^n in two factors so
// that denormal results round once. NaN stays NaN: the constants come first in min and max.
static inline v16 v_exp(v16 x) {
  const v16 magic = v_set1(12582912.0f);
  x = v_min(v_set1(90.0f), v_max(v_set1(-110.0f), x));
  v16 n = v_sub(v_fma(x, v_set1(1.44269504f), magic), magic);
  v16 r = v_fma(n, v_set1(-0x1.62e43p-1f), x);
  r = v_fma(n, v_set1(0x1.05c61p-29f), r);
  v16 p = v_set1(1.0f / 5040);
  p = v_fma(p, r, v_set1(1.0f / 720));
  p = v_fma(p, r, v_set1(1.0f / 120));
  p = v_fma(p, r, v_set1(1.0f / 24));
  p = v_fma(p, r, v_set1(1.0f / 6));
  p = v_fma(p, r, v_set1(0.5f));
  p = v_fma(p, r, v_set1(1));
  p = v_fma(p, r, v_set1(1));
  v16 half = v_sub(v_fma(n, v_set1(0.5f), magic), magic);
  return v_mul(v_mul(p, v_pow2(half)), v_pow2(v_sub(n, half)));
}
static inline v16 v_sigmoid(v16 x) { return v_div(v_set1(1), v_add(v_set1(1), v_exp(v_neg(x)))); }
static inline v16 v_silu(v16 x) { return v_div(x, v_add(v_set1(1), v_exp(v_neg(x)))); }

// log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)); log1p(e) = 2 atanh(e / (2 + e)), whose argument is at most 1/3.
static inline v16 v_softplus(v16 x) {
  v16 e = v_exp(v_neg(v_abs(x)));
  v16 s = v_div(e, v_add(v_set1(2), e)), q = v_mul(s, s);
  v16 p = v_set1(1.0f / 17);
  p = v_fma(p, q, v_set1(1.0f / 15));
  p = v_fma(p, q, v_set1(1.0f / 13));
  p = v_fma(p, q, v_set1(1.0f / 11));
  p = v_fma(p, q, v_set1(1.0f / 9));
  p = v_fma(p, q, v_set1(1.0f / 7));
  p = v_fma(p, q, v_set1(1.0f / 5));
  p = v_fma(p, q, v_set1(1.0f / 3));
  p = v_fma(p, q, v_set1(1));
  return v_add(v_max(v_zero(), x), v_mul(v_add(s, s), p));
}
static inline float s_exp(float x) { return v_first(v_exp(v_set1(x))); }
static inline float s_sigmoid(float x) { return v_first(v_sigmoid(v_set1(x))); }
static inline float s_sqrt(float x) { return v_first(v_sqrt(v_set1(x))); }

// Sums in the fixed 16-lane order.
static inline float sum_squares(const float *x, int n) {
  v16 acc = v_zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    v16 v = v_load(x + i);
    acc = v_fma(v, v, acc);
  }
  if (i < n) {
    v16 v = v_load_part(x + i, n - i);
    acc = v_fma(v, v, acc);
  }
  return v_sum(acc);
}
static inline float inv_rms(const float *x, int n, float eps) { return 1.0f / s_sqrt(sum_squares(x, n) / (float)n + eps); }

// y = (x * r) * w, rounded to BF16 or not.
static inline void norm_apply(const float *x, const float *w, int n, float r, float *y, int bf16) {
  v16 rr = v_set1(r);
  for (int i = 0; i < n; i += 16) {
    v16 v = v_mul(v_mul(v_load_n(x + i, n - i), rr), v_load_n(w + i, n - i));
    v_store_n(y + i, v_round_if(v, bf16), n - i);
  }
}
