/* SPDX-License-Identifier: Apache-2.0 */
/* vocab.c -- compares tokenizers, and finds the row of each token of the result in each model. */
#include "merge/vocab.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "merge/vocab_impl.h"
#include "model/arch.h"

bool lm_vocab_is_table(const char *tensor)
{
    return lm_arch_names(LM_PART_EMBED, "weight", tensor) ||
           lm_arch_names(LM_PART_OUTPUT, "weight", tensor) ||
           lm_arch_names(LM_PART_OUTPUT, "bias", tensor) ||
           lm_arch_names(LM_PART_HEAD_BIAS, "", tensor) ||
           lm_arch_names(LM_PART_AHEAD_HEAD, "weight",
                         tensor); /* the embedding's copy has its name */
}

/* ---- comparing ---- */

/* Up to three tokens of a kind, for a message. */
typedef struct {
    int64_t n;
    lm_buf names;
} sample;

static lm_code take_sample(sample *s, const char *text, size_t len, lm_err *e)
{
    size_t shown = len < 24 ? len : lm_utf8_valid(text, 24);
    if (++s->n > 3)
        return LM_OK;
    return lm_buf_addf(&s->names, e, "%s\"%.*s\"", s->n > 1 ? ", " : "", (int)shown, text);
}

/* a lacks `less`, has `more` that b lacks, and others have another id than in b. */
typedef struct {
    sample less, more, moved;
} difference;

static void fini_difference(difference *d)
{
    lm_buf_fini(&d->less.names);
    lm_buf_fini(&d->more.names);
    lm_buf_fini(&d->moved.names);
}

static bool equal_text(const lm_tokenizer *a, const lm_tokenizer *b)
{
    size_t n, m;
    const char *x = lm_tokenizer_json(a, &n), *y = lm_tokenizer_json(b, &m);
    return a == b || (n == m && !memcmp(x, y, n));
}

static lm_code compare(const lm_tokenizer *a, const lm_tokenizer *b, difference *d, lm_err *e)
{
    if (equal_text(a, b))
        return LM_OK;
    for (int side = 0; side < 2; side++) {
        const lm_tokenizer *x = side ? b : a, *y = side ? a : b;
        for (int64_t id = 0; id < lm_tokenizer_vocab_size(x); id++) {
            size_t len;
            const char *text = lm_tokenizer_token(x, (uint32_t)id, &len);
            int64_t there = text ? lm_tokenizer_id(y, text, len) : id;
            if (there < 0 && take_sample(side ? &d->less : &d->more, text, len, e))
                return e->code;
            if (there >= 0 && there != id && !side && take_sample(&d->moved, text, len, e))
                return e->code;
        }
    }
    return LM_OK;
}

static lm_code add_part(lm_buf *out, const sample *s, const char *verb, lm_err *e)
{
    if (!s->n)
        return LM_OK;
    return lm_buf_addf(out, e, "%s%s %" PRId64 " (%s%s)", out->len ? ", " : "", verb, s->n,
                       s->names.data, s->n > 3 ? ", ..." : "");
}

/* Compare two tokenizers; LM_EUSAGE with the differences. */
static lm_code check_same(const lm_vocab_model *a, const lm_vocab_model *b, lm_err *e)
{
    static const char todo[] = "choose the tokenizer: union, base or one of the models";
    difference d = { .less = { 0 } };
    lm_buf text = { 0 };
    lm_code rc = a->tok && b->tok ? compare(a->tok, b->tok, &d, e) : LM_OK;
    if (!rc)
        rc = add_part(&text, &d.more, "has", e);
    if (!rc && text.len)
        rc = lm_buf_addf(&text, e, " that %s lacks", b->name);
    if (!rc)
        rc = add_part(&text, &d.less, "lacks", e);
    if (!rc)
        rc = add_part(&text, &d.moved, "has other ids for", e);
    if (!rc && text.len)
        rc = lm_fail(e, LM_EUSAGE, a->name, todo,
                     "its tokenizer is not that of %s: of its tokens it %s", b->name, text.data);
    else if (!rc && a->rows != b->rows)
        rc = lm_fail(e, LM_EUSAGE, a->name, todo,
                     "its embedding has %" PRId64 " rows, that of %s %" PRId64, a->rows, b->name,
                     b->rows);
    lm_buf_fini(&text);
    fini_difference(&d);
    return rc;
}

