// plan.c: building a plan, validating a batch, running the stages.
//
// Invariants:
//   - Builder calls either append a fully checked op or change nothing and return an error.
//   - A plan keeps one reference to every weight and buffer of its ops.
//   - rk_plan_run checks the whole batch before the first op runs; after that no op can fail.
#include <stdlib.h>
#include "internal.h"

size_t rk_linear_work(void) {
  return (size_t)(2 * RK_K_PIECE * RK_LANES + RK_BLOCK_ROWS * (RK_BLOCK_PANELS + 1) * RK_LANES) * sizeof(float);
}

rk_plan *rk_plan_new(rk_device *d, rk_class cls, int max_rows, int max_segs, int max_pos) {
  if (!d || atomic_load(&d->closed)) return rk_fail(RK_EINVAL, "plan: device is null or closed"), NULL;
  if (cls != RK_CLASS_F32 && cls != RK_CLASS_BF16) return rk_fail(RK_EINVAL, "plan: class %d", (int)cls), NULL;
  if (max_rows <= 0 || max_rows > RK_ROWS_MAX || max_segs <= 0 || max_segs > max_rows || max_pos <= 0 || max_pos > INT32_MAX - RK_ROWS_MAX)
    return rk_fail(RK_EINVAL, "plan: max_rows %d, max_segs %d, max_pos %d", max_rows, max_segs, max_pos), NULL;
  rk_plan *p = calloc(1, sizeof *p);
  if (p) {
    p->dev = d, p->cls = cls, p->max_rows = max_rows, p->max_segs = max_segs, p->max_pos = max_pos;
    p->row_seg = calloc((size_t)max_rows, sizeof *p->row_seg);
    p->check_len = (size_t)max_segs * 3 + (size_t)(max_rows / RK_PAGE_TOKENS);
    p->check = calloc(p->check_len, sizeof *p->check);
  }
  if (!p || !p->row_seg || !p->check) {
    if (p) free(p->row_seg), free(p->check);
    free(p);
    return rk_fail(RK_ENOMEM, "plan: no memory"), NULL;
  }
  rk_device_retain(d);
  return p;
}

void rk_plan_free(rk_plan *p) {
  if (!p) return;
  for (int i = 0; i < p->n_ops; i++) {
    rk_op *op = &p->ops[i];
    if (op->w) rk_weight_free(op->w);
    if (op->buf) rk_buffer_free(op->buf);
    if (op->cache.pages) rk_buffer_free(op->cache.pages);
    free(op->p0), free(op->p1), free(op->p2), free(op->p3), free(op->p4);
    if (op->kind == OP_MOE_UP) rk_moe_free(op->moe);
  }
  for (int i = 0; i < p->n_scratch; i++) rk_release(p->scratch[i].data.f, p->scratch[i].bytes);
  rk_release(p->work, p->work_mapped);
  free(p->scratch), free(p->ops), free(p->row_seg), free(p->check);
  rk_device_drop(p->dev);
  free(p);
}

size_t rk_plan_bytes(const rk_plan *p) { return p ? p->bytes + p->work_bytes * (size_t)p->dev->threads : 0; }

static int add_scratch(rk_plan *p, rk_scratch_kind kind, int width, size_t ld) {
  if (!p) return rk_fail(RK_EINVAL, "plan_scratch: plan is null");
  if (p->n_scratch == p->cap_scratch) {
    int cap = p->cap_scratch ? 2 * p->cap_scratch : 32;
    rk_scratch *s = realloc(p->scratch, (size_t)cap * sizeof *s);
    if (!s) return rk_fail(RK_ENOMEM, "plan_scratch: no memory");
    p->scratch = s, p->cap_scratch = cap;
  }
  rk_scratch s = {.kind = kind, .width = width, .ld = (int)ld, .bytes = (size_t)p->max_rows * ld * 4};
  s.data.f = rk_alloc(s.bytes);
  if (!s.data.f) return rk_fail(RK_ENOMEM, "plan_scratch: no memory for %d x %d", p->max_rows, width);
  p->scratch[p->n_scratch] = s;
  p->bytes += s.bytes;
  return p->n_scratch++;
}

int rk_plan_scratch(rk_plan *p, int width) {
  if (width <= 0 || width > RK_WIDTH_MAX) return rk_fail(RK_EINVAL, "plan_scratch: width %d", width);
  return add_scratch(p, SC_ROWS, width, rk_ld(width));
}

