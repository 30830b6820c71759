// plan_rows.c: builders of the ops on rows, matrix products and mHC.
#include <stdlib.h>
#include "internal.h"

// About this many elements make a task worth claiming.
enum { TASK_ELEMENTS = 1 << 14 };

static int by_elements(rk_plan *p, rk_op *op) {
  return rk_cut_rows(p, op, p->batch->n_rows, rk_max(1, TASK_ELEMENTS / (op->width * rk_max(1, op->times))));
}

static int by_segment(rk_plan *p, rk_op *op) {
  (void)op;
  return p->batch->n_segs;
}

// Cuts [m] x [panels] into tasks; the weight of a streamed product goes in runs of a few hundred KiB.
static int cut_matrix(rk_plan *p, rk_op *op, int m, int panels, size_t panel_bytes, int copies) {
  enum { STREAM_BYTES = 64 << 10, TASKS_PER_THREAD = 6, ROW_STEP = 12 };
  if (m <= 0) return 0;
  int want = p->dev->threads * TASKS_PER_THREAD;
  if (m <= p->dev->isa->gemv_rows) {
    op->row_blocks = 1, op->rows_per = m;
    int least = (int)(STREAM_BYTES / panel_bytes) + 1;
    op->panels_per = rk_max(least, rk_ceil(panels * copies, want));
    op->panels_per = rk_min(RK_BLOCK_PANELS, op->panels_per > 4 ? (int)rk_pad((size_t)op->panels_per, 8) : 4);
  } else {
    op->row_blocks = rk_ceil(m, RK_BLOCK_ROWS);
    op->rows_per = rk_min(RK_BLOCK_ROWS, (int)rk_pad((size_t)rk_ceil(m, op->row_blocks), ROW_STEP));
    op->row_blocks = rk_ceil(m, op->rows_per);
    op->panels_per = rk_min(RK_BLOCK_PANELS, (int)rk_pad((size_t)rk_ceil(panels * op->row_blocks * copies, want), 2));
  }
  op->col_blocks = rk_ceil(panels, op->panels_per);
  return op->row_blocks * op->col_blocks * copies;
}

static int prepare_linear(rk_plan *p, rk_op *op) { return cut_matrix(p, op, p->batch->n_rows, op->w->panels, op->w->panel_bytes, 1); }
static int prepare_logits(rk_plan *p, rk_op *op) { return cut_matrix(p, op, p->batch->n_out, op->w->panels, op->w->panel_bytes, 1); }
static int prepare_heads(rk_plan *p, rk_op *op) {
  int wout = op->w->n / op->heads, panels = wout % RK_LANES ? wout / RK_LANES + 2 : wout / RK_LANES;   // at most so many touched
  return cut_matrix(p, op, p->batch->n_rows, panels, op->w->panel_bytes, op->heads);
}

rk_status rk_plan_embed(rk_plan *p, rk_weight *table, int out) {
  if (!rk_need_weight(p, "embed", table) || !rk_need_rows(p, "embed", "out", out, table->k)) return RK_EINVAL;
  rk_op *op = rk_push(p, OP_EMBED, by_elements);
  if (!op) return RK_ENOMEM;
  op->w = table, op->out = out, op->width = table->k, op->times = RK_LANES;   // a row is one lane of its panel
  rk_weight_retain(table);
  return RK_OK;
}

static int good_times(int times) { return times > 0 && times <= RK_WIDTH_MAX / 2; }

rk_status rk_plan_repeat(rk_plan *p, int in, int out, int times) {
  if (!rk_need_rows(p, "repeat", "in", in, 1)) return RK_EINVAL;
  int width = p->scratch[in].width;
  if (!good_times(times) || width > RK_WIDTH_MAX / times) return rk_fail(RK_EINVAL, "repeat: times %d", times);
  if (!rk_need_rows(p, "repeat", "out", out, width * times)) return RK_EINVAL;
  if (in == out) return rk_fail(RK_EINVAL, "repeat: out is in");
  rk_op *op = rk_push(p, OP_REPEAT, by_elements);
  if (!op) return RK_ENOMEM;
  op->in = in, op->out = out, op->times = times, op->width = width;
  return RK_OK;
}

rk_status rk_plan_mean(rk_plan *p, int in, int out, int times) {
  if (!rk_need_rows(p, "mean", "in", in, 1)) return RK_EINVAL;
  int width = p->scratch[in].width;
  if (!good_times(times) || width % times) return rk_fail(RK_EINVAL, "mean: times %d of width %d", times, width);
  if (!rk_need_rows(p, "mean", "out", out, width / times)) return RK_EINVAL;
  if (in == out) return rk_fail(RK_EINVAL, "mean: out is in");
  rk_op *op = rk_push(p, OP_MEAN, by_elements);
  if (!op) return RK_ENOMEM;
  op->in = in, op->out = out, op->times = times, op->width = width / times;
  return RK_OK;
}

