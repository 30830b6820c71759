// ops_hc.h: the residual streams of mHC (models.md 1.4).

// comb from its logits, in place: softmax over j of comb[i][j], + eps, then columns, then (rows, columns) iters-1 times.
static void sinkhorn(float *comb, int m, int iters, float eps) {
  for (int i = 0; i < m; i++) {
    float *c = comb + i * m, top = c[0], sum = 0;
    for (int j = 1; j < m; j++) top = c[j] > top ? c[j] : top;
    for (int j = 0; j < m; j++) c[j] = s_exp(c[j] - top), sum += c[j];
    for (int j = 0; j < m; j++) c[j] = c[j] / sum + eps;
  }
  for (int it = 0; it < iters; it++) {
    for (int i = 0; it > 0 && i < m; i++) {
      float sum = 0;
      for (int j = 0; j < m; j++) sum += comb[i * m + j];
      for (int j = 0; j < m; j++) comb[i * m + j] /= sum + eps;
    }
    for (int j = 0; j < m; j++) {
      float sum = 0;
      for (int i = 0; i < m; i++) sum += comb[i * m + j];
      for (int i = 0; i < m; i++) comb[i * m + j] /= sum + eps;
    }
  }
}

static void task_hc_pre(rk_plan *p, const rk_op *op, int i, int worker) {
  int m = op->times, d = op->width;
  const float *base = op->p0, *scale = op->p1;
  ROWS_DO(row) {
    const float *x = rk_row(p, op->in, row), *mix = rk_row(p, op->in2, row);
    float *post = rk_row(p, op->in3, row), *comb = rk_row(p, op->in4, row), *out = rk_row(p, op->out, row);
    float r = inv_rms(x, m * d, op->eps2), pre[RK_HC_MULT_MAX];
    for (int s = 0; s < m; s++) {
      pre[s] = s_sigmoid(fmaf(mix[s] * r, scale[0], base[s])) + op->eps;
      post[s] = 2.0f * s_sigmoid(fmaf(mix[m + s] * r, scale[1], base[m + s]));
    }
    for (int s = 0; s < m * m; s++) comb[s] = fmaf(mix[2 * m + s] * r, scale[2], base[2 * m + s]);
    sinkhorn(comb, m, op->iters, op->eps);
    for (int c = 0; c < d; c += 16) {
      v16 acc = v_zero();
      for (int s = 0; s < m; s++) acc = v_fma(v_set1(pre[s]), v_load_n(x + (size_t)s * (size_t)d + c, d - c), acc);
      v_store_n(out + c, acc, d - c);
    }
    norm_apply(out, op->p2, d, inv_rms(out, d, op->eps2), out, op->round);
  }
}

// X'[j] = post[j] * y + sum over i ascending of comb[i][j] X[i], in place.
static void task_hc_post(rk_plan *p, const rk_op *op, int i, int worker) {
  int m = op->times, d = op->width;
  ROWS_DO(row) {
    float *x = rk_row(p, op->in, row);
    const float *post = rk_row(p, op->in2, row), *comb = rk_row(p, op->in3, row), *y = rk_row(p, op->in4, row);
    for (int c = 0; c < d; c += 16) {
      v16 in[RK_HC_MULT_MAX], branch = v_load_n(y + c, d - c);
      for (int s = 0; s < m; s++) in[s] = v_load_n(x + (size_t)s * (size_t)d + c, d - c);
      for (int j = 0; j < m; j++) {
        v16 acc = v_zero();
        for (int s = 0; s < m; s++) acc = v_fma(v_set1(comb[s * m + j]), in[s], acc);
        v_store_n(x + (size_t)j * (size_t)d + c, v_fma(v_set1(post[j]), branch, acc), d - c);
      }
    }
  }
}
