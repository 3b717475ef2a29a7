/* SPDX-License-Identifier: Apache-2.0 */
/* convert_llmc.c -- headers of llm.c's GPT-2 checkpoints and llama2.c's .bin. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/text.h"
#include "convert/convert_flat.h"

enum { LLMC_MAGIC = 20240326, LLMC_HEADER = 1024, LLMC_F32 = 3, LLMC_BF16 = 5, LLMC_PAD = 128 };
enum { AK42 = 0x616b3432, AK42_HEADER = 256, LLAMA2C_HEADER = 28 };

static int32_t get(const uint8_t *data, int i)
{
    const uint8_t *p = data + 4 * i;

    return (int32_t)((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
                     (uint32_t)p[3] << 24);
}

static void set(uint8_t *data, int i, int64_t v)
{
    for (int k = 0; k < 4; k++)
        data[4 * i + k] = (uint8_t)((uint64_t)v >> 8 * k);
}

static lm_code take_config(lm_import *m, json_t *tree, lm_err *e)
{
    m->tree = tree;
    if (!tree)
        return lm_fail(e, LM_ELIMIT, m->path, NULL, "no memory for its config");
    lm_code rc = lm_config_read(tree, m->path, &m->config, e);
    if (rc ==
        LM_EUSAGE) /* its numbers are those of a header, which are part of the file's format */
        rc = e->code = LM_EFORMAT;
    return rc;
}

/* ---- llm.c ---- */

bool lm_is_llmc(const uint8_t *data, size_t size)
{
    return size >= 4 && get(data, 0) == LLMC_MAGIC;
}

lm_code lm_import_llmc(lm_import *m, lm_map *map, lm_err *e)
{
    const uint8_t *h = map->data;
    lm_flat_file f = { .order = lm_llmc_order, .header = LLMC_HEADER };
    lm_code rc = LM_OK;

    if (map->size < LLMC_HEADER || !lm_is_llmc(h, map->size))
        rc = lm_fail(e, LM_EFORMAT, m->path, NULL, "this is not a checkpoint of llm.c");
    else if (get(h, 1) != LLMC_F32 && get(h, 1) != LLMC_BF16)
        rc = lm_fail(e, LM_EFORMAT, m->path, "versions 3 (F32) and 5 (BF16) are supported",
                     "version %" PRId32 " of llm.c's checkpoints", get(h, 1));
    else if (get(h, 3) < 1 || get(h, 7) < get(h, 3))
        rc = lm_fail(e, LM_EFORMAT, m->path, NULL,
                     "a vocabulary of %" PRId32 " in %" PRId32 " row%s", get(h, 3), get(h, 7),
                     lm_plural(get(h, 7)));
    if (!rc) {
        f.dtype = get(h, 1) == LLMC_F32 ? LM_DTYPE_F32 : LM_DTYPE_BF16;
        f.pad_rows = get(h, 7);
        int eot = get(h, 3) - 1; /* the last token of GPT-2's vocabulary */
        rc = take_config(m,
                         json_pack("{s:[s], s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:i, s:s, "
                                   "s:b}",
                                   "architectures", "GPT2LMHeadModel", "model_type", "gpt2",
                                   "activation_function", "gelu_new", "n_positions", get(h, 2),
                                   "vocab_size", get(h, 3), "n_layer", get(h, 4), "n_head",
                                   get(h, 5), "n_embd", get(h, 6), "bos_token_id", eot,
                                   "layer_norm_epsilon", 1e-5, "eos_token_id", eot, "torch_dtype",
                                   f.dtype == LM_DTYPE_F32 ? "float32" : "bfloat16",
                                   "tie_word_embeddings", 1),
                         e);
    }
    if (rc) {
        lm_map_close(map);
        return rc;
    }
    return lm_flat_import(m, map, &f, e);
}

static lm_code refuse(const lm_import *m, const char *format, const char *what, lm_err *e)
{
    return lm_fail(e, LM_EUSAGE, m->path, NULL, "%s has no %s", format, what);
}

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-6 * fabs(b);
}

