// internal.h: what the C files of this package share. Not part of the ABI.
#ifndef ROCKET_KERNELS_INTERNAL_H
#define ROCKET_KERNELS_INTERNAL_H
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include "kernels.h"

enum {
  RK_LANES = 16,             // outputs of a weight panel, lanes of a vector
  RK_THREADS_MAX = 512,
  RK_TASKS_MAX = 1 << 19,    // of a stage; the pool's ticket has 20 bits and every thread may overshoot once
  RK_BLOCK_ROWS = 96,        // rows of one blocked matrix product task: a multiple of every microkernel's rows
  RK_BLOCK_PANELS = 16,      // panels of one blocked task
  RK_ROWS_MAX = 1 << 14,     // rows of a plan
  RK_WIDTH_MAX = 1 << 24,    // columns of a scratch
  RK_HEAD_BLOCK = 64,        // heads of one attention task
  RK_CONV_MAX = 8,           // convolution width
  RK_KDA_D_MAX = 512,        // KDA head width
  RK_KDA_BLOCK = 16,         // rows whose inputs are prepared together
  RK_HC_MULT_MAX = 8,        // residual streams
  RK_TOPK_MAX = 64,          // experts of a row
};

// ---- errors (error.c) ----
rk_status rk_fail(rk_status st, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

// ---- memory (memory.c): zeroed, aligned, huge pages where large ----
void *rk_alloc(size_t bytes);
void rk_release(void *p, size_t bytes);
static inline size_t rk_pad(size_t n, size_t to) { return (n + to - 1) / to * to; }
// Elements from row to row of an FP32 matrix: an odd number of cache lines, so that rows do not share cache sets.
static inline size_t rk_ld(int width) { return (rk_pad((size_t)width, 16) / 16 | 1) * 16; }
static inline int rk_min(int a, int b) { return a < b ? a : b; }
static inline int rk_max(int a, int b) { return a > b ? a : b; }
static inline int rk_ceil(int a, int b) { return (a + b - 1) / b; }

// ---- pool (pool.c) ----
// A job is a sequence of stages of numbered tasks. advance runs alone between stages and returns the number of tasks
// of the next one, 0 when the job is over. Every task of a stage happens before the next advance.
typedef struct {
  int (*advance)(void *ctx);
  void (*task)(void *ctx, int index, int worker);
  void *ctx;
} rk_job;
typedef struct rk_pool rk_pool;
rk_pool *rk_pool_new(int threads);
void rk_pool_free(rk_pool *);
void rk_pool_run(rk_pool *, const rk_job *);   // one at a time (the pool locks); the caller is worker 0

typedef struct rk_isa rk_isa;
struct rk_device {
  atomic_int refs;           // the handle, and one for each object of the device
  atomic_int closed;
  int threads;
  const rk_isa *isa;
  rk_pool *pool;
  pthread_mutex_t lock;      // lazy parts of weights
};
void rk_device_retain(rk_device *);
void rk_device_drop(rk_device *);

struct rk_buffer {
  atomic_int refs;
  rk_device *dev;
  size_t bytes, mapped;
  uint8_t *data;
};
void rk_buffer_retain(rk_buffer *);

// Panels of 16 rows; inside one, BF16 goes in pairs of columns [k/2][16][2], F32 as [k][16].
struct rk_weight {
  atomic_int refs;
  rk_device *dev;
  int n, k, f32;
  int panels, pieces;
  size_t panel_bytes, mapped;
  uint8_t *data;
  float *row_scale;          // [panels*16], NULL while no part has one
  float *block_scale;        // [panels][pieces][16], NULL while no part has one
  uint8_t *filled;           // by row
};
void rk_weight_retain(rk_weight *);
int rk_weight_complete(const rk_weight *);

// ---- plans (plan.c) ----
typedef enum {
  OP_EMBED, OP_REPEAT, OP_MEAN, OP_ADD, OP_RMSNORM, OP_LINEAR, OP_HEADS, OP_SWIGLU, OP_HC_PRE, OP_HC_POST, OP_KDA,
  OP_MLA_STORE, OP_MLA_POOL, OP_MLA_INDEX, OP_MLA_ATTEND, OP_ROUTE, OP_MOE_UP, OP_MOE_ACT, OP_MOE_DOWN, OP_MOE_SUM,
  OP_KEEP_LAST, OP_LOGITS, OP_KINDS
} rk_kind;

typedef enum { SC_ROWS, SC_SELECTION, SC_ROUTE } rk_scratch_kind;
typedef struct {
  rk_scratch_kind kind;
  int width;                 // SC_ROWS: columns; SC_SELECTION: positions; SC_ROUTE: experts of a row
  int ld;                    // elements (4 bytes) from row to row
  union { float *f; int32_t *i; } data;
  size_t bytes;
} rk_scratch;

// Selection row: [0] = count, then positions. Route row: ids [width], then weights [width] as float bits.

typedef struct rk_moe_state rk_moe_state;
typedef struct rk_op rk_op;
struct rk_op {
  rk_kind kind;
  int stage;
  int (*prepare)(rk_plan *, rk_op *);   // tasks for the current batch; runs alone, earlier stages are done
  // How prepare cut the work, read by the tasks.
  int tasks, task0;                     // task0: first task of the op in its stage
  int rows_per, panels_per, row_blocks, col_blocks;
  // Operands; each kind uses its own.
  int in, in2, in3, in4, out, col, in_col;
  int width, heads, topk, times, round, flag, iters;
  float eps, eps2, scale, limit;
  rk_weight *w;
  rk_buffer *buf;
  size_t stride, off;
  rk_mla_cache cache;
  float *p0, *p1, *p2, *p3, *p4;        // copied parameters
  rk_moe_state *moe;                    // owned by the OP_MOE_UP op
  int experts, n_group, topk_group, norm, conv, d;
};

struct rk_moe_state {
  int experts, topk, d, inter;
  size_t rows, up_ld, act_ld, down_ld;   // room for so many assignments
  float limit;
  rk_weight **gate_up, **down;
  // Of the current batch: assignments (row, place) sorted by expert, rows ascending inside one.
  int n_active;              // experts with rows
  int *active, *first;       // [experts], [experts+1]: first assignment of active[i]
  int *row, *slot_of;        // [max_rows*topk]: row of an assignment; assignment of (row, place)
  float *up, *act, *down_out; // [rows][up_ld], ...
  int *task_active, *task_row, *task_rows; // row blocks of the matrix stages
  int n_blocks;
  size_t bytes;
};

void rk_moe_free(rk_moe_state *);

struct rk_plan {
  rk_device *dev;
  rk_class cls;
  int max_rows, max_segs, max_pos;
  rk_scratch *scratch; int n_scratch, cap_scratch;
  rk_op *ops; int n_ops, cap_ops;
  int stage;                 // of the next op
  size_t work_bytes;         // of one worker
  uint8_t *work; size_t work_mapped;
  size_t bytes;
  int has_logits;
  // Of the current run.
  const rk_batch *batch;
  int32_t *row_seg;          // [max_rows]
  int op_first, op_last;     // ops of the running stage: [op_first, op_last)
  int run_tasks, run_chunk;  // its tasks, and how many of them a claim runs
  int32_t *check;            // room for the duplicate checks
  size_t check_len;
};

static inline int rk_elem(rk_class c) { return c == RK_CLASS_BF16 ? 2 : 4; }
static inline float *rk_row(const rk_plan *p, int id, int row) { return p->scratch[id].data.f + (size_t)row * p->scratch[id].ld; }
static inline int32_t *rk_irow(const rk_plan *p, int id, int row) { return p->scratch[id].data.i + (size_t)row * p->scratch[id].ld; }
static inline void *rk_work(const rk_plan *p, int worker) { return p->work + (size_t)worker * p->work_bytes; }
static inline int rk_pos(const rk_plan *p, int row) {
  const rk_seg *s = &p->batch->segs[p->row_seg[row]];
  return s->pos0 + (row - s->row0);
}
// Layout of a layer's slab inside a page, and of a KDA slot.
typedef struct { size_t latent, key, gate, pooled, bytes; } rk_slab;
int rk_slab_layout(int latent, int index_dim, int pool, int elem, rk_slab *out);   // 0 = bad shape
static inline uint8_t *rk_page(const rk_mla_cache *c, int32_t page) {
  return c->pages->data + (size_t)page * c->page_stride + c->layer_off;
}
static inline int32_t rk_page_id(const rk_plan *p, const rk_seg *s, int pos) {
  return p->batch->pages[s->table + pos / RK_PAGE_TOKENS];
}

// Builder helpers (plan.c).
int rk_reserve(rk_plan *, int n);   // room for n more ops; 0: no memory, the error is set
rk_op *rk_push(rk_plan *, rk_kind, int (*prepare)(rk_plan *, rk_op *));   // NULL: no memory, the error is set
int rk_need_rows(rk_plan *, const char *op, const char *arg, int id, int width);   // 1 when id is an FP32 scratch at least that wide
int rk_need_kind(rk_plan *, const char *op, const char *arg, int id, rk_scratch_kind kind);
int rk_need_weight(rk_plan *, const char *op, const rk_weight *w);
int rk_need_cache(rk_plan *, const char *op, const rk_mla_cache *c, int indexer);
float *rk_copy(const float *src, size_t n);
void rk_need_work(rk_plan *, size_t bytes);
int rk_cut_rows(rk_plan *, rk_op *, int rows, int least);   // tasks of at least `least` rows

// ---- instruction sets ----
struct rk_isa {
  const char *name;
  void (*task[OP_KINDS])(rk_plan *, const rk_op *, int index, int worker);
  int gemv_rows;             // up to so many rows a matrix product streams its weight
  uint64_t (*read)(const uint8_t *p, size_t n);          // touches every byte
  double (*fma)(uint64_t rounds);                        // runs rounds * fma_count multiply-adds
  double fma_count;
  int (*contracts)(volatile const float *abc);           // 1 when the compiler fused a*b+c
};
extern const rk_isa rk_isa_portable;
#if defined(__x86_64__)
extern const rk_isa rk_isa_avx2, rk_isa_avx512;
#endif
size_t rk_linear_work(void);   // worker bytes of a matrix product task

#endif
