/* SPDX-License-Identifier: Apache-2.0 */
/* table.c -- every CUDA kernel, and the choice among them. */
#include <string.h>

#include "kernels/cuda/comm.h"
#include "kernels/cuda/stream.h"

static const lm_kernel *const tables[] = {
    lm_linear_cuda_kernels,
    lm_attention_cuda_kernels,
    lm_attention_cached_cuda_kernels,
    lm_norm_cuda_kernels,
    lm_norm_backward_cuda_kernels,
    lm_head_norm_cuda_kernels,
    lm_rope_cuda_kernels,
    lm_elementwise_cuda_kernels,
    lm_embed_cuda_kernels,
    lm_head_cuda_kernels,
    lm_optim_cuda_kernels,
    lm_sample_cuda_kernels,
    lm_grouped_cuda_kernels,
    lm_norm_linear_cuda_kernels,
    lm_map_cuda_kernels,
    lm_codes_cuda_kernels,
    lm_qk_norm_cuda_kernels,
    lm_householder_cuda_kernels,
    lm_jacobi_cuda_kernels,
    lm_head_rotate_cuda_kernels,
    lm_kv_write_cuda_kernels,
    lm_kv_attention_cuda_kernels,
    lm_kv_keep_cuda_kernels,
    lm_lora_cuda_kernels,
    lm_virtual_cuda_kernels,
    lm_arrange_cuda_kernels,
    lm_matmul_cuda_kernels,
    lm_divergence_cuda_kernels,
    lm_route_cuda_kernels,
    lm_route_rows_cuda_kernels,
    lm_route_aux_cuda_kernels,
    lm_route_load_cuda_kernels,
    lm_conv_cuda_kernels,
    lm_gated_norm_cuda_kernels,
    lm_delta_cuda_kernels,
    lm_noise_cuda_kernels,
    lm_gates_cuda_kernels,
    lm_attention_sink_cuda_kernels,
    lm_attention_bias_cuda_kernels,
    lm_expert_cuda_kernels,
    lm_latent_cuda_kernels,
    lm_gaussian_cuda_kernels,
    lm_linear_attention_cuda_kernels,
    lm_comm_cuda_kernels,
};
enum { N_TABLES = sizeof(tables) / sizeof(tables[0]) };

const lm_kernel *lm_cuda_kernel(const char *op, lm_dtype act, lm_cuda_level max)
{
    const lm_kernel *best = NULL;
    for (int t = 0; t < N_TABLES; t++)
        for (const lm_kernel *k = tables[t]; k->op; k++)
            if (k->level <= (int)max && (k->act == act || k->act == LM_DTYPE_NONE) &&
                !strcmp(k->op, op) && (!best || k->level > best->level))
                best = k;
    return best;
}
