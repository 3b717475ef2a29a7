/* SPDX-License-Identifier: Apache-2.0 */
/* arch.c -- the list of architectures. */
#include "model/arch.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const lm_arch *const known[] = {
    &lm_arch_gpt2,        &lm_arch_llama,       &lm_arch_mistral,   &lm_arch_qwen2,
    &lm_arch_qwen3,       &lm_arch_olmo2,       &lm_arch_olmo3,     &lm_arch_gemma2,
    &lm_arch_gemma3,      &lm_arch_mixtral,     &lm_arch_qwen2_moe, &lm_arch_qwen3_moe,
    &lm_arch_dots1,       &lm_arch_qwen3_next,  &lm_arch_qwen3_5,   &lm_arch_gpt_oss,
    &lm_arch_deepseek_v2, &lm_arch_deepseek_v3, &lm_arch_bert,      &lm_arch_bloom,
    &lm_arch_t5,          &lm_arch_hybrid,
};
enum { N_KNOWN = sizeof known / sizeof *known };

const lm_arch *lm_arch_at(int i)
{
    return i < N_KNOWN ? known[i] : NULL;
}

const lm_arch *lm_arch_find(const char *model_type)
{
    for (int i = 0; i < N_KNOWN; i++)
        if (!strcmp(known[i]->name, model_type))
            return known[i];
    return NULL;
}

const char *lm_arch_name(const lm_arch *a)
{
    return a->name;
}

/* True if entry i has no name in GGUF, or that of an entry before it. */
static bool is_left_out(int i, bool gguf)
{
    for (int k = 0; gguf && k < i; k++)
        if (!strcmp(known[k]->gguf, known[i]->gguf))
            return true;
    return gguf && !*known[i]->gguf;
}

const char *lm_arch_list(bool gguf, char out[LM_ARCH_LIST])
{
    size_t n = 0;
    int last = N_KNOWN - 1;

    while (is_left_out(last, gguf))
        last--;
    for (int i = 0; i <= last; i++)
        if (!is_left_out(i, gguf) && n < LM_ARCH_LIST - 40)
            n += (size_t)snprintf(out + n, LM_ARCH_LIST - n, "%s%s",
                                  !i          ? ""
                                  : i == last ? " and "
                                              : ", ",
                                  gguf ? known[i]->gguf : known[i]->name);
    snprintf(out + n, LM_ARCH_LIST - n, " are %s", gguf ? "converted" : "known");
    return out;
}

double lm_arch_gguf_scale(const lm_arch *a, int64_t layers, int64_t width, int64_t heads,
                          int64_t head_dim)
{
    bool wide = a->gguf_wide_layers && layers == a->gguf_wide_layers;

    return 1 / sqrt((double)(wide ? width / heads : head_dim));
}

bool lm_part_is_norm(lm_part part)
{
    return part == LM_PART_OUTPUT_NORM || part == LM_PART_ATTN_NORM || part == LM_PART_MLP_NORM ||
           part == LM_PART_ATTN_POST_NORM || part == LM_PART_MLP_POST_NORM ||
           part == LM_PART_Q_NORM || part == LM_PART_K_NORM || part == LM_PART_DELTA_NORM ||
           part == LM_PART_LINEAR_NORM || part == LM_PART_Q_A_NORM || part == LM_PART_KV_A_NORM ||
           part == LM_PART_EMBED_NORM || part == LM_PART_HEAD_NORM ||
           part == LM_PART_AHEAD_TOKEN_NORM || part == LM_PART_AHEAD_STATE_NORM ||
           part == LM_PART_AHEAD_NORM || part == LM_PART_CROSS_NORM;
}

bool lm_part_plus_one(const lm_config *c, lm_part part)
{
    return c->norm_plus_one && lm_part_is_norm(part) && part != LM_PART_DELTA_NORM;
}

bool lm_part_is_bare(lm_part part)
{
    return part == LM_PART_ROUTER_BIAS || part == LM_PART_DELTA_LOG || part == LM_PART_DELTA_DT ||
           part == LM_PART_SINKS || part == LM_PART_HEAD_BIAS;
}

const lm_tensor_name *lm_arch_part(const lm_arch *a, lm_part part)
{
    for (const lm_tensor_name *t = a->tensors; t->part; t++)
        if (t->part == part)
            return t;
    return NULL;
}