/* BF16 only if that is lossless, or on request. */
static lm_dtype llmc_dtype(const lm_import *m, const lm_export_opts *o)
{
    if (o->dtype != LM_DTYPE_NONE)
        return o->dtype;
    for (size_t i = 0; i < lm_st_plan_count(m->plan); i++)
        if (lm_st_plan_at(m->plan, i)->dtype != LM_DTYPE_BF16)
            return LM_DTYPE_F32;
    return LM_DTYPE_BF16;
}

lm_code lm_export_llmc(lm_import *m, const char *path, const lm_export_opts *o, lm_err *e)
{
    const lm_config *c = &m->config;
    uint8_t h[LLMC_HEADER] = { 0 };
    lm_flat_file f = { lm_llmc_order, LLMC_HEADER, llmc_dtype(m, o),
                       (c->vocab + LLMC_PAD - 1) / LLMC_PAD * LLMC_PAD };

    if (c->arch != &lm_arch_gpt2)
        return refuse(m, "llm.c", "model but GPT-2", e);
    const lm_layer *y = &c->layer[c->layers - 1]; /* the smallest scale, if layers have their own */
    if (y->ffn != 4 * c->width || !c->tied || y->mlp != LM_MLP_GELU ||
        !near(y->scale, 1 / sqrt((double)y->head_dim)) || !near(c->norm_eps, 1e-5))
        return refuse(m, "llm.c",
                      "GPT-2 with another ffn width, head, activation, scale or norm epsilon than "
                      "the published ones",
                      e);
    if (f.dtype == LM_DTYPE_F16)
        return refuse(m, "llm.c", "F16; F32 and BF16 are supported", e);
    set(h, 0, LLMC_MAGIC);
    set(h, 1, f.dtype == LM_DTYPE_F32 ? LLMC_F32 : LLMC_BF16);
    set(h, 2, c->max_positions);
    set(h, 3, c->vocab);
    set(h, 4, c->layers);
    set(h, 5, y->heads);
    set(h, 6, c->width);
    set(h, 7, f.pad_rows);
    return lm_flat_export(m, path, &f, h, o, e);
}

/* ---- llama2.c ---- */

typedef struct {
    int64_t width, ffn, layers, heads, kv, vocab, positions;
    bool tied, version1;
} shape;

static bool read_shape(const uint8_t *data, size_t size, shape *s)
{
    if (size < LLAMA2C_HEADER)
        return false;
    s->version1 = (uint32_t)get(data, 0) == AK42;
    if (s->version1 && (size < AK42_HEADER || get(data, 1) != 1))
        return false;
    const uint8_t *p = data + (s->version1 ? 8 : 0);
    *s = (shape){ get(p, 0), get(p, 1), get(p, 2), get(p, 3),  get(p, 4),
                  get(p, 5), get(p, 6), false,     s->version1 };
    s->tied = s->version1 ? data[36] != 0 : s->vocab > 0;
    s->vocab = s->vocab < 0 ? -s->vocab : s->vocab;
    return s->width > 0 && s->ffn > 0 && s->layers > 0 && s->heads > 0 && s->kv > 0 &&
           s->vocab > 0 && s->positions > 0 && s->width % s->heads == 0 && s->heads % s->kv == 0 &&
           s->width / s->heads % 2 == 0;
}

/* Elements of the file, as a double: if it does not match, it is not such a file. */
static double elements(const shape *s)
{
    double w = (double)s->width, kv = w / (double)s->heads * (double)s->kv;
    double layer = 2 * w + 2 * w * w + 2 * w * kv + 3 * w * (double)s->ffn;

    return (double)s->vocab * w * (s->tied ? 1 : 2) + (double)s->layers * layer + w +
           (s->version1 ? 0 : (double)s->positions * w / (double)s->heads);
}

