// plan_state.c: builders of the ops with caches: KDA, MLA.
#include <math.h>
#include <stdlib.h>
#include "internal.h"

enum { STATE_ALIGN = 64, HEADS_MAX = 1024, LATENT_MAX = 8192, INDEX_DIM_MAX = 4096 };

static int good_kda(int heads, int d, int conv) {
  return heads > 0 && heads <= HEADS_MAX && d > 0 && d <= RK_KDA_D_MAX && d % RK_LANES == 0 && conv >= 2 && conv <= RK_CONV_MAX;
}

size_t rk_kda_slot_bytes(int heads, int d, int conv, rk_class cls) {
  if (!good_kda(heads, d, conv)) return 0;
  size_t hd = (size_t)heads * (size_t)d;
  return hd * (size_t)d * sizeof(float) + rk_pad(hd * 3 * (size_t)(conv - 1) * (size_t)rk_elem(cls), STATE_ALIGN);
}

static int prepare_kda(rk_plan *p, rk_op *op) { return p->batch->n_segs * op->heads; }

// [3*H*D][W] to [3][H][W][D]: lanes run over channels.
static float *conv_by_tap(const float *w, int heads, int d, int conv) {
  size_t rows = (size_t)3 * (size_t)heads, dd = (size_t)d, cc = (size_t)conv;
  float *out = malloc(rows * dd * cc * sizeof *out);
  if (!out) return rk_fail(RK_ENOMEM, "kda: no memory for parameters"), NULL;
  for (size_t r = 0; r < rows; r++)
    for (size_t c = 0; c < dd; c++)
      for (size_t t = 0; t < cc; t++) out[(r * cc + t) * dd + c] = w[(r * dd + c) * cc + t];
  return out;
}

rk_status rk_plan_kda(rk_plan *p, const rk_kda *a) {
  if (!a || !a->conv_w || !a->a_log || !a->dt_bias || !a->norm_w) return rk_fail(RK_EINVAL, "kda: conv_w, a_log, dt_bias or norm_w is null");
  if (!good_kda(a->heads, a->d, a->conv)) return rk_fail(RK_EINVAL, "kda: heads %d, d %d (multiples of 16 to %d), conv %d (2 to %d)", a->heads, a->d, RK_KDA_D_MAX, a->conv, RK_CONV_MAX);
  int hd = a->heads * a->d;
  if (!rk_need_rows(p, "kda", "qkv", a->qkv, 3 * hd) || !rk_need_rows(p, "kda", "f", a->f, hd) || !rk_need_rows(p, "kda", "b", a->b, a->heads) ||
      !rk_need_rows(p, "kda", "g", a->g, hd) || !rk_need_rows(p, "kda", "out", a->out, hd))
    return RK_EINVAL;
  if (a->out == a->qkv || a->out == a->f || a->out == a->b || a->out == a->g) return rk_fail(RK_EINVAL, "kda: out is an input");
  if (!isfinite(a->lower_bound) || !(a->norm_eps >= 0)) return rk_fail(RK_EINVAL, "kda: lower_bound %g, norm_eps %g", (double)a->lower_bound, (double)a->norm_eps);
  size_t bytes = rk_kda_slot_bytes(a->heads, a->d, a->conv, p->cls);
  if (!a->slots || a->slots->dev != p->dev) return rk_fail(RK_EINVAL, "kda: slots is null or of another device");
  if (a->slot_stride % STATE_ALIGN || a->slot_off % STATE_ALIGN) return rk_fail(RK_EINVAL, "kda: slot_stride %zu and slot_off %zu need alignment %d", a->slot_stride, a->slot_off, STATE_ALIGN);
  if (a->slot_off > a->slot_stride || bytes > a->slot_stride - a->slot_off) return rk_fail(RK_EINVAL, "kda: %zu bytes at %zu outside a slot of %zu", bytes, a->slot_off, a->slot_stride);
  float *conv = conv_by_tap(a->conv_w, a->heads, a->d, a->conv), *a_log = rk_copy(a->a_log, (size_t)a->heads);
  float *dt = rk_copy(a->dt_bias, (size_t)hd), *norm = rk_copy(a->norm_w, (size_t)a->d);
  rk_op *op = conv && a_log && dt && norm ? rk_push(p, OP_KDA, prepare_kda) : NULL;
  if (!op) return free(conv), free(a_log), free(dt), free(norm), RK_ENOMEM;
  op->in = a->qkv, op->in2 = a->f, op->in3 = a->b, op->in4 = a->g, op->out = a->out, op->heads = a->heads, op->d = a->d, op->conv = a->conv;
  op->p0 = conv, op->p1 = a_log, op->p2 = dt, op->p3 = norm, op->limit = a->lower_bound, op->eps = a->norm_eps;
  op->scale = (float)(1 / sqrt((double)a->d));
  op->buf = a->slots, op->stride = a->slot_stride, op->off = a->slot_off;
  rk_buffer_retain(a->slots);
  size_t d = (size_t)a->d;
  rk_need_work(p, ((size_t)(a->conv - 1 + RK_KDA_BLOCK) * 3 * d + 6 * RK_KDA_BLOCK * d) * sizeof(float));
  return RK_OK;
}

