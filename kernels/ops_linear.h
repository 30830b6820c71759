// ops_linear.h: matrix products. One chain of fused multiply-adds a piece and output, whatever the path:
//   gemv     few rows: the weight streams through registers, several panels at once for independent chains
//   blocked  many rows: a piece of MK_PANELS panels is unpacked once into L1 and used by every row of the block

typedef const float *const *rows_in;

// Microkernels are specialised for their constant shape, except where compile time matters more (portable on x86).
#if RK_SPECIALISE
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#else
#define INLINE static __attribute__((noinline))
#define UNROLL
#endif

// acc over k [0, kn) of MR rows and NP panels, then added to tot: the piece's end.
// Arrays have constant bounds, not MR and NP: variable ones would live in memory even where both are known.
enum { MR_MAX = 12, NP_MAX = 8 };

INLINE void piece_end(const int MR, const int NP, v16 acc[MR_MAX][NP_MAX], float *tot, size_t ld, const float *scale, size_t scale_step) {
  UNROLL for (int r = 0; r < MR; r++)
    UNROLL for (int p = 0; p < NP; p++) {
      float *t = tot + (size_t)r * ld + (size_t)p * 16;
      v16 sum = v_load(t);
      v_store(t, scale ? v_fma(acc[r][p], v_load(scale + (size_t)p * scale_step), sum) : v_add(sum, acc[r][p]));
    }
}

INLINE void mk(const int MR, const int NP, rows_in rows, size_t k0, int kn, const float *b, float *tot, size_t ld,
               const float *scale, size_t scale_step) {
  v16 acc[MR_MAX][NP_MAX];
  const float *a[MR_MAX];
  UNROLL for (int r = 0; r < MR; r++) {
    a[r] = rows[r] + k0;
    UNROLL for (int p = 0; p < NP; p++) acc[r][p] = v_zero();
  }
  for (int k = 0; k < kn; k++) {
    v16 w[NP_MAX];
    UNROLL for (int p = 0; p < NP; p++) w[p] = v_load(b + p * RK_K_PIECE * 16 + k * 16);
    UNROLL for (int r = 0; r < MR; r++) {
      v16 x = v_set1(a[r][k]);
      UNROLL for (int p = 0; p < NP; p++) acc[r][p] = v_fma(x, w[p], acc[r][p]);
    }
  }
  piece_end(MR, NP, acc, tot, ld, scale, scale_step);
}

// Every row of a block against np unpacked panels of one piece.
static __attribute__((noinline)) void mk_rows(rows_in rows, int m, size_t k0, int kn, const float *b, int np, float *tot, size_t ld, const float *scale, size_t scale_step) {
#define TAKE(MR)                                                                                    \
  for (; m - r >= MR; r += MR) {                                                                    \
    float *t = tot + (size_t)r * ld;                                                                \
    if (np == MK_PANELS) mk(MR, MK_PANELS, rows + r, k0, kn, b, t, ld, scale, scale_step);          \
    else                                                                                            \
      for (int p = 0; p < np; p++)                                                                  \
        mk(MR, 1, rows + r, k0, kn, b + (size_t)p * RK_K_PIECE * 16, t + p * 16, ld, scale ? scale + (size_t)p * scale_step : NULL, scale_step); \
  }
  int r = 0;
#if MK_ROWS >= 12
  TAKE(12)
#endif
#if MK_ROWS >= 6
  TAKE(6)
#endif
  TAKE(4) TAKE(2) TAKE(1)
#undef TAKE
}

// A piece of one panel as FP32 [kn][16].
static void unpack_piece(const rk_weight *w, int panel, int piece, int kn, float *b) {
  const uint8_t *src = w->data + (size_t)panel * w->panel_bytes + (size_t)piece * RK_K_PIECE * (w->f32 ? 64 : 32);
  if (w->f32) {
    memcpy(b, src, (size_t)kn * 64);
    return;
  }
  int k = 0;
  for (; k + 2 <= kn; k += 2, src += 64) {
    v_prefetch(src + w->panel_bytes);   // the next panel's piece is unpacked next
    v_store(b + k * 16, v_pair_even(src));
    v_store(b + k * 16 + 16, v_pair_odd(src));
  }
  if (k < kn) v_store(b + k * 16, v_pair_even(src));
}

// Totals of a block: [rows][tot_ld].
static inline size_t tot_ld(int p0, int p1) { return rk_ld((p1 - p0) * 16); }