bool lm_is_llama2c(const uint8_t *data, size_t size)
{
    shape s = { 0 };
    double want;

    if (size >= 4 && (uint32_t)get(data, 0) == AK42)
        return true;
    if (!read_shape(data, size, &s))
        return false;
    want = 4 * elements(&s) + LLAMA2C_HEADER;
    return want < 1e15 && (double)size <= want && (double)size >= want;
}

bool lm_has_llama2c_header(const uint8_t *data, size_t n)
{
    shape s = { 0 };

    return read_shape(data, n, &s) && s.layers < 10000 && elements(&s) < 1e13;
}

lm_code lm_import_llama2c(lm_import *m, lm_map *map, lm_err *e)
{
    shape s = { 0 };
    lm_code rc = LM_OK;

    if (!read_shape(map->data, map->size, &s))
        rc = lm_fail(e, LM_EFORMAT, m->path, "versions 0 and 1 are supported",
                     "this is not a model of llama2.c");
    if (!rc)
        rc = take_config(m,
                         json_pack("{s:[s], s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, "
                                   "s:i, s:i, s:s, s:b}",
                                   "architectures", "LlamaForCausalLM", "model_type", "llama",
                                   "hidden_act", "silu", "hidden_size", (json_int_t)s.width,
                                   "intermediate_size", (json_int_t)s.ffn, "num_hidden_layers",
                                   (json_int_t)s.layers, "num_attention_heads", (json_int_t)s.heads,
                                   "num_key_value_heads", (json_int_t)s.kv, "vocab_size",
                                   (json_int_t)s.vocab, "max_position_embeddings",
                                   (json_int_t)s.positions, "rms_norm_eps", 1e-5, "rope_theta",
                                   10000.0, "bos_token_id", 1, "eos_token_id", 2, "torch_dtype",
                                   "float32", "tie_word_embeddings", (int)s.tied),
                         e);
    if (rc) {
        lm_map_close(map);
        return rc;
    }
    const lm_flat_file f = { .order = s.version1 ? lm_llama2c_order1 : lm_llama2c_order,
                             .header = s.version1 ? AK42_HEADER : LLAMA2C_HEADER,
                             .dtype = LM_DTYPE_F32 };
    return lm_flat_import(m, map, &f, e);
}

lm_code lm_export_llama2c(lm_import *m, const char *path, const lm_export_opts *o, lm_err *e)
{
    const lm_config *c = &m->config;
    const lm_layer *y = &c->layer[0];
    const int64_t v[7] = { c->width,        y->ffn,      c->layers,
                           y->heads,        y->kv_heads, c->tied ? c->vocab : -c->vocab,
                           c->max_positions };
    const lm_flat_file f = { .order = lm_llama2c_order,
                             .header = LLAMA2C_HEADER,
                             .dtype = LM_DTYPE_F32 };
    uint8_t h[LLAMA2C_HEADER];

    if (c->arch != &lm_arch_llama && c->arch != &lm_arch_mistral)
        return refuse(m, "llama2.c", "model but Llama", e);
    if (lm_config_window(c) > 0 && lm_config_window(c) < c->max_positions)
        return refuse(m, "llama2.c", "sliding window", e);
    if (y->qkv_bias || y->out_bias || y->mlp_bias || y->head_dim * y->heads != c->width)
        return refuse(m, "llama2.c", "biases, nor heads of another width than hidden/heads", e);
    if (c->rope[0].type != LM_ROPE_DEFAULT || !near(c->rope[0].theta, 10000))
        return refuse(m, "llama2.c", "rotary positions but those of theta 10000, not scaled", e);
    if (!near(c->norm_eps, 1e-5))
        lm_log(m->sink, LM_LOG_WARN, "%s: llama2.c computes with a norm epsilon of 1e-5, not %g",
               m->path, c->norm_eps);
    for (int i = 0; i < 7; i++)
        set(h, i, v[i]);
    return lm_flat_export(m, path, &f, h, o, e);
}
