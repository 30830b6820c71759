// ops_mla.h: the latent cache, the k-pool indexer and absorbed attention (models.md 1.4, 1.6).

static void layer_norm(const float *x, const float *w, const float *b, int n, float eps, float *y) {
  v16 sum = v_zero(), sq = v_zero();
  for (int c = 0; c < n; c += 16) sum = v_add(sum, v_load_n(x + c, n - c));
  v16 mean = v_set1(v_sum(sum) / (float)n);
  for (int c = 0; c < n; c += 16) {
    v16 v = v_sub(v_load_n(x + c, n - c), mean);
    v_store_n(y + c, v, n - c);
    v = v_load_n(y + c, n - c);   // lanes past the end count nothing
    sq = v_fma(v, v, sq);
  }
  v16 r = v_set1(1.0f / s_sqrt(v_sum(sq) / (float)n + eps));
  for (int c = 0; c < n; c += 16)
    v_store_n(y + c, v_fma(v_mul(v_load_n(y + c, n - c), r), v_load_n(w + c, n - c), v_load_n(b + c, n - c)), n - c);
}

static void store_elems(void *dst, size_t at, const float *x, int n, int bf16) {
  for (int c = 0; c < n; c += 16) v_store_elem(dst, at + (size_t)c, v_round_if(v_load_n(x + c, n - c), bf16), n - c, bf16);
}

static void task_mla_store(rk_plan *p, const rk_op *op, int i, int worker) {
  float *t = rk_work(p, worker);
  const rk_mla_cache *c = &op->cache;
  int bf16 = p->cls == RK_CLASS_BF16;
  rk_slab slab;
  rk_slab_layout(c->latent, c->index_dim, c->pool, rk_elem(p->cls), &slab);
  ROWS_DO(row) {
    const rk_seg *s = &p->batch->segs[p->row_seg[row]];
    int pos = rk_pos(p, row);
    if (pos < s->write_from) continue;
    uint8_t *page = rk_page(c, rk_page_id(p, s, pos));
    size_t at = (size_t)(pos % RK_PAGE_TOKENS);
    const float *kv = rk_row(p, op->in, row);
    norm_apply(kv, op->p0, c->latent, inv_rms(kv, c->latent, op->eps), t, bf16);
    store_elems(page + slab.latent, at * (size_t)c->latent, t, c->latent, bf16);
    if (op->in2 < 0) continue;
    layer_norm(rk_row(p, op->in2, row), op->p1, op->p2, c->index_dim, op->eps2, t);
    store_elems(page + slab.key, at * (size_t)c->index_dim, t, c->index_dim, bf16);
    store_elems(page + slab.gate, at * (size_t)c->index_dim, rk_row(p, op->in3, row), c->index_dim, bf16);
  }
}

// A task is one sequence: pools whose last token is one of the rows that write.
static void task_mla_pool(rk_plan *p, const rk_op *op, int i, int worker) {
  (void)worker;
  const rk_mla_cache *c = &op->cache;
  const rk_seg *s = &p->batch->segs[i];
  int bf16 = p->cls == RK_CLASS_BF16, di = c->index_dim, pool = c->pool, per_page = RK_PAGE_TOKENS / pool;
  rk_slab slab;
  rk_slab_layout(c->latent, di, pool, rk_elem(p->cls), &slab);
  int from = rk_max(s->pos0, s->write_from), end = s->pos0 + s->rows;
  for (int j = from / pool; (j + 1) * pool <= end; j++) {
    uint8_t *page = rk_page(c, rk_page_id(p, s, j * pool));
    size_t first = (size_t)(j * pool % RK_PAGE_TOKENS);
    for (int ch = 0; ch < di; ch += 16) {
      int n = rk_min(16, di - ch);
      v16 top = v_zero(), sum = v_zero(), acc = v_zero();
      for (int t = 0; t < pool; t++) {
        v16 x = v_add(v_load_elem(page + slab.gate, (first + (size_t)t) * (size_t)di + (size_t)ch, n, bf16), v_load_n(op->p0 + (size_t)t * (size_t)di + ch, n));
        top = t ? v_max(top, x) : x;
      }
      for (int pass = 0; pass < 2; pass++)
        for (int t = 0; t < pool; t++) {
          size_t at = (first + (size_t)t) * (size_t)di + (size_t)ch;
          v16 x = v_add(v_load_elem(page + slab.gate, at, n, bf16), v_load_n(op->p0 + (size_t)t * (size_t)di + ch, n));
          x = v_exp(v_sub(x, top));
          if (!pass) sum = v_add(sum, x);
          else acc = v_fma(v_div(x, sum), v_load_elem(page + slab.key, at, n, bf16), acc);
        }
      float out[16];
      v_store(out, v_round_if(acc, bf16));
      for (int l = 0; l < n; l++) {
        size_t at = (size_t)(ch + l) * (size_t)per_page + (size_t)(j % per_page);
        uint32_t u;
        memcpy(&u, out + l, 4);
        if (bf16) ((uint16_t *)(page + slab.pooled))[at] = (uint16_t)(u >> 16);
        else ((float *)(page + slab.pooled))[at] = out[l];
      }
    }
  }
}