// ---- MLA ----

int rk_slab_layout(int latent, int index_dim, int pool, int elem, rk_slab *s) {
  if (latent <= 0 || latent > LATENT_MAX || index_dim < 0 || index_dim > INDEX_DIM_MAX || pool <= 0 || pool > RK_PAGE_TOKENS || RK_PAGE_TOKENS % pool) return 0;
  size_t e = (size_t)elem, key = rk_pad((size_t)RK_PAGE_TOKENS * (size_t)index_dim * e, STATE_ALIGN);
  s->latent = 0;
  s->key = rk_pad((size_t)RK_PAGE_TOKENS * (size_t)latent * e, STATE_ALIGN);
  s->gate = s->key + key;
  s->pooled = s->gate + key;
  s->bytes = s->pooled + rk_pad((size_t)(RK_PAGE_TOKENS / pool) * (size_t)index_dim * e, STATE_ALIGN);
  return 1;
}

size_t rk_mla_slab_bytes(int latent, int index_dim, int pool, rk_class cls) {
  rk_slab s;
  return rk_slab_layout(latent, index_dim, pool, rk_elem(cls), &s) ? s.bytes : 0;
}

int rk_need_cache(rk_plan *p, const char *op, const rk_mla_cache *c, int indexer) {
  rk_slab s;
  if (!p || !c) return rk_fail(RK_EINVAL, "%s: plan or cache is null", op), 0;
  if (!rk_slab_layout(c->latent, c->index_dim, c->pool, rk_elem(p->cls), &s))
    return rk_fail(RK_EINVAL, "%s: cache: latent %d, index_dim %d, pool %d (must divide %d)", op, c->latent, c->index_dim, c->pool, RK_PAGE_TOKENS), 0;
  if (indexer && c->index_dim == 0) return rk_fail(RK_EINVAL, "%s: the cache has no indexer part", op), 0;
  if (!c->pages || c->pages->dev != p->dev) return rk_fail(RK_EINVAL, "%s: pages is null or of another device", op), 0;
  if (c->page_stride % STATE_ALIGN || c->layer_off % STATE_ALIGN) return rk_fail(RK_EINVAL, "%s: page_stride %zu and layer_off %zu need alignment %d", op, c->page_stride, c->layer_off, STATE_ALIGN), 0;
  if (c->layer_off > c->page_stride || s.bytes > c->page_stride - c->layer_off)
    return rk_fail(RK_EINVAL, "%s: %zu bytes at %zu outside a page of %zu", op, s.bytes, c->layer_off, c->page_stride), 0;
  return 1;
}

static void use_cache(rk_op *op, const rk_mla_cache *c) {
  op->cache = *c;
  rk_buffer_retain(c->pages);
}

static int few_rows(rk_plan *p, rk_op *op) { return rk_cut_rows(p, op, p->batch->n_rows, 4); }
static int each_row(rk_plan *p, rk_op *op) {
  op->rows_per = 1;   // costs differ with the position
  return p->batch->n_rows;
}
static int each_segment(rk_plan *p, rk_op *op) {
  (void)op;
  return p->batch->n_segs;
}

rk_status rk_plan_mla_store(rk_plan *p, const rk_mla_store *a) {
  if (!a || !a->kv_w) return rk_fail(RK_EINVAL, "mla_store: kv_w is null");
  int keys = a->key >= 0;
  if (!rk_need_cache(p, "mla_store", &a->cache, keys)) return RK_EINVAL;
  const rk_mla_cache *c = &a->cache;
  if (!rk_need_rows(p, "mla_store", "kv", a->kv, c->latent)) return RK_EINVAL;
  if (keys && (!rk_need_rows(p, "mla_store", "key", a->key, c->index_dim) || !rk_need_rows(p, "mla_store", "gate", a->gate, c->index_dim))) return RK_EINVAL;
  if (keys && (!a->k_w || !a->k_b)) return rk_fail(RK_EINVAL, "mla_store: k_w or k_b is null");
  if (!(a->eps >= 0) || (keys && !(a->k_eps >= 0))) return rk_fail(RK_EINVAL, "mla_store: eps %g, k_eps %g", (double)a->eps, (double)a->k_eps);
  float *kv_w = rk_copy(a->kv_w, (size_t)c->latent), *k_w = keys ? rk_copy(a->k_w, (size_t)c->index_dim) : NULL, *k_b = keys ? rk_copy(a->k_b, (size_t)c->index_dim) : NULL;
  rk_op *op = kv_w && (!keys || (k_w && k_b)) ? rk_push(p, OP_MLA_STORE, few_rows) : NULL;
  if (!op) return free(kv_w), free(k_w), free(k_b), RK_ENOMEM;
  op->in = a->kv, op->in2 = keys ? a->key : -1, op->in3 = keys ? a->gate : -1, op->p0 = kv_w, op->p1 = k_w, op->p2 = k_b, op->eps = a->eps, op->eps2 = a->k_eps;
  use_cache(op, c);
  rk_need_work(p, (size_t)rk_max(c->latent, c->index_dim) * sizeof(float));
  return RK_OK;
}