int rk_plan_selection(rk_plan *p, int topk, int pool) {
  if (topk <= 0 || topk > RK_WIDTH_MAX || pool <= 0 || pool > RK_PAGE_TOKENS) return rk_fail(RK_EINVAL, "plan_selection: topk %d, pool %d", topk, pool);
  int width = topk + pool - 1;
  if (p) width = rk_min(width, p->max_pos);   // a list never names a position twice
  return add_scratch(p, SC_SELECTION, topk + pool - 1, rk_pad((size_t)width + 1, RK_LANES));
}

int rk_plan_route_scratch(rk_plan *p, int topk) {
  if (topk <= 0 || topk > RK_TOPK_MAX) return rk_fail(RK_EINVAL, "plan_route_scratch: topk %d", topk);
  return add_scratch(p, SC_ROUTE, topk, rk_pad(2 * (size_t)topk, RK_LANES));
}

rk_status rk_plan_barrier(rk_plan *p) {
  if (!p) return rk_fail(RK_EINVAL, "plan_barrier: plan is null");
  if (p->n_ops && p->ops[p->n_ops - 1].stage == p->stage) p->stage++;
  return RK_OK;
}

int rk_reserve(rk_plan *p, int n) {
  if (p->n_ops + n <= p->cap_ops) return 1;
  int cap = 2 * p->cap_ops + 64;
  rk_op *ops = realloc(p->ops, (size_t)cap * sizeof *ops);
  if (!ops) return rk_fail(RK_ENOMEM, "plan: no memory for an op"), 0;
  p->ops = ops, p->cap_ops = cap;
  return 1;
}

rk_op *rk_push(rk_plan *p, rk_kind kind, int (*prepare)(rk_plan *, rk_op *)) {
  if (!rk_reserve(p, 1)) return NULL;
  rk_op *op = &p->ops[p->n_ops++];
  *op = (rk_op){.kind = kind, .stage = p->stage, .prepare = prepare, .in = -1, .in2 = -1, .in3 = -1, .in4 = -1, .out = -1};
  return op;
}

int rk_need_kind(rk_plan *p, const char *op, const char *arg, int id, rk_scratch_kind kind) {
  static const char *names[] = {"an FP32 scratch", "a selection", "a route scratch"};
  if (!p) return rk_fail(RK_EINVAL, "%s: plan is null", op), 0;
  if (id < 0 || id >= p->n_scratch || p->scratch[id].kind != kind) return rk_fail(RK_EINVAL, "%s: %s: %d is not %s", op, arg, id, names[kind]), 0;
  return 1;
}

int rk_need_rows(rk_plan *p, const char *op, const char *arg, int id, int width) {
  if (!rk_need_kind(p, op, arg, id, SC_ROWS)) return 0;
  if (width <= 0 || p->scratch[id].width < width) return rk_fail(RK_EINVAL, "%s: %s: needs %d columns, the scratch has %d", op, arg, width, p->scratch[id].width), 0;
  return 1;
}

int rk_need_weight(rk_plan *p, const char *op, const rk_weight *w) {
  if (!w) return rk_fail(RK_EINVAL, "%s: weight is null", op), 0;
  if (p && w->dev != p->dev) return rk_fail(RK_EINVAL, "%s: weight belongs to another device", op), 0;
  if (!rk_weight_complete(w)) return rk_fail(RK_EINVAL, "%s: weight [%d][%d] has rows that were never filled", op, w->n, w->k), 0;
  return 1;
}

float *rk_copy(const float *src, size_t n) {
  float *p = malloc(n * sizeof *p);
  if (!p) return rk_fail(RK_ENOMEM, "plan: no memory for parameters"), NULL;
  memcpy(p, src, n * sizeof *p);
  return p;
}

void rk_need_work(rk_plan *p, size_t bytes) {
  bytes = rk_pad(bytes, 4096);   // workers never share a line or a page
  if (bytes > p->work_bytes) p->work_bytes = bytes;
}

int rk_cut_rows(rk_plan *p, rk_op *op, int rows, int least) {
  enum { TASKS_PER_THREAD = 4 };
  op->rows_per = rk_max(least, rk_ceil(rows, p->dev->threads * TASKS_PER_THREAD));
  return rk_ceil(rows, op->rows_per);
}

rk_status rk_plan_write(rk_plan *p, int id, int row0, int rows, const float *src) {
  if (!rk_need_rows(p, "plan_write", "scratch", id, 1)) return RK_EINVAL;
  if (row0 < 0 || rows < 0 || rows > p->max_rows - row0 || (rows && !src)) return rk_fail(RK_EINVAL, "plan_write: rows [%d, +%d) outside %d", row0, rows, p->max_rows);
  for (int r = 0; r < rows; r++) memcpy(rk_row(p, id, row0 + r), src + (size_t)r * (size_t)p->scratch[id].width, (size_t)p->scratch[id].width * sizeof *src);
  return RK_OK;
}

