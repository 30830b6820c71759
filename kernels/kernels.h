// kernels.h: the one C ABI of Rocket's compute.
//
// A rk_device owns a worker pool (CPU) or a GPU. A rk_weight is a matrix packed once for that device.
// A rk_buffer is device memory: the page arena (caches), the slot arena (recurrent states).
// A rk_plan is a fixed list of ops, built once for at most max_rows rows and run by one call a step with one batch.
//
// Invariants, each with a test:
//  1. A row's result depends on that row's inputs, its sequence's caches and state, and the weights; never on the
//     number of rows, the chunking of a sequence, the thread count, or the instruction set.
//  2. Every output element of a matrix product is ONE scalar chain: K is cut every RK_K_PIECE columns, each piece
//     starts at +0 and runs acc = fma(a[k], w[n][k], acc) in ascending k, pieces are added in ascending order
//     (with the piece's scale where the weight has block scales: total = fma(piece, scale, total)), and last
//     y = total * row_scale where the weight has row scales. Lanes run over n, so AVX2, AVX-512, NEON and plain C
//     agree bit for bit and share one arithmetic id.
//  3. Nothing is written outside an op's output rows; a row that must not touch caches (see rk_seg.write_from) does not.
//  4. No compiler contraction (ISO C mode plus FP_CONTRACT OFF, checked when a device opens): every fused
//     multiply-add is explicit. exp and sigmoid are ours.
//     Every worker sets flush-to-zero off (IEEE denormals) and round to nearest.
//  5. Where a reduction over a vector is unavoidable (norm sums), it has 16 lanes: lane i takes elements i, i+16, ...
//     in ascending order from +0, then lanes are added as (i,i+8), (i,i+4), (i,i+2), (i,i+1).
//
// Numeric class: class F32 keeps everything in FP32. Class BF16 rounds to BF16 (nearest even), once, when produced:
// the operand rows of matrix products (norm outputs, head outputs, expert activations), and what caches and conv rows
// hold (latents, indexer keys, gates, pooled keys, raw conv rows). Accumulators, residual streams, router logits,
// indexer scores, softmax, and the recurrent state are FP32 in every class.
#ifndef ROCKET_KERNELS_H
#define ROCKET_KERNELS_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

enum { RK_K_PIECE = 128, RK_PAGE_TOKENS = 128, RK_ATTN_SPLIT = 128 };
typedef enum { RK_CLASS_F32 = 0, RK_CLASS_BF16 = 1 } rk_class;
typedef enum { RK_OK = 0, RK_EINVAL = -1, RK_ENOMEM = -2, RK_EUNSUPPORTED = -3 } rk_status;
typedef enum { RK_DT_F32 = 0, RK_DT_BF16 = 1, RK_DT_FP8_BLOCK = 2, RK_DT_FP8 = 3, RK_DT_NVFP4 = 4 } rk_dtype;

typedef struct rk_device rk_device;
typedef struct rk_weight rk_weight;
typedef struct rk_buffer rk_buffer;
typedef struct rk_plan rk_plan;

// ---- device -------------------------------------------------------------------------------------------------------
// isa: "auto", "avx512", "avx2", "neon", "portable". threads 0 = all cores. On failure returns NULL and writes err.
rk_device *rk_device_open(const char *isa, int threads, char *err, size_t err_len);
void rk_device_close(rk_device *);
const char *rk_device_isa(const rk_device *);            // what was chosen
int rk_device_threads(const rk_device *);
const char *rk_device_arithmetic(const rk_device *);     // e.g. "cpu-fma32/1": equal ids = equal bits
void rk_name_thread(const char *name);                    // of the calling thread, for tools that list threads; up to 15 bytes
const char *rk_last_error(void);                         // text of this thread's last failed call: "op: argument: why"
// Measured roofs: bytes/s read by all workers over a working set of `bytes`; FMA/s in FP32 (one fma = 1).
double rk_device_measure_read(rk_device *, size_t bytes, double seconds);
double rk_device_measure_fma(rk_device *, double seconds);

// ---- memory -------------------------------------------------------------------------------------------------------
rk_buffer *rk_buffer_new(rk_device *, size_t bytes);     // zeroed, 64 KiB aligned; NULL = no memory
void rk_buffer_free(rk_buffer *);
size_t rk_buffer_size(const rk_buffer *);
rk_status rk_buffer_write(rk_buffer *, size_t off, const void *src, size_t n);
rk_status rk_buffer_read(const rk_buffer *, size_t off, void *dst, size_t n);
void *rk_buffer_map(rk_buffer *, size_t off, size_t n);  // the bytes themselves, valid until the buffer is freed; NULL = outside, or not addressable
rk_status rk_buffer_copy(rk_buffer *dst, size_t dst_off, const rk_buffer *src, size_t src_off, size_t n);

