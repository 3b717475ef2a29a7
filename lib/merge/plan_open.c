/* SPDX-License-Identifier: Apache-2.0 */
/* plan_open.c -- opens the inputs of a merge, and compares the models. */
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "convert/verify.h"
#include "format/fp8_source.h"
#include "format/safetensors_table.h"
#include "merge/plan_impl.h"
#include "merge/plan_names.h"
#include "text/tokenizer_source.h"

bool lm_plan_used(const lm_merge_plan *p, int i)
{
    const lm_merge_recipe *r = p->recipe;

    if (i == r->base)
        return true;
    for (int s = 0; s < r->n_slices; s++) {
        if (r->slice[s].base == i)
            return true;
        for (int k = 0; k < r->slice[s].n; k++)
            if (r->slice[s].source[k].input == i)
                return true;
    }
    return false;
}

int lm_plan_base_of(const lm_merge_plan *p, const lm_merge_slice *s)
{
    return s->base >= 0 ? s->base : p->recipe->base;
}

const lm_st_tensor *lm_plan_effective(const lm_merge_model *m, const lm_st_tensor *t)
{
    const void *data;

    return m->lora && lm_lora_effect_on(m->lora, t) == LM_LORA_REPLACED
               ? lm_lora_replacement(m->lora, t, &data)
               : t;
}

/* Rows of the embedding of a model; 0: unknown. */
static int64_t embedding_rows(const lm_merge_model *m)
{
    for (size_t i = 0; i < lm_model_source_count(m->source); i++) {
        const lm_st_tensor *t = lm_model_source_at(m->source, i);

        if (t->ndim == 2 && lm_vocab_is_table(t->name))
            return lm_plan_effective(m, lm_plan_find(m, t->name))->dim[0];
    }
    return 0;
}

/* ---- Opening ---- */

/* The model that an adapter alone is merged into: the one that it names if it is an input,
 * otherwise the base of the merge. */
static lm_code base_of_lora(const lm_merge_plan *p, int i, const lm_merge_plan_opts *o,
                            const char **path, lm_err *e)
{
    const lm_merge_recipe *r = p->recipe;
    const char *named = lm_lora_base(p->model[i].lora);

    *path = NULL;
    if (named && *named && lm_path_exists(named))
        *path = named;
    else if (r->base >= 0 && r->base != i && !lm_lora_is(r->input[r->base].path, o->bundle))
        *path = r->input[r->base].path;
    if (*path)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, r->input[i].name, "write MODEL+ADAPTER",
                   "this adapter's base '%.100s' is not an input", named ? named : "");
}

/* A path is opened once: streams cannot be read twice, mappings need not be. */
static lm_code open_source(lm_merge_plan *p, int i, const char *path, const lm_merge_plan_opts *o,
                           lm_err *e)
{
    for (int k = 0; k < i; k++) {
        if (!strcmp(p->path[k], path)) {
            p->model[i].source = p->model[k].source;
            p->path[i] = path;
            return LM_OK;
        }
    }
    p->path[i] = path;
    return lm_fp8_source_open(path, o->bundle, &p->model[i].source, e);
}

static lm_code open_extra(const char *path, lm_st **out, lm_err *e)
{
    lm_code rc = path ? lm_st_open(path, out, e) : LM_OK;

    if (rc || !path || lm_st_count(*out))
        return rc;
    return lm_fail(e, LM_EFORMAT, path, "make it again", "it holds no tensors");
}

enum { SPAN = 8192 };

/* True if a number of the tensor is not 0. */
static lm_code any_number(const lm_st *st, const lm_st_tensor *t, bool *any, lm_err *e)
{
    double raw[SPAN], v[SPAN];
    int64_t n, size = (int64_t)lm_dtype_size(t->dtype);

    for (int64_t at = 0; lm_dtype_is_float(t->dtype) && at < t->count && !*any; at += n) {
        n = t->count - at < SPAN ? t->count - at : SPAN;
        if (lm_st_read(st, t, (uint64_t)(at * size), raw, (size_t)(n * size), e))
            return e->code;
        lm_convert(t->dtype, raw, LM_DTYPE_F64, v, n);
        for (int64_t i = 0; i < n && !*any; i++)
            *any = v[i] != 0;
    }
    return LM_OK;
}