rk_status rk_plan_read(rk_plan *p, int id, int row0, int rows, float *dst) {
  if (!rk_need_rows(p, "plan_read", "scratch", id, 1)) return RK_EINVAL;
  if (row0 < 0 || rows < 0 || rows > p->max_rows - row0 || (rows && !dst)) return rk_fail(RK_EINVAL, "plan_read: rows [%d, +%d) outside %d", row0, rows, p->max_rows);
  for (int r = 0; r < rows; r++) memcpy(dst + (size_t)r * (size_t)p->scratch[id].width, rk_row(p, id, row0 + r), (size_t)p->scratch[id].width * sizeof *dst);
  return RK_OK;
}

// ---- batches ----

static int ascending(const void *a, const void *b) {
  int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
  return (x > y) - (x < y);
}

// The first value that occurs twice, or -1.
static int32_t duplicate(int32_t *v, size_t n) {
  qsort(v, n, sizeof *v, ascending);
  for (size_t i = 1; i < n; i++)
    if (v[i] == v[i - 1]) return v[i];
  return -1;
}

static rk_status check_rows(rk_plan *p, const rk_batch *b) {
  if (b->n_rows <= 0 || b->n_rows > p->max_rows) return rk_fail(RK_EINVAL, "run: n_rows %d, the plan takes 1 to %d", b->n_rows, p->max_rows);
  if (b->n_segs <= 0 || b->n_segs > p->max_segs || !b->segs) return rk_fail(RK_EINVAL, "run: n_segs %d, the plan takes 1 to %d", b->n_segs, p->max_segs);
  int row = 0;
  for (int i = 0; i < b->n_segs; i++) {
    const rk_seg *s = &b->segs[i];
    if (s->row0 != row || s->rows <= 0 || s->rows > b->n_rows - row)
      return rk_fail(RK_EINVAL, "run: segment %d has rows [%d, +%d), want consecutive ones from %d below %d", i, s->row0, s->rows, row, b->n_rows);
    if (s->pos0 < 0 || s->pos0 > p->max_pos - s->rows) return rk_fail(RK_EINVAL, "run: segment %d has positions [%d, +%d), the plan's bound is %d", i, s->pos0, s->rows, p->max_pos);
    if (s->write_from < 0) return rk_fail(RK_EINVAL, "run: segment %d: write_from %d", i, s->write_from);
    for (int r = 0; r < s->rows; r++) p->row_seg[row + r] = i;
    row += s->rows;
  }
  if (row != b->n_rows) return rk_fail(RK_EINVAL, "run: segments cover %d of %d rows", row, b->n_rows);
  if (b->n_out < 0 || b->n_out > p->max_rows || (b->n_out && (!b->out_rows || !b->logits))) return rk_fail(RK_EINVAL, "run: n_out %d without out_rows or logits, or above %d", b->n_out, p->max_rows);
  if (b->n_out && !p->has_logits) return rk_fail(RK_EINVAL, "run: n_out %d, the plan has no logits op", b->n_out);
  for (int i = 0; i < b->n_out; i++)
    if (b->out_rows[i] < 0 || b->out_rows[i] >= b->n_rows) return rk_fail(RK_EINVAL, "run: out_rows[%d] is %d of %d rows", i, b->out_rows[i], b->n_rows);
  return RK_OK;
}

static rk_status check_slots(const rk_plan *p, const rk_batch *b, const rk_op *op) {
  size_t slots = op->buf->bytes / op->stride;   // the builder checked that off and the layout lie inside a stride
  for (int i = 0; i < b->n_segs; i++) {
    if (b->segs[i].slot < 0 || (size_t)b->segs[i].slot >= slots) return rk_fail(RK_EINVAL, "run: segment %d: slot %d of %zu", i, b->segs[i].slot, slots);
    p->check[i] = b->segs[i].slot;
  }
  int32_t twice = duplicate(p->check, (size_t)b->n_segs);
  return twice < 0 ? RK_OK : rk_fail(RK_EINVAL, "run: slot %d is named by two segments", twice);
}