// ---- weights ------------------------------------------------------------------------------------------------------
// A weight is [n][k] (out, in). It is created with its resident kind and filled part by part (so that q, k, v or
// gate, up share one matrix); every row must be filled before use. F32 parts make an F32 weight; everything else is
// resident as BF16 values (NVFP4's e2m1*e4m3 and FP8's e4m3 are exact in BF16) with FP32 scales beside them.
typedef struct {
  rk_dtype dtype;
  int n, k;
  const void *data;        // F32/BF16: [n][k]; FP8: u8 [n][k]; NVFP4: u8 [n][k/2], even column = low nibble
  const uint8_t *scale8;   // NVFP4: e4m3 [n][k/16] (sign bit ignored)
  const float *scale;      // NVFP4: one global scale; FP8: one, per tensor; FP8_BLOCK: [ceil(n/128)][ceil(k/128)]
  int scale_rows;          // FP8: 1 or n
} rk_matrix;
rk_weight *rk_weight_new(rk_device *, int n, int k, int f32);   // f32 != 0: F32 resident, else BF16
rk_status rk_weight_fill(rk_weight *, int row0, const rk_matrix *part);
void rk_weight_free(rk_weight *);
size_t rk_weight_bytes(const rk_weight *);               // resident bytes, padding included
rk_status rk_weight_row(const rk_weight *, int row, float *out);   // dequantised row (tests, inspect)

// ---- batch --------------------------------------------------------------------------------------------------------
// Rows of one sequence are consecutive and ascending in position; each sequence appears at most once.
typedef struct {
  int32_t row0, rows;      // rows [row0, row0+rows) of the batch
  int32_t pos0;            // absolute position of the first row = tokens consumed before
  int32_t slot;            // state slot, exclusively this sequence's for the step
  int32_t table;           // offset of its page table in rk_batch.pages; page i holds positions [128i, 128i+128)
  int32_t write_from;      // rows at positions below this do not write caches (shared pages hold them already)
} rk_seg;
typedef struct {
  int32_t n_rows; const int32_t *tokens;
  int32_t n_segs; const rk_seg *segs;
  int32_t n_pages; const int32_t *pages;    // concatenated page tables (page ids in the page arena)
  int32_t n_out; const int32_t *out_rows;   // rows whose logits are wanted
  float *logits;           // [n_out][vocab] or NULL when n_out == 0
} rk_batch;

// ---- plans --------------------------------------------------------------------------------------------------------
// Scratch ids name [max_rows][width] FP32 matrices that live in the plan. Ops are appended in order. Ops between two
// rk_plan_barrier calls must not depend on each other and run side by side.
rk_plan *rk_plan_new(rk_device *, rk_class, int max_rows, int max_segs, int max_pos);   // max_pos: context bound
void rk_plan_free(rk_plan *);
int rk_plan_scratch(rk_plan *, int width);                         // >= 0, or a negative rk_status
rk_status rk_plan_barrier(rk_plan *);
rk_status rk_plan_run(rk_plan *, const rk_batch *);
rk_status rk_plan_write(rk_plan *, int scratch, int row0, int rows, const float *src);   // between runs: tests, MTP input
rk_status rk_plan_read(rk_plan *, int scratch, int row0, int rows, float *dst);
size_t rk_plan_bytes(const rk_plan *);

// Rows.
rk_status rk_plan_embed(rk_plan *, rk_weight *table, int out);                          // out[row] = table[token]
rk_status rk_plan_repeat(rk_plan *, int in, int out, int times);                        // out = [in, in, ...]: mHC streams
rk_status rk_plan_mean(rk_plan *, int in, int out, int times);                          // inverse: mean of `times` streams, ascending sum
rk_status rk_plan_add(rk_plan *, int a, int b, int out);                                // out = a + b (out may be a)
rk_status rk_plan_rmsnorm(rk_plan *, int in, const float *w, float eps, int out, int out_col, int round);
                                                          // round: to the class's operand type; 0 keeps FP32
// y = x W^T, FP32 result. in may be wider than k; columns [in_col, in_col+k).
rk_status rk_plan_linear(rk_plan *, int in, int in_col, rk_weight *w, int out, int out_col);
// Per head h: out[h*wout .. ) = in[h*win ..) W_h^T with W_h = rows [h*wout, (h+1)*wout) of w, k = win.
// round: round the result to the operand type.
rk_status rk_plan_linear_heads(rk_plan *, int in, rk_weight *w, int heads, int out, int round);
// h = silu(min(gate, limit)) * clamp(up, -limit, limit), in = [gate | up]; limit <= 0: no clamp. Rounded operand.
rk_status rk_plan_swiglu(rk_plan *, int in, int out, int width, float limit);

// mHC (models.md 1.4). mix = fn . streams must already be in `mix` (a linear over the raw streams); this op applies the
// RMS scale of the flattened streams, makes pre/post/comb (softmax start, then alternate column and row sums,
// `iters` column normalisations in all), collapses, and RMS-normalises with w into `out` (rounded operand).
typedef struct { int streams, mix, post, comb, out; int mult, d; const float *base, *scale; int iters; float hc_eps, norm_eps;
                 const float *w; } rk_hc_pre;
rk_status rk_plan_hc_pre(rk_plan *, const rk_hc_pre *);
rk_status rk_plan_hc_post(rk_plan *, int streams, int post, int comb, int y, int mult, int d);  // X' = post (x) y + comb^T X

