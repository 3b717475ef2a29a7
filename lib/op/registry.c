/* SPDX-License-Identifier: Apache-2.0 */
/* registry.c -- the list of operators. */
#include <string.h>

#include "op/ops.h"

static const lm_op *const ops[] = {
    &lm_op_linear,
    &lm_op_linear_dx,
    &lm_op_linear_dw,
    &lm_op_lora_down,
    &lm_op_lora_down_dx,
    &lm_op_lora_up,
    &lm_op_lora_up_dx,
    &lm_op_lora_up_dw,
    &lm_op_virtual_rows,
    &lm_op_virtual_rows_dx,
    &lm_op_virtual_rows_dw,
    &lm_op_grouped_linear,
    &lm_op_grouped_linear_dx,
    &lm_op_grouped_linear_dw,
    &lm_op_norm,
    &lm_op_norm_dx,
    &lm_op_norm_dw,
    &lm_op_head_norm,
    &lm_op_head_norm_dx,
    &lm_op_head_norm_dw,
    &lm_op_qk_norm,
    &lm_op_qk_norm_dx,
    &lm_op_qk_norm_dw,
    &lm_op_rope,
    &lm_op_attention,
    &lm_op_attention_dx,
    &lm_op_attention_cached,
    &lm_op_kv_attention,
    &lm_op_kv_write,
    &lm_op_kv_mass,
    &lm_op_kv_gather,
    &lm_op_head_rotate,
    &lm_op_gelu,
    &lm_op_gelu_dx,
    &lm_op_swiglu,
    &lm_op_swiglu_dx,
    &lm_op_geglu,
    &lm_op_geglu_dx,
    &lm_op_soft_cap,
    &lm_op_soft_cap_dx,
    &lm_op_add,
    &lm_op_dropout,
    &lm_op_cast,
    &lm_op_rows,
    &lm_op_embed,
    &lm_op_embed_dw,
    &lm_op_map,
    &lm_op_reduce,
    &lm_op_permute,
    &lm_op_window,
    &lm_op_join,
    &lm_op_gather,
    &lm_op_scatter,
    &lm_op_widen,
    &lm_op_stop,
    &lm_op_accumulate,
    &lm_op_matmul,
    &lm_op_inverse,
    &lm_op_encode,
    &lm_op_decode,
    &lm_op_panels,
    &lm_op_qr,
    &lm_op_eigh,
    &lm_op_eigh_next,
    &lm_op_svd,
    &lm_op_head_stats,
    &lm_op_head_grad,
    &lm_op_head_loss,
    &lm_op_divergence,
    &lm_op_divergence_grad,
    &lm_op_linear_act,
    &lm_op_linear_act_dx,
    &lm_op_norm_linear,
    &lm_op_norm_dx_dw,
    &lm_op_attention_step,
    &lm_op_adamw,
    &lm_op_sgd,
    &lm_op_sumsq,
    &lm_op_total,
    &lm_op_clip,
    &lm_op_strided,
};

const lm_op *lm_op_at(int i)
{
    return i >= 0 && i < (int)(sizeof ops / sizeof *ops) ? ops[i] : NULL;
}

const lm_op *lm_op_find(const char *name)
{
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (!strcmp(ops[i]->name, name))
            return ops[i];
    return NULL;
}
