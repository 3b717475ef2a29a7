/* SPDX-License-Identifier: Apache-2.0 */
/* arch_hybrid.c -- Llama (arch_llama.c) with an attention of its own for each layer, as the required list layer_types says.
 *
 * It is an architecture of lmutils, with a model_type of its own: a program that knows Llama alone refuses the folder, in
 * place of computing softmax attention over all tokens with its weights. */
#include <inttypes.h>
#include <string.h>

#include "model/arch_llama.h"

static const char *const keys[] = { LM_KEYS_DECODER,
                                    "hidden_act",
                                    "attention_bias",
                                    "mlp_bias",
                                    "layer_types",
                                    "sliding_window",
                                    "block_sparse_attention",
                                    "gaussian_window",
                                    "linear_attention",
                                    NULL };

/* Of block-sparse attention: tiles of kernels are not cut finer than the unit; device kernels count in 32 bits. */
enum { BLOCK_UNIT = 16, MOST_BLOCK = 1 << 24, MOST_BLOCKS = 1 << 24 };

static const lm_tensor_name tensors[] = {
    LM_ROWS_START,
    LM_ROWS_HEADS,
    { LM_PART_LINEAR_GATE, "self_attn.g_proj", "" },
    { LM_PART_LINEAR_NORM, "self_attn.g_norm", "" },
    LM_ROWS_OUT,
    { LM_PART_MLP_NORM, "post_attention_layernorm", "" },
    LM_ROWS_MLP,
    LM_ROWS_END,
};

/* A word of layer_types.  read: what the config has for layers of the kind, into *y, which attends to all tokens; key: what
 * it has it under, NULL: nothing. */
typedef struct {
    const char *name, *key;
    lm_code (*read)(const json_t *o, const char *where, lm_layer *y, lm_err *e);
} kind;

static lm_code read_full(const json_t *o, const char *where, lm_layer *y, lm_err *e)
{
    (void)o, (void)where, (void)y, (void)e;
    return LM_OK;
}

static lm_code read_sliding(const json_t *o, const char *where, lm_layer *y, lm_err *e)
{
    if (lm_json_i64_or(o, "sliding_window", 0, 1, INT64_C(1) << 40, &y->window, where, e))
        return e->code;
    if (!y->window)
        return lm_read_bad(where, "sliding_window", e,
                           "is not given, but a layer is of the type sliding_attention");
    return LM_OK;
}

/* gaussian_window: the keys that a query sees, itself included; null: all. */
static lm_code read_gaussian(const json_t *o, const char *where, lm_layer *y, lm_err *e)
{
    y->weigh = LM_WEIGH_GAUSSIAN;
    return lm_json_i64_or(o, "gaussian_window", 0, 1, INT64_C(1) << 40, &y->window, where, e);
}

static lm_code read_gaussian_norm(const json_t *o, const char *where, lm_layer *y, lm_err *e)
{
    if (read_gaussian(o, where, y, e))
        return e->code;
    y->weigh = LM_WEIGH_GAUSSIAN_NORM;
    return LM_OK;
}

/* The object `key` of the config in *out, NULL without it; its keys are all in `known`. */
static lm_code read_object(const json_t *o, const char *where, const char *key,
                           const char *const *known, const json_t **out, lm_err *e)
{
    const json_t *b = json_object_get(o, key);
    const char *inner;
    json_t *v;

    *out = json_is_null(b) ? NULL : b;
    if (*out && !json_is_object(*out))
        return lm_read_bad(where, key, e, "is not an object");
    json_object_foreach((json_t *)(uintptr_t)*out, inner, v)
    {
        int i = 0;
        while (known[i] && strcmp(known[i], inner) != 0)
            i++;
        if (!known[i])
            return lm_fail(e, LM_EUSAGE, where, NULL, "\"%s\": unknown key \"%.40s\"", key, inner);
    }
    return LM_OK;
}

const char *const lm_block_sparse_keys[] = { "block_size",  "local_blocks", "global_blocks",
                                             "vert_stride", "homo_head",    NULL };