// KDA (models.md 1.1), all of a layer between its input projections and o_proj, one task a (sequence, head):
// causal conv + silu, l2norm (divide by sqrt(sum + 1e-6)), q * D^-0.5, gate, recurrence, gated RMSNorm.
// qkv: raw rows [q | k | v], each H*D. f: gate pre-activation H*D. b: H. g: output-gate pre-activation H*D.
// State slot layout at slot_off: S FP32 [H][D(key)][D(value)], then conv rows [H][3][W-1][D] of the class's element
// type padded to 64 bytes, then the place of the raw-record ring (record_rows * H * (3*D+1) FP32; 0 today).
// gate: 0 = -exp(A)*softplus(f+dt); else lower bound L: L*sigmoid(exp(A)*(f+dt)).
typedef struct { int qkv, f, b, g, out; int heads, d, conv; const float *conv_w; /* [3*H*D][W] */ const float *a_log, *dt_bias;
                 float lower_bound, norm_eps; const float *norm_w; rk_buffer *slots; size_t slot_stride, slot_off; } rk_kda;
rk_status rk_plan_kda(rk_plan *, const rk_kda *);
size_t rk_kda_slot_bytes(int heads, int d, int conv, rk_class);   // bytes of that layout (record_rows 0); 0 = bad shape

// Sparse MLA. Cache slab of a page at layer_off: latents [128][L], then (full indexers only) keys [128][Di],
// gates [128][Di], pooled keys TRANSPOSED [Di][128/pool]; class's element type; each part padded to 64 bytes.
// index_dim 0: no indexer part (then pool 1).
typedef struct { rk_buffer *pages; size_t page_stride, layer_off; int latent, index_dim, pool; } rk_mla_cache;
size_t rk_mla_slab_bytes(int latent, int index_dim, int pool, rk_class);   // bytes of one layer's slab; 0 = bad shape
// Stores latent = rmsnorm(kv) (+ key = layernorm(wk row) with bias, raw gate) of each row, positions >= write_from.
typedef struct { rk_mla_cache cache; int kv, key, gate; const float *kv_w; float eps; const float *k_w, *k_b; float k_eps; } rk_mla_store;
rk_status rk_plan_mla_store(rk_plan *, const rk_mla_store *);
// Pools completed by rows of this batch: per channel softmax over the pool's tokens of (gate + ape) weights the keys.
rk_status rk_plan_mla_pool(rk_plan *, const rk_mla_cache *, const float *ape /* [pool][Di] */);
// Selection list per row, ascending positions, the incomplete tail last: all complete pools when they are no more than
// topk/pool, else the topk/pool best by (score descending, -0 == +0, lower index). score = sum_h ascending of
// w[h]*H^-0.5 * relu(q_h . key * Di^-0.5). heads 0 (q, weights -1): no scoring, topk must cover max_pos. `sel` is an int scratch from rk_plan_selection; a shared layer reuses it.
int rk_plan_selection(rk_plan *, int topk, int pool);
rk_status rk_plan_mla_index(rk_plan *, const rk_mla_cache *, int q, int weights, int heads, int topk, int tail_always, int sel);
// Absorbed attention (latents are the cache's; q . latent is a chain as in a matrix product): per row and head h over the selection: softmax(scale * q_h . latent) weighted latents -> out[h*L..).
// Splits of RK_ATTN_SPLIT entries, each from zero with its own maximum, folded in ascending order. Rounded operand.
rk_status rk_plan_mla_attend(rk_plan *, const rk_mla_cache *, int q /* [H][L] */, int heads, float scale, int sel, int out);

// MoE. route: scores = sigmoid(logits); choice by score + bias, groups by the sum of their two best, top-k by (choice
// descending, lower id); weights = scores / (sum + 1e-20 when norm) * scaling; ids kept ascending.
typedef struct { int logits; int experts, topk, n_group, topk_group, norm; float scaling; const float *bias; int route; } rk_router;
int rk_plan_route_scratch(rk_plan *, int topk);           // ids + weights
rk_status rk_plan_route(rk_plan *, const rk_router *);
// out = sum over the row's experts in ascending id of fma(weight, expert(x), acc) from +0, then + shared (a scratch of
// FP32 rows, or -1). gate_up[e]: [2I][d], down[e]: [d][I]; swiglu with limit as above, activations rounded operands.
typedef struct { int in, shared, out, route; int experts, topk, d, inter; float limit; rk_weight *const *gate_up; rk_weight *const *down; } rk_moe;
rk_status rk_plan_moe(rk_plan *, const rk_moe *);         // contains its own barriers

// The sequence's last row of `in` is kept at slot_off (FP32 [width]): the final normed hidden row, for MTP.
rk_status rk_plan_keep_last(rk_plan *, int in, int width, rk_buffer *slots, size_t slot_stride, size_t slot_off);
// logits[i] = in[out_rows[i]] W^T
rk_status rk_plan_logits(rk_plan *, int in, rk_weight *w);

#ifdef __cplusplus
}
#endif
#endif
