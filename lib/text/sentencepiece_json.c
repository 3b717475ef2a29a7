/* SPDX-License-Identifier: Apache-2.0 */
/* sentencepiece_json.c -- a SentencePiece model as tokenizer.json, with the files beside it: see
 * sentencepiece.h. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "text/sentencepiece.h"
#include "text/tokenizer_impl.h"

enum { MOST_EXTRA = 1 << 16 };

static void name_piece(lm_jw *w, const lm_scored_vocab *v, const char *key, int64_t id)
{
    if (id >= 0)
        lm_jw_strn(w, key, v->v[id].text, v->v[id].len);
}

static lm_code write_config(const lm_scored_vocab *v, lm_buf *out, lm_err *e)
{
    lm_jw w;

    lm_jw_begin(&w, out, 2, e);
    lm_jw_obj(&w, NULL);
    lm_jw_bool(&w, "add_bos_token", v->add_bos);
    lm_jw_bool(&w, "add_eos_token", v->add_eos);
    name_piece(&w, v, "bos_token", v->bos);
    name_piece(&w, v, "eos_token", v->eos);
    name_piece(&w, v, "pad_token", v->pad);
    name_piece(&w, v, "unk_token", v->unk);
    lm_jw_bool(&w, "clean_up_tokenization_spaces", false);
    lm_jw_str(&w, "tokenizer_class", "PreTrainedTokenizerFast");
    lm_jw_close_obj(&w);
    return lm_jw_end(&w);
}

/* Decimal digits alone, nine at most. */
static bool is_id(const char *s, int64_t *id)
{
    size_t n = strspn(s, "0123456789");

    *id = strtoll(s, NULL, 10);
    return n && n < 10 && !s[n];
}

/* Tokens that were added to the model's pieces: numbered behind them, or the same as they are. */
static lm_code check_extra(const lm_scored_vocab *v, const json_t *extra, const char *where,
                           lm_err *e)
{
    const char *key;
    json_t *token;

    if (extra && !json_is_null(extra) && !json_is_object(extra))
        return lm_fail(e, LM_EFORMAT, where, NULL, "\"added_tokens_decoder\" is no object");
    json_object_foreach((json_t *)extra, key, token)
    {
        const json_t *content = json_object_get(token, "content");
        size_t len = json_string_length(content);
        int64_t id = -1;
        if (!is_id(key, &id) || id >= (int64_t)v->n + MOST_EXTRA || !len)
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "added token \"%.40s\" has no \"content\", or is no number below %zu",
                           key, v->n + MOST_EXTRA);
        if (id < (int64_t)v->n &&
            (len != v->v[id].len || memcmp(json_string_value(content), v->v[id].text, len) != 0))
            return lm_fail(e, LM_EFORMAT, where, "give the model's tokenizer.json",
                           "added token %" PRId64 " is '%.40s', the model's piece '%.*s'", id,
                           json_string_value(content), (int)(v->v[id].len < 40 ? v->v[id].len : 40),
                           v->v[id].text);
    }
    return LM_OK;
}

/* Is it one of the tokens that the configuration names? */
static bool is_named(const json_t *config, const char *token)
{
    static const char *const keys[] = { "bos_token", "eos_token", "unk_token", "pad_token" };
    const json_t *more = json_object_get(config, "additional_special_tokens"), *one;
    size_t k;

    for (int i = 0; i < 4; i++) {
        const json_t *c = json_object_get(config, keys[i]);
        const char *s = json_string_value(json_is_object(c) ? json_object_get(c, "content") : c);
        if (s && !strcmp(s, token))
            return true;
    }
    json_array_foreach(more, k, one)
    {
        const json_t *c = json_is_object(one) ? json_object_get(one, "content") : one;
        if (json_is_string(c) && !strcmp(json_string_value(c), token))
            return true;
    }
    return false;
}

static lm_code add_tokens(json_t *config, const json_t *added, const char *where, lm_err *e)
{
    json_t *decoder = json_object(), *id;
    const char *token;
    char key[24];

    if (!decoder || json_object_set_new(config, "added_tokens_decoder", decoder))
        return lm_fail(e, LM_ELIMIT, where, NULL, "no memory for added tokens");
    json_object_foreach((json_t *)added, token, id)
    {
        if (!json_is_integer(id) || json_integer_value(id) < 0)
            return lm_fail(e, LM_EFORMAT, where, NULL, "added token \"%.40s\" has no id", token);
        snprintf(key, sizeof key, "%" PRId64, (int64_t)json_integer_value(id));
        if (json_object_get(decoder, key))
            return lm_fail(e, LM_EFORMAT, where, NULL, "two added tokens have the id %s", key);
        if (json_object_set_new(
                decoder, key,
                json_pack("{s:s, s:b}", "content", token, "special", is_named(config, token))))
            return lm_fail(e, LM_ELIMIT, where, NULL, "no memory for added tokens");
    }
    return LM_OK;
}

lm_code lm_sentencepiece_add(lm_buf *config, const lm_buf *added, const char *where, lm_err *e)
{
    json_t *tree = NULL, *list = NULL;
    char beside[320];
    lm_jw w;
    lm_code rc = lm_json_parse(added->data, added->len, where, &list, e);

    lm_tokenizer_config_where(where, beside, sizeof beside);
    if (!rc && config->len)
        rc = lm_json_parse(config->data, config->len, beside, &tree, e);
    else if (!rc && !(tree = json_object()))
        rc = lm_fail(e, LM_ELIMIT, where, NULL, "no memory for added tokens");
    if (!rc && (!json_is_object(list) || !json_is_object(tree)))
        rc = lm_fail(e, LM_EFORMAT, json_is_object(list) ? beside : where, NULL, "is no object");
    if (!rc && !json_object_get(tree, "added_tokens_decoder") && json_object_size(list)) {
        rc = add_tokens(tree, list, where, e);
        config->len = 0;
        lm_jw_begin(&w, config, 2, e);
        lm_jw_json(&w, NULL, tree);
        lm_code end = lm_jw_end(&w);
        rc = rc ? rc : end;
    }
    json_decref(tree);
    json_decref(list);
    return rc;
}

lm_code lm_sentencepiece_json(const char *data, size_t len, const char *where, lm_buf *json,
                              lm_buf *config, lm_err *e)
{
    lm_sentencepiece m;
    json_t *tree = NULL;
    char beside[320];
    lm_code rc = lm_sentencepiece_parse(data, len, where, &m, e);

    if (rc)
        return rc;
    lm_scored_vocab *v = &m.vocab;
    lm_tokenizer_config_where(where, beside, sizeof beside);
    if (config->len)
        rc = lm_json_parse(config->data, config->len, beside, &tree, e);
    v->add_bos = true;
    if (!rc && tree)
        rc = lm_json_bool_or(tree, "add_bos_token", true, &v->add_bos, beside, e);
    if (!rc && tree)
        rc = lm_json_bool_or(tree, "add_eos_token", false, &v->add_eos, beside, e);
    v->add_bos = v->add_bos && v->bos >= 0;
    v->add_eos = v->add_eos && v->eos >= 0;
    v->extra = json_object_get(tree, "added_tokens_decoder");
    if (!rc)
        rc = check_extra(v, v->extra, beside, e);
    if (!rc)
        rc = lm_scored_write(v, &m.steps, json, e);
    if (!rc && !tree)
        rc = write_config(v, config, e);
    json_decref(tree);
    lm_sentencepiece_fini(&m);
    return rc;
}