rk_status rk_plan_mla_pool(rk_plan *p, const rk_mla_cache *c, const float *ape) {
  if (!rk_need_cache(p, "mla_pool", c, 1)) return RK_EINVAL;
  if (!ape) return rk_fail(RK_EINVAL, "mla_pool: ape is null");
  float *copy = rk_copy(ape, (size_t)c->pool * (size_t)c->index_dim);
  rk_op *op = copy ? rk_push(p, OP_MLA_POOL, each_segment) : NULL;
  if (!op) return free(copy), RK_ENOMEM;
  op->p0 = copy;
  use_cache(op, c);
  return RK_OK;
}

rk_status rk_plan_mla_index(rk_plan *p, const rk_mla_cache *c, int q, int weights, int heads, int topk, int tail_always, int sel) {
  if (!rk_need_cache(p, "mla_index", c, heads != 0) || !rk_need_kind(p, "mla_index", "sel", sel, SC_SELECTION)) return RK_EINVAL;
  if (heads < 0 || heads > HEADS_MAX || topk < c->pool || topk > RK_WIDTH_MAX) return rk_fail(RK_EINVAL, "mla_index: heads %d, topk %d", heads, topk);
  if (heads && (!rk_need_rows(p, "mla_index", "q", q, heads * c->index_dim) || !rk_need_rows(p, "mla_index", "weights", weights, heads))) return RK_EINVAL;
  if (!heads && topk / c->pool < p->max_pos / c->pool) return rk_fail(RK_EINVAL, "mla_index: topk %d without heads must cover max_pos %d", topk, p->max_pos);
  if (p->scratch[sel].width < topk / c->pool * c->pool + c->pool - 1)
    return rk_fail(RK_EINVAL, "mla_index: sel: made for %d positions, topk %d with pool %d needs more", p->scratch[sel].width, topk, c->pool);
  rk_op *op = rk_push(p, OP_MLA_INDEX, each_row);
  if (!op) return RK_ENOMEM;
  op->in = q, op->in2 = weights, op->heads = heads, op->topk = topk, op->flag = tail_always != 0, op->out = sel;
  if (heads) op->scale = (float)(1 / sqrt((double)c->index_dim)), op->limit = (float)(1 / sqrt((double)heads));
  use_cache(op, c);
  rk_need_work(p, ((size_t)(RK_K_PIECE + RK_BLOCK_ROWS) * RK_LANES + (size_t)(p->max_pos / c->pool) + RK_LANES) * sizeof(float));
  return RK_OK;
}

// Whole heads stay together when rows alone give enough tasks: latents are then expanded once for all heads.
static int prepare_attend(rk_plan *p, rk_op *op) {
  enum { TASKS_PER_THREAD = 2, HEADS_LEAST = 12 };
  int want = rk_ceil(p->dev->threads * TASKS_PER_THREAD, p->batch->n_rows);
  int per = rk_max(HEADS_LEAST, (int)rk_pad((size_t)rk_ceil(op->heads, want), HEADS_LEAST));
  op->panels_per = rk_min(per, RK_HEAD_BLOCK);
  op->col_blocks = rk_ceil(op->heads, op->panels_per);
  return p->batch->n_rows * op->col_blocks;
}

rk_status rk_plan_mla_attend(rk_plan *p, const rk_mla_cache *c, int q, int heads, float scale, int sel, int out) {
  if (!rk_need_cache(p, "mla_attend", c, 0) || !rk_need_kind(p, "mla_attend", "sel", sel, SC_SELECTION)) return RK_EINVAL;
  if (heads <= 0 || heads > HEADS_MAX) return rk_fail(RK_EINVAL, "mla_attend: heads %d", heads);
  if (!rk_need_rows(p, "mla_attend", "q", q, heads * c->latent) || !rk_need_rows(p, "mla_attend", "out", out, heads * c->latent)) return RK_EINVAL;
  if (q == out) return rk_fail(RK_EINVAL, "mla_attend: out is q");
  if (!isfinite(scale)) return rk_fail(RK_EINVAL, "mla_attend: scale %g", (double)scale);
  rk_op *op = rk_push(p, OP_MLA_ATTEND, prepare_attend);
  if (!op) return RK_ENOMEM;
  op->in = q, op->in2 = sel, op->out = out, op->heads = heads, op->scale = scale;
  use_cache(op, c);
  rk_need_work(p, ((size_t)2 * RK_K_PIECE * RK_LANES + (size_t)RK_HEAD_BLOCK * (size_t)(RK_ATTN_SPLIT + RK_LANES + 4 + c->latent)) * sizeof(float));
  return RK_OK;
}