rk_status rk_plan_add(rk_plan *p, int a, int b, int out) {
  if (!rk_need_rows(p, "add", "a", a, 1)) return RK_EINVAL;
  int width = p->scratch[a].width;
  if (!rk_need_rows(p, "add", "b", b, width) || !rk_need_rows(p, "add", "out", out, width)) return RK_EINVAL;
  rk_op *op = rk_push(p, OP_ADD, by_elements);
  if (!op) return RK_ENOMEM;
  op->in = a, op->in2 = b, op->out = out, op->width = width;
  return RK_OK;
}

static int need_cols(rk_plan *p, const char *op, const char *arg, int id, int col, int width) {
  if (col < 0 || col > RK_WIDTH_MAX || width > RK_WIDTH_MAX) return rk_fail(RK_EINVAL, "%s: %s: columns [%d, +%d)", op, arg, col, width), 0;
  return rk_need_rows(p, op, arg, id, col + width);
}

rk_status rk_plan_rmsnorm(rk_plan *p, int in, const float *w, float eps, int out, int out_col, int round) {
  if (!rk_need_rows(p, "rmsnorm", "in", in, 1)) return RK_EINVAL;
  int width = p->scratch[in].width;
  if (!w) return rk_fail(RK_EINVAL, "rmsnorm: w is null");
  if (!(eps >= 0)) return rk_fail(RK_EINVAL, "rmsnorm: eps %g", (double)eps);
  if (!need_cols(p, "rmsnorm", "out", out, out_col, width)) return RK_EINVAL;
  if (in == out && out_col) return rk_fail(RK_EINVAL, "rmsnorm: out overlaps in");
  float *copy = rk_copy(w, (size_t)width);
  rk_op *op = copy ? rk_push(p, OP_RMSNORM, by_elements) : NULL;
  if (!op) return free(copy), RK_ENOMEM;
  op->in = in, op->out = out, op->col = out_col, op->width = width, op->eps = eps, op->p0 = copy;
  op->round = round && p->cls == RK_CLASS_BF16;
  return RK_OK;
}

rk_status rk_plan_linear(rk_plan *p, int in, int in_col, rk_weight *w, int out, int out_col) {
  if (!rk_need_weight(p, "linear", w) || !need_cols(p, "linear", "in", in, in_col, w->k) || !need_cols(p, "linear", "out", out, out_col, w->n)) return RK_EINVAL;
  if (in == out) return rk_fail(RK_EINVAL, "linear: out is in");
  rk_op *op = rk_push(p, OP_LINEAR, prepare_linear);
  if (!op) return RK_ENOMEM;
  op->in = in, op->in_col = in_col, op->out = out, op->col = out_col, op->w = w;
  rk_weight_retain(w);
  rk_need_work(p, rk_linear_work());
  return RK_OK;
}

rk_status rk_plan_linear_heads(rk_plan *p, int in, rk_weight *w, int heads, int out, int round) {
  if (!rk_need_weight(p, "linear_heads", w)) return RK_EINVAL;
  if (heads <= 0 || w->n % heads || w->k > RK_WIDTH_MAX / heads) return rk_fail(RK_EINVAL, "linear_heads: %d heads of a [%d][%d] weight", heads, w->n, w->k);
  if (!rk_need_rows(p, "linear_heads", "in", in, heads * w->k) || !rk_need_rows(p, "linear_heads", "out", out, w->n)) return RK_EINVAL;
  if (in == out) return rk_fail(RK_EINVAL, "linear_heads: out is in");
  rk_op *op = rk_push(p, OP_HEADS, prepare_heads);
  if (!op) return RK_ENOMEM;
  op->in = in, op->out = out, op->heads = heads, op->w = w, op->round = round && p->cls == RK_CLASS_BF16;
  rk_weight_retain(w);
  rk_need_work(p, rk_linear_work());
  return RK_OK;
}

rk_status rk_plan_logits(rk_plan *p, int in, rk_weight *w) {
  if (!rk_need_weight(p, "logits", w) || !rk_need_rows(p, "logits", "in", in, w->k)) return RK_EINVAL;
  if (p->has_logits) return rk_fail(RK_EINVAL, "logits: the plan has one already");
  rk_op *op = rk_push(p, OP_LOGITS, prepare_logits);
  if (!op) return RK_ENOMEM;
  op->in = in, op->w = w;
  rk_weight_retain(w);
  rk_need_work(p, rk_linear_work());
  p->has_logits = 1;
  return RK_OK;
}