static lm_code read_block_sparse(const json_t *o, const char *where, lm_layer *y, lm_err *e)
{
    static const char object[] = "block_sparse_attention";
    const json_t *b;
    lm_attention_blocks *to = &y->blocks;
    char inside[300];

    if (read_object(o, where, object, lm_block_sparse_keys, &b, e))
        return e->code;
    if (!b)
        return lm_read_bad(where, object, e,
                           "is not given, but a layer is of the type block_sparse_attention");
    snprintf(inside, sizeof inside, "%.200s: %s", where, object);
    if (lm_json_i64(b, "block_size", 1, MOST_BLOCK, &to->size, inside, e) ||
        lm_json_i64(b, "local_blocks", 1, MOST_BLOCKS, &to->local, inside, e) ||
        lm_json_i64_or(b, "global_blocks", 0, 0, MOST_BLOCKS, &to->global, inside, e) ||
        lm_json_i64_or(b, "vert_stride", 0, 0, MOST_BLOCKS, &to->stride, inside, e) ||
        lm_json_bool_or(b, "homo_head", false, &to->homogeneous, inside, e))
        return e->code;
    if (to->size % BLOCK_UNIT)
        return lm_fail(e, LM_EUSAGE, inside, NULL,
                       "\"block_size\": %" PRId64 " is not a multiple of %d", to->size, BLOCK_UNIT);
    return LM_OK;
}

const char *const lm_linear_attention_keys[] = { "feature", "decay", NULL };

/* Features that are elu+1 are those of numbers that are not rotated: their products would not be functions of distances.
 * The identity's are, and retention has them. */
static lm_code read_linear(const json_t *o, const char *where, lm_layer *y, lm_err *e)
{
    static const char object[] = "linear_attention", *const features[] = { "elu+1", "identity" };
    const json_t *b = NULL;
    const char *name = features[LM_FEATURE_ELU];
    char inside[300];
    int i = 0;

    snprintf(inside, sizeof inside, "%.200s: %s", where, object);
    if (read_object(o, where, object, lm_linear_attention_keys, &b, e))
        return e->code;
    if (b && (lm_json_str_or(b, "feature", name, &name, inside, e) ||
              lm_json_bool_or(b, "decay", false, &y->linear.decay, inside, e)))
        return e->code;
    while (i < 2 && strcmp(features[i], name) != 0)
        i++;
    if (i == 2)
        return lm_fail(e, LM_EUSAGE, inside, "elu+1 and identity are known",
                       "\"feature\": \"%.40s\" is not known", name);
    y->attention = LM_ATTENTION_LINEAR;
    y->linear.feature = (lm_feature)i;
    y->rope = i == LM_FEATURE_ELU ? -1 : y->rope;
    return LM_OK;
}

static const kind kinds[] = {
    { "full_attention", NULL, read_full },
    { "sliding_attention", "sliding_window", read_sliding },
    { "block_sparse_attention", "block_sparse_attention", read_block_sparse },
    { "gaussian_attention", "gaussian_window", read_gaussian },
    { "gaussian_norm_attention", "gaussian_window", read_gaussian_norm },
    { "linear_attention", "linear_attention", read_linear },
};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

/* "full_attention, sliding_attention, ... and linear_attention are known" */
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
    return lm_fail(e, LM_EUSAGE, where, list_kinds(known),
                   "\"layer_types\": layer %" PRId64 " has the unknown type \"%.40s\"", l,
                   name ? name : "");
}

/* What is there for kinds that no layer has is checked as well: it is for layers that are changed to them. */
static lm_code check_all(const json_t *o, const char *where, lm_err *e)
{
    for (int i = 0; i < N_KINDS; i++) {
        const json_t *v = kinds[i].key ? json_object_get(o, kinds[i].key) : NULL;
        lm_layer scratch = { 0 };
        if (v && !json_is_null(v) && kinds[i].read(o, where, &scratch, e))
            return e->code;
    }
    return LM_OK;
}

static lm_code read(const json_t *o, const char *where, lm_config *c, lm_err *e)
{
    const json_t *types = json_object_get(o, "layer_types");
    bool bias = false;

    if (lm_read_decoder(o, where, &(lm_decoder_defaults){ .positions = 2048 }, c, e) ||
        lm_read_attention_bias(o, where, c, e) ||
        lm_json_bool_or(o, "mlp_bias", false, &bias, where, e) || check_all(o, where, e))
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
    .tensors = tensors,
    .gguf_keys = no_gguf,
};
