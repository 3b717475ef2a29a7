/* SPDX-License-Identifier: Apache-2.0 */
/* fp8.h -- matrices of FP8 codes with scales: encoding and products.
 *
 * An element of a matrix [rows, k] stands for its code (E4M3 or E5M2 as in numeric/dtype.h) times
 * the scale of its block.  k is the dimension that a product sums over, and it is the inner one:
 * both factors of a product have their k contiguous, so a matrix that is used in two products
 * (weights forward and backward, a gradient by rows and by columns) is encoded twice, once
 * transposed.
 *
 * Scalings, and the position of the scale of element (i, q) (lm_fp8_scale_at):
 *   TENSOR  one for all
 *   ROW     each row's 128 steps of k (activations, gradients): [ceil(k/128), rows]
 *   BLOCK   128 rows by 128 steps of k (weights): [ceil(rows/128), P], P = ceil(k/128) rounded up
 *           to a multiple of 4, zeros where there is no block
 * These are the layouts of cuBLASLt on compute capability 9.0. */
#ifndef LM_KERNELS_FP8_H
#define LM_KERNELS_FP8_H

#include <stdbool.h>
#include <stdint.h>

#include "numeric/dtype.h"

typedef enum { LM_FP8_TENSOR, LM_FP8_ROW, LM_FP8_BLOCK } lm_fp8_scaling;

#define LM_FP8_SIDE 128 /* of a block */

/* The scale of (i, q) is number (i >> shift) * row_step + q / LM_FP8_SIDE * k_step. */
typedef struct {
    int shift;
    int64_t row_step, k_step;
} lm_fp8_steps;

static inline int64_t lm_fp8_blocks(int64_t n)
{
    return (n + LM_FP8_SIDE - 1) / LM_FP8_SIDE;
}
static inline lm_fp8_steps lm_fp8_steps_of(lm_fp8_scaling s, int64_t rows, int64_t k)
{
    lm_fp8_steps none = { 0, 0, 0 }, row = { 0, 1, rows };
    lm_fp8_steps block = { 7, (lm_fp8_blocks(k) + 3) / 4 * 4, 1 };
    return s == LM_FP8_TENSOR ? none : s == LM_FP8_ROW ? row : block;
}
/* Number of scales (floats) of a matrix. */
static inline int64_t lm_fp8_scales(lm_fp8_scaling s, int64_t rows, int64_t k)
{
    lm_fp8_steps b = lm_fp8_steps_of(LM_FP8_BLOCK, rows, k);
    return s == LM_FP8_TENSOR ? 1
           : s == LM_FP8_ROW  ? rows * lm_fp8_blocks(k)
                              : lm_fp8_blocks(rows) * b.row_step;
}
static inline int64_t lm_fp8_scale_at(lm_fp8_scaling s, int64_t rows, int64_t k, int64_t i,
                                      int64_t q)
{
    lm_fp8_steps p = lm_fp8_steps_of(s, rows, k);
    return (i >> p.shift) * p.row_step + q / LM_FP8_SIDE * p.k_step;
}

typedef struct {
    lm_dtype type; /* F8E4M3 or F8E5M2 */
    lm_fp8_scaling scaling;
    const void *codes;
    int64_t ld; /* elements from one row to the next */
    const float *scale;
} lm_fp8_matrix;

/* C [m,n] = A B^T (+ C) (+ bias over columns); A [m,k], B [n,k], not both E5M2; C BF16 or F32.
 * Products of codes are summed in F32 over each 128 steps of k; such a sum times its two scales is
 * added, in F32, to the previous ones (cuBLASLt may sum over more steps where both factors are
 * scaled by TENSOR). */
typedef struct {
    int64_t m, n, k;
    lm_fp8_matrix a, b;
    lm_dtype cd;
    bool accumulate;
    void *c;
    int64_t ldc;
    const float *bias; /* [n] or NULL; with a C of BF16 only */
    void *work;        /* at least the bytes that the backend's work function returns */
} lm_fp8_gemm;

/* The matrix of x [rows, cols] (F32, BF16 or F16), or of its transpose: codes and scales.
 *
 * The scale of a block is its largest magnitude / 448 (E4M3) or 57344 (E5M2), rounded to nearest,
 * at least 2^-126 (also for a block of zeros), and rounded up to a power of two on request.  A code
 * is x * (1 / scale) in F32, rounded to nearest, ties to even, at most the largest code.  A NaN
 * becomes a NaN and does not affect the scale; an infinity makes its block's scale infinite, so all
 * products with the block are NaN. */
typedef struct {
    int64_t rows, cols, ldx;
    lm_dtype in;
    const void *x;
    bool transpose; /* codes and scales are those of [cols, rows] */
    bool power_of_two;
    bool given; /* TENSOR: the scale is an input, from an earlier step */
    lm_dtype type;
    lm_fp8_scaling scaling;
    void *codes;
    int64_t ld;
    float *scale;
    void *work;
} lm_fp8_quantize;

#endif
