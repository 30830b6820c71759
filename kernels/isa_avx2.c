// isa_avx2.c: the op bodies for AVX2 with FMA.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define _GNU_SOURCE
#include "internal.h"
#include "simd_avx2.h"
#define RK_ISA rk_isa_avx2
#define RK_ISA_NAME "avx2"
#define RK_SPECIALISE 1
#define MK_ROWS 6
#define MK_PANELS 1
#define GEMV_NP_1 4
#define GEMV_NP_2 2
#define GEMV_NP_3 2
#define GEMV_NP_4 1
#define GEMV_NP_5 1
#define GEMV_NP_6 1
#define KDA_VECS 2
#include "ops.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