/* All importances are 0 if they were never computed: the floor would turn the merge into a plain
 * mean. */
static lm_code check_fisher(const lm_st *st, const char *path, lm_err *e)
{
    bool any = false;

    for (size_t i = 0; i < lm_st_count(st) && !any; i++)
        if (any_number(st, lm_st_at(st, i), &any, e))
            return e->code;
    return any ? LM_OK
               : lm_fail(e, LM_EFORMAT, path, "compute them again: the mean of squared gradients",
                         "all importances are 0");
}

static lm_code open_input(lm_merge_plan *p, int i, const lm_merge_plan_opts *o, lm_err *e)
{
    const lm_merge_input *in = &p->recipe->input[i];
    lm_merge_model *m = &p->model[i];
    const char *path = in->path, *lora = in->lora;
    char line[600];
    lm_code rc = LM_OK;

    m->name = in->name;
    if (!lora && lm_lora_is(in->path, o->bundle))
        lora = in->path;
    if (lora)
        rc = lm_lora_open(lora, o->bundle, &m->lora, e);
    if (!rc && lora && !in->lora)
        rc = base_of_lora(p, i, o, &path, e);
    if (!rc)
        rc = open_source(p, i, path, o, e);
    if (!rc)
        lm_arch_head(lm_plan_arch(m), m->head);
    if (!rc && m->lora)
        rc = lm_lora_bind(m->lora, m->source, lm_plan_tied_to(m), e);
    if (!rc && m->lora && lm_lora_experts_line(m->lora, line, sizeof line))
        lm_log(o->sink, LM_LOG_NOTICE, "%s: %s", m->name, line);
    if (!rc && m->lora)
        rc = lm_plan_adapter_tokens(m, o->sink, e);
    if (!rc)
        rc = open_extra(in->fisher, &m->fisher, e);
    if (!rc && m->fisher)
        rc = check_fisher(m->fisher, in->fisher, e);
    if (!rc)
        rc = open_extra(in->gram, &m->gram, e);
    return rc;
}

static lm_code count_layers(lm_merge_model *m, lm_err *e)
{
    const char *const *keys = lm_layer_count_keys;
    const json_t *c = lm_model_source_config(m->source);
    lm_code rc = LM_OK;

    for (int i = 0; c && keys[i] && !rc && !m->layers; i++)
        rc = lm_json_i64_or(c, keys[i], 0, 0, LM_MERGE_MAX_LAYERS, &m->layers, m->name, e);
    return rc;
}

/* What tells tensors of modules that predict tokens further on from those of the layers. */
static lm_code read_config(lm_merge_model *m, lm_err *e)
{
    const json_t *c = lm_model_source_config(m->source);
    lm_err unknown = { 0 };

    if (!c || !lm_arch_of(c))
        return LM_OK;
    if (lm_alloc_n(&m->config, 1, sizeof *m->config, "a config", e))
        return e->code;
    if (lm_config_read(c, m->name, m->config, &unknown)) {
        lm_free(m->config);
        m->config = NULL;
    }
    return LM_OK;
}

/* ---- Comparing ---- */

static const char *text_of(const json_t *c, const char *key)
{
    const json_t *v = json_object_get(c, key);

    if (json_is_array(v)) /* architectures */
        v = json_array_get(v, 0);
    return json_string_value(v);
}

static lm_code same_text(const lm_merge_model *a, const lm_merge_model *b, const char *key,
                         lm_err *e)
{
    const char *x = text_of(lm_model_source_config(a->source), key);
    const char *y = text_of(lm_model_source_config(b->source), key);

    if (!x || !y || !strcmp(x, y))
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, b->name, "merge models of one architecture",
                   "%s is %.60s, but %.60s in %.80s", key, y, x, a->name);
}