// Larger is better; -0 equals +0. A NaN sorts above +inf or below -inf by its sign: any fixed place will do.
static inline uint32_t order_key(float f) {
  uint32_t u;
  f += 0.0f;   // -0 becomes +0
  memcpy(&u, &f, 4);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The k best of n scores, ascending indices: those above the k-th best value, and the first ones equal to it.
static int select_best(const float *score, int n, int k, int32_t *out) {
  uint32_t prefix = 0, mask = 0;
  int need = k;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int count[256] = {0};
    for (int i = 0; i < n; i++) {
      uint32_t u = order_key(score[i]);
      if ((u & mask) == prefix) count[u >> shift & 255]++;
    }
    int digit = 255;
    for (; digit > 0 && count[digit] < need; digit--) need -= count[digit];
    prefix |= (uint32_t)digit << shift, mask |= 255u << shift;
  }
  int got = 0;
  for (int i = 0; i < n && got < k; i++) {
    uint32_t u = order_key(score[i]);
    if (u > prefix || (u == prefix && need-- > 0)) out[got++] = i;
  }
  return got;
}

// Scores of pools [0, pools) for one row. dots: [heads][16]; tile: one piece of 16 pooled keys.
static void index_scores(const rk_plan *p, const rk_op *op, const rk_seg *s, int row, int pools, float *score, float *dots, float *tile) {
  const rk_mla_cache *c = &op->cache;
  int bf16 = p->cls == RK_CLASS_BF16, di = c->index_dim, per_page = RK_PAGE_TOKENS / c->pool, heads = op->heads;
  const float *q = rk_row(p, op->in, row), *wts = rk_row(p, op->in2, row);
  v16 key_scale = v_set1(op->scale);
  rk_slab slab;
  rk_slab_layout(c->latent, di, c->pool, rk_elem(p->cls), &slab);
  const float *rows[RK_BLOCK_ROWS];
  for (int j0 = 0; j0 < pools;) {
    int in_page = j0 % per_page, n = rk_min(16, rk_min(per_page - in_page, pools - j0));
    const uint8_t *keys = rk_page(c, rk_page_id(p, s, j0 * c->pool)) + slab.pooled;
    v16 total = v_zero();
    for (int h0 = 0; h0 < heads; h0 += RK_BLOCK_ROWS) {
      int hn = rk_min(RK_BLOCK_ROWS, heads - h0);
      memset(dots, 0, (size_t)hn * 64);
      for (int h = 0; h < hn; h++) rows[h] = q + (size_t)(h0 + h) * (size_t)di;
      for (int k0 = 0; k0 < di; k0 += RK_K_PIECE) {
        int kn = rk_min(RK_K_PIECE, di - k0);
        for (int k = 0; k < kn; k++)
          v_store(tile + k * 16, v_load_elem(keys, (size_t)(k0 + k) * (size_t)per_page + (size_t)in_page, n, bf16));
        mk_rows(rows, hn, (size_t)k0, kn, tile, 1, dots, 16, NULL, 0);
      }
      for (int h = 0; h < hn; h++) {
        v16 dot = v_mul(v_load(dots + h * 16), key_scale);
        total = v_fma(v_set1(wts[h0 + h] * op->limit), v_max(v_zero(), dot), total);
      }
    }
    v_store_n(score + j0, total, n);
    j0 += n;
  }
}