static void blocked(float *b, float *tot, rows_in rows, int m, const rk_weight *w, int p0, int p1) {
  size_t ld = tot_ld(p0, p1);
  for (int piece = 0; piece < w->pieces; piece++) {
    int kn = rk_min(RK_K_PIECE, w->k - piece * RK_K_PIECE);
    for (int p = p0; p < p1; p += MK_PANELS) {
      int np = rk_min(MK_PANELS, p1 - p);
      for (int i = 0; i < np; i++) unpack_piece(w, p + i, piece, kn, b + (size_t)i * RK_K_PIECE * 16);
      const float *scale = w->block_scale ? w->block_scale + ((size_t)p * (size_t)w->pieces + (size_t)piece) * 16 : NULL;
      mk_rows(rows, m, (size_t)piece * RK_K_PIECE, kn, b, np, tot + (size_t)(p - p0) * 16, ld, scale, (size_t)w->pieces * 16);
    }
  }
}

enum { STREAM_AHEAD = 1024 };   // bytes of a panel's stream that are asked for ahead of use

INLINE void gemv_panels(const int MR, const int NP, const int F32, rows_in rows, const rk_weight *w, int panel, float *tot, size_t ld) {
  const uint8_t *base = w->data + (size_t)panel * w->panel_bytes;
  for (int piece = 0; piece < w->pieces; piece++) {
    int kn = rk_min(RK_K_PIECE, w->k - piece * RK_K_PIECE), k = 0;
    const float *a[MR_MAX];
    v16 acc[MR_MAX][NP_MAX];
    UNROLL for (int r = 0; r < MR; r++) {
      a[r] = rows[r] + (size_t)piece * RK_K_PIECE;
      UNROLL for (int p = 0; p < NP; p++) acc[r][p] = v_zero();
    }
    const uint8_t *src = base + (size_t)piece * RK_K_PIECE * (F32 ? 64 : 32);
    if (F32) {
      for (; k < kn; k++, src += 64)
        UNROLL for (int p = 0; p < NP; p++) {
          const uint8_t *s = src + (size_t)p * w->panel_bytes;
          v_prefetch(s + STREAM_AHEAD);
          v16 x = v_load((const float *)s);
          UNROLL for (int r = 0; r < MR; r++) acc[r][p] = v_fma(v_set1(a[r][k]), x, acc[r][p]);
        }
    } else {
      for (; k + 2 <= kn; k += 2, src += 64)
        UNROLL for (int p = 0; p < NP; p++) {
          const uint8_t *s = src + (size_t)p * w->panel_bytes;
          v_prefetch(s + STREAM_AHEAD);
          v16 x = v_pair_even(s);
          UNROLL for (int r = 0; r < MR; r++) acc[r][p] = v_fma(v_set1(a[r][k]), x, acc[r][p]);
          x = v_pair_odd(s);
          UNROLL for (int r = 0; r < MR; r++) acc[r][p] = v_fma(v_set1(a[r][k + 1]), x, acc[r][p]);
        }
      if (k < kn)
        UNROLL for (int p = 0; p < NP; p++) {
          v16 x = v_pair_even(src + (size_t)p * w->panel_bytes);
          UNROLL for (int r = 0; r < MR; r++) acc[r][p] = v_fma(v_set1(a[r][k]), x, acc[r][p]);
        }
    }
    const float *scale = w->block_scale ? w->block_scale + ((size_t)panel * (size_t)w->pieces + (size_t)piece) * 16 : NULL;
    piece_end(MR, NP, acc, tot, ld, scale, (size_t)w->pieces * 16);
  }
}

#define GEMV(MR, NP)                                                                                         \
  static void gemv_##MR(rows_in rows, const rk_weight *w, int p0, int p1, float *tot) {                      \
    size_t ld = tot_ld(p0, p1);                                                                              \
    int p = p0;                                                                                              \
    for (; p + NP <= p1; p += NP) {                                                                          \
      if (w->f32) gemv_panels(MR, NP, 1, rows, w, p, tot + (size_t)(p - p0) * 16, ld);                       \
      else gemv_panels(MR, NP, 0, rows, w, p, tot + (size_t)(p - p0) * 16, ld);                              \
    }                                                                                                        \
    for (; p < p1; p++) {                                                                                    \
      if (w->f32) gemv_panels(MR, 1, 1, rows, w, p, tot + (size_t)(p - p0) * 16, ld);                        \
      else gemv_panels(MR, 1, 0, rows, w, p, tot + (size_t)(p - p0) * 16, ld);                               \
    }                                                                                                        \
  }
GEMV(1, GEMV_NP_1)
GEMV(2, GEMV_NP_2)
GEMV(3, GEMV_NP_3)
GEMV(4, GEMV_NP_4)
GEMV(5, GEMV_NP_5)
GEMV(6, GEMV_NP_6)
enum { GEMV_ROWS = 6 };

