/* SPDX-License-Identifier: Apache-2.0 */
/* added_list.c -- see added_list.h. */
#include "text/added_list.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/tokenizer_impl.h"

enum { MOST_EXTRA = 1 << 16 };

/* Decimal digits alone, nine at most. */
static bool is_id(const char *s, int64_t *id)
{
    size_t n = strspn(s, "0123456789");

    *id = strtoll(s, NULL, 10);
    return n && n < 10 && !s[n];
}

lm_code lm_added_list_check(const json_t *list, int64_t n, const char *where, lm_err *e)
{
    const char *key;
    json_t *token;

    if (list && !json_is_null(list) && !json_is_object(list))
        return lm_fail(e, LM_EFORMAT, where, NULL, "\"added_tokens_decoder\" is not an object");
    json_object_foreach((json_t *)list, key, token)
    {
        int64_t id = -1;
        if (!is_id(key, &id) || id >= n + MOST_EXTRA ||
            !json_string_length(json_object_get(token, "content")))
            return lm_fail(e, LM_EFORMAT, where, NULL,
                           "added token \"%.40s\" has no \"content\", or its id is not a number "
                           "below %" PRId64,
                           key, n + MOST_EXTRA);
    }
    return LM_OK;
}

void lm_added_list_write(lm_jw *w, const json_t *list, int64_t from, int64_t except)
{
    static const char *const flags[] = { "single_word", "lstrip", "rstrip", "normalized",
                                         "special" };
    const char *key;
    json_t *token;

    json_object_foreach((json_t *)list, key, token)
    {
        const json_t *content = json_object_get(token, "content");
        int64_t id = strtoll(key, NULL, 10);
        if (id < from || id == except)
            continue;
        lm_jw_obj(w, NULL);
        lm_jw_int(w, "id", id);
        lm_jw_strn(w, "content", json_string_value(content), json_string_length(content));
        for (int i = 0; i < 5; i++)
            lm_jw_bool(w, flags[i], json_is_true(json_object_get(token, flags[i])));
        lm_jw_close_obj(w);
    }
}

/* True if it is one of the special tokens that the configuration names. */
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

lm_code lm_added_list_take(lm_buf *config, const lm_buf *added, const char *where, lm_err *e)
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
        rc =
            lm_fail(e, LM_EFORMAT, json_is_object(list) ? beside : where, NULL, "is not an object");
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
