/* SPDX-License-Identifier: Apache-2.0 */
/* arch_hybrid.c -- Llama (arch_llama.c) with an attention of its own for each layer, as the required list layer_types says.
 *
 * It is an architecture of lmutils, with a model_type of its own: a program that knows Llama alone refuses the folder, in
 * place of computing softmax attention over all tokens with its weights. */
#include <inttypes.h>
#include <string.h>

#include "model/arch_llama.h"

static const char *const keys[] = {
    LM_KEYS_DECODER,  "hidden_act", "attention_bias", "mlp_bias", "layer_types",
    "sliding_window", NULL
};

/* A word of layer_types.  read: what the config has for layers of the kind, into *y, which attends to all tokens. */
typedef struct {
    const char *name;
    lm_code (*read)(const json_t *o, const char *where, lm_layer *y, lm_err *e);
} kind;

static lm_code read_full(const json_t *o, const char *where, lm_layer *y, lm_err *e)
{
    (void)o, (void)where, (void)y, (void)e;
    return LM_OK;
}

static lm_code read_sliding(const json_t *o, const char *where, lm_layer *y, lm_err *e)
{
    if (lm_read_window(o, where, 0, &y->window, e))
        return e->code;
    if (!y->window)
        return lm_read_bad(where, "sliding_window", e,
                           "is not given, but a layer is of the type sliding_attention");
    return LM_OK;
}

static const kind kinds[] = {
    { "full_attention", read_full },
    { "sliding_attention", read_sliding },
};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

/* "full_attention and sliding_attention are known" */
static const char *list_kinds(char out[256])
{
    size_t n = 0;
    for (int i = 0; i < N_KINDS; i++)
        n += (size_t)snprintf(out + n, 256 - n, "%s%s",
                              !i                 ? ""
                              : i == N_KINDS - 1 ? " and "
                                                 : ", ",
                              kinds[i].name);
    snprintf(out + n, 256 - n, " are known");
    return out;
}

static lm_code read_kind(const json_t *o, const char *where, const char *name, int64_t l,
                         lm_layer *y, lm_err *e)
{
    char known[256];
    for (int i = 0; name && i < N_KINDS; i++)
        if (!strcmp(kinds[i].name, name))
            return kinds[i].read(o, where, y, e);
    return lm_fail(e, LM_EFORMAT, where, list_kinds(known),
                   "\"layer_types\": layer %" PRId64 " has the unknown type \"%.40s\"", l,
                   name ? name : "");
}

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const json_t *types = json_object_get(o, "layer_types");
    bool bias = false;

    if (lm_read_decoder(o, where, &(lm_decoder_defaults){ .positions = 2048 }, c, e) ||
        lm_read_attention_bias(o, where, c, e) ||
        lm_json_bool_or(o, "mlp_bias", false, &bias, where, e))
        return e->code;
    if (!json_is_array(types) || (int64_t)json_array_size(types) != c->layers)
        return lm_read_bad(where, "layer_types", e, "is not a list with one entry for each layer");
    for (int64_t l = 0; l < c->layers; l++) {
        lm_layer *y = &c->layer[l];
        y->mlp_bias = bias;
        if (read_kind(o, where, json_string_value(json_array_get(types, (size_t)l)), l, y, e))
            return e->code;
    }
    return lm_read_rope(o, where, 10000, c, e);
}

static const lm_gguf_key no_gguf[] = { { .hf = NULL } };

const lm_arch lm_arch_hybrid = {
    .name = "lm_hybrid",
    .class_name = "LmHybridForCausalLM",
    .gguf = "",
    .keys = keys,
    .read = read,
    .root = "model.",
    .layers = "model.layers.",
    .tensors = lm_llama_tensors,
    .gguf_keys = no_gguf,
};
