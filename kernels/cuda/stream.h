/* SPDX-License-Identifier: Apache-2.0 */
/* stream.h -- the object behind lm_call.stream, for launchers of CUDA kernels.
 *
 * lib/graph/cuda makes and owns these; launchers only read them. */
#ifndef LM_KERNELS_CUDA_STREAM_H
#define LM_KERNELS_CUDA_STREAM_H

#include <cuda_runtime_api.h>

#include "kernels/kernel.h"

/* The path of the kernels, and the level of an entry in their tables.
 *
 * PLAIN: grid, block, shared memory, shuffles; the same source runs under the emulation (tests/emu).
 * TENSOR: matrix products by cuBLASLt, attention and grouped products by tensor-core instructions, coded caches by
 * products of integers.
 * TF32: the same, and F32 products round their factors to TF32 (10 bits of mantissa). */
typedef enum { LM_CUDA_PLAIN = 0, LM_CUDA_TENSOR = 1, LM_CUDA_TF32 = 2 } lm_cuda_level;

/* The default path.  Only a path that was tested on a GPU may be the default. */
#define LM_CUDA_DEFAULT LM_CUDA_PLAIN

/* Counters of a stream, by which the last of several blocks detects that it is the last. */
enum { LM_CUDA_TICKETS = 4096 };

struct lm_stream {
    cudaStream_t handle;
    const lm_step *step;   /* device memory: the numbers of the present run, for kernels */
    unsigned *tickets;     /* device memory: LM_CUDA_TICKETS zeros; a kernel leaves them zero */
    struct lm_cuda_lt *lt; /* cuBLASLt and its choices (blaslt.h); NULL on the plain path */
    int sms;               /* multiprocessors */
    int cc;                /* compute capability: 90 */
    size_t shared_max;     /* bytes of shared memory that a block may ask for */
    lm_cuda_level level;
    bool deterministic;
};

/* Each FAMILY.cu exports one table that ends with op NULL; table.c lists them. */
extern const lm_kernel lm_linear_cuda_kernels[], lm_attention_cuda_kernels[],
    lm_attention_cached_cuda_kernels[], lm_norm_cuda_kernels[], lm_norm_backward_cuda_kernels[],
    lm_head_norm_cuda_kernels[], lm_qk_norm_cuda_kernels[], lm_rope_cuda_kernels[],
    lm_elementwise_cuda_kernels[], lm_embed_cuda_kernels[], lm_head_cuda_kernels[],
    lm_optim_cuda_kernels[], lm_sample_cuda_kernels[], lm_grouped_cuda_kernels[],
    lm_lora_cuda_kernels[], lm_virtual_cuda_kernels[], lm_norm_linear_cuda_kernels[],
    lm_map_cuda_kernels[], lm_arrange_cuda_kernels[], lm_matmul_cuda_kernels[],
    lm_divergence_cuda_kernels[], lm_codes_cuda_kernels[], lm_householder_cuda_kernels[],
    lm_jacobi_cuda_kernels[], lm_head_rotate_cuda_kernels[], lm_kv_write_cuda_kernels[],
    lm_kv_attention_cuda_kernels[], lm_kv_keep_cuda_kernels[], lm_route_cuda_kernels[],
    lm_route_rows_cuda_kernels[], lm_route_aux_cuda_kernels[], lm_route_load_cuda_kernels[],
    lm_conv_cuda_kernels[], lm_gated_norm_cuda_kernels[], lm_delta_cuda_kernels[],
    lm_noise_cuda_kernels[], lm_gates_cuda_kernels[], lm_attention_sink_cuda_kernels[],
    lm_attention_bias_cuda_kernels[], lm_expert_cuda_kernels[], lm_latent_cuda_kernels[],
    lm_gaussian_cuda_kernels[], lm_linear_attention_cuda_kernels[];

/* The kernel with the highest level <= max that serves (op, act); NULL if there is none. */
const lm_kernel *lm_cuda_kernel(const char *op, lm_dtype act, lm_cuda_level max);

#endif
