/* SPDX-License-Identifier: Apache-2.0 */
/* names.c -- names and shapes of all tensors of the five architectures. */
#include "convert/names.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"

typedef struct {
    lm_model_tensor *v;
    size_t n, cap;
    const lm_config *c;
    lm_err *e;
    lm_code rc;
} list;

/* What a part of a layer or of the model is called on either side. */
typedef struct {
    const char *gguf, *hf;
    lm_part part;
} naming;

static void add(list *l, int64_t layer, const naming *p, bool bias, int64_t rows, int64_t cols,
                lm_element_order order, int64_t heads)
{
    const char *suffix = bias ? "bias" : "weight";
    bool gpt2 = l->c->arch == LM_ARCH_GPT2;
    lm_model_tensor *s;

    if (!l->rc)
        l->rc = lm_grow(&l->v, &l->cap, l->n + 1, sizeof *l->v, "list of tensors", l->e);
    if (l->rc)
        return;
    s = &l->v[l->n++];
    *s = (lm_model_tensor){ .ndim = cols ? 2 : 1,
                            .dim = { rows, cols },
                            .order = order,
                            .part = p->part,
                            .bias = bias,
                            .layer = layer,
                            .heads = heads };
    if (layer < 0) {
        snprintf(s->gguf, sizeof s->gguf, "%s.%s", p->gguf, suffix);
        snprintf(s->hf, sizeof s->hf, "%s%s.%s",
                 p->part == LM_PART_OUTPUT ? ""
                 : gpt2                    ? "transformer."
                                           : "model.",
                 p->hf, suffix);
    } else {
        snprintf(s->gguf, sizeof s->gguf, "blk.%" PRId64 ".%s.%s", layer, p->gguf, suffix);
        snprintf(s->hf, sizeof s->hf, "%s.%" PRId64 ".%s.%s",
                 gpt2 ? "transformer.h" : "model.layers", layer, p->hf, suffix);
    }
}

static const naming output = { "output", "lm_head", LM_PART_OUTPUT };

/* ---- GPT-2 ---- */

static void norm(list *l, int64_t layer, const char *gguf, const char *hf)
{
    const naming p = { gguf, hf, LM_PART_NORM };

    add(l, layer, &p, false, l->c->width, 0, LM_ORDER_SAME, 0);
    add(l, layer, &p, true, l->c->width, 0, LM_ORDER_SAME, 0);
}

static void conv1d(list *l, int64_t layer, const char *gguf, const char *hf, lm_part part,
                   int64_t in, int64_t out)
{
    const naming p = { gguf, hf, part };

    add(l, layer, &p, false, in, out, LM_ORDER_CONV1D, 0);
    add(l, layer, &p, true, out, 0, LM_ORDER_SAME, 0);
}

static void gpt2(list *l)
{
    static const naming embed = { "token_embd", "wte", LM_PART_EMBED };
    static const naming position = { "position_embd", "wpe", LM_PART_POSITION };
    const lm_config *c = l->c;
    int64_t w = c->width;

    add(l, -1, &embed, false, c->vocab, w, LM_ORDER_SAME, 0);
    add(l, -1, &position, false, c->max_positions, w, LM_ORDER_SAME, 0);
    for (int64_t i = 0; i < c->layers && !l->rc; i++) {
        norm(l, i, "attn_norm", "ln_1");
        conv1d(l, i, "attn_qkv", "attn.c_attn", LM_PART_QKV, w, 3 * w);
        conv1d(l, i, "attn_output", "attn.c_proj", LM_PART_ATTN_OUT, w, w);
        norm(l, i, "ffn_norm", "ln_2");
        conv1d(l, i, "ffn_up", "mlp.c_fc", LM_PART_UP, w, c->ffn);
        conv1d(l, i, "ffn_down", "mlp.c_proj", LM_PART_DOWN, c->ffn, w);
    }
    norm(l, -1, "output_norm", "ln_f");
    if (!c->tied)
        add(l, -1, &output, false, c->vocab, w, LM_ORDER_SAME, 0);
}

/* ---- The Llama family ---- */

static void rms(list *l, int64_t layer, const char *gguf, const char *hf, int64_t n)
{
    const naming p = { gguf, hf, LM_PART_NORM };

    add(l, layer, &p, false, n, 0, LM_ORDER_SAME, 0);
}

