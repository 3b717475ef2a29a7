/* SPDX-License-Identifier: Apache-2.0 */
/* linear.h -- the linear layer y = x W^T + b and the two halves of its backward, kept apart so that
 * schedules can move the weight half (zero-bubble pipelines, frozen weights).
 *
 * linear     in  x [N,K] act, w [M,K] act, b [M] F32 (optional)
 *            out y [N,M] act or F32                          y = x w^T + b, sums in F32
 *            w may be in codes, or in panels
 * linear_dx  in  dy [N,M] act, w [M,K] act (also in codes, or in panels)
 *            out dx [N,K] act                                dx = dy w
 * linear_dw  in  dy [N,M] act, x [N,K] act
 *            out dw [M,K] F32 (acc), db [M] F32 (optional, acc)   dw (+)= dy^T x; db (+)= column sums of dy
 *
 * Joined forms, which graphs get where a backend has kernels for them (lib/op/fuse.h):
 * linear_act     in  x [N,K] act, w [M,K] act, b [M] F32 (optional)
 *                out y [N,M] act, z [N,M] act (optional)         z = x w^T + b; y = f(z), of the sum
 *                                                                before it is rounded to act
 * linear_act_dx  in  dy [N,M] act, w [M,K] act, z [N,K] act
 *                out dz [N,K] act                                dz = (dy w) f'(z)
 *                f: GELU, the tanh form or the exact one (kernels/elementwise.h)
 * norm_linear    in  x [N,C] act, nw [C] F32, nb [C] F32 (optional), r [N,C] act (optional),
 *                    w [M,C] act, b [M] F32 (optional)
 *                out y [N,M] act or F32, s [N,C] act (present iff r is)
 *                h and s as norm makes them of x, nw, nb, r (kernels/norm.h; h rounded to act);
 *                y = f(h w^T + b).  f: none, GELU, or SwiGLU or GeGLU: then y is [N,M/2],
 *                silu (GELU, tanh form) of the sums of the first half of w times those of the
 *                second
 *
 * No operand aliases another.  Tolerance against linear_ref in double: relative L2 1e-6 (F32), 4e-3 (BF16);
 * of norm_linear 2e-6 and 1e-2.
 *
 * All use lm_gemm_run below, which is exported for the head and for the bench. */
#ifndef LM_KERNELS_LINEAR_H
#define LM_KERNELS_LINEAR_H

#include "kernels/kernel.h"
#include "kernels/norm.h"

typedef struct {
    lm_acc acc; /* linear_dw only */
} lm_linear_attr;

/* The function behind a linear layer.  Those from LM_ACT_SWIGLU on take pairs: f(gate) up. */
typedef enum {
    LM_ACT_NONE,
    LM_ACT_GELU,
    LM_ACT_GELU_EXACT,
    LM_ACT_SWIGLU,
    LM_ACT_GEGLU
} lm_activation;

typedef struct {
    lm_activation act; /* GELU or GELU_EXACT */
} lm_linear_act_attr;

typedef struct {
    lm_norm_kind kind;
    double eps;
    lm_activation act;
    bool plus_one; /* of the norm */
} lm_norm_linear_attr;

/* C [m,n] (row pitch ldc) = op(A) op(B) (+ C) (+ bias over columns), all row-major, any m, n, k >= 1.
 * ta: A is stored [k,m]; tb: B is stored [n,k].  a and b have dtype ab (BF16 or F32); c has dtype cd (BF16 or
 * F32).  Sums run over k in order in F32 (reference: in double), so the bits depend on the level and on the
 * shape, never on the number of threads.  Nothing outside the named matrices is read or written.
 *
 * Weights that serve many products unchanged (forward, backward and all micro-batches of one optimiser step,
 * or every token of a generation) can be packed once: lm_gemm_pack writes op(B) in the layout of that level
 * into lm_gemm_pack_size bytes (64-byte aligned), and a call with b_packed = that memory reads it instead
 * of b.  The packed form depends on (n, k, ab, level), not on m or threads; y = x w^T and dx = dy w need one
 * each.  With m <= LM_GEMM_SMALL_M the plain b is read when given: it is no larger than the packed form.  Where
 * it is not given, AMX and AVX512-BF16 unpack rows (k a multiple of 32), as their sums, and so the bits, have
 * the order of b.
 *
 * Training, evaluation and batches over pages in BF16 at these levels keep weights in the packed form of y = x w^T
 * (kernels/panels.h), in place of the plain one; dx = dy w packs its panels from these (b_turned), in blocks of
 * 2 KiB instead of short pieces of rows.  Gains over the plain form on AMX (one thread, weights not in the caches;
 * share/doc/benchmarks.md):
 * y = x w^T 24 to 56 % at 64 and 256 rows, 14 to 22 % at 1,024, about none at 8,192; dx 34 to 123 %, 4 to 22 % and
 * 1 to 5 %, of a small matrix (640 x 640) at most 7 %.  Panels of dx as a second copy would gain 36 to 100 points
 * more at 64 rows and 7 to 17 at 1,024, and take as much memory again.  With AVX512-BF16 packing is a
 * smaller part of a product: 19 to 57 % at 16 rows, 7 to 18 % at 64, and 0 to 5 % at 1,024, of y and dx. */
typedef struct {
    int64_t m, n, k;
    lm_dtype ab, cd;
    bool ta, tb, accumulate;
    const void *a, *b;
    int64_t lda, ldb, ldc;
    void *c;
    const float *bias;    /* [n] or NULL */
    void *work;           /* lm_gemm_work bytes, 64-byte aligned */
    const void *b_packed; /* from lm_gemm_pack, or NULL; then b may be NULL */
    /* AMX and AVX512-BF16, not tb: the packed form of B's transpose, whose depth is n, from which panels of B are
     * packed; ldb is that depth rounded up to a multiple of 32.  NULL: b is read. */
    const void *b_turned;
    /* Rows of B as codes (numeric/code_rows.h), which are read as ab, with the bits of a B of these numbers that is read;
     * NULL: b.  Not packed, and on a level with vectors. */
    const struct lm_code_rows *b_codes;
    int64_t b_from; /* not tb: the row of b_codes that is row 0 of B */
    float *a_sum;   /* [m] or NULL: sums of op(A) over k (a bias gradient); added when a_sum_add */
    bool a_sum_add;
} lm_gemm;

/* Up to this many rows a product streams op(B) once without packing it (decoding).
 *
 * The bits of a row of y = x w^T depend on the number of rows by this alone: they are the same for 1 to
 * LM_GEMM_SMALL_M rows, and the same for any larger number, whichever rows stand beside it; on the CPU at every
 * level, on the plain CUDA path, and for weights in codes.  (The tensor-core path follows the choices of cuBLASLt.) */
#define LM_GEMM_SMALL_M 8

size_t lm_gemm_work(const lm_gemm *g, lm_cpu_level level, int threads);
void lm_gemm_run(const lm_gemm *g, lm_cpu_level level, lm_par *par);
/* 0: this level has no packed form. */
size_t lm_gemm_pack_size(const lm_gemm *g, lm_cpu_level level);
void lm_gemm_pack(const lm_gemm *g, lm_cpu_level level, lm_par *par, void *dst);

#endif
