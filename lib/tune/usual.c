/* SPDX-License-Identifier: Apache-2.0 */
/* usual.c -- the modules that a method adapts when a request names none: PEFT's table
 * (utils/constants.py), for decoders and T5; lm_hybrid's are Llama's. */
#include <string.h>

#include "tune/modules.h"

#define LIST(...) ((const char *const[]){ __VA_ARGS__, NULL })

typedef struct {
    const char *types; /* of models: names with blanks around them */
    const char *const *modules;
} row;

/* The attention projections that low-rank methods adapt. */
static const row low_rank[] = {
    { " llama llama4 mistral mixtral opt gptj gpt_neo stablelm gemma gemma2 gemma3_text qwen2 "
      "qwen3 lm_hybrid ",
      LIST("q_proj", "v_proj") },
    { " t5 mt5 ", LIST("q", "v") },
    { " gpt2 gpt_bigcode ", LIST("c_attn") },
    { " bloom gpt_neox chatglm falcon RefinedWeb RefinedWebModel ", LIST("query_key_value") },
    { " phi ", LIST("q_proj", "v_proj", "fc1", "fc2") },
    { " mpt ", LIST("Wqkv") },
    { " codegen ", LIST("qkv_proj") },
    { " nemotron_h ", LIST("q_proj", "k_proj", "v_proj", "o_proj") },
    { 0 },
};

static const row spectral[] = { { " gpt2 gpt_bigcode ", LIST("mlp.c_proj") }, { 0 } };
static const row two_projections[] = { { " phi ", LIST("q_proj", "v_proj") }, { 0 } };

/* Of methods that find out where ranks are needed. */
static const row projections[] = {
    { " t5 ", LIST("q", "k", "v", "o", "wi", "wo") },
    { " mt5 ", LIST("q", "k", "v", "o", "wi_0", "wi_1", "wo") },
    { " opt ", LIST("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2") },
    { 0 },
};

static const row scales[] = {
    { " t5 ", LIST("k", "v", "wo") },
    { " mt5 ", LIST("k", "v", "wi_1") },
    { " llama mistral lm_hybrid ", LIST("k_proj", "v_proj", "down_proj") },
    { " gemma gemma2 gemma3_text qwen2 qwen3 llama4 ", LIST("q_proj", "v_proj", "down_proj") },
    { " gpt2 gpt_bigcode ", LIST("c_attn", "mlp.c_proj") },
    { " mixtral ", LIST("k_proj", "v_proj", "w2") },
    { " opt ", LIST("q_proj", "k_proj", "fc2") },
    { " phi ", LIST("q_proj", "v_proj", "fc2") },
    { " gptj ", LIST("q_proj", "v_proj", "fc_out") },
    { " gpt_neo ", LIST("q_proj", "v_proj", "c_proj") },
    { " bloom ", LIST("query_key_value", "mlp.dense_4h_to_h") },
    { " gpt_neox falcon RefinedWeb RefinedWebModel ", LIST("query_key_value", "dense_4h_to_h") },
    { 0 },
};

static const row norms[] = {
    { " t5 mt5 ", LIST("layer_norm", "final_layer_norm") },
    { " llama mistral gemma lm_hybrid ",
      LIST("input_layernorm", "post_attention_layernorm", "norm") },
    { " gemma2 gemma3_text ",
      LIST("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
           "post_feedforward_layernorm", "norm") },
    { " qwen2 qwen3 ", LIST("post_attention_layernorm") },
    { " gpt2 ", LIST("ln_1", "ln_2", "ln_f") },
    { " gptj ", LIST("ln_1", "ln_f") },
    { " falcon bloom ", LIST("input_layernorm", "post_attention_layernorm", "ln_f") },
    { " phi ", LIST("input_layernorm", "final_layernorm") },
    { 0 },
};

static const row values[] = {
    { " opt gptj gpt_neo llama llama4 mistral mixtral phi gemma gemma2 gemma3_text qwen2 qwen3 "
      "lm_hybrid ",
      LIST("v_proj") },
    { 0 },
};

static const row embeddings[] = {
    { " llama llama4 mistral mixtral opt gemma gemma2 gemma3_text qwen2 qwen3 olmo2 olmo3 phi "
      "lm_hybrid ",
      LIST("embed_tokens") },
    { " gpt2 gpt_bigcode gpt_neo gptj codegen mpt ", LIST("wte") },
    { " falcon bloom ", LIST("word_embeddings") },
    { " gpt_neox ", LIST("embed_in") },
    { 0 },
};

static const row all[] = {
    { " llama llama4 mistral mixtral gemma gemma2 gemma3_text qwen2 qwen3 phi lm_hybrid ",
      LIST("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj") },
    { " gpt2 gpt_bigcode ", LIST("c_attn", "c_proj") },
    { " opt ", LIST("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2") },
    { " gptj ", LIST("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out") },
    { " bloom gpt_neox falcon ", LIST("query_key_value", "dense_4h_to_h") },
    { 0 },
};

/* Methods whose usual modules differ from LoRA's; the second table is for types that the first
 * lacks. */
static const struct {
    const char *methods;
    const row *first, *second;
} tables[] = {
    { " FOURIERFT C3A WAVEFT ", spectral, low_rank },
    { " VERA PVERA FROD SHIRA ", two_projections, low_rank },
    { " ADALORA VBLORA ", projections, low_rank },
    { " IA3 ", scales, NULL },
    { " LN_TUNING ", norms, NULL },
    { " BEFT ", values, NULL },
    { " OSF ", all, NULL },
    { " TRAINABLE_TOKENS ", embeddings, NULL },
};

static bool has_word(const char *words, const char *word)
{
    size_t n = strlen(word);

    for (const char *p = strstr(words, word); n && p; p = strstr(p + 1, word))
        if (p[-1] == ' ' && p[n] == ' ')
            return true;
    return false;
}

static const char *const *look_up(const row *r, const char *type)
{
    for (; r && r->types; r++)
        if (has_word(r->types, type))
            return r->modules;
    return NULL;
}

const char *const *lm_tune_usual_modules(const lm_tune_method *t, const char *model_type)
{
    const row *first = low_rank, *second = NULL;
    const char *const *found;

    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if (has_word(tables[i].methods, t->peft_type)) {
            first = tables[i].first;
            second = tables[i].second;
        }
    found = look_up(first, model_type);
    return found ? found : look_up(second, model_type);
}