static void linear(list *l, int64_t layer, const char *gguf, const char *hf, lm_part part,
                   int64_t out, int64_t in, bool bias, int64_t rope_heads)
{
    const naming p = { gguf, hf, part };
    lm_element_order how = rope_heads ? LM_ORDER_ROPE : LM_ORDER_SAME;

    add(l, layer, &p, false, out, in, how, rope_heads);
    if (bias)
        add(l, layer, &p, true, out, 0, how, rope_heads);
}

static void llama_layer(list *l, int64_t i)
{
    const lm_config *c = l->c;
    int64_t w = c->width, q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    bool rope = c->arch == LM_ARCH_LLAMA || c->arch == LM_ARCH_MISTRAL;

    rms(l, i, "attn_norm", "input_layernorm", w);
    linear(l, i, "attn_q", "self_attn.q_proj", LM_PART_Q, q, w, c->qkv_bias, rope ? c->heads : 0);
    linear(l, i, "attn_k", "self_attn.k_proj", LM_PART_K, kv, w, c->qkv_bias,
           rope ? c->kv_heads : 0);
    linear(l, i, "attn_v", "self_attn.v_proj", LM_PART_V, kv, w, c->qkv_bias, 0);
    if (c->qk_norm) {
        rms(l, i, "attn_q_norm", "self_attn.q_norm", c->head_dim);
        rms(l, i, "attn_k_norm", "self_attn.k_norm", c->head_dim);
    }
    linear(l, i, "attn_output", "self_attn.o_proj", LM_PART_ATTN_OUT, w, q, c->out_bias, 0);
    rms(l, i, "ffn_norm", "post_attention_layernorm", w);
    linear(l, i, "ffn_gate", "mlp.gate_proj", LM_PART_GATE, c->ffn, w, c->mlp_bias, 0);
    linear(l, i, "ffn_up", "mlp.up_proj", LM_PART_UP, c->ffn, w, c->mlp_bias, 0);
    linear(l, i, "ffn_down", "mlp.down_proj", LM_PART_DOWN, w, c->ffn, c->mlp_bias, 0);
}

static void llama(list *l)
{
    static const naming embed = { "token_embd", "embed_tokens", LM_PART_EMBED };
    const lm_config *c = l->c;

    add(l, -1, &embed, false, c->vocab, c->width, LM_ORDER_SAME, 0);
    for (int64_t i = 0; i < c->layers && !l->rc; i++)
        llama_layer(l, i);
    rms(l, -1, "output_norm", "norm", c->width);
    if (!c->tied)
        add(l, -1, &output, false, c->vocab, c->width, LM_ORDER_SAME, 0);
}

lm_code lm_model_tensors_make(const lm_config *c, lm_model_tensor **out, size_t *n, lm_err *e)
{
    list l = { .c = c, .e = e };

    if (c->arch == LM_ARCH_GPT2)
        gpt2(&l);
    else
        llama(&l);
    if (l.rc) {
        lm_free(l.v);
        return l.rc;
    }
    *out = l.v;
    *n = l.n;
    return LM_OK;
}

void lm_model_tensor_gguf_dim(const lm_model_tensor *s, int64_t dim[2])
{
    bool turn = s->order == LM_ORDER_CONV1D;

    dim[0] = s->dim[turn];
    dim[1] = s->dim[!turn];
}

int64_t lm_model_tensor_hf_row(const lm_model_tensor *s, int64_t r)
{
    int64_t d = s->dim[0] / s->heads, head = r / d, i = r % d;

    return head * d + (i % 2) * (d / 2) + i / 2;
}

int64_t lm_model_tensor_gguf_row(const lm_model_tensor *s, int64_t r)
{
    int64_t d = s->dim[0] / s->heads, head = r / d, i = r % d;

    return head * d + 2 * (i % (d / 2)) + i / (d / 2);
}

bool lm_is_buffer(const char *name)
{
    return lm_text_ends(name, ".attn.bias") || lm_text_ends(name, ".attn.masked_bias") ||
           lm_text_ends(name, "rotary_emb.inv_freq");
}

const char *lm_gguf_arch(lm_arch a)
{
    return a == LM_ARCH_MISTRAL ? "llama" : lm_arch_name(a);
}