static rk_status check_pages(const rk_plan *p, const rk_batch *b, const rk_op *op) {
  size_t pages = op->cache.pages->bytes / op->cache.page_stride, written = 0;
  if (b->n_pages < 0 || (b->n_pages && !b->pages)) return rk_fail(RK_EINVAL, "run: n_pages %d without pages", b->n_pages);
  for (int i = 0; i < b->n_segs; i++) {
    const rk_seg *s = &b->segs[i];
    int end = s->pos0 + s->rows, need = rk_ceil(end, RK_PAGE_TOKENS);
    if (s->table < 0 || s->table > b->n_pages || need > b->n_pages - s->table)
      return rk_fail(RK_EINVAL, "run: segment %d: %d positions need %d pages from table offset %d of %d", i, end, need, s->table, b->n_pages);
    for (int j = 0; j < need; j++) {
      int32_t id = b->pages[s->table + j];
      if (id < 0 || (size_t)id >= pages) return rk_fail(RK_EINVAL, "run: segment %d: page id %d of %zu", i, id, pages);
      if ((j + 1) * RK_PAGE_TOKENS > rk_max(s->pos0, s->write_from) && rk_max(s->pos0, s->write_from) < end) p->check[written++] = id;
    }
  }
  int32_t twice = duplicate(p->check, written);
  return twice < 0 ? RK_OK : rk_fail(RK_EINVAL, "run: page %d would be written by two segments or at two positions", twice);
}

static rk_status check_batch(rk_plan *p, const rk_batch *b) {
  rk_status st = check_rows(p, b);
  const rk_buffer *slots = NULL, *pages = NULL;   // the usual plan has one of each: check it once
  size_t slot_stride = 0, page_stride = 0;
  for (int i = 0; i < p->n_ops && !st; i++) {
    const rk_op *op = &p->ops[i];
    if (op->kind == OP_EMBED) {
      if (!b->tokens) return rk_fail(RK_EINVAL, "run: tokens is null");
      for (int r = 0; r < b->n_rows; r++)
        if (b->tokens[r] < 0 || b->tokens[r] >= op->w->n) return rk_fail(RK_EINVAL, "run: tokens[%d] is %d, the table has %d rows", r, b->tokens[r], op->w->n);
    }
    if (op->buf && (op->buf != slots || op->stride != slot_stride)) st = check_slots(p, b, op), slots = op->buf, slot_stride = op->stride;
    if (!st && op->cache.pages && (op->cache.pages != pages || op->cache.page_stride != page_stride))
      st = check_pages(p, b, op), pages = op->cache.pages, page_stride = op->cache.page_stride;
  }
  return st;
}

// ---- running ----

static int advance(void *ctx) {
  rk_plan *p = ctx;
  while (p->op_last < p->n_ops) {
    int stage = p->ops[p->op_last].stage, total = 0;
    p->op_first = p->op_last;
    for (; p->op_last < p->n_ops && p->ops[p->op_last].stage == stage; p->op_last++) {
      rk_op *op = &p->ops[p->op_last];
      op->task0 = total;
      op->tasks = op->prepare(p, op);
      total += op->tasks;
    }
    if (total > 0) {
      p->run_tasks = total;
      p->run_chunk = rk_ceil(total, RK_TASKS_MAX);   // 1 unless a stage has more tasks than a ticket can count
      return rk_ceil(total, p->run_chunk);
    }
  }
  return 0;
}

static void run_task(void *ctx, int index, int worker) {
  rk_plan *p = ctx;
  int i = p->op_first, end = rk_min(p->run_tasks, (index + 1) * p->run_chunk);
  for (int t = index * p->run_chunk; t < end; t++) {
    while (t >= p->ops[i].task0 + p->ops[i].tasks) i++;
    const rk_op *op = &p->ops[i];
    p->dev->isa->task[op->kind](p, op, t - op->task0, worker);
  }
}

rk_status rk_plan_run(rk_plan *p, const rk_batch *b) {
  if (!p || !b) return rk_fail(RK_EINVAL, "run: plan or batch is null");
  if (atomic_load(&p->dev->closed)) return rk_fail(RK_EINVAL, "run: the device is closed");
  rk_status st = check_batch(p, b);
  if (st) return st;
  size_t want = p->work_bytes * (size_t)p->dev->threads;
  if (want > p->work_mapped) {
    rk_release(p->work, p->work_mapped);
    p->work = rk_alloc(want);
    p->work_mapped = p->work ? want : 0;
    if (!p->work) return rk_fail(RK_ENOMEM, "run: no memory for %zu bytes of worker space", want);
  }
  p->batch = b;
  p->op_first = p->op_last = 0;
  rk_job job = {advance, run_task, p};
  rk_pool_run(p->dev->pool, &job);
  p->batch = NULL;
  return RK_OK;
}
