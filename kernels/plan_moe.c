// plan_moe.c: builders of the router and the routed experts.
#include <math.h>
#include <stdlib.h>
#include "internal.h"

enum { EXPERTS_MAX = 4096 };

static int route_rows(rk_plan *p, rk_op *op) { return rk_cut_rows(p, op, p->batch->n_rows, 4); }

rk_status rk_plan_route(rk_plan *p, const rk_router *a) {
  if (!a || !a->bias) return rk_fail(RK_EINVAL, "route: bias is null");
  if (a->experts <= 0 || a->experts > EXPERTS_MAX || a->topk <= 0 || a->topk > RK_TOPK_MAX || a->topk > a->experts) return rk_fail(RK_EINVAL, "route: top %d of %d experts", a->topk, a->experts);
  if (a->n_group <= 0 || a->experts % a->n_group || a->topk_group <= 0 || a->topk_group > a->n_group || a->topk > a->topk_group * (a->experts / a->n_group))
    return rk_fail(RK_EINVAL, "route: n_group %d, topk_group %d for top %d of %d experts", a->n_group, a->topk_group, a->topk, a->experts);
  if (!isfinite(a->scaling)) return rk_fail(RK_EINVAL, "route: scaling %g", (double)a->scaling);
  if (!rk_need_rows(p, "route", "logits", a->logits, a->experts) || !rk_need_kind(p, "route", "route", a->route, SC_ROUTE)) return RK_EINVAL;
  if (p->scratch[a->route].width != a->topk) return rk_fail(RK_EINVAL, "route: route: made for top %d, want %d", p->scratch[a->route].width, a->topk);
  float *bias = rk_copy(a->bias, (size_t)a->experts);
  rk_op *op = bias ? rk_push(p, OP_ROUTE, route_rows) : NULL;
  if (!op) return free(bias), RK_ENOMEM;
  op->in = a->logits, op->out = a->route, op->experts = a->experts, op->topk = a->topk, op->n_group = a->n_group, op->topk_group = a->topk_group;
  op->norm = a->norm != 0, op->scale = a->scaling, op->p0 = bias;
  rk_need_work(p, 3 * rk_pad((size_t)a->experts, 16) * sizeof(float));
  return RK_OK;
}

// Groups the batch's (row, place) pairs by expert, rows ascending, and cuts each expert's rows into blocks.
static void group_rows(rk_plan *p, const rk_op *op) {
  rk_moe_state *m = op->moe;
  int rows = p->batch->n_rows, topk = m->topk, *count = m->first;   // counts first, then offsets
  memset(count, 0, (size_t)(m->experts + 1) * sizeof *count);
  for (int r = 0; r < rows; r++)
    for (int k = 0; k < topk; k++) count[rk_irow(p, op->in2, r)[k]]++;
  // active[] in ascending id; first[] is rewritten behind the reading point
  int n = 0, at = 0;
  m->n_blocks = 0;
  int *next = m->active + m->experts;   // [experts]: next assignment of an expert
  for (int e = 0; e < m->experts; e++) {
    int c = count[e];
    if (!c) continue;
    next[e] = at;
    int blocks = rk_ceil(c, RK_BLOCK_ROWS), per = rk_ceil(c, blocks);
    for (int b = 0; b < c; b += per) {
      m->task_active[m->n_blocks] = n, m->task_row[m->n_blocks] = at + b, m->task_rows[m->n_blocks] = rk_min(per, c - b);
      m->n_blocks++;
    }
    m->active[n] = e, m->first[n] = at;
    n++, at += c;
  }
  m->first[n] = at, m->n_active = n;
  for (int r = 0; r < rows; r++)
    for (int k = 0; k < topk; k++) {
      int a = next[rk_irow(p, op->in2, r)[k]]++;
      m->row[a] = r, m->slot_of[(size_t)r * (size_t)topk + (size_t)k] = a;
    }
}

static int cut_experts(rk_plan *p, rk_op *op, int panels) {
  enum { TASKS_PER_THREAD = 8, PANELS_LEAST = 4 };
  int want = p->dev->threads * TASKS_PER_THREAD;
  op->panels_per = rk_min(RK_BLOCK_PANELS, rk_max(PANELS_LEAST, (int)rk_pad((size_t)rk_ceil(panels * op->moe->n_blocks, want), 4)));
  return op->moe->n_blocks * rk_ceil(panels, op->panels_per);
}

static int prepare_up(rk_plan *p, rk_op *op) {
  group_rows(p, op);
  return cut_experts(p, op, rk_ceil(2 * op->moe->inter, RK_LANES));
}
static int prepare_act(rk_plan *p, rk_op *op) {
  enum { TASK_ELEMENTS = 1 << 14 };
  return rk_cut_rows(p, op, op->moe->first[op->moe->n_active], rk_max(1, TASK_ELEMENTS / op->moe->inter));
}
static int prepare_down(rk_plan *p, rk_op *op) { return cut_experts(p, op, rk_ceil(op->moe->d, RK_LANES)); }
static int prepare_sum(rk_plan *p, rk_op *op) { return rk_cut_rows(p, op, p->batch->n_rows, rk_max(1, (1 << 14) / (op->moe->d * op->moe->topk))); }