static void task_mla_index(rk_plan *p, const rk_op *op, int i, int worker) {
  float *tile = rk_work(p, worker), *dots = tile + RK_K_PIECE * 16, *score = dots + RK_BLOCK_ROWS * 16;
  int pool = op->cache.pool, best = op->topk / pool;
  ROWS_DO(row) {
    const rk_seg *s = &p->batch->segs[p->row_seg[row]];
    int tokens = rk_pos(p, row) + 1, pools = tokens / pool, n = 0;
    int32_t *sel = rk_irow(p, op->out, row), *list = sel + 1;
    if (pools <= best) {
      for (; n < pools * pool; n++) list[n] = n;
    } else {
      index_scores(p, op, s, row, pools, score, dots, tile);
      int got = select_best(score, pools, best, list);
      for (int j = got - 1; j >= 0; j--)   // in place, from the end: index j spreads to [j*pool, (j+1)*pool)
        for (int t = pool - 1, at = list[j] * pool; t >= 0; t--) list[j * pool + t] = at + t;
      n = got * pool;
    }
    if (op->flag)
      for (int pos = pools * pool; pos < tokens; pos++) list[n++] = pos;
    sel[0] = n;
  }
}

typedef struct {
  float *tile;               // [128][16]
  float *gather;             // [16][128]
  float *score;              // [heads][128]
  float *part;               // [heads][16]
  float *out;                // [heads][latent]
  float *top, *sum, *keep, *take;   // [heads]
} attend_work;

// Scores of one split: dots of hn query rows with n latents, times scale, in w->score; lanes run over entries.
static void attend_scores(const attend_work *w, rows_in q, int hn, const uint8_t *const *lat, int n, int latent, float scale, int bf16) {
  memset(w->score, 0, (size_t)hn * RK_ATTN_SPLIT * sizeof(float));
  for (int e0 = 0; e0 < n; e0 += 16)
    for (int k0 = 0; k0 < latent; k0 += RK_K_PIECE) {
      int kn = rk_min(RK_K_PIECE, latent - k0);
      for (int e = 0; e < 16; e++)
        for (int k = 0; k < kn; k += 16)
          v_store(w->gather + e * RK_K_PIECE + k, e0 + e < n ? v_load_elem(lat[e0 + e], (size_t)(k0 + k), rk_min(16, kn - k), bf16) : v_zero());
      for (int k = 0; k < kn; k += 16) v_transpose(w->gather + k, RK_K_PIECE, w->tile + k * 16);
      mk_rows(q, hn, (size_t)k0, kn, w->tile, 1, w->score + e0, RK_ATTN_SPLIT, NULL, 0);
    }
  v16 s = v_set1(scale);
  for (int h = 0; h < hn; h++)
    for (int e = 0; e < n; e += 16) {
      float *x = w->score + h * RK_ATTN_SPLIT + e;
      v_store(x, v_mul(v_load(x), s));
    }
}

// Turns scores into exp(score - max) and folds (max, sum) into the running ones: keep and take are the factors of the
// sums so far and of this split.
static void attend_softmax(const attend_work *w, int hn, int n, int first) {
  for (int h = 0; h < hn; h++) {
    float *x = w->score + h * RK_ATTN_SPLIT;
    float top = x[0];
    for (int e = 1; e < n; e++) top = x[e] > top ? x[e] : top;
    v16 sum = v_zero();
    for (int e = 0; e < n; e += 16) {
      v_store_n(x + e, v_exp(v_sub(v_load(x + e), v_set1(top))), n - e);
      sum = v_add(sum, v_load_n(x + e, n - e));
    }
    float total = v_sum(sum);
    if (first) {
      w->top[h] = top, w->sum[h] = total, w->keep[h] = 0, w->take[h] = 1;
      continue;
    }
    float old = w->top[h], now = top > old ? top : old;
    w->keep[h] = s_exp(old - now), w->take[h] = s_exp(top - now);
    w->sum[h] = fmaf(total, w->take[h], w->sum[h] * w->keep[h]);
    w->top[h] = now;
  }
}