/* Keys that change the meaning of equal weights. */
static void warn_meaning(const lm_merge_model *a, const lm_merge_model *b, lm_sink *sink)
{
    static const char *const keys[] = { "num_attention_heads",
                                        "num_key_value_heads",
                                        "n_head",
                                        "head_dim",
                                        "rope_theta",
                                        "rope_scaling",
                                        "hidden_act",
                                        "activation_function",
                                        "rms_norm_eps",
                                        "sliding_window",
                                        "rope_parameters",
                                        "rope_local_base_freq",
                                        "hidden_activation",
                                        "layer_norm_epsilon",
                                        "query_pre_attn_scalar",
                                        "attn_logit_softcapping",
                                        "final_logit_softcapping" };

    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        json_t *x = json_object_get(lm_model_source_config(a->source), keys[i]);
        json_t *y = json_object_get(lm_model_source_config(b->source), keys[i]);

        if (x && y && !json_equal(x, y))
            lm_log(sink, LM_LOG_WARN, "%s: %s is not that of %s, whose config.json is used",
                   b->name, keys[i], a->name);
    }
}

/* The weights of a model that is merged must be numbers. */
static lm_code refuse_quantised(const lm_merge_model *m, lm_err *e)
{
    const json_t *config = lm_model_source_config(m->source);
    const lm_st_tensor *fp8 = lm_verify_scaled_fp8(m->source);
    char show[LM_ST_SHOWN];

    if (json_is_object(json_object_get(config, "quantization_config")))
        return lm_fail(e, LM_EUSAGE, m->name, "merge the models before quantising",
                       "its weights are quantised");
    return fp8 ? lm_fail(e, LM_EUSAGE, m->name, "merge the models before quantising",
                         "tensor '%s' is %s with a scale of its own", lm_st_show(fp8->name, show),
                         fp8->dtype_name)
               : LM_OK;
}

static lm_code compare(const lm_merge_plan *p, lm_sink *sink, lm_err *e)
{
    const lm_merge_model *lead = &p->model[p->lead];
    bool computes = strcmp(p->recipe->method->name, "passthrough") != 0;
    lm_code rc = LM_OK;

    for (int i = 0; !rc && i < p->recipe->n_inputs; i++) {
        const lm_merge_model *m = &p->model[i];
        const json_t *c = lm_model_source_config(m->source);

        if (!lm_plan_used(p, i))
            continue;
        if (computes)
            rc = refuse_quantised(m, e);
        if (!rc && c && lm_model_source_config(lead->source) && m != lead) {
            rc = same_text(lead, m, "model_type", e);
            rc = rc ? rc : same_text(lead, m, "architectures", e);
            if (!rc)
                warn_meaning(lead, m, sink);
        }
    }
    return rc;
}

/* Check all inputs before the first is read for its digest. */
static lm_code check_there(const lm_merge_input *in, lm_err *e)
{
    const char *const side[] = { in->fisher, in->gram };
    lm_code rc = in->path ? lm_bundle_there(in->path, e) : LM_OK;

    if (!rc && in->lora)
        rc = lm_bundle_there(in->lora, e);
    for (size_t i = 0; !rc && i < sizeof side / sizeof *side; i++)
        if (side[i] && strcmp(side[i], "-") && !lm_path_exists(side[i]))
            rc = lm_fail(e, LM_EIO, side[i], "check the path", "cannot open");
    return rc;
}

lm_code lm_plan_open(lm_merge_plan *p, const lm_merge_plan_opts *o, lm_err *e)
{
    const lm_merge_recipe *r = p->recipe;
    lm_code rc = LM_OK;

    p->whole = o->whole_digest;
    for (int i = 0; !rc && i < r->n_inputs; i++)
        rc = check_there(&r->input[i], e);
    for (int i = 0; !rc && i < r->n_inputs; i++) {
        rc = open_input(p, i, o, e);
        if (!rc)
            rc = count_layers(&p->model[i], e);
        if (!rc && r->sliced)
            rc = read_config(&p->model[i], e);
        if (!rc && !o->no_digest)
            rc = lm_plan_digest(p, i, o, e);
    }
    return rc ? rc : compare(p, o->sink, e);
}