rk_status rk_plan_swiglu(rk_plan *p, int in, int out, int width, float limit) {
  if (width <= 0 || width > RK_WIDTH_MAX / 2) return rk_fail(RK_EINVAL, "swiglu: width %d", width);
  if (!rk_need_rows(p, "swiglu", "in", in, 2 * width) || !rk_need_rows(p, "swiglu", "out", out, width)) return RK_EINVAL;
  if (limit != limit) return rk_fail(RK_EINVAL, "swiglu: limit is NaN");
  rk_op *op = rk_push(p, OP_SWIGLU, by_elements);
  if (!op) return RK_ENOMEM;
  op->in = in, op->out = out, op->width = width, op->limit = limit, op->round = p->cls == RK_CLASS_BF16;
  return RK_OK;
}

rk_status rk_plan_hc_pre(rk_plan *p, const rk_hc_pre *a) {
  if (!a || !a->base || !a->scale || !a->w) return rk_fail(RK_EINVAL, "hc_pre: base, scale or w is null");
  int m = a->mult, d = a->d;
  if (m <= 0 || m > RK_HC_MULT_MAX || d <= 0 || d > RK_WIDTH_MAX / m) return rk_fail(RK_EINVAL, "hc_pre: mult %d, d %d", m, d);
  if (a->iters < 1 || a->iters > 1000) return rk_fail(RK_EINVAL, "hc_pre: iters %d", a->iters);
  if (!(a->hc_eps >= 0) || !(a->norm_eps >= 0)) return rk_fail(RK_EINVAL, "hc_pre: hc_eps %g, norm_eps %g", (double)a->hc_eps, (double)a->norm_eps);
  if (!rk_need_rows(p, "hc_pre", "streams", a->streams, m * d) || !rk_need_rows(p, "hc_pre", "mix", a->mix, (2 + m) * m) ||
      !rk_need_rows(p, "hc_pre", "post", a->post, m) || !rk_need_rows(p, "hc_pre", "comb", a->comb, m * m) || !rk_need_rows(p, "hc_pre", "out", a->out, d))
    return RK_EINVAL;
  if (a->out == a->streams) return rk_fail(RK_EINVAL, "hc_pre: out is streams");
  float *base = rk_copy(a->base, (size_t)((2 + m) * m)), *scale = rk_copy(a->scale, 3), *w = rk_copy(a->w, (size_t)d);
  rk_op *op = base && scale && w ? rk_push(p, OP_HC_PRE, by_elements) : NULL;
  if (!op) return free(base), free(scale), free(w), RK_ENOMEM;
  op->in = a->streams, op->in2 = a->mix, op->in3 = a->post, op->in4 = a->comb, op->out = a->out, op->times = m, op->width = d;
  op->p0 = base, op->p1 = scale, op->p2 = w, op->iters = a->iters, op->eps = a->hc_eps, op->eps2 = a->norm_eps, op->round = p->cls == RK_CLASS_BF16;
  return RK_OK;
}

rk_status rk_plan_hc_post(rk_plan *p, int streams, int post, int comb, int y, int m, int d) {
  if (m <= 0 || m > RK_HC_MULT_MAX || d <= 0 || d > RK_WIDTH_MAX / m) return rk_fail(RK_EINVAL, "hc_post: mult %d, d %d", m, d);
  if (!rk_need_rows(p, "hc_post", "streams", streams, m * d) || !rk_need_rows(p, "hc_post", "post", post, m) || !rk_need_rows(p, "hc_post", "comb", comb, m * m) ||
      !rk_need_rows(p, "hc_post", "y", y, d))
    return RK_EINVAL;
  if (y == streams) return rk_fail(RK_EINVAL, "hc_post: y is streams");
  rk_op *op = rk_push(p, OP_HC_POST, by_elements);
  if (!op) return RK_ENOMEM;
  op->in = streams, op->in2 = post, op->in3 = comb, op->in4 = y, op->times = m, op->width = d;
  return RK_OK;
}

rk_status rk_plan_keep_last(rk_plan *p, int in, int width, rk_buffer *slots, size_t stride, size_t off) {
  if (!rk_need_rows(p, "keep_last", "in", in, width)) return RK_EINVAL;
  size_t bytes = (size_t)width * sizeof(float);
  if (!slots || slots->dev != p->dev) return rk_fail(RK_EINVAL, "keep_last: slots is null or of another device");
  if (stride == 0 || off > stride || bytes > stride - off) return rk_fail(RK_EINVAL, "keep_last: %zu bytes at %zu outside a slot of %zu", bytes, off, stride);
  rk_op *op = rk_push(p, OP_KEEP_LAST, by_segment);
  if (!op) return RK_ENOMEM;
  op->in = in, op->width = width, op->buf = slots, op->stride = stride, op->off = off;
  rk_buffer_retain(slots);
  return RK_OK;
}
