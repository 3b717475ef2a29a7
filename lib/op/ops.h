/* SPDX-License-Identifier: Apache-2.0 */
/* ops.h -- all operators, by name and by variable.  Operands and attributes are those of
 * kernels/FAMILY.h. */
#ifndef LM_OP_OPS_H
#define LM_OP_OPS_H

#include "graph/op.h"

/* linear.c */
extern const lm_op lm_op_linear, lm_op_linear_dx, lm_op_linear_dw;
/* lora.c */
extern const lm_op lm_op_lora_down, lm_op_lora_down_dx, lm_op_lora_up, lm_op_lora_up_dx,
    lm_op_lora_up_dw;
/* virtual.c */
extern const lm_op lm_op_virtual_rows, lm_op_virtual_rows_dx, lm_op_virtual_rows_dw;
/* joined.c: inserted by fuse.h */
extern const lm_op lm_op_linear_act, lm_op_linear_act_dx, lm_op_norm_linear, lm_op_norm_dx_dw,
    lm_op_attention_step, lm_op_head_loss;
/* grouped.c */
extern const lm_op lm_op_grouped_linear, lm_op_grouped_linear_dx, lm_op_grouped_linear_dw;
/* latent.c */
extern const lm_op lm_op_latent_rows, lm_op_latent_rows_dx, lm_op_latent_queries,
    lm_op_latent_values;
/* gaussian.c */
extern const lm_op lm_op_gaussian_rows, lm_op_gaussian_rows_dx;
/* conv.c */
extern const lm_op lm_op_conv, lm_op_conv_dx, lm_op_conv_dw, lm_op_conv_cached;
/* gated_norm.c */
extern const lm_op lm_op_gated_norm, lm_op_gated_norm_dx, lm_op_gated_norm_dw;
/* noise.c */
extern const lm_op lm_op_noise;
/* gates.c */
extern const lm_op lm_op_gate_split, lm_op_gate_join, lm_op_delta_gates, lm_op_delta_gates_dx,
    lm_op_delta_gates_dw;
/* delta.c */
extern const lm_op lm_op_delta, lm_op_delta_dx, lm_op_delta_cached;
/* linear_attention.c */
extern const lm_op lm_op_linear_attention, lm_op_linear_attention_dx, lm_op_linear_attention_cached;
/* route.c */
extern const lm_op lm_op_route_choose, lm_op_route_choose_dz, lm_op_route_plan, lm_op_route_rows,
    lm_op_route_sum, lm_op_route_dot, lm_op_route_aux, lm_op_route_aux_dz;
/* route_load.c */
extern const lm_op lm_op_route_bar, lm_op_route_bar_dy, lm_op_route_importance,
    lm_op_route_importance_dw;
/* norm.c */
extern const lm_op lm_op_norm, lm_op_norm_dx, lm_op_norm_dw;
extern const lm_op lm_op_head_norm, lm_op_head_norm_dx, lm_op_head_norm_dw;
/* qk_norm.c */
extern const lm_op lm_op_qk_norm, lm_op_qk_norm_dx, lm_op_qk_norm_dw;
/* rope.c */
extern const lm_op lm_op_rope;
/* Bytes of a rotary table (absent: 0) that rows at these positions do not look up, for costs. */
double lm_rope_unread_bytes(const lm_tensor *table, const lm_tensor *pos);
/* expert.c */
extern const lm_op lm_op_grouped_bias, lm_op_grouped_bias_db, lm_op_clamped_swiglu,
    lm_op_clamped_swiglu_dx;
/* attention.c */
extern const lm_op lm_op_attention, lm_op_attention_dx, lm_op_attention_dsinks,
    lm_op_attention_dbias, lm_op_attention_cached;

/* distance.c */
extern const lm_op lm_op_distance_bias, lm_op_distance_bias_dtable;
/* kv_keep.c */
extern const lm_op lm_op_kv_mass, lm_op_kv_gather;

/* kv.c, kv_write.c, head_rotate.c */
extern const lm_op lm_op_kv_attention, lm_op_kv_write, lm_op_head_rotate;
/* elementwise.c (and lm_op_add, lm_op_cast of graph/op.h) */
extern const lm_op lm_op_gelu, lm_op_gelu_dx, lm_op_swiglu, lm_op_swiglu_dx, lm_op_geglu,
    lm_op_geglu_dx, lm_op_soft_cap, lm_op_soft_cap_dx, lm_op_dropout, lm_op_rows;
/* embed.c */
extern const lm_op lm_op_embed, lm_op_embed_dw;
/* map.c */
extern const lm_op lm_op_map, lm_op_reduce;
/* permute.c: other shapes and orders, parts, and side by side; gather.c; values.c (and lm_op_accumulate of
 * graph/op.h) */
extern const lm_op lm_op_permute, lm_op_window, lm_op_join, lm_op_gather, lm_op_scatter,
    lm_op_widen, lm_op_stop;
/* matmul.c */
extern const lm_op lm_op_matmul, lm_op_inverse;
/* panels.c */
extern const lm_op lm_op_panels;
/* codes.c */
extern const lm_op lm_op_encode, lm_op_decode;
/* factor.c: on the host alone */
extern const lm_op lm_op_qr, lm_op_eigh, lm_op_eigh_next, lm_op_svd;
/* head.c, divergence.c */
extern const lm_op lm_op_head_stats, lm_op_head_grad, lm_op_divergence, lm_op_divergence_grad;

/* exchange.c (and those of graph/op.h) */
extern const lm_op lm_op_part_ids;
/* dispatch.c: what the sharding pass makes of routing; and the bytes that a rank gives to others and itself in a call that
 * exchanges rows, if all experts have as many */
extern const lm_op lm_op_collect, lm_op_deal;
extern const lm_op lm_op_expert_offsets, lm_op_expert_rows, lm_op_expert_scale, lm_op_expert_sum,
    lm_op_expert_dot;
double lm_dispatch_bytes(const lm_call *c);
/* ring.c: what it makes of attention whose positions are split */
extern const lm_op lm_op_ring_pass, lm_op_ring_rows, lm_op_ring_add, lm_op_ring_mask,
    lm_op_ring_merge;

/* optim.c */
extern const lm_op lm_op_adamw, lm_op_sgd, lm_op_sumsq, lm_op_total, lm_op_clip, lm_op_strided;

/* The i-th operator; NULL past the end.  Tests walk these. */
const lm_op *lm_op_at(int i);
const lm_op *lm_op_find(const char *name); /* NULL if unknown */

#endif