/* True if every model has the tokens and rows of `lead`. */
static lm_code all_agree(const lm_vocab_model *m, int n, int lead, bool *agree, lm_err *e)
{
    *agree = true;
    for (int i = 0; i < n && *agree; i++) {
        difference d = { .less = { 0 } };
        if (m[i].tok && m[lead].tok && compare(m[i].tok, m[lead].tok, &d, e)) {
            fini_difference(&d);
            return e->code;
        }
        *agree = !d.less.n && !d.more.n && !d.moved.n && m[i].rows == m[lead].rows;
        fini_difference(&d);
    }
    return LM_OK;
}

/* ---- policy ---- */

static int find_model(const lm_vocab_model *m, int n, const char *name)
{
    for (int i = 0; name && i < n; i++)
        if (!strcmp(m[i].name, name))
            return i;
    return -1;
}

/* The model whose ids are kept. */
static lm_code find_first(const lm_vocab_spec *spec, const lm_vocab *v, int *first, lm_err *e)
{
    *first = v->base >= 0 ? v->base : 0;
    if (spec->policy == LM_VOCAB_BASE && v->base < 0)
        return lm_fail(e, LM_EUSAGE, "tokenizer", "name a base, or choose union or a model",
                       "the policy is base, and there is none");
    if (spec->policy == LM_VOCAB_MODEL) {
        *first = find_model(v->model, v->n, spec->model);
        if (*first < 0)
            return lm_fail(e, LM_EUSAGE, "tokenizer", "write it as in the list of models",
                           "\"%s\" is not one of the models", spec->model ? spec->model : "");
    }
    return LM_OK;
}

static bool must_force(const lm_vocab_spec *spec)
{
    bool force = false;
    for (int i = 0; i < spec->n_rules; i++)
        force |= spec->rules[i].force;
    return force;
}

/* ---- rows ---- */

static lm_code make_maps(lm_vocab *v, lm_err *e)
{
    int64_t ids = lm_tokenizer_vocab_size(v->tok);
    size_t rows = (size_t)v->rows;
    if (lm_alloc_n(&v->map, (size_t)v->n, sizeof *v->map, "vocabularies", e) ||
        lm_alloc_n(&v->from, rows, sizeof *v->from, "vocabularies", e) ||
        lm_alloc_n(&v->from_row, rows, sizeof *v->from_row, "vocabularies", e) ||
        lm_alloc_n(&v->force, rows, sizeof *v->force, "vocabularies", e))
        return e->code;
    for (int m = 0; m < v->n; m++) {
        if (lm_alloc_n(&v->map[m], rows, sizeof **v->map, "vocabularies", e))
            return e->code;
        for (int64_t t = 0; t < v->rows; t++) {
            size_t len;
            const char *text = t < ids ? lm_tokenizer_token(v->tok, (uint32_t)t, &len) : NULL;
            v->map[m][t] = text ? (int32_t)lm_tokenizer_id(v->model[m].tok, text, len) : -1;
        }
    }
    return LM_OK;
}

/* The default source of each row. */
static void choose_sources(lm_vocab *v)
{
    int64_t ids = lm_tokenizer_vocab_size(v->tok);
    for (int64_t t = 0; t < v->rows; t++) {
        size_t len;
        int have = 0, last = -1;
        if (t >= ids || !lm_tokenizer_token(v->tok, (uint32_t)t, &len)) {
            v->from[t] = LM_ROW_BLANK;
            continue;
        }
        for (int m = 0; m < v->n; m++)
            if (v->map[m][t] >= 0) {
                have++;
                last = m;
            }
        int from = have == 1 ? last : LM_ROW_MEAN;
        if (have > 1 && v->base >= 0 && v->map[v->base][t] >= 0)
            from = v->base;
        v->from[t] = have ? from : LM_ROW_ZERO;
        v->from_row[t] = v->from[t] >= 0 ? v->map[from][t] : -1;
    }
}

