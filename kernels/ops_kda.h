// ops_kda.h: a KDA layer between its projections (models.md 1.1). A task is one (sequence, head): convolution, gates and
// norms of RK_KDA_BLOCK rows at a time, then the recurrence over them with lanes along the value axis, a slice of
// KDA_VECS vectors at a time so that the slice of the state stays in L1.

typedef struct {
  float *raw;                // [conv-1 + block][3][d] raw rows, oldest first
  float *q, *k, *v, *decay, *o, *u;   // [block][d]; u is one row
  float beta[RK_KDA_BLOCK];
} kda_work;

static kda_work kda_split(void *work, int d, int conv) {
  float *f = work;
  kda_work w;
  size_t n = (size_t)RK_KDA_BLOCK * (size_t)d;
  w.raw = f, f += (size_t)(conv - 1 + RK_KDA_BLOCK) * 3 * (size_t)d;
  w.q = f, w.k = f + n, w.v = f + 2 * n, w.decay = f + 3 * n, w.o = f + 4 * n, w.u = f + 5 * n;
  return w;
}

// Convolution and silu of one channel group; taps in ascending time. w: [conv][d].
static inline void conv_row(const float *raw, const float *w, int conv, int d, float *out) {
  for (int c = 0; c < d; c += 16) {
    v16 acc = v_zero();
    for (int t = 0; t < conv; t++) acc = v_fma(v_load(w + (size_t)t * (size_t)d + c), v_load(raw + (size_t)t * 3 * (size_t)d + c), acc);
    v_store(out + c, v_silu(acc));
  }
}

static inline void l2norm(float *x, int d, float times) {
  v16 norm = v_set1(s_sqrt(sum_squares(x, d) + 1e-6f)), s = v_set1(times);
  for (int c = 0; c < d; c += 16) v_store(x + c, v_mul(v_div(v_load(x + c), norm), s));
}

// Row t of the block from the raw inputs; w.raw already holds its raw row at conv-1+t.
static void kda_inputs(const rk_op *op, const kda_work *w, int t, int head, const float *f, float *decay, float rate) {
  int d = op->d, conv = op->conv;
  size_t at = (size_t)t * (size_t)d;
  const float *raw = w->raw + (size_t)t * 3 * (size_t)d, *cw = op->p0;
  size_t head_w = (size_t)conv * (size_t)d, part = (size_t)op->heads * head_w;
  conv_row(raw, cw + (size_t)head * head_w, conv, d, w->q + at);
  conv_row(raw + d, cw + part + (size_t)head * head_w, conv, d, w->k + at);
  conv_row(raw + 2 * d, cw + 2 * part + (size_t)head * head_w, conv, d, w->v + at);
  l2norm(w->q + at, d, op->scale);
  l2norm(w->k + at, d, 1);
  const float *dt = op->p2 + (size_t)head * (size_t)d;
  for (int c = 0; c < d; c += 16) {
    v16 x = v_add(v_load(f + c), v_load(dt + c)), g;
    if (op->limit != 0) g = v_mul(v_set1(op->limit), v_sigmoid(v_mul(v_set1(rate), x)));
    else g = v_mul(v_set1(-rate), v_softplus(x));
    v_store(decay + c, v_exp(g));
  }
}

enum { KDA_FIRST, KDA_MIDDLE, KDA_LAST };

// One sweep over a slice of the state. FIRST decays for row t+1 and sums k . S; LAST adds k u of row t and sums q . S;
// MIDDLE does LAST of row t and FIRST of row t+1 in one pass. The values are those of separate passes.
INLINE void kda_sweep(const int MODE, const int NV, float *s, size_t ld, int d, const kda_work *w, size_t at, const v16 *u, v16 *o, v16 *kv,
                      int prefetch) {
  const float *q = w->q + at, *k = w->k + at, *next_k = k + d, *next_decay = w->decay + at + d;
  if (MODE == KDA_FIRST) next_k = k, next_decay = w->decay + at;
  v16 oo[KDA_VECS], acc[KDA_VECS], uu[KDA_VECS];
  UNROLL for (int j = 0; j < NV; j++) oo[j] = v_zero(), acc[j] = v_zero(), uu[j] = MODE == KDA_FIRST ? v_zero() : u[j];
  for (int i = 0; i < d; i++, s += ld) {
    if (MODE == KDA_FIRST && prefetch)
      for (int c = 0; c < d; c += 16) v_prefetch(s + 4 * ld + c);
    UNROLL for (int j = 0; j < NV; j++) {
      v16 x = v_load(s + 16 * j);
      if (MODE != KDA_FIRST) {
        x = v_fma(v_set1(k[i]), uu[j], x);
        oo[j] = v_fma(v_set1(q[i]), x, oo[j]);
      }
      if (MODE != KDA_LAST) {
        x = v_mul(x, v_set1(next_decay[i]));
        acc[j] = v_fma(v_set1(next_k[i]), x, acc[j]);
      }
      v_store(s + 16 * j, x);
    }
  }
  UNROLL for (int j = 0; j < NV; j++) o[j] = oo[j], kv[j] = acc[j];
}

