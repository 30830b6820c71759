// isa_portable.c: the op bodies in plain C with fmaf. Slow on x86 (fmaf is a call there); the same bits.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif
#define _GNU_SOURCE
#include "internal.h"
#include "simd_portable.h"
#define RK_ISA rk_isa_portable
#if defined(__aarch64__)
#define RK_ISA_NAME "neon"
#else
#define RK_ISA_NAME "portable"
#endif
#if defined(__x86_64__)
#define RK_SPECIALISE 0
#else
#define RK_SPECIALISE 1
#endif
#define MK_ROWS 4
#define MK_PANELS 1
#define GEMV_NP_1 2
#define GEMV_NP_2 1
#define GEMV_NP_3 1
#define GEMV_NP_4 1
#define GEMV_NP_5 1
#define GEMV_NP_6 1
#define KDA_VECS 1
#include "ops.h"
