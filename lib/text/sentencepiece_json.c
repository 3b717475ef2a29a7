/* SPDX-License-Identifier: Apache-2.0 */
/* sentencepiece_json.c -- a SentencePiece model as a tokenizer.json, with the settings of the files
 * beside it: see sentencepiece.h. */
#include <inttypes.h>
#include <stdio.h>
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

/* True for T5's class, or for no class and a model like T5's.  Other classes renumber pieces. */
static lm_code is_t5(const lm_sentencepiece *m, const json_t *config, const char *where, bool *t5,
                     lm_err *e)
{
    static const char *const plain[] = { "LlamaTokenizer", "LlamaTokenizerFast",
                                         "PreTrainedTokenizer", "PreTrainedTokenizerFast" };
    const char *class = json_string_value(json_object_get(config, "tokenizer_class"));

    *t5 =
        m->steps.unigram && (class ? !strncmp(class, "T5Token", 7) || !strncmp(class, "MT5Token", 8)
                                   : m->vocab.bos < 0 && m->vocab.eos >= 0);
    if (!m->steps.unigram || *t5 || !class)
        return LM_OK;
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++)
        if (!strcmp(class, plain[i]))
            return LM_OK;
    return lm_fail(e, LM_EFORMAT, where, "give the model's tokenizer.json",
                   "tokenizer_class \"%.60s\" is not one whose Unigram model is read", class);
}

/* T5's sentinels, numbered down from the last id; NULL without memory. */
static json_t *sentinels(int64_t first, int64_t n)
{
    json_t *list = json_object();
    char key[24], name[40];

    for (int64_t i = 0; list && i < n; i++) {
        snprintf(key, sizeof key, "%" PRId64, first + n - 1 - i);
        snprintf(name, sizeof name, "<extra_id_%" PRId64 ">", i);
        if (json_object_set_new(list, key,
                                json_pack("{s:s, s:b}", "content", name, "special", 1))) {
            json_decref(list);
            list = NULL;
        }
    }
    return list;
}

static lm_code add_sentinels(lm_scored_vocab *v, const json_t *config, const char *where,
                             json_t **own, lm_err *e)
{
    int64_t n = 100;
    lm_code rc = LM_OK;

    if (v->extra)
        return LM_OK;
    if (config)
        rc = lm_json_i64_or(config, "extra_ids", 100, 0, 10000, &n, where, e);
    if (rc)
        return rc;
    v->extra = *own = sentinels((int64_t)v->n, n);
    return *own ? LM_OK : lm_fail(e, LM_ELIMIT, where, NULL, "no memory for added tokens");
}

lm_code lm_sentencepiece_json(const char *data, size_t len, const char *where, lm_buf *json,
                              lm_buf *config, lm_err *e)
{
    lm_sentencepiece m;
    json_t *tree = NULL, *own = NULL;
    char beside[320];
    bool t5 = false;
    lm_code rc = lm_sentencepiece_parse(data, len, where, &m, e);

    if (rc)
        return rc;
    lm_scored_vocab *v = &m.vocab;
    lm_tokenizer_config_where(where, beside, sizeof beside);
    if (config->len)
        rc = lm_json_parse(config->data, config->len, beside, &tree, e);
    if (!rc)
        rc = is_t5(&m, tree, beside, &t5, e);
    v->add_bos = !t5;
    v->add_eos = t5;
    if (!rc && tree)
        rc = lm_json_bool_or(tree, "add_bos_token", !t5, &v->add_bos, beside, e);
    if (!rc && tree)
        rc = lm_json_bool_or(tree, "add_eos_token", t5, &v->add_eos, beside, e);
    v->add_bos = v->add_bos && v->bos >= 0;
    v->add_eos = v->add_eos && v->eos >= 0;
    v->extra = json_object_get(tree, "added_tokens_decoder");
    if (!rc && t5)
        rc = add_sentinels(v, tree, beside, &own, e);
    if (!rc)
        rc = check_extra(v, v->extra, beside, e);
    if (!rc)
        rc = lm_scored_write(v, &m.steps, json, e);
    if (!rc && !tree)
        rc = write_config(v, config, e);
    json_decref(tree);
    json_decref(own);
    lm_sentencepiece_fini(&m);
    return rc;
}
