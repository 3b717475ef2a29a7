/* SPDX-License-Identifier: Apache-2.0 */
/* The post-processor: the ids added before and behind the text, around and between two texts. */
#include <string.h>

#include "text/tokenizer_impl.h"

enum { MAX_DEPTH = 8 };

/* An affix being built: ids in order, `at` counts them. */
static lm_code append_id(uint32_t *v, int *n, int64_t id, const char *where, lm_err *e)
{
    if (*n == LM_MAX_AFFIX)
        return lm_fail(e, LM_EFORMAT, where, NULL, "more than %d tokens around the text",
                       LM_MAX_AFFIX);
    v[(*n)++] = (uint32_t)id;
    return LM_OK;
}

static lm_code append_pair(lm_tokenizer *t, int64_t id, int64_t type, const char *where, lm_err *e)
{
    if (t->n_pair == LM_MAX_PAIR)
        return lm_fail(e, LM_EFORMAT, where, NULL, "more than %d parts of a pair", LM_MAX_PAIR);
    t->pair[t->n_pair++] = (lm_pair_item){ id, (uint32_t)type };
    return LM_OK;
}

static lm_code put_special(lm_tokenizer *t, const json_t *specials, const char *name, uint32_t *v,
                           int *n, const char *where, lm_err *e)
{
    const json_t *ids = json_object_get(json_object_get(specials, name), "ids"), *item;
    size_t i;
    lm_code rc = LM_OK;

    if (!json_is_array(ids))
        return lm_fail(e, LM_EFORMAT, where, NULL, "special token \"%s\" is not defined", name);
    json_array_foreach(ids, i, item)
    {
        json_int_t id = json_integer_value(item);
        if (!json_is_integer(item) || id < 0 || id >= t->vocab_size)
            return lm_fail(e, LM_EFORMAT, where, NULL, "special token \"%s\" has no valid id",
                           name);
        rc = append_id(v, n, id, where, e);
        if (rc)
            break;
    }
    return rc;
}

/* Add ids outside the present ones: before the prefix, behind the suffix. */
static lm_code wrap(lm_tokenizer *t, const uint32_t *before, int nb, const uint32_t *after, int na,
                    const char *where, lm_err *e)
{
    if (nb + t->n_prefix > LM_MAX_AFFIX || na + t->n_suffix > LM_MAX_AFFIX)
        return lm_fail(e, LM_EFORMAT, where, NULL, "more than %d tokens around the text",
                       LM_MAX_AFFIX);
    memmove(t->prefix + nb, t->prefix, (size_t)t->n_prefix * sizeof *t->prefix);
    memcpy(t->prefix, before, (size_t)nb * sizeof *before);
    t->n_prefix += nb;
    memcpy(t->suffix + t->n_suffix, after, (size_t)na * sizeof *after);
    t->n_suffix += na;
    return LM_OK;
}

/* One item of "pair": {"Sequence": {"id": "A", "type_id": 0}} or {"SpecialToken": ...}. */
static lm_code parse_pair_item(lm_tokenizer *t, const json_t *item, const json_t *specials,
                               const char *where, lm_err *e)
{
    const json_t *text = json_object_get(item, "Sequence");
    const json_t *own = text ? text : json_object_get(item, "SpecialToken");
    const char *id = json_string_value(json_object_get(own, "id"));
    uint32_t ids[LM_MAX_AFFIX];
    int64_t type;
    int n = 0;
    lm_code rc;

    if (!id || (text && strcmp(id, "A") && strcmp(id, "B")))
        return lm_fail(e, LM_EFORMAT, where, NULL,
                       "an item of \"pair\" is neither a Sequence A or B nor a SpecialToken");
    rc = lm_json_i64_or(own, "type_id", 0, 0, UINT32_MAX, &type, where, e);
    if (!rc && text)
        return append_pair(t, *id == 'A' ? LM_PAIR_A : LM_PAIR_B, type, where, e);
    if (!rc)
        rc = put_special(t, specials, id, ids, &n, where, e);
    for (int i = 0; i < n && !rc; i++)
        rc = append_pair(t, ids[i], type, where, e);
    return rc;
}