// out = out * keep + (weights . latents) * take; each dot is a chain over the split's entries.
static void attend_values(const attend_work *w, int hn, const uint8_t *const *lat, int n, int latent, int first, int bf16) {
  const float *rows[RK_HEAD_BLOCK];
  for (int h = 0; h < hn; h++) rows[h] = w->score + h * RK_ATTN_SPLIT;
  for (int c = 0; c < latent; c += 16) {
    int cn = rk_min(16, latent - c);
    for (int e = 0; e < n; e++) v_store(w->tile + e * 16, v_load_elem(lat[e], (size_t)c, cn, bf16));
    memset(w->part, 0, (size_t)hn * 64);
    mk_rows(rows, hn, 0, n, w->tile, 1, w->part, 16, NULL, 0);
    for (int h = 0; h < hn; h++) {
      float *o = w->out + (size_t)h * (size_t)latent + c;
      v16 part = v_load(w->part + h * 16);
      if (!first) part = v_fma(part, v_set1(w->take[h]), v_mul(v_load_n(o, cn), v_set1(w->keep[h])));
      v_store_n(o, part, cn);
    }
  }
}

// A task is (row, block of heads).
static void task_mla_attend(rk_plan *p, const rk_op *op, int i, int worker) {
  int row = i / op->col_blocks, h0 = i % op->col_blocks * op->panels_per, hn = rk_min(op->panels_per, op->heads - h0);
  const rk_mla_cache *c = &op->cache;
  int latent = c->latent, bf16 = p->cls == RK_CLASS_BF16;
  size_t elem = (size_t)rk_elem(p->cls);
  float *f = rk_work(p, worker);
  attend_work w = {.tile = f, .gather = f + 2048, .score = f + 4096};
  w.part = w.score + RK_HEAD_BLOCK * RK_ATTN_SPLIT, w.top = w.part + RK_HEAD_BLOCK * 16, w.sum = w.top + RK_HEAD_BLOCK;
  w.keep = w.sum + RK_HEAD_BLOCK, w.take = w.keep + RK_HEAD_BLOCK, w.out = w.take + RK_HEAD_BLOCK;
  const rk_seg *s = &p->batch->segs[p->row_seg[row]];
  const int32_t *sel = rk_irow(p, op->in2, row), *list = sel + 1;
  const float *q[RK_HEAD_BLOCK];
  for (int h = 0; h < hn; h++) q[h] = rk_row(p, op->in, row) + (size_t)(h0 + h) * (size_t)latent;
  float *out = rk_row(p, op->out, row) + (size_t)h0 * (size_t)latent;
  if (sel[0] == 0) {   // nothing to attend to
    memset(out, 0, (size_t)hn * (size_t)latent * sizeof *out);
    return;
  }
  for (int at = 0; at < sel[0]; at += RK_ATTN_SPLIT) {
    int n = rk_min(RK_ATTN_SPLIT, sel[0] - at);
    const uint8_t *lat[RK_ATTN_SPLIT];
    for (int e = 0; e < n; e++) {
      int pos = list[at + e];
      lat[e] = rk_page(c, rk_page_id(p, s, pos)) + (size_t)(pos % RK_PAGE_TOKENS) * (size_t)latent * elem;   // latents come first
    }
    attend_scores(&w, q, hn, lat, n, latent, op->scale, bf16);
    attend_softmax(&w, hn, n, at == 0);
    attend_values(&w, hn, lat, n, latent, at == 0, bf16);
  }
  for (int h = 0; h < hn; h++) {
    v16 sum = v_set1(w.sum[h]);
    for (int k = 0; k < latent; k += 16) {
      const float *o = w.out + (size_t)h * (size_t)latent + k;
      v_store_n(out + (size_t)h * (size_t)latent + k, v_round_if(v_div(v_load_n(o, latent - k), sum), bf16), latent - k);
    }
  }
}
