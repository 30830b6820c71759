#include "kernels.h"
#include <string.h>
#include <stdio.h>
rk_device *rk_device_open(const char *isa, int threads, char *err, size_t n){(void)isa;(void)threads;snprintf(err,n,"not built yet");return 0;}
void rk_device_close(rk_device *d){(void)d;}
const char *rk_device_isa(const rk_device *d){(void)d;return "";}
int rk_device_threads(const rk_device *d){(void)d;return 0;}
const char *rk_device_arithmetic(const rk_device *d){(void)d;return "";}
const char *rk_last_error(void){return "not built yet";}
double rk_device_measure_read(rk_device *d, size_t b, double s){(void)d;(void)b;(void)s;return 0;}
double rk_device_measure_fma(rk_device *d, double s){(void)d;(void)s;return 0;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_buffer *rk_buffer_new(rk_device * a0, size_t bytes){return 0;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
void rk_buffer_free(rk_buffer * a0){return;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
size_t rk_buffer_size(const rk_buffer * a0){return 0;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_buffer_write(rk_buffer * a0, size_t off, const void *src, size_t n){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_buffer_read(const rk_buffer * a0, size_t off, void *dst, size_t n){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_buffer_copy(rk_buffer *dst, size_t dst_off, const rk_buffer *src, size_t src_off, size_t n){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_weight *rk_weight_new(rk_device * a0, int n, int k, int f32){return 0;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_weight_fill(rk_weight * a0, int row0, const rk_matrix *part){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
void rk_weight_free(rk_weight * a0){return;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
size_t rk_weight_bytes(const rk_weight * a0){return 0;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_weight_row(const rk_weight * a0, int row, float *out){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_plan *rk_plan_new(rk_device * a0, rk_class a1, int max_rows, int max_segs, int max_pos){return 0;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
void rk_plan_free(rk_plan * a0){return;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
int rk_plan_scratch(rk_plan * a0, int width){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_barrier(rk_plan * a0){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_run(rk_plan * a0, const rk_batch * a1){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_write(rk_plan * a0, int scratch, int row0, int rows, const float *src){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_read(rk_plan * a0, int scratch, int row0, int rows, float *dst){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
size_t rk_plan_bytes(const rk_plan * a0){return 0;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_embed(rk_plan * a0, rk_weight *table, int out){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_repeat(rk_plan * a0, int in, int out, int times){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_mean(rk_plan * a0, int in, int out, int times){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_add(rk_plan * a0, int a, int b, int out){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_rmsnorm(rk_plan * a0, int in, const float *w, float eps, int out, int out_col, int round){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_linear(rk_plan * a0, int in, int in_col, rk_weight *w, int out, int out_col){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_linear_heads(rk_plan * a0, int in, rk_weight *w, int heads, int out, int round){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_swiglu(rk_plan * a0, int in, int out, int width, float limit){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_hc_pre(rk_plan * a0, const rk_hc_pre * a1){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_hc_post(rk_plan * a0, int streams, int post, int comb, int y, int mult, int d){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_kda(rk_plan * a0, const rk_kda * a1){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
size_t rk_kda_slot_bytes(int heads, int d, int conv, rk_class a3){return 0;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
size_t rk_mla_slab_bytes(int latent, int index_dim, int pool, rk_class a3){return 0;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_mla_store(rk_plan * a0, const rk_mla_store * a1){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_mla_pool(rk_plan * a0, const rk_mla_cache * a1, const float *ape){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
int rk_plan_selection(rk_plan * a0, int topk, int pool){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_mla_index(rk_plan * a0, const rk_mla_cache * a1, int q, int weights, int heads, int topk, int tail_always, int sel){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_mla_attend(rk_plan * a0, const rk_mla_cache * a1, int q, int heads, float scale, int sel, int out){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
int rk_plan_route_scratch(rk_plan * a0, int topk){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_route(rk_plan * a0, const rk_router * a1){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_moe(rk_plan * a0, const rk_moe * a1){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_keep_last(rk_plan * a0, int in, int width, rk_buffer *slots, size_t slot_stride, size_t slot_off){return RK_EUNSUPPORTED;}
#pragma GCC diagnostic ignored "-Wunused-parameter"
rk_status rk_plan_logits(rk_plan * a0, int in, rk_weight *w){return RK_EUNSUPPORTED;}
