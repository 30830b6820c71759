// ops_moe.h: the router and the routed experts. Rows are grouped by expert (moe.c); an assignment is one (row, expert).

// The k best of n choices as ascending ids. Better: larger, or equal with the lower id; so comparisons are strict while
// ids ascend. There are always k of them, NaN choices or not.
static void best_experts(const float *choice, int n, int k, int32_t *ids) {
  float value[RK_TOPK_MAX];   // descending, beside ids
  int have = 0;
  for (int e = 0; e < n; e++) {
    if (have == k && !(choice[e] > value[k - 1])) continue;
    int at = have < k ? have++ : k - 1;
    for (; at > 0 && choice[e] > value[at - 1]; at--) value[at] = value[at - 1], ids[at] = ids[at - 1];
    value[at] = choice[e], ids[at] = e;
  }
  for (int i = 1; i < k; i++) {
    int32_t id = ids[i];
    int at = i;
    for (; at > 0 && ids[at - 1] > id; at--) ids[at] = ids[at - 1];
    ids[at] = id;
  }
}

static void task_route(rk_plan *p, const rk_op *op, int i, int worker) {
  float *score = rk_work(p, worker), *choice = score + rk_pad((size_t)op->experts, 16), *group = choice + rk_pad((size_t)op->experts, 16);
  int experts = op->experts, per = experts / op->n_group;
  ROWS_DO(row) {
    const float *logits = rk_row(p, op->in, row);
    for (int e = 0; e < experts; e += 16) {
      v16 s = v_sigmoid(v_load_n(logits + e, experts - e));
      v_store_n(score + e, s, experts - e);
      v_store_n(choice + e, v_add(s, v_load_n(op->p0 + e, experts - e)), experts - e);
    }
    if (op->topk_group < op->n_group) {
      for (int g = 0; g < op->n_group; g++) {
        float a = -INFINITY, b = -INFINITY;
        for (int e = g * per; e < (g + 1) * per; e++) {
          float c = choice[e];
          if (c > a) b = a, a = c;
          else if (c > b) b = c;
        }
        group[g] = per > 1 ? a + b : a;
      }
      for (int n = 0; n < op->topk_group; n++) {
        int best = -1;
        for (int g = 0; g < op->n_group; g++)
          if (!isnan(group[g]) && (best < 0 || group[g] > group[best])) best = g;
        if (best >= 0) group[best] = NAN;   // taken
      }
      for (int g = 0; g < op->n_group; g++)
        for (int e = g * per; !isnan(group[g]) && e < (g + 1) * per; e++) choice[e] = -INFINITY;
    }
    int32_t *ids = rk_irow(p, op->out, row);
    float *weights = (float *)(ids + op->topk);
    best_experts(choice, experts, op->topk, ids);
    float sum = 0;
    for (int n = 0; n < op->topk; n++) weights[n] = score[ids[n]], sum += weights[n];
    for (int n = 0; n < op->topk; n++) weights[n] = (op->norm ? weights[n] / (sum + 1e-20f) : weights[n]) * op->scale;
  }
}

// Shared by the two matrix stages: block i % n_blocks of assignments of one expert, panel group i / n_blocks.
static void moe_matrix(rk_plan *p, const rk_op *op, int i, int worker, const rk_weight *const *weights, int gather, float *result, size_t ld) {
  const rk_moe_state *m = op->moe;
  int block = i % m->n_blocks, group = i / m->n_blocks;
  int a = m->task_active[block], first = m->task_row[block], n = m->task_rows[block];
  const rk_weight *w = weights[m->active[a]];
  int p0 = group * op->panels_per, p1 = rk_min(w->panels, p0 + op->panels_per);
  if (p0 >= p1) return;
  const float *rows[RK_BLOCK_ROWS];
  float *outs[RK_BLOCK_ROWS];
  for (int r = 0; r < n; r++) {
    rows[r] = gather ? rk_row(p, op->in, m->row[first + r]) : m->act + (size_t)(first + r) * m->act_ld;
    outs[r] = result + (size_t)(first + r) * ld + (size_t)p0 * 16;
  }
  linear_block(rk_work(p, worker), rows, n, w, p0, p1, p0 * 16, rk_min(w->n, p1 * 16), outs, 0);
}

static void task_moe_up(rk_plan *p, const rk_op *op, int i, int worker) {
  moe_matrix(p, op, i, worker, (const rk_weight *const *)op->moe->gate_up, 1, op->moe->up, op->moe->up_ld);
}

static void task_moe_act(rk_plan *p, const rk_op *op, int i, int worker) {
  const rk_moe_state *m = op->moe;
  (void)worker;
  int total = m->first[m->n_active], end = rk_min(total, (i + 1) * op->rows_per);
  for (int a = i * op->rows_per; a < end; a++) {
    const float *up = m->up + (size_t)a * m->up_ld;
    swiglu_row(up, up + m->inter, m->act + (size_t)a * m->act_ld, m->inter, m->limit, p->cls == RK_CLASS_BF16);
  }
}

static void task_moe_down(rk_plan *p, const rk_op *op, int i, int worker) {
  moe_matrix(p, op, i, worker, (const rk_weight *const *)op->moe->down, 0, op->moe->down_out, op->moe->down_ld);
}

static void task_moe_sum(rk_plan *p, const rk_op *op, int i, int worker) {
  const rk_moe_state *m = op->moe;
  int d = m->d, topk = m->topk;
  ROWS_DO(row) {
    const float *weights = (const float *)(rk_irow(p, op->in2, row) + topk), *shared = op->in3 >= 0 ? rk_row(p, op->in3, row) : NULL;
    float *out = rk_row(p, op->out, row);
    for (int c = 0; c < d; c += 16) {
      v16 acc = v_zero();
      for (int k = 0; k < topk; k++) {   // ids ascend
        const float *y = m->down_out + (size_t)m->slot_of[(size_t)row * (size_t)topk + (size_t)k] * m->down_ld;
        acc = v_fma(v_set1(weights[k]), v_load_n(y + c, d - c), acc);
      }
      if (shared) acc = v_add(acc, v_load_n(shared + c, d - c));
      v_store_n(out + c, acc, d - c);
    }
  }
}
