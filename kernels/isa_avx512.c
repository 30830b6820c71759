// isa_avx512.c: the op bodies for AVX-512F.
#if defined(__x86_64__)
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#pragma clang attribute push(__attribute__((target("avx512f,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx2,fma")
#endif
#define _GNU_SOURCE
#include "internal.h"
#include "simd_avx512.h"
#define RK_ISA rk_isa_avx512
#define RK_ISA_NAME "avx512"
#define RK_SPECIALISE 1
#define MK_ROWS 12
#define MK_PANELS 2
#define GEMV_NP_1 8
#define GEMV_NP_2 8
#define GEMV_NP_3 4
#define GEMV_NP_4 4
#define GEMV_NP_5 4
#define GEMV_NP_6 4
#define KDA_VECS 4
#include "ops.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