static lm_code apply_rule(lm_vocab *v, const lm_vocab_rule *r, lm_sink *sink, lm_err *e)
{
    int64_t t = lm_tokenizer_id(v->tok, r->token, strlen(r->token)), row;
    const char *source = r->source ? r->source : r->token;
    int m = find_model(v->model, v->n, r->model);
    if (t < 0)
        return lm_fail(e, LM_EBUG, r->token, NULL, "was not added to the vocabulary");
    if (r->from == LM_VOCAB_FROM_MODEL && m < 0)
        return lm_fail(e, LM_EUSAGE, r->token, "write it as in the list of models",
                       "its embedding is requested from \"%s\", which is not one of the models",
                       r->model ? r->model : "");
    if (r->from == LM_VOCAB_FROM_MODEL) {
        bool by_id = !r->source && r->source_id >= 0;
        row = by_id ? r->source_id : lm_tokenizer_id(v->model[m].tok, source, strlen(source));
        if (row < 0 || row >= v->model[m].rows)
            return by_id
                       ? lm_fail(e, LM_EUSAGE, r->token, NULL,
                                 "row %" PRId64 " is requested from %s, which has %" PRId64, row,
                                 r->model, v->model[m].rows)
                       : lm_fail(e, LM_EUSAGE, r->token, NULL,
                                 "its embedding is requested from %s, which has no token \"%.80s\"",
                                 r->model, source);
        v->from[t] = m;
        v->from_row[t] = (int32_t)row;
    } else if (r->from == LM_VOCAB_FROM_ZERO) {
        v->from[t] = LM_ROW_ZERO;
    } else if (v->from[t] == LM_ROW_ZERO) {
        lm_log(sink, LM_LOG_WARN, "no model has token \"%.80s\": its embedding is zero", r->token);
    }
    v->force[t] = r->force;
    return LM_OK;
}

static lm_code check_rows(const lm_vocab *v, lm_err *e)
{
    for (int m = 0; m < v->n; m++)
        if (!v->model[m].tok)
            return lm_fail(e, LM_EUSAGE, v->model[m].name, "add its tokenizer.json",
                           "has no tokenizer, which remapping its embedding needs");
        else if (v->model[m].rows < lm_tokenizer_vocab_size(v->model[m].tok))
            return lm_fail(e, LM_EFORMAT, v->model[m].name,
                           "tokenizer and weights do not belong "
                           "together",
                           "its tokenizer has %lld id%s, its embedding %" PRId64 " row%s",
                           (long long)lm_tokenizer_vocab_size(v->model[m].tok),
                           lm_plural(lm_tokenizer_vocab_size(v->model[m].tok)), v->model[m].rows,
                           lm_plural(v->model[m].rows));
    return LM_OK;
}

static lm_code remap(lm_vocab *v, const lm_vocab_spec *spec, lm_sink *sink, lm_err *e)
{
    int first = 0;
    bool all = spec->policy == LM_VOCAB_UNION || spec->policy == LM_VOCAB_STRICT;
    if (find_first(spec, v, &first, e) || check_rows(v, e) ||
        lm_vocab_unite(spec, v->model, v->n, first, all, sink, &v->own, e))
        return e->code;
    v->tok = v->own ? v->own : v->model[first].tok;
    v->owner = v->own ? -1 : first;
    v->rows = lm_tokenizer_vocab_size(v->tok);
    if (spec->pad_to > 1)
        v->rows += (spec->pad_to - v->rows % spec->pad_to) % spec->pad_to;
    if (v->rows > INT32_MAX)
        return lm_fail(e, LM_EUSAGE, "tokenizer", NULL, "%" PRId64 " rows are too many", v->rows);
    if (make_maps(v, e))
        return e->code;
    choose_sources(v);
    for (int i = 0; i < spec->n_rules; i++)
        if (apply_rule(v, &spec->rules[i], sink, e))
            return e->code;
    return LM_OK;
}

/* The model that the others are compared with: the base, else the first, that has a tokenizer. */
static int reference(const lm_vocab *v)
{
    int lead = v->base >= 0 ? v->base : 0;
    for (int i = 0; i < v->n && !v->model[lead].tok; i++)
        lead = v->model[i].tok ? i : lead;
    return lead;
}

static lm_code build(lm_vocab *v, const lm_vocab_spec *spec, lm_sink *sink, lm_err *e)
{
    int lead = reference(v);
    bool agree, asked = spec->policy || spec->n_rules || spec->pad_to;
    for (int i = 0; i < v->n; i++)
        if (!asked && check_same(&v->model[i], &v->model[lead], e))
            return e->code;
    if (all_agree(v->model, v->n, lead, &agree, e))
        return e->code;
    for (int i = 0; agree && i < v->n; i++)
        if (v->model[i].tok && v->model[lead].tok &&
            !equal_text(v->model[i].tok, v->model[lead].tok) &&
            lm_vocab_warn_of_splits(&v->model[lead], &v->model[i], sink, e))
            return e->code;
    bool fits = spec->pad_to < 2 || v->model[lead].rows % spec->pad_to == 0;
    for (int i = 0; agree && i < spec->n_rules; i++) /* a rule may add a token */
        fits = fits && v->model[lead].tok &&
               lm_tokenizer_id(v->model[lead].tok, spec->rules[i].token,
                               strlen(spec->rules[i].token)) >= 0;
    v->same = agree && fits && !must_force(spec);
    v->owner = lead;
    v->tok = v->model[lead].tok;
    v->rows = v->model[lead].rows;
    if (v->same && spec->policy && spec->policy != LM_VOCAB_UNION) {
        if (find_first(spec, v, &v->owner, e))
            return e->code;
        v->tok = v->model[v->owner].tok;
    }
    return v->same ? LM_OK : remap(v, spec, sink, e);
}

