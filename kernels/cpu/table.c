/* SPDX-License-Identifier: Apache-2.0 */
/* table.c -- the list of CPU kernels, and the choice among them. */
#include <string.h>

#include "kernels/cpu/tables.h"

static const lm_kernel *const tables[] = {
    lm_linear_ref_kernels,
    lm_linear_avx2_kernels,
    lm_linear_avx512_kernels,
    lm_linear_bf16_kernels,
    lm_linear_amx_kernels,
    lm_comm_ref_kernels,
    lm_dispatch_ref_kernels,
    lm_ring_ref_kernels,
    lm_ring_avx2_kernels,
    lm_ring_avx512_kernels,
    lm_attention_ref_kernels,
    lm_attention_avx2_kernels,
    lm_attention_avx512_kernels,
    lm_attention_bf16_kernels,
    lm_attention_amx_kernels,
    lm_attention_sink_ref_kernels,
    lm_attention_sink_avx2_kernels,
    lm_attention_sink_avx512_kernels,
    lm_distance_ref_kernels,
    lm_distance_avx2_kernels,
    lm_distance_avx512_kernels,
    lm_norm_ref_kernels,
    lm_norm_avx2_kernels,
    lm_norm_avx512_kernels,
    lm_norm_bf16_kernels,
    lm_rope_ref_kernels,
    lm_rope_avx2_kernels,
    lm_rope_avx512_kernels,
    lm_rope_bf16_kernels,
    lm_elementwise_ref_kernels,
    lm_elementwise_avx2_kernels,
    lm_elementwise_avx512_kernels,
    lm_elementwise_bf16_kernels,
    lm_embed_ref_kernels,
    lm_embed_avx2_kernels,
    lm_embed_avx512_kernels,
    lm_head_ref_kernels,
    lm_head_avx2_kernels,
    lm_head_avx512_kernels,
    lm_head_bf16_kernels,
    lm_head_amx_kernels,
    lm_optim_ref_kernels,
    lm_optim_avx2_kernels,
    lm_optim_avx512_kernels,
    lm_sample_ref_kernels,
    lm_lora_ref_kernels,
    lm_lora_avx2_kernels,
    lm_lora_avx512_kernels,
    lm_lora_bf16_kernels,
    lm_lora_amx_kernels,
    lm_virtual_ref_kernels,
    lm_virtual_avx2_kernels,
    lm_virtual_avx512_kernels,
    lm_grouped_ref_kernels,
    lm_grouped_avx2_kernels,
    lm_grouped_avx512_kernels,
    lm_grouped_bf16_kernels,
    lm_grouped_amx_kernels,
    lm_expert_ref_kernels,
    lm_expert_avx2_kernels,
    lm_expert_avx512_kernels,
    lm_latent_ref_kernels,
    lm_latent_avx2_kernels,
    lm_latent_avx512_kernels,
    lm_gaussian_ref_kernels,
    lm_gaussian_avx2_kernels,
    lm_gaussian_avx512_kernels,
    lm_conv_ref_kernels,
    lm_conv_avx2_kernels,
    lm_conv_avx512_kernels,
    lm_gated_norm_ref_kernels,
    lm_gated_norm_avx2_kernels,
    lm_gated_norm_avx512_kernels,
    lm_noise_ref_kernels,
    lm_noise_avx2_kernels,
    lm_noise_avx512_kernels,
    lm_gates_ref_kernels,
    lm_gates_avx2_kernels,
    lm_gates_avx512_kernels,
    lm_delta_ref_kernels,
    lm_delta_avx2_kernels,
    lm_delta_avx512_kernels,
    lm_linear_attention_ref_kernels,
    lm_linear_attention_avx2_kernels,
    lm_linear_attention_avx512_kernels,
    lm_linear_attention_bf16_kernels,
    lm_linear_attention_amx_kernels,
    lm_route_ref_kernels,
    lm_route_avx2_kernels,
    lm_route_avx512_kernels,
    lm_route_rows_avx2_kernels,
    lm_route_rows_avx512_kernels,
    lm_route_aux_avx2_kernels,
    lm_route_aux_avx512_kernels,
    lm_route_load_ref_kernels,
    lm_route_load_avx2_kernels,
    lm_route_load_avx512_kernels,
    lm_joined_ref_kernels,
    lm_factor_ref_kernels,
    lm_map_ref_kernels,
    lm_map_avx2_kernels,
    lm_map_avx512_kernels,
    lm_divergence_ref_kernels,
    lm_divergence_avx2_kernels,
    lm_divergence_avx512_kernels,
    lm_divergence_bf16_kernels,
    lm_divergence_amx_kernels,
    lm_arrange_ref_kernels,
    lm_arrange_avx2_kernels,
    lm_arrange_avx512_kernels,
    lm_matmul_ref_kernels,
    lm_matmul_avx2_kernels,
    lm_matmul_avx512_kernels,
    lm_double_avx2_kernels,
    lm_double_avx512_kernels,
    lm_codes_ref_kernels,
    lm_codes_avx2_kernels,
    lm_codes_avx512_kernels,
    lm_kv_ref_kernels,
    lm_kv_avx2_kernels,
    lm_kv_avx512_kernels,
    lm_panels_ref_kernels,
    lm_panels_bf16_kernels,
    lm_kv_amx_kernels,
    lm_kv_write_ref_kernels,
    lm_kv_write_avx2_kernels,
    lm_kv_write_avx512_kernels,
    lm_kv_keep_ref_kernels,
    lm_kv_keep_avx2_kernels,
    lm_kv_keep_avx512_kernels,
    lm_kv_keep_amx_kernels,
    lm_head_rotate_ref_kernels,
    lm_head_rotate_avx2_kernels,
    lm_head_rotate_avx512_kernels,
};
enum { N_TABLES = sizeof(tables) / sizeof(tables[0]) };

const lm_kernel *lm_cpu_kernel(const char *op, lm_dtype act, lm_cpu_level max)
{
    const lm_kernel *best = NULL;
    for (int t = 0; t < N_TABLES; t++) {
        for (const lm_kernel *k = tables[t]; k->op; k++) {
            if (k->level > (int)max || (k->act != act && k->act != LM_DTYPE_NONE) ||
                strcmp(k->op, op))
                continue;
            bool exact = k->act == act;
            bool best_exact = best && best->act == act;
            if (!best || exact > best_exact || (exact == best_exact && k->level > best->level))
                best = k;
        }
    }
    return best;
}

const lm_kernel *lm_cpu_kernel_at(int i)
{
    for (int t = 0; i >= 0 && t < N_TABLES; t++)
        for (const lm_kernel *k = tables[t]; k->op; k++)
            if (i-- == 0)
                return k;
    return NULL;
}
