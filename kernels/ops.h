// ops.h: every op's tasks for one instruction set. Included once by each isa_*.c, which has chosen the vector type and
// defined RK_ISA (the table's name), RK_ISA_NAME, RK_SPECIALISE, MK_ROWS, MK_PANELS, GEMV_NP_1..6 and KDA_VECS.
#include <math.h>
#include "ops_math.h"
#include "ops_linear.h"
#include "ops_rows.h"
#include "ops_hc.h"
#include "ops_kda.h"
#include "ops_mla.h"
#include "ops_moe.h"

// Four streams with prefetch, as a weight is read: one stream alone does not fill the memory pipeline.
static uint64_t probe_read(const uint8_t *p, size_t n) {
  v16 acc[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
  size_t part = n / 4 / 64 * 64, i = 0;
  for (; i < part; i += 64)
    UNROLL for (size_t j = 0; j < 4; j++) {
      const uint8_t *at = p + j * part + i;
      v_prefetch(at + STREAM_AHEAD);
      acc[j] = v_max(acc[j], v_load((const float *)at));
    }
  uint64_t rest = 0;
  for (i = 4 * part; i < n; i++) rest ^= p[i];
  return rest ^ (uint64_t)(v_first(v_max(v_max(acc[0], acc[1]), v_max(acc[2], acc[3]))) > 0);
}

enum { PROBE_CHAINS = 6, PROBE_STEPS = 64 };
static double probe_fma(uint64_t rounds) {
  v16 acc[PROBE_CHAINS], x = v_set1(0.999f), y = v_set1(0.001f);
  float start[16];   // lanes must differ, or the compiler computes half a vector
  for (int i = 0; i < 16; i++) start[i] = (float)(rounds + (uint64_t)i);
  UNROLL for (int j = 0; j < PROBE_CHAINS; j++) acc[j] = v_add(v_load(start), v_set1((float)j));
  for (uint64_t r = 0; r < rounds * PROBE_STEPS; r++)
    UNROLL for (int j = 0; j < PROBE_CHAINS; j++) acc[j] = v_fma(acc[j], x, y);
  v16 sum = v_zero();
  for (int j = 0; j < PROBE_CHAINS; j++) sum = v_add(sum, acc[j]);
  return v_sum(sum);
}

static int probe_contracts(volatile const float *abc) {
  v16 a = v_set1(abc[0]), b = v_set1(abc[1]), c = v_set1(abc[2]);
  float scalar = abc[0] * abc[1] + abc[2];
  return scalar != 0 || v_first(v_add(v_mul(a, b), c)) != 0;
}

const rk_isa RK_ISA = {
    .name = RK_ISA_NAME,
    .task = {[OP_EMBED] = task_embed, [OP_REPEAT] = task_repeat, [OP_MEAN] = task_mean, [OP_ADD] = task_add, [OP_RMSNORM] = task_rmsnorm,
             [OP_LINEAR] = task_linear, [OP_HEADS] = task_heads, [OP_SWIGLU] = task_swiglu, [OP_HC_PRE] = task_hc_pre, [OP_HC_POST] = task_hc_post,
             [OP_KDA] = task_kda, [OP_MLA_STORE] = task_mla_store, [OP_MLA_POOL] = task_mla_pool, [OP_MLA_INDEX] = task_mla_index,
             [OP_MLA_ATTEND] = task_mla_attend, [OP_ROUTE] = task_route, [OP_MOE_UP] = task_moe_up, [OP_MOE_ACT] = task_moe_act,
             [OP_MOE_DOWN] = task_moe_down, [OP_MOE_SUM] = task_moe_sum, [OP_KEEP_LAST] = task_keep_last, [OP_LOGITS] = task_logits},
    .gemv_rows = GEMV_ROWS,
    .read = probe_read,
    .fma = probe_fma,
    .fma_count = 16.0 * PROBE_CHAINS * PROBE_STEPS,
    .contracts = probe_contracts,
};