static lm_code parse_pair(lm_tokenizer *t, const json_t *j, const char *where, lm_err *e)
{
    const json_t *pair = json_object_get(j, "pair"), *item;
    size_t i;
    lm_code rc = LM_OK;

    t->n_templates++;
    t->n_pair = 0;
    json_array_foreach(pair, i, item)
    {
        rc = parse_pair_item(t, item, json_object_get(j, "special_tokens"), where, e);
        if (rc)
            break;
    }
    return rc;
}

static lm_code parse_template(lm_tokenizer *t, const json_t *j, const char *where, lm_err *e)
{
    const json_t *single = json_object_get(j, "single"), *item;
    const json_t *specials = json_object_get(j, "special_tokens");
    uint32_t before[LM_MAX_AFFIX], after[LM_MAX_AFFIX];
    int nb = 0, na = 0, texts = 0;
    size_t i;
    lm_code rc = LM_OK;

    if (!json_is_array(single))
        return lm_fail(e, LM_EFORMAT, where, NULL, "\"single\" must be a list");
    json_array_foreach(single, i, item)
    {
        const json_t *special = json_object_get(item, "SpecialToken");
        const char *id = json_string_value(json_object_get(special, "id"));
        if (json_object_get(item, "Sequence"))
            texts++;
        else if (!id)
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "single[%zu] is neither a Sequence nor a SpecialToken", i);
        else
            rc = put_special(t, specials, id, texts ? after : before, texts ? &na : &nb, where, e);
        if (rc)
            return rc;
    }
    if (texts != 1)
        return lm_fail(e, LM_EFORMAT, where, NULL, "\"single\" has %d Sequences instead of one",
                       texts);
    rc = parse_pair(t, j, where, e);
    return rc ? rc : wrap(t, before, nb, after, na, where, e);
}

/* BertProcessing and RobertaProcessing: "cls": ["<s>", 0], "sep": ["</s>", 2]. */
static lm_code parse_bert(lm_tokenizer *t, const json_t *j, bool roberta, const char *where,
                          lm_err *e)
{
    const char *const keys[2] = { "cls", "sep" };
    uint32_t ids[2];

    for (int i = 0; i < 2; i++) {
        const json_t *id = json_array_get(json_object_get(j, keys[i]), 1);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= t->vocab_size)
            return lm_fail(e, LM_EFORMAT, where, NULL, "\"%s\" must be [token, id]", keys[i]);
        ids[i] = (uint32_t)json_integer_value(id);
    }
    /* cls A sep B sep, of which B and its sep have type 1; RoBERTa repeats sep, and has no types */
    const lm_pair_item items[] = { { ids[0], 0 }, { LM_PAIR_A, 0 }, { ids[1], 0 },
                                   { ids[1], 0 }, { LM_PAIR_B, 1 }, { ids[1], 1 } };
    t->n_templates++;
    t->n_pair = 0;
    for (int i = 0; i < 6; i++) {
        if (i == 3 && !roberta)
            continue;
        t->pair[t->n_pair] = items[i];
        t->pair[t->n_pair++].type *= !roberta;
    }
    return wrap(t, &ids[0], 1, &ids[1], 1, where, e);
}

static lm_code parse_post(lm_tokenizer *t, const json_t *j, int depth, const char *where, lm_err *e)
{
    const char *type;
    lm_code rc = lm_json_str_or(j, "type", "", &type, where, e);

    if (rc)
        return rc;
    if (!strcmp(type, "ByteLevel")) /* only moves offsets */
        return LM_OK;
    if (!strcmp(type, "TemplateProcessing"))
        return parse_template(t, j, where, e);
    if (!strcmp(type, "BertProcessing") || !strcmp(type, "RobertaProcessing"))
        return parse_bert(t, j, *type == 'R', where, e);
    if (!strcmp(type, "Sequence")) {
        const json_t *list = json_object_get(j, "processors"), *item;
        size_t i;
        if (!json_is_array(list) || depth == MAX_DEPTH)
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "\"processors\" of a Sequence must be a list, nested %d deep at most",
                           MAX_DEPTH);
        json_array_foreach(list, i,
                           item) if ((rc = parse_post(t, item, depth + 1, where, e))) return rc;
        return LM_OK;
    }
    return lm_fail(e, LM_EFORMAT, where, NULL, "post_processor type \"%s\" is not supported", type);
}

lm_code lm_post_parse(lm_tokenizer *t, const json_t *j, const char *where, lm_err *e)
{
    return !j || json_is_null(j) ? LM_OK : parse_post(t, j, 0, where, e);
}