static rk_status check_moe(rk_plan *p, const rk_moe *a) {
  if (!p || !a || !a->gate_up || !a->down) return rk_fail(RK_EINVAL, "moe: plan, gate_up or down is null");
  if (a->experts <= 0 || a->experts > EXPERTS_MAX || a->topk <= 0 || a->topk > RK_TOPK_MAX || a->d <= 0 || a->d > RK_WIDTH_MAX || a->inter <= 0 || a->inter > RK_WIDTH_MAX / 2)
    return rk_fail(RK_EINVAL, "moe: experts %d, topk %d, d %d, inter %d", a->experts, a->topk, a->d, a->inter);
  if (a->limit != a->limit) return rk_fail(RK_EINVAL, "moe: limit is NaN");
  if (!rk_need_rows(p, "moe", "in", a->in, a->d) || !rk_need_rows(p, "moe", "out", a->out, a->d) || !rk_need_kind(p, "moe", "route", a->route, SC_ROUTE)) return RK_EINVAL;
  if (a->shared >= 0 && !rk_need_rows(p, "moe", "shared", a->shared, a->d)) return RK_EINVAL;
  if (a->out == a->in) return rk_fail(RK_EINVAL, "moe: out is in");
  if (p->scratch[a->route].width != a->topk) return rk_fail(RK_EINVAL, "moe: route: made for top %d, want %d", p->scratch[a->route].width, a->topk);
  for (int e = 0; e < a->experts; e++) {
    if (!rk_need_weight(p, "moe", a->gate_up[e]) || !rk_need_weight(p, "moe", a->down[e])) return RK_EINVAL;
    if (a->gate_up[e]->n != 2 * a->inter || a->gate_up[e]->k != a->d || a->down[e]->n != a->d || a->down[e]->k != a->inter)
      return rk_fail(RK_EINVAL, "moe: expert %d: gate_up [%d][%d], down [%d][%d]", e, a->gate_up[e]->n, a->gate_up[e]->k, a->down[e]->n, a->down[e]->k);
  }
  // Route ids come from a route op of the same plan; it must not name more experts than there are.
  for (int i = 0; i < p->n_ops; i++)
    if (p->ops[i].kind == OP_ROUTE && p->ops[i].out == a->route && p->ops[i].experts > a->experts)
      return rk_fail(RK_EINVAL, "moe: route: the router chooses among %d experts, have %d", p->ops[i].experts, a->experts);
  return RK_OK;
}

void rk_moe_free(rk_moe_state *m) {
  if (!m) return;
  for (int e = 0; e < m->experts; e++) rk_weight_free(m->gate_up[e]), rk_weight_free(m->down[e]);
  rk_release(m->up, m->rows * m->up_ld * sizeof(float)), rk_release(m->act, m->rows * m->act_ld * sizeof(float)), rk_release(m->down_out, m->rows * m->down_ld * sizeof(float));
  free(m->gate_up), free(m->down), free(m->active), free(m->first), free(m->row), free(m->slot_of);
  free(m->task_active), free(m->task_row), free(m->task_rows), free(m);
}

static rk_moe_state *new_state(rk_plan *p, const rk_moe *a) {
  rk_moe_state *m = calloc(1, sizeof *m);
  if (!m) return NULL;
  size_t rows = (size_t)p->max_rows, n = rows * (size_t)a->topk, e = (size_t)a->experts, blocks = e + n / RK_BLOCK_ROWS + 1;
  m->up_ld = rk_ld(2 * a->inter), m->act_ld = rk_ld(a->inter), m->down_ld = rk_ld(a->d), m->rows = n;
  m->topk = a->topk, m->d = a->d, m->inter = a->inter, m->limit = a->limit;
  m->gate_up = calloc(e, sizeof *m->gate_up), m->down = calloc(e, sizeof *m->down);
  m->active = calloc(2 * e, sizeof(int)), m->first = calloc(e + 1, sizeof(int));
  m->row = calloc(n, sizeof(int)), m->slot_of = calloc(n, sizeof(int));
  m->task_active = calloc(blocks, sizeof(int)), m->task_row = calloc(blocks, sizeof(int)), m->task_rows = calloc(blocks, sizeof(int));
  m->up = rk_alloc(n * m->up_ld * sizeof(float));
  m->act = rk_alloc(n * m->act_ld * sizeof(float));
  m->down_out = rk_alloc(n * m->down_ld * sizeof(float));
  m->bytes = n * (m->up_ld + m->act_ld + m->down_ld) * sizeof(float);
  if (m->gate_up && m->down && m->active && m->first && m->row && m->slot_of && m->task_active && m->task_row && m->task_rows && m->up && m->act && m->down_out) return m;
  rk_moe_free(m);
  return NULL;
}

rk_status rk_plan_moe(rk_plan *p, const rk_moe *a) {
  rk_status st = check_moe(p, a);
  if (st) return st;
  if (!rk_reserve(p, 4)) return RK_ENOMEM;   // from here on no push fails
  rk_moe_state *m = new_state(p, a);
  if (!m) return rk_fail(RK_ENOMEM, "moe: no memory for %d rows of top %d", p->max_rows, a->topk);
  m->experts = a->experts;
  for (int e = 0; e < a->experts; e++) {
    m->gate_up[e] = a->gate_up[e], m->down[e] = a->down[e];
    rk_weight_retain(a->gate_up[e]), rk_weight_retain(a->down[e]);
  }
  p->bytes += m->bytes;
  static const struct { rk_kind kind; int (*prepare)(rk_plan *, rk_op *); } part[] = {
      {OP_MOE_UP, prepare_up}, {OP_MOE_ACT, prepare_act}, {OP_MOE_DOWN, prepare_down}, {OP_MOE_SUM, prepare_sum}};
  for (int i = 0; i < 4; i++) {
    if (i) p->stage++;
    rk_op *op = rk_push(p, part[i].kind, part[i].prepare);
    op->moe = m, op->in = a->in, op->in2 = a->route, op->in3 = a->shared, op->out = a->out;
  }
  rk_need_work(p, rk_linear_work());
  return RK_OK;
}