lm_code lm_vocab_new(const lm_vocab_spec *spec, const lm_vocab_model *model, int n, int base,
                     lm_sink *sink, lm_vocab **out, lm_err *e)
{
    lm_vocab *v = NULL;
    *out = NULL;
    if (lm_alloc_n(&v, 1, sizeof *v, "vocabularies", e))
        return e->code;
    v->model = model;
    v->n = n;
    v->base = base;
    if (build(v, spec, sink, e)) {
        lm_vocab_free(v);
        return e->code;
    }
    *out = v;
    return LM_OK;
}

void lm_vocab_free(lm_vocab *v)
{
    if (!v)
        return;
    for (int m = 0; v->map && m < v->n; m++)
        lm_free(v->map[m]);
    lm_free(v->map);
    lm_free(v->from);
    lm_free(v->from_row);
    lm_free(v->force);
    lm_tokenizer_free(v->own);
    lm_free(v);
}

/* ---- queries ---- */

bool lm_vocab_same(const lm_vocab *v)
{
    return v->same;
}

int64_t lm_vocab_rows(const lm_vocab *v)
{
    return v->rows;
}

int lm_vocab_owner(const lm_vocab *v)
{
    return v->owner;
}

const lm_tokenizer *lm_vocab_tokenizer(const lm_vocab *v)
{
    return v->tok;
}

const char *lm_vocab_json(const lm_vocab *v, size_t *len)
{
    *len = 0;
    return v->tok ? lm_tokenizer_json(v->tok, len) : NULL;
}

const char *lm_vocab_config_json(const lm_vocab *v, size_t *len)
{
    *len = 0;
    return v->tok ? lm_tokenizer_config_json(v->tok, len) : NULL;
}

/* The id in the result of the token `id` of a model; -1: dropped. */
static int64_t new_id(const lm_vocab *v, const lm_tokenizer *old, json_int_t id)
{
    size_t len;
    const char *text = NULL;
    if (id >= 0 && id < lm_tokenizer_vocab_size(old))
        text = lm_tokenizer_token(old, (uint32_t)id, &len);
    return text ? lm_tokenizer_id(v->tok, text, len) : -1;
}

/* An id, or a list of them, for the merged vocabulary; a new reference, NULL: out of memory. */
static json_t *renumber(const lm_vocab *v, const lm_tokenizer *old, const json_t *value)
{
    if (json_is_integer(value)) {
        int64_t id = new_id(v, old, json_integer_value(value));
        return id < 0 ? json_null() : json_integer(id);
    }
    json_t *list = json_array();
    for (size_t i = 0; list && i < json_array_size(value); i++) {
        int64_t id = new_id(v, old, json_integer_value(json_array_get(value, i)));
        if (id >= 0 && json_array_append_new(list, json_integer(id))) {
            json_decref(list);
            list = NULL;
        }
    }
    return list;
}

lm_code lm_vocab_fix_config(const lm_vocab *v, int of, json_t *config, lm_err *e)
{
    static const char suffix[] = "_token_id";
    const lm_tokenizer *old = v->model[of].tok;
    const char *key;
    json_t *value;
    void *next;
    if (v->same)
        return LM_OK;
    json_object_foreach_safe(config, next, key, value)
    {
        size_t len = strlen(key), tail = sizeof suffix - 1;
        json_t *fresh = NULL;
        if (!strcmp(key, "vocab_size"))
            fresh = json_integer(v->rows);
        else if (len > tail && !strcmp(key + len - tail, suffix) && old &&
                 (json_is_integer(value) || json_is_array(value)))
            fresh = renumber(v, old, value);
        else
            continue;
        if (!fresh || json_object_set_new(config, key, fresh))
            return lm_fail(e, LM_ELIMIT, "config.json", NULL, "no memory for a change");
    }
    return LM_OK;
}