void lm_plan_close(lm_merge_plan *p)
{
    for (int i = 0; p->model && i < p->recipe->n_inputs; i++) {
        lm_merge_model *m = &p->model[i];
        bool shared = false;

        for (int k = 0; k < i; k++)
            shared = shared || p->model[k].source == m->source;
        if (!shared)
            lm_model_source_close(m->source);
        if (m->config)
            lm_config_fini(m->config);
        lm_free(m->config);
        lm_lora_close(m->lora);
        lm_st_close(m->fisher);
        lm_st_close(m->gram);
        lm_tokenizer_free(m->tok);
    }
}

/* ---- Tokenizers ---- */

typedef struct {
    lm_buf json, config;
    const char *found; /* its file; NULL: the model has no tokenizer */
} words;

static bool same_bytes(const lm_buf *a, const lm_buf *b)
{
    return a->len == b->len && (!a->len || !memcmp(a->data, b->data, a->len));
}

/* Without a policy, tokens need not be read if the bytes and the numbers of rows are equal. */
static bool all_alike(const lm_merge_plan *p, const words *w)
{
    int first = -1;

    for (int i = 0; i < p->recipe->n_inputs; i++) {
        if (!w[i].found)
            continue;
        if (first >= 0 && (!same_bytes(&w[i].json, &w[first].json) ||
                           embedding_rows(&p->model[i]) != embedding_rows(&p->model[first])))
            return false;
        first = i;
    }
    return true;
}

static lm_code make_vocab(lm_merge_plan *p, words *w, lm_sink *sink, lm_err *e)
{
    const lm_merge_recipe *r = p->recipe;
    lm_vocab_model *of = NULL;
    lm_code rc = lm_arena_alloc(p->arena, &of, (size_t)r->n_inputs, sizeof *of, e);

    for (int i = 0; !rc && i < r->n_inputs; i++) {
        lm_merge_model *m = &p->model[i];

        char where[300];

        snprintf(where, sizeof where, "%.200s: %s", m->name, w[i].found ? w[i].found : "");
        if (w[i].found)
            rc = lm_tokenizer_from_text(w[i].json.data, w[i].json.len, &w[i].config, where, &m->tok,
                                        e);
        of[i] = (lm_vocab_model){ m->name, m->tok, embedding_rows(m) };
    }
    return rc ? rc : lm_vocab_new(&r->vocab, of, r->n_inputs, r->base, sink, &p->vocab, e);
}

lm_code lm_plan_vocab(lm_merge_plan *p, const lm_merge_plan_opts *o, lm_err *e)
{
    const lm_merge_recipe *r = p->recipe;
    words *w = NULL;
    bool is_read[LM_MERGE_MAX_INPUTS] = { false };
    int found = 0;
    bool policy = r->vocab.policy != LM_VOCAB_STRICT || r->vocab.n_rules || r->vocab.pad_to;
    lm_code rc = lm_arena_alloc(p->arena, &w, (size_t)r->n_inputs, sizeof *w, e);

    for (int i = 0; !rc && i < r->n_inputs; i++) {
        rc = lm_tokenizer_text(p->model[i].source, false, &w[i].json, &w[i].config, &w[i].found, e);
        is_read[i] = w[i].found != NULL;
        found += is_read[i];
    }
    p->tokenizer = p->lead;
    for (int i = 0; !rc && found && !w[p->tokenizer].found; i++)
        p->tokenizer = i;
    if (!rc)
        rc = lm_plan_unread_tokenizers(p, is_read, e);
    if (!rc && (policy || (found > 1 && !all_alike(p, w))))
        rc = make_vocab(p, w, o->sink, e);
    for (int i = 0; w && i < r->n_inputs; i++) {
        lm_buf_fini(&w[i].json);
        lm_buf_fini(&w[i].config);
    }
    return rc;
}