// The recurrence of n prepared rows on value columns [c, c + 16 NV).
INLINE void kda_slice(const int NV, float *state, int d, const kda_work *w, int n, int c, int prefetch) {
  v16 u[KDA_VECS], o[KDA_VECS], kv[KDA_VECS];
  size_t ld = (size_t)d;
  kda_sweep(KDA_FIRST, NV, state + c, ld, d, w, 0, u, o, kv, prefetch);
  for (int t = 0; t < n; t++) {
    size_t at = (size_t)t * ld;
    v16 beta = v_set1(w->beta[t]);
    UNROLL for (int j = 0; j < NV; j++) u[j] = v_mul(beta, v_sub(v_load(w->v + at + c + 16 * j), kv[j]));
    if (t + 1 < n) kda_sweep(KDA_MIDDLE, NV, state + c, ld, d, w, at, u, o, kv, 0);
    else kda_sweep(KDA_LAST, NV, state + c, ld, d, w, at, u, o, kv, 0);
    UNROLL for (int j = 0; j < NV; j++) v_store(w->o + at + c + 16 * j, o[j]);
  }
}

static void kda_wide(float *state, int d, const kda_work *w, int n, int c, int prefetch) { kda_slice(KDA_VECS, state, d, w, n, c, prefetch); }
static void kda_narrow(float *state, int d, const kda_work *w, int n, int c, int prefetch) { kda_slice(1, state, d, w, n, c, prefetch); }

static void task_kda(rk_plan *p, const rk_op *op, int i, int worker) {
  int d = op->d, conv = op->conv, heads = op->heads, head = i % heads, bf16 = p->cls == RK_CLASS_BF16;
  const rk_seg *seg = &p->batch->segs[i / heads];
  kda_work w = kda_split(rk_work(p, worker), d, conv);
  uint8_t *slot = op->buf->data + (size_t)seg->slot * op->stride + op->off;
  float *state = (float *)slot + (size_t)head * (size_t)d * (size_t)d;
  uint8_t *rows = slot + (size_t)heads * (size_t)d * (size_t)d * sizeof(float);   // [heads][3][conv-1][d]
  size_t kept = (size_t)(conv - 1), hd = (size_t)heads * (size_t)d, col = (size_t)head * (size_t)d;
  float rate = s_exp(op->p1[head]);
  if (seg->pos0 == 0) {   // whatever the slot holds belongs to another sequence
    memset(state, 0, (size_t)d * (size_t)d * sizeof *state);
    memset(w.raw, 0, kept * 3 * (size_t)d * sizeof(float));
  } else {
    for (size_t part = 0; part < 3; part++)
      for (size_t t = 0; t < kept; t++)
        for (int c = 0; c < d; c += 16)
          v_store(w.raw + (t * 3 + part) * (size_t)d + c, v_load_elem(rows, (((size_t)head * 3 + part) * kept + t) * (size_t)d + (size_t)c, 16, bf16));
  }
  for (int done = 0; done < seg->rows;) {
    int n = rk_min(RK_KDA_BLOCK, seg->rows - done);
    for (int t = 0; t < n; t++) {
      int row = seg->row0 + done + t;
      const float *qkv = rk_row(p, op->in, row);
      float *raw = w.raw + (kept + (size_t)t) * 3 * (size_t)d;
      for (size_t part = 0; part < 3; part++)
        for (int c = 0; c < d; c += 16) v_store(raw + part * (size_t)d + c, v_round_if(v_load(qkv + part * hd + col + c), bf16));
      kda_inputs(op, &w, t, head, rk_row(p, op->in2, row) + col, w.decay + (size_t)t * (size_t)d, rate);
      w.beta[t] = s_sigmoid(rk_row(p, op->in3, row)[head]);
    }
    int c = 0;
    for (; c + 16 * KDA_VECS <= d; c += 16 * KDA_VECS) kda_wide(state, d, &w, n, c, c == 0 && done == 0);
    for (; c < d; c += 16) kda_narrow(state, d, &w, n, c, c == 0 && done == 0);
    for (int t = 0; t < n; t++) {
      int row = seg->row0 + done + t;
      const float *o = w.o + (size_t)t * (size_t)d, *gate = rk_row(p, op->in4, row) + col;
      float *out = rk_row(p, op->out, row) + col;
      v16 r = v_set1(inv_rms(o, d, op->eps));
      for (int k = 0; k < d; k += 16) {
        v16 y = v_mul(v_load(op->p3 + k), v_mul(v_load(o + k), r));
        v_store(out + k, v_round_if(v_mul(y, v_sigmoid(v_load(gate + k))), bf16));
      }
    }
    memmove(w.raw, w.raw + (size_t)n * 3 * (size_t)d, kept * 3 * (size_t)d * sizeof(float));
    done += n;
  }
  for (size_t part = 0; part < 3; part++)
    for (size_t t = 0; t < kept; t++)
      for (int c = 0; c < d; c += 16)
        v_store_elem(rows, (((size_t)head * 3 + part) * kept + t) * (size_t)d + (size_t)c, v_load(w.raw + (t * 3 + part) * (size_t)d + c), 16, bf16);
}
