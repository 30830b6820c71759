// pack.c: weights. Decoding of the storage types and packing in panels of 16 rows.
#include <stdlib.h>
#include "internal.h"

static inline float bits_f32(uint32_t u) {
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}

static inline uint32_t f32_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof u);
  return u;
}

// E4M3 (bias 7, no infinities, 0x7f and 0xff are NaN); every value is a BF16 value.
static float e4m3(uint8_t b) {
  int exponent = b >> 3 & 15, mantissa = b & 7;
  float v;
  if (exponent == 15 && mantissa == 7) v = bits_f32(0x7fc00000u);
  else if (exponent == 0) v = (float)mantissa * 0x1p-9f;
  else v = bits_f32((uint32_t)(exponent + 120) << 23 | (uint32_t)mantissa << 20);
  return b & 0x80 ? -v : v;
}

static float e2m1(uint8_t nibble) {
  static const float grid[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  float v = grid[nibble & 7];
  return nibble & 8 ? -v : v;
}

static inline uint16_t bf16_exact(float f) { return (uint16_t)(f32_bits(f) >> 16); }

rk_weight *rk_weight_new(rk_device *d, int n, int k, int f32) {
  enum { SIDE_MAX = 1 << 26 };
  if (!d || n <= 0 || k <= 0 || n > SIDE_MAX || k > SIDE_MAX) return rk_fail(RK_EINVAL, "weight: shape [%d][%d]", n, k), NULL;
  rk_weight *w = calloc(1, sizeof *w);
  if (!w) return rk_fail(RK_ENOMEM, "weight: no memory"), NULL;
  atomic_init(&w->refs, 1);
  w->dev = d, w->n = n, w->k = k, w->f32 = f32 != 0;
  w->panels = rk_ceil(n, RK_LANES), w->pieces = rk_ceil(k, RK_K_PIECE);
  w->panel_bytes = f32 ? (size_t)k * 64 : (size_t)rk_ceil(k, 2) * 64;
  w->mapped = w->panel_bytes * (size_t)w->panels;
  w->data = rk_alloc(w->mapped);
  w->filled = calloc((size_t)n, 1);
  if (!w->data || !w->filled) {
    rk_release(w->data, w->mapped);
    free(w->filled);
    free(w);
    return rk_fail(RK_ENOMEM, "weight: no memory for [%d][%d]", n, k), NULL;
  }
  rk_device_retain(d);
  return w;
}

void rk_weight_retain(rk_weight *w) { atomic_fetch_add(&w->refs, 1); }

static size_t row_scale_bytes(const rk_weight *w) { return (size_t)w->panels * RK_LANES * sizeof(float); }
static size_t block_scale_bytes(const rk_weight *w) { return row_scale_bytes(w) * (size_t)w->pieces; }

void rk_weight_free(rk_weight *w) {
  if (!w || atomic_fetch_sub(&w->refs, 1) != 1) return;
  rk_release(w->data, w->mapped);
  rk_release(w->row_scale, row_scale_bytes(w));
  rk_release(w->block_scale, block_scale_bytes(w));
  free(w->filled);
  rk_device_drop(w->dev);
  free(w);
}

size_t rk_weight_bytes(const rk_weight *w) {
  if (!w) return 0;
  return w->mapped + (w->row_scale ? row_scale_bytes(w) : 0) + (w->block_scale ? block_scale_bytes(w) : 0);
}

int rk_weight_complete(const rk_weight *w) { return memchr(w->filled, 0, (size_t)w->n) == NULL; }

// Scales beside the values start as 1, which changes nothing: total * 1, fma(piece, 1, total).
static float *ones(size_t bytes) {
  float *s = rk_alloc(bytes);
  for (size_t i = 0; s && i < bytes / sizeof *s; i++) s[i] = 1;
  return s;
}

static rk_status make_scales(rk_weight *w, rk_dtype t, float **rows, float **blocks) {
  rk_status st = RK_OK;
  pthread_mutex_lock(&w->dev->lock);
  if (t == RK_DT_FP8_BLOCK && !w->block_scale && !(w->block_scale = ones(block_scale_bytes(w)))) st = RK_ENOMEM;
  if ((t == RK_DT_FP8 || t == RK_DT_NVFP4) && !w->row_scale && !(w->row_scale = ones(row_scale_bytes(w)))) st = RK_ENOMEM;
  *rows = w->row_scale, *blocks = w->block_scale;
  pthread_mutex_unlock(&w->dev->lock);
  return st ? rk_fail(st, "weight_fill: no memory for scales") : RK_OK;
}

static rk_status check_part(const rk_weight *w, int row0, const rk_matrix *m) {
  if (!w || !m || !m->data) return rk_fail(RK_EINVAL, "weight_fill: weight, part or data is null");
  if (row0 < 0 || m->n <= 0 || m->n > w->n - (row0 < w->n ? row0 : w->n)) return rk_fail(RK_EINVAL, "weight_fill: rows [%d, +%d) outside %d", row0, m->n, w->n);
  if (m->k != w->k) return rk_fail(RK_EINVAL, "weight_fill: k is %d, the weight's is %d", m->k, w->k);
  switch (m->dtype) {
  case RK_DT_F32:
    if (!w->f32) return rk_fail(RK_EINVAL, "weight_fill: an F32 part needs an F32 weight");
    return RK_OK;
  case RK_DT_BF16: return RK_OK;
  case RK_DT_FP8_BLOCK: break;
  case RK_DT_FP8:
    if (m->scale_rows != 1 && m->scale_rows != m->n) return rk_fail(RK_EINVAL, "weight_fill: scale_rows is %d, want 1 or %d", m->scale_rows, m->n);
    break;
  case RK_DT_NVFP4:
    if (m->k % 16) return rk_fail(RK_EINVAL, "weight_fill: NVFP4 needs k in groups of 16, k is %d", m->k);
    if (!m->scale8) return rk_fail(RK_EINVAL, "weight_fill: scale8 is null");
    break;
  default: return rk_fail(RK_EUNSUPPORTED, "weight_fill: dtype %d", (int)m->dtype);
  }
  if (w->f32) return rk_fail(RK_EINVAL, "weight_fill: a scaled part cannot fill an F32 weight");
  if (!m->scale) return rk_fail(RK_EINVAL, "weight_fill: scale is null");
  return RK_OK;
}

typedef struct {
  float e4m3[256];
  uint16_t bf16[256];        // the same as BF16 bits
} fp8_table;

static void fill_table(fp8_table *t) {
  for (int i = 0; i < 256; i++) t->e4m3[i] = e4m3((uint8_t)i), t->bf16[i] = bf16_exact(t->e4m3[i]);
}

// The BF16 bits of element (row, col) of a part.
static inline uint16_t part_bf16(const rk_matrix *m, const fp8_table *t, size_t row, size_t col) {
  size_t k = (size_t)m->k;
  switch (m->dtype) {
  case RK_DT_BF16: return ((const uint16_t *)m->data)[row * k + col];
  case RK_DT_NVFP4: {
    uint8_t pair = ((const uint8_t *)m->data)[row * (k / 2) + col / 2];
    float scale = t->e4m3[m->scale8[row * (k / 16) + col / 16] & 0x7f];
    return bf16_exact(e2m1(col & 1 ? pair >> 4 : pair & 15) * scale);
  }
  default: return t->bf16[((const uint8_t *)m->data)[row * k + col]];
  }
}

// Packs part rows [r0, r1) that lie in one panel, column by column so that writes stream.
static void pack_panel(rk_weight *w, int row0, const rk_matrix *m, const fp8_table *t, int r0, int r1) {
  int row = row0 + r0, lane = row % RK_LANES, n = r1 - r0, k = m->k;
  uint8_t *panel = w->data + (size_t)(row / RK_LANES) * w->panel_bytes;
  if (w->f32) {
    float *out = (float *)panel + lane;
    for (int c = 0; c < k; c++)
      for (int r = 0; r < n; r++) {
        size_t at = (size_t)(r0 + r) * (size_t)k + (size_t)c;
        out[(size_t)c * RK_LANES + (size_t)r] = m->dtype == RK_DT_F32 ? ((const float *)m->data)[at] : bits_f32((uint32_t)((const uint16_t *)m->data)[at] << 16);
      }
    return;
  }
  uint16_t *out = (uint16_t *)panel + 2 * lane;
#define PACK(DT)                                                                                                       \
  case DT: {                                                                                                           \
    rk_matrix mm = *m;                                                                                                 \
    mm.dtype = DT;                                                                                                     \
    for (int c = 0; c < k; c++)                                                                                        \
      for (int r = 0; r < n; r++)                                                                                      \
        out[(size_t)(c / 2) * 2 * RK_LANES + 2 * (size_t)r + (c & 1)] = part_bf16(&mm, t, (size_t)(r0 + r), (size_t)c);  \
    break;                                                                                                             \
  }
  switch (m->dtype) {
    PACK(RK_DT_BF16)
    PACK(RK_DT_NVFP4)
    PACK(RK_DT_FP8)
  default: PACK(RK_DT_FP8_BLOCK)
  }
#undef PACK
}

rk_status rk_weight_fill(rk_weight *w, int row0, const rk_matrix *m) {
  rk_status st = check_part(w, row0, m);
  if (st) return st;
  float *rows, *blocks;      // other parts may be filled at the same time
  st = make_scales(w, m->dtype, &rows, &blocks);
  if (st) return st;
  fp8_table t;
  fill_table(&t);
  for (int r0 = 0; r0 < m->n;) {
    int r1 = rk_min(m->n, r0 + RK_LANES - (row0 + r0) % RK_LANES);
    pack_panel(w, row0, m, &t, r0, r1);
    r0 = r1;
  }
  for (int r = 0; r < m->n; r++) {
    size_t row = (size_t)(row0 + r);
    if (rows) rows[row] = m->dtype == RK_DT_NVFP4 ? m->scale[0] : m->dtype == RK_DT_FP8 ? m->scale[m->scale_rows == 1 ? 0 : r] : 1;
    for (int p = 0; blocks && p < w->pieces; p++)
      blocks[(row / RK_LANES * (size_t)w->pieces + (size_t)p) * RK_LANES + row % RK_LANES] =
          m->dtype == RK_DT_FP8_BLOCK ? m->scale[(size_t)(r / 128) * (size_t)w->pieces + (size_t)p] : 1;
    w->filled[row] = 1;
  }
  return RK_OK;
}

rk_status rk_weight_row(const rk_weight *w, int row, float *out) {
  if (!w || !out || row < 0 || row >= w->n) return rk_fail(RK_EINVAL, "weight_row: row %d outside %d", row, w ? w->n : 0);
  const uint8_t *panel = w->data + (size_t)(row / RK_LANES) * w->panel_bytes;
  int lane = row % RK_LANES;
  for (int c = 0; c < w->k; c++) {
    if (w->f32) out[c] = ((const float *)panel)[(size_t)c * RK_LANES + (size_t)lane];
    else out[c] = bits_f32((uint32_t)((const uint16_t *)panel)[(size_t)(c / 2) * 2 * RK_LANES + 2 * (size_t)lane + (size_t)(c & 1)] << 16);
    if (w->block_scale) out[c] *= w->block_scale[((size_t)(row / RK_LANES) * (size_t)w->pieces + (size_t)(c / RK_K_PIECE)) * RK_LANES + (size_t)lane];
    if (w->row_scale) out[c] *= w->row_scale[row];
  }
  return RK_OK;
}