// Row scales, rounding, and only the outputs [n_lo, n_hi); outs[r] is where output n_lo goes.
static void linear_end(const float *tot, int m, const rk_weight *w, int p0, int p1, int n_lo, int n_hi, float *const *outs, int bf16) {
  size_t ld = tot_ld(p0, p1);
  for (int r = 0; r < m; r++)
    for (int p = p0; p < p1; p++) {
      int lo = rk_max(n_lo, p * 16), hi = rk_min(n_hi, p * 16 + 16);
      if (lo >= hi) continue;
      v16 y = v_load(tot + (size_t)r * ld + (size_t)(p - p0) * 16);
      if (w->row_scale) y = v_mul(y, v_load(w->row_scale + (size_t)p * 16));
      y = v_round_if(y, bf16);
      if (hi - lo == 16) {
        v_store(outs[r] + (lo - n_lo), y);
      } else {
        float t[16];
        v_store(t, y);
        memcpy(outs[r] + (lo - n_lo), t + (lo - p * 16), (size_t)(hi - lo) * sizeof *t);
      }
    }
}

// Up to RK_BLOCK_ROWS rows against panels [p0, p1), at most RK_BLOCK_PANELS of them. work: rk_linear_work bytes.
static __attribute__((noinline)) void linear_block(void *work, rows_in rows, int m, const rk_weight *w, int p0, int p1, int n_lo, int n_hi, float *const *outs, int bf16) {
  float *b = work, *tot = b + 2 * RK_K_PIECE * 16;
  memset(tot, 0, (size_t)m * tot_ld(p0, p1) * sizeof *tot);
  switch (m) {
  case 1: gemv_1(rows, w, p0, p1, tot); break;
  case 2: gemv_2(rows, w, p0, p1, tot); break;
  case 3: gemv_3(rows, w, p0, p1, tot); break;
  case 4: gemv_4(rows, w, p0, p1, tot); break;
  case 5: gemv_5(rows, w, p0, p1, tot); break;
  case 6: gemv_6(rows, w, p0, p1, tot); break;
  default: blocked(b, tot, rows, m, w, p0, p1);
  }
  linear_end(tot, m, w, p0, p1, n_lo, n_hi, outs, bf16);
}

static void task_linear(rk_plan *p, const rk_op *op, int i, int worker) {
  const rk_weight *w = op->w;
  int row0 = i % op->row_blocks * op->rows_per, m = rk_min(op->rows_per, p->batch->n_rows - row0);
  int p0 = i / op->row_blocks * op->panels_per, p1 = rk_min(w->panels, p0 + op->panels_per);
  const float *rows[RK_BLOCK_ROWS];
  float *outs[RK_BLOCK_ROWS];
  for (int r = 0; r < m; r++) rows[r] = rk_row(p, op->in, row0 + r) + op->in_col, outs[r] = rk_row(p, op->out, row0 + r) + op->col + p0 * 16;
  linear_block(rk_work(p, worker), rows, m, w, p0, p1, p0 * 16, rk_min(w->n, p1 * 16), outs, op->round);
}

static void task_logits(rk_plan *p, const rk_op *op, int i, int worker) {
  const rk_weight *w = op->w;
  const rk_batch *b = p->batch;
  int row0 = i % op->row_blocks * op->rows_per, m = rk_min(op->rows_per, b->n_out - row0);
  int p0 = i / op->row_blocks * op->panels_per, p1 = rk_min(w->panels, p0 + op->panels_per);
  const float *rows[RK_BLOCK_ROWS];
  float *outs[RK_BLOCK_ROWS];
  for (int r = 0; r < m; r++) rows[r] = rk_row(p, op->in, b->out_rows[row0 + r]), outs[r] = b->logits + (size_t)(row0 + r) * (size_t)w->n + (size_t)p0 * 16;
  linear_block(rk_work(p, worker), rows, m, w, p0, p1, p0 * 16, rk_min(w->n, p1 * 16), outs, 0);
}

// Task = (head, group of the head's panels, row block). Heads may share a panel; each writes only its own outputs.
static void task_heads(rk_plan *p, const rk_op *op, int i, int worker) {
  const rk_weight *w = op->w;
  int wout = w->n / op->heads, per_head = op->row_blocks * op->col_blocks;
  int h = i / per_head, group = i % per_head / op->row_blocks, row0 = i % op->row_blocks * op->rows_per;
  int m = rk_min(op->rows_per, p->batch->n_rows - row0);
  int last = (h + 1) * wout, p0 = h * wout / 16 + group * op->panels_per, p1 = rk_min(rk_ceil(last, 16), p0 + op->panels_per);
  if (p0 >= p1) return;
  int n_lo = rk_max(h * wout, p0 * 16), n_hi = rk_min(last, p1 * 16);
  const float *rows[RK_BLOCK_ROWS];
  float *outs[RK_BLOCK_ROWS];
  for (int r = 0; r < m; r++) rows[r] = rk_row(p, op->in, row0 + r) + (size_t)h * (size_t)w->k, outs[r] = rk_row(p, op->out, row0 + r) + n_lo;
  linear_block(rk_work(p, worker), rows, m, w, p0, p1, n_lo, n_hi, outs, op->round);
}
