/* SPDX-License-Identifier: Apache-2.0 */
/* kernel.h -- what a kernel is, on every backend: a function of one lm_call.
 *
 * On the host a call is complete when the kernel returns.  A kernel of a device (kernels/cuda)
 * enqueues its work on call->stream, behind all earlier work, and returns at once; the backend's
 * sync reports its failures.
 *
 * The contract of each operator family (operands in order, shapes, types, aliasing, tolerance) is in
 * kernels/FAMILY.h; kernels/cpu/FAMILY_ref.c is its definition: plain C, any float dtype, arithmetic in
 * double, one rounding at each store.  Shapes and dtypes were checked by the graph before a kernel runs, so
 * kernels cannot fail.  They never allocate, create threads, print or branch on dtype inside loops.
 *
 * Conventions for all families
 *  - "act" is the dtype of activations: F32, BF16, F16 (reference and CUDA) or F64 (reference, double_simd.c).  "F32"
 *    operands (statistics, norm weights, biases, weight gradients, losses) are F64 when act is F64.
 *  - N = rows (B*T, batch-major), C = width, H query heads, K key/value heads, D head size, V vocabulary.
 *  - An optional operand that is absent has data == NULL and ndim == 0.
 *  - Weight gradients accumulate according to attr.acc (lm_acc): LM_ACC_ADD always adds into the output;
 *    LM_ACC_FIRST adds when step->more, otherwise overwrites it; LM_ACC_FRESH, of a weight that was computed, always
 *    overwrites it (head_grad, divergence_grad).
 *  - Results must not depend on the number of threads, bit for bit. */
#ifndef LM_KERNELS_KERNEL_H
#define LM_KERNELS_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/cpu.h"
#include "base/par.h"
#include "numeric/tensor.h"

typedef enum { LM_ACC_FIRST = 0, LM_ACC_ADD = 1, LM_ACC_FRESH = 2 } lm_acc;

/* The numbers that change between runs of one graph. */
typedef struct {
    uint64_t seed; /* of the training run */
    int64_t step;  /* optimiser step, from 0 */
    int64_t micro; /* micro-batch of the step, from 0, counted over all processes */
    bool more;     /* add to gradients and sums: not this process's first micro-batch */
    /* The other ranks along each axis of the mesh, by lm_axis (kernels/comm.h); NULL: there are none. */
    struct lm_links *const *links;
} lm_step;

/* True if a gradient is added to what is there; step NULL, while scratch is being planned: false. */
static inline bool lm_acc_adds(lm_acc acc, const lm_step *step)
{
    return acc == LM_ACC_ADD || (acc == LM_ACC_FIRST && step && step->more);
}

/* An order of execution on a device, and the parameters of its kernels (kernels/cuda/stream.h). */
typedef struct lm_stream lm_stream;

typedef struct {
    const void *attr; /* the operator's attribute struct */
    const lm_tensor *in;
    int n_in;
    lm_tensor *out;
    int n_out;
    void *work;  /* scratch: at least the bytes that the kernel's work() returns, 64-byte aligned */
    lm_par *par; /* host threads */
    lm_stream *stream; /* NULL on the host */
    const lm_step *step;
} lm_call;

typedef void (*lm_kernel_fn)(const lm_call *c);
/* Scratch bytes for this call on `threads` threads (on a device: multiprocessors); operands have
 * shapes but no data.  SIZE_MAX: the kernel does not serve these shapes, and the call must not run.
 * NULL: none. */
typedef size_t (*lm_work_fn)(const lm_call *c, int threads);

typedef struct {
    const char *op; /* operator name, e.g. "norm_dx"                            */
    lm_dtype act;   /* dtype of activations; LM_DTYPE_NONE: any (reference) */
    int level;      /* minimum level: lm_cpu_level, or lm_cuda_level (kernels/cuda/stream.h) */
    lm_kernel_fn run;
    lm_work_fn work;
} lm_kernel;

/* Each kernels/cpu/FAMILY_*.c exports one NULL-op-terminated table, listed in kernels/cpu/table.c. */

/* The kernel with the highest level <= max that serves (op, act); NULL if the operator is unknown. */
const lm_kernel *lm_cpu_kernel(const char *op, lm_dtype act, lm_cpu_level max);
/* The i-th kernel, for tests that walk all kernels; NULL past the end. */
const lm_kernel *lm_cpu_kernel_at(int i);

#endif
