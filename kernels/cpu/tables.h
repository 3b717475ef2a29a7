/* SPDX-License-Identifier: Apache-2.0 */
/* tables.h -- the kernel tables of the CPU backend, one for each family and level: arrays that end
 * with an entry whose op is NULL.  A new table is declared here and listed in table.c. */
#ifndef LM_KERNELS_CPU_TABLES_H
#define LM_KERNELS_CPU_TABLES_H

#include "kernels/kernel.h"

extern const lm_kernel lm_linear_ref_kernels[], lm_linear_avx2_kernels[],
    lm_linear_avx512_kernels[], lm_linear_bf16_kernels[], lm_linear_amx_kernels[];
extern const lm_kernel lm_comm_ref_kernels[], lm_dispatch_ref_kernels[], lm_ring_ref_kernels[],
    lm_ring_avx2_kernels[], lm_ring_avx512_kernels[];
extern const lm_kernel lm_lora_ref_kernels[], lm_lora_avx2_kernels[], lm_lora_avx512_kernels[],
    lm_lora_bf16_kernels[], lm_lora_amx_kernels[];
extern const lm_kernel lm_virtual_ref_kernels[], lm_virtual_avx2_kernels[],
    lm_virtual_avx512_kernels[];
extern const lm_kernel lm_grouped_ref_kernels[], lm_grouped_avx2_kernels[],
    lm_grouped_avx512_kernels[], lm_grouped_bf16_kernels[], lm_grouped_amx_kernels[];
extern const lm_kernel lm_expert_ref_kernels[], lm_expert_avx2_kernels[],
    lm_expert_avx512_kernels[];
extern const lm_kernel lm_latent_ref_kernels[], lm_latent_avx2_kernels[],
    lm_latent_avx512_kernels[];
extern const lm_kernel lm_gaussian_ref_kernels[], lm_gaussian_avx2_kernels[],
    lm_gaussian_avx512_kernels[];
extern const lm_kernel lm_conv_ref_kernels[], lm_conv_avx2_kernels[], lm_conv_avx512_kernels[];
extern const lm_kernel lm_gated_norm_ref_kernels[], lm_gated_norm_avx2_kernels[],
    lm_gated_norm_avx512_kernels[];
extern const lm_kernel lm_noise_ref_kernels[], lm_noise_avx2_kernels[], lm_noise_avx512_kernels[];
extern const lm_kernel lm_gates_ref_kernels[], lm_gates_avx2_kernels[], lm_gates_avx512_kernels[];
extern const lm_kernel lm_delta_ref_kernels[], lm_delta_avx2_kernels[], lm_delta_avx512_kernels[];
extern const lm_kernel lm_linear_attention_ref_kernels[], lm_linear_attention_avx2_kernels[],
    lm_linear_attention_avx512_kernels[], lm_linear_attention_bf16_kernels[],
    lm_linear_attention_amx_kernels[];
extern const lm_kernel lm_route_ref_kernels[], lm_route_avx2_kernels[], lm_route_avx512_kernels[],
    lm_route_rows_avx2_kernels[], lm_route_rows_avx512_kernels[], lm_route_aux_avx2_kernels[],
    lm_route_aux_avx512_kernels[], lm_route_load_ref_kernels[], lm_route_load_avx2_kernels[],
    lm_route_load_avx512_kernels[];
extern const lm_kernel lm_attention_ref_kernels[], lm_attention_avx2_kernels[],
    lm_attention_avx512_kernels[], lm_attention_bf16_kernels[], lm_attention_amx_kernels[];
extern const lm_kernel lm_attention_sink_ref_kernels[], lm_attention_sink_avx2_kernels[],
    lm_attention_sink_avx512_kernels[];
extern const lm_kernel lm_distance_ref_kernels[], lm_distance_avx2_kernels[],
    lm_distance_avx512_kernels[];
extern const lm_kernel lm_kv_ref_kernels[], lm_kv_avx2_kernels[], lm_kv_avx512_kernels[],
    lm_kv_amx_kernels[];
extern const lm_kernel lm_kv_keep_ref_kernels[], lm_kv_keep_avx2_kernels[],
    lm_kv_keep_avx512_kernels[], lm_kv_keep_amx_kernels[];
extern const lm_kernel lm_kv_write_ref_kernels[], lm_kv_write_avx2_kernels[],
    lm_kv_write_avx512_kernels[], lm_head_rotate_ref_kernels[], lm_head_rotate_avx2_kernels[],
    lm_head_rotate_avx512_kernels[];
extern const lm_kernel lm_norm_ref_kernels[], lm_norm_avx2_kernels[], lm_norm_avx512_kernels[],
    lm_norm_bf16_kernels[];
extern const lm_kernel lm_rope_ref_kernels[], lm_rope_avx2_kernels[], lm_rope_avx512_kernels[],
    lm_rope_bf16_kernels[];
extern const lm_kernel lm_elementwise_ref_kernels[], lm_elementwise_avx2_kernels[],
    lm_elementwise_avx512_kernels[], lm_elementwise_bf16_kernels[];
extern const lm_kernel lm_embed_ref_kernels[], lm_embed_avx2_kernels[], lm_embed_avx512_kernels[];
extern const lm_kernel lm_head_ref_kernels[], lm_head_avx2_kernels[], lm_head_avx512_kernels[],
    lm_head_bf16_kernels[], lm_head_amx_kernels[];
extern const lm_kernel lm_optim_ref_kernels[], lm_optim_avx2_kernels[], lm_optim_avx512_kernels[];
extern const lm_kernel lm_factor_ref_kernels[], lm_map_ref_kernels[], lm_map_avx2_kernels[],
    lm_map_avx512_kernels[];
extern const lm_kernel lm_divergence_ref_kernels[], lm_divergence_avx2_kernels[],
    lm_divergence_avx512_kernels[], lm_divergence_bf16_kernels[], lm_divergence_amx_kernels[];
extern const lm_kernel lm_arrange_ref_kernels[], lm_arrange_avx2_kernels[],
    lm_arrange_avx512_kernels[], lm_matmul_ref_kernels[], lm_matmul_avx2_kernels[],
    lm_matmul_avx512_kernels[];
extern const lm_kernel lm_codes_ref_kernels[], lm_codes_avx2_kernels[], lm_codes_avx512_kernels[];
extern const lm_kernel lm_panels_ref_kernels[], lm_panels_bf16_kernels[];
extern const lm_kernel lm_sample_ref_kernels[], lm_joined_ref_kernels[];
extern const lm_kernel lm_double_avx2_kernels[], lm_double_avx512_kernels[];

/* NAME_simd.c is compiled once for each width, with LM_SIMD = avx2 or avx512; this names its table.
 */
#define LM_TABLE_PASTE(family, level) lm_##family##_##level##_kernels
#define LM_TABLE_NAME(family, level)  LM_TABLE_PASTE(family, level)

#endif
