/* SPDX-License-Identifier: Apache-2.0 */
/* cublaslt_impl.h -- shared by the files of the emulated cuBLASLt. */
#ifndef LM_EMU_CUBLASLT_IMPL_H
#define LM_EMU_CUBLASLT_IMPL_H

#include "cublasLt.h"
#include "emu_impl.h"

/* ---- contents of cuBLASLt's opaque structs ---- */

typedef struct {
    int32_t type, order;
    uint64_t rows, cols;
    int64_t ld, batch_stride;
    int32_t batch;
} lt_layout;

typedef struct {
    int32_t compute, scale, pointer_mode, ta, tb, aux_type, bias_type;
    uint32_t epilogue;
    char *bias, *aux;
    int64_t bias_stride, aux_ld, aux_stride;
    const float *scale_a, *scale_b;
    int32_t sms, mode_a, mode_b;
    int8_t fast;
} lt_product;

typedef struct {
    uint64_t workspace;
    uint32_t search, reduction, align[4]; /* of A, B, C, D */
    float waves;
    uint64_t impl;
} lt_preference;

typedef struct {
    uint64_t magic, workspace;
    uint16_t align[6]; /* of A, B, C, D, bias, aux */
} lt_choice;

_Static_assert(sizeof(lt_layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "fits");
_Static_assert(sizeof(lt_product) <= sizeof(cublasLtMatmulDescOpaque_t), "fits");
_Static_assert(sizeof(lt_preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "fits");
_Static_assert(sizeof(lt_choice) <= sizeof(cublasLtMatmulAlgo_t), "fits");

/* An enqueued product. */
typedef struct {
    lt_product p;
    lt_layout a, b, c, d;
    const char *at_a, *at_b, *at_c;
    char *at_d;
    const float *alpha_at, *beta_at; /* on the device; else: */
    float alpha, beta;
    unsigned char *workspace;
    size_t workspace_bytes;
    lt_choice chosen;
} lt_task;

/* ---- of these ---- */

/* Bits of an epilogue without a public name: sums of D are written to the bias pointer, the input
 * of GELU is read, there is an auxiliary matrix. */
enum { BIT_BGRAD = 16, BIT_DGELU = 64, BIT_AUX = 128 };

static inline bool is_fp8(int type)
{
    return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
}

static inline size_t type_size(int type)
{
    return type == CUDA_R_32F                          ? 4
           : type == CUDA_R_16F || type == CUDA_R_16BF ? 2
           : is_fp8(type)                              ? 1
                                                       : 0;
}

static inline bool wants_bias(uint32_t e)
{
    return (e & (CUBLASLT_EPILOGUE_BIAS | BIT_BGRAD | CUBLASLT_EPILOGUE_BGRADA |
                 CUBLASLT_EPILOGUE_BGRADB)) != 0;
}

static inline bool wants_aux(uint32_t e)
{
    return (e & BIT_AUX) != 0;
}

enum { SCALE_SIDE = 128 }; /* of a block that has a scale */

static inline bool by_blocks(const lt_product *p)
{
    return p->mode_a != CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
}

/* Index of an element. */
static inline int64_t place(const lt_layout *l, int64_t row, int64_t col)
{
    return l->order == CUBLASLT_ORDER_ROW ? row * l->ld + col : col * l->ld + row;
}

/* cublaslt_check.c: whether cuBLASLt accepts a product according to its documentation. */
LM_EMU_HIDDEN cublasStatus_t emu_lt_check(const lt_product *p, const lt_layout *a,
                                          const lt_layout *b, const lt_layout *c,
                                          const lt_layout *d);
LM_EMU_HIDDEN bool emu_lt_pointers_sane(const lt_task *t);

/* cublaslt_product.c: computes a product; the emu_work of a task. */
LM_EMU_HIDDEN void emu_lt_run(void *data);

#endif
