// ops_rows.h: ops on rows by themselves. A task is op->rows_per rows.

#define ROWS_DO(row)                                                                                  \
  (void)worker;                                                                                       \
  for (int row = i * op->rows_per, end_ = rk_min(p->batch->n_rows, row + op->rows_per); row < end_; row++)

static void task_embed(rk_plan *p, const rk_op *op, int i, int worker) {
  ROWS_DO(row) rk_weight_row(op->w, p->batch->tokens[row], rk_row(p, op->out, row));
}

static void task_repeat(rk_plan *p, const rk_op *op, int i, int worker) {
  ROWS_DO(row) for (int t = 0; t < op->times; t++)
    memcpy(rk_row(p, op->out, row) + (size_t)t * (size_t)op->width, rk_row(p, op->in, row), (size_t)op->width * sizeof(float));
}

static void task_mean(rk_plan *p, const rk_op *op, int i, int worker) {
  v16 times = v_set1((float)op->times);
  ROWS_DO(row) {
    const float *x = rk_row(p, op->in, row);
    float *y = rk_row(p, op->out, row);
    for (int c = 0; c < op->width; c += 16) {
      v16 sum = v_zero();
      for (int t = 0; t < op->times; t++) sum = v_add(sum, v_load_n(x + (size_t)t * (size_t)op->width + c, op->width - c));
      v_store_n(y + c, v_div(sum, times), op->width - c);
    }
  }
}

static void task_add(rk_plan *p, const rk_op *op, int i, int worker) {
  ROWS_DO(row) {
    const float *a = rk_row(p, op->in, row), *b = rk_row(p, op->in2, row);
    float *y = rk_row(p, op->out, row);
    for (int c = 0; c < op->width; c += 16) {
      int n = op->width - c;
      v_store_n(y + c, v_add(v_load_n(a + c, n), v_load_n(b + c, n)), n);
    }
  }
}

static void task_rmsnorm(rk_plan *p, const rk_op *op, int i, int worker) {
  ROWS_DO(row) {
    const float *x = rk_row(p, op->in, row);
    norm_apply(x, op->p0, op->width, inv_rms(x, op->width, op->eps), rk_row(p, op->out, row) + op->col, op->round);
  }
}

static inline void swiglu_row(const float *gate, const float *up, float *out, int width, float limit, int bf16) {
  v16 hi = v_set1(limit), lo = v_set1(-limit);
  for (int c = 0; c < width; c += 16) {
    v16 g = v_load_n(gate + c, width - c), u = v_load_n(up + c, width - c);
    if (limit > 0) g = v_min(hi, g), u = v_max(lo, v_min(hi, u));
    v_store_n(out + c, v_round_if(v_mul(v_silu(g), u), bf16), width - c);
  }
}

static void task_swiglu(rk_plan *p, const rk_op *op, int i, int worker) {
  ROWS_DO(row) {
    const float *x = rk_row(p, op->in, row);
    swiglu_row(x, x + op->width, rk_row(p, op->out, row), op->width, op->limit, op->round);
  }
}

static void task_keep_last(rk_plan *p, const rk_op *op, int i, int worker) {
  (void)worker;
  const rk_seg *s = &p->batch->segs[i];
  memcpy(op->buf->data + (size_t)s->slot * op->stride + op->off, rk_row(p, op->in, s->row0 + s->rows - 1), (size_t)op->width * sizeof(float));
}
