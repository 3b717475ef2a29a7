/* SPDX-License-Identifier: Apache-2.0 */
/* sentencepiece_json.c -- a SentencePiece model as a tokenizer.json, with the settings of the files
 * beside it: see sentencepiece.h. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "text/added_list.h"
#include "text/sentencepiece.h"
#include "text/tokenizer_impl.h"

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

/* Added tokens with ids below the model's size must be its pieces. */
static lm_code check_extra(const lm_scored_vocab *v, const json_t *extra, const char *where,
                           lm_err *e)
{
    const char *key;
    json_t *token;
    lm_code rc = lm_added_list_check(extra, (int64_t)v->n, where, e);

    if (rc)
        return rc;
    json_object_foreach((json_t *)extra, key, token)
    {
        const json_t *content = json_object_get(token, "content");
        size_t len = json_string_length(content);
        int64_t id = strtoll(key, NULL, 10);
        if (id < (int64_t)v->n &&
            (len != v->v[id].len || memcmp(json_string_value(content), v->v[id].text, len) != 0))
            return lm_fail(e, LM_EFORMAT, where, "give the model's tokenizer.json",
                           "added token %" PRId64 " is '%.40s', the model's piece '%.*s'", id,
                           json_string_value(content), (int)(v->v[id].len < 40 ? v->v[id].len : 40),
                           v->v[id].text);
    }
    return LM_OK;
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
