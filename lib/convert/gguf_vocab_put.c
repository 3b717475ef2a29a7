/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_vocab_put.c -- a tokenizer.json as GGUF's tokenizer.* keys.
 *
 * Byte-level BPE is llama.cpp's "gpt2": tokens, merges and the name of a pattern.  BPE with byte
 * fallback is its "llama", which has no merges: it joins the pair whose joined token has the
 * highest score, so the score of a token is the rank of the first merge that makes it.  Models without merges: gguf_words.h. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "convert/gguf_meta.h"
#include "convert/gguf_words.h"
#include "text/added_list.h"
#include "text/pretok_scan.h"
#include "text/sentencepiece.h"
#include "text/tokenizer.h"
#include "text/tokenizer_lists.h"

enum { NORMAL = 1, UNKNOWN, CONTROL, USER, UNUSED, BYTE };

typedef struct {
    const lm_import *m;
    lm_gguf_plan *p;
    lm_err *e;
    const lm_side_file *pieces; /* tokenizer.model, if there is no tokenizer.json; otherwise NULL */
    lm_tokenizer *tok;
    lm_lists lists;
    json_t *rest; /* tokenizer.json without vocabulary and merges */
    size_t n;     /* size of the model's vocabulary */
    lm_gguf_text *text;
    int32_t *type;
    float *score;
    lm_buf names; /* "[PAD5]" and other synthesised texts */
    char where[300];
} vocab;

/* The texts of tokenizer.json and its configuration, from the side files or from SentencePiece's
 * file. */
static lm_code read_files(vocab *v, lm_buf *json, lm_buf *config)
{
    const lm_side_file *whole = lm_import_side(v->m, "tokenizer.json");
    const lm_side_file *beside = lm_import_side(v->m, "tokenizer_config.json");
    const lm_side_file *added = lm_import_side(v->m, "added_tokens.json");
    lm_code rc = LM_OK;

    const char *from = v->m->tokenizer ? v->m->tokenizer : v->m->path;
    if (v->m->tokenizer && !lm_path_is_dir(from))
        snprintf(v->where, sizeof v->where, "%.200s", from);
    else
        snprintf(v->where, sizeof v->where, "%.200s: tokenizer.%s", from,
                 v->pieces ? "model" : "json");
    if (beside)
        rc = lm_buf_add(config, beside->data.data, beside->data.len, v->e);
    if (!rc && v->pieces && added) {
        char where[300];
        snprintf(where, sizeof where, "%.200s: added_tokens.json", from);
        rc = lm_added_list_take(config, &added->data, where, v->e);
    }
    if (!rc && v->pieces)
        return lm_sentencepiece_json(v->pieces->data.data, v->pieces->data.len, v->where, json,
                                     config, v->e);
    return rc ? rc : lm_buf_add(json, whole->data.data, whole->data.len, v->e);
}

static lm_code open_tokenizer(vocab *v)
{
    lm_buf rest = { 0 }, json = { 0 }, config = { 0 };
    bool cut = false;
    lm_code rc = read_files(v, &json, &config);

    if (!rc)
        rc = lm_tokenizer_from_json(json.data, json.len, config.len ? config.data : NULL,
                                    config.len, v->where, &v->tok, v->e);
    if (!rc)
        rc = lm_lists_cut(&v->lists, json.data, json.len, &rest, &cut, v->e);
    if (!rc)
        rc = lm_json_parse(cut ? rest.data : json.data, cut ? rest.len : json.len, v->where,
                           &v->rest, v->e);
    lm_buf_fini(&json);
    lm_buf_fini(&config);
    const json_t *model = json_object_get(v->rest, "model");
    if (!rc && !cut) {
        lm_lists_fini(&v->lists);
        v->lists = (lm_lists){ 0 };
        rc = lm_lists_from_tree(&v->lists, json_object_get(model, "vocab"),
                                json_object_get(model, "merges"), v->where, v->e);
    }
    lm_buf_fini(&rest);
    if (!rc && lm_tokenizer_vocab_size(v->tok) > (int64_t)v->n)
        rc = lm_fail(v->e, LM_EUSAGE, v->where, "choose another tokenizer",
                     "it has %" PRId64 " token%s, the model only %zu",
                     lm_tokenizer_vocab_size(v->tok), lm_plural(lm_tokenizer_vocab_size(v->tok)),
                     v->n);
    return rc;
}

/* ---- Tokens ---- */

/* <0x0A> */
static bool is_byte(const char *s, size_t len)
{
    return len == 6 && !memcmp(s, "<0x", 3) && s[5] == '>';
}

/* A text in the form of a control token is treated as one, as in llama.cpp's conversion. */
static bool looks_special(const char *s, size_t len)
{
    return len > 4 && !memcmp(s, "<|", 2) && !memcmp(s + len - 2, "|>", 2);
}

static lm_code fill_tokens(vocab *v, bool fallback, bool unigram)
{
    const json_t *added = json_object_get(v->rest, "added_tokens"), *a;
    int64_t unk = lm_tokenizer_unk(v->tok);
    size_t i;
    lm_code rc = LM_OK;

    for (i = 0; i < v->lists.n_tokens; i++) {
        const lm_list_token *t = &v->lists.tokens[i];
        const char *s = v->lists.text.data + t->off;
        v->text[t->id] = (lm_gguf_text){ s, t->len };
        v->type[t->id] = fallback && is_byte(s, t->len) ? BYTE
                         : unigram && t->id == unk      ? UNKNOWN
                                                        : NORMAL;
        if (unigram)
            v->score[t->id] = (float)t->score;
    }
    json_array_foreach(added, i, a)
    {
        const json_t *content = json_object_get(a, "content");
        size_t id = (size_t)json_integer_value(json_object_get(a, "id"));
        size_t len = json_string_length(content);
        const char *s = json_string_value(content);
        v->text[id] = (lm_gguf_text){ s, len };
        if (unigram && !v->type[id])
            v->score[id] = -1000;
        v->type[id] = (fallback || unigram) && (int64_t)id == unk ? UNKNOWN
                      : json_is_true(json_object_get(a, "special")) || looks_special(s, len)
                          ? CONTROL
                          : USER;
    }
    /* Reserve memory first: pointers to the texts are kept. */
    rc = lm_buf_room(&v->names, v->n * 24, v->e);
    for (i = 0; !rc && i < v->n; i++)
        if (!v->text[i].text) {
            size_t at = v->names.len;
            rc = lm_buf_addf(&v->names, v->e, "[PAD%zu]", i);
            v->text[i] = (lm_gguf_text){ v->names.data + at, v->names.len - at };
            v->type[i] = UNUSED;
            v->score[i] = unigram ? -10000 : 0;
        }
    return rc;
}

/* ---- Byte level ---- */

static const char *split_pattern(const json_t *step)
{
    const char *type = json_string_value(json_object_get(step, "type"));

    return type && !strcmp(type, "Split")
               ? json_string_value(json_object_get(json_object_get(step, "pattern"), "Regex"))
               : NULL;
}

/* llama.cpp's name of the pre-tokeniser; NULL if it has none. */
static const char *pre_name(const json_t *pre, bool ignore_merges)
{
    const char *type = json_string_value(json_object_get(pre, "type")), *pattern;
    const json_t *steps = json_object_get(pre, "pretokenizers"), *first = json_array_get(steps, 0);

    if (type && !strcmp(type, "ByteLevel"))
        return json_is_false(json_object_get(pre, "use_regex")) ? NULL : "gpt-2";
    if (!type || strcmp(type, "Sequence") || json_array_size(steps) != 2)
        return NULL;
    type = json_string_value(json_object_get(first, "type"));
    if (type && !strcmp(type, "Digits") &&
        json_is_true(json_object_get(first, "individual_digits")))
        return "smollm";
    pattern = split_pattern(first);
    if (!pattern)
        return NULL;
    switch (lm_scan_of_pattern(pattern)) {
    case LM_SCAN_GPT2:
        return "gpt-2";
    case LM_SCAN_CL100K: /* the nearest one: see put_byte_level */
        return "smaug-bpe";
    case LM_SCAN_LLAMA3:
        return ignore_merges ? "llama-bpe" : "smaug-bpe";
    case LM_SCAN_QWEN:
        return "qwen2";
    case LM_SCAN_O200K:
        return "gpt-4o";
    default:
        return NULL;
    }
}

/* "a b" for each merge; a space inside a part cannot be represented. */
static lm_code put_merges(vocab *v)
{
    lm_gguf_text *list = NULL;
    lm_buf all = { 0 };
    size_t bytes = 0, n = v->lists.n_merges;
    lm_code rc = lm_alloc_n(&list, n, sizeof *list, "merges", v->e);

    for (size_t i = 0; i < n; i++)
        bytes += v->lists.merges[i].left + v->lists.merges[i].right + 1;
    if (!rc)
        rc = lm_buf_room(&all, bytes, v->e);
    for (size_t i = 0; !rc && i < n; i++) {
        const lm_list_merge *x = &v->lists.merges[i];
        const char *s = v->lists.text.data + x->off;
        size_t at = all.len;
        if (memchr(s, ' ', x->left + x->right)) {
            rc = lm_fail(v->e, LM_EUSAGE, v->where, NULL,
                         "merge %zu has a space in it, which GGUF cannot represent", i);
            break;
        }
        rc = lm_buf_add(&all, s, x->left, v->e);
        rc = rc ? rc : lm_buf_add(&all, " ", 1, v->e);
        rc = rc ? rc : lm_buf_add(&all, s + x->left, x->right, v->e);
        list[i] = (lm_gguf_text){ all.data + at, all.len - at };
    }
    if (!rc)
        lm_gguf_put_strs(v->p, "tokenizer.ggml.merges", list, n);
    lm_buf_fini(&all);
    lm_free(list);
    return rc;
}

static lm_code put_byte_level(vocab *v, const json_t *model)
{
    const json_t *pre = json_object_get(v->rest, "pre_tokenizer");
    const char *name = pre_name(pre, json_is_true(json_object_get(model, "ignore_merges")));

    if (!name) {
        name = "default";
        lm_log(v->m->sink, LM_LOG_WARN,
               "%s: llama.cpp has no pre-tokeniser like this one: it will cut words differently",
               v->where);
    }
    const char *pattern = split_pattern(json_array_get(json_object_get(pre, "pretokenizers"), 0));
    if (pattern && lm_scan_of_pattern(pattern) == LM_SCAN_CL100K)
        lm_log(v->m->sink, LM_LOG_WARN,
               "%s: llama.cpp will cut white space at the end of a text differently", v->where);
    lm_gguf_put_str(v->p, "tokenizer.ggml.model", "gpt2", 4);
    lm_gguf_put_str(v->p, "tokenizer.ggml.pre", name, strlen(name));
    lm_gguf_put_strs(v->p, "tokenizer.ggml.tokens", v->text, v->n);
    lm_gguf_put_i32s(v->p, "tokenizer.ggml.token_type", v->type, v->n);
    return put_merges(v);
}

/* ---- Byte fallback ---- */

static void fill_scores(vocab *v)
{
    char joined[1024];

    for (size_t i = 0; i < v->n; i++)
        v->score[i] = v->type[i] == NORMAL ? -1e9f : v->type[i] == BYTE ? 0 : -1000.0f;
    for (size_t i = v->lists.n_merges; i-- > 0;) {
        const lm_list_merge *x = &v->lists.merges[i];
        size_t len = x->left + x->right;
        if (len > sizeof joined)
            continue;
        memcpy(joined, v->lists.text.data + x->off, len);
        int64_t id = lm_tokenizer_id(v->tok, joined, len);
        if (id >= 0 && id < (int64_t)v->n)
            v->score[id] = -(float)i;
    }
}

static bool names_type(const json_t *step, const char *want)
{
    const char *type = json_string_value(json_object_get(step, "type"));
    return type && !strcmp(type, want);
}

/* True if every space is replaced, as in llama.cpp. */
static bool replaces_space(const json_t *step)
{
    const char *from =
        json_string_value(json_object_get(json_object_get(step, "pattern"), "String"));

    return names_type(step, "Replace") && from && !strcmp(from, " ");
}

/* True if a space is added before a text. */
static bool adds_space(const json_t *rest)
{
    const json_t *normal = json_object_get(rest, "normalizer"), *step;
    const json_t *pre = json_object_get(rest, "pre_tokenizer");
    const char *scheme = json_string_value(json_object_get(pre, "prepend_scheme"));
    size_t i;

    if (names_type(normal, "Prepend"))
        return true;
    json_array_foreach(json_object_get(normal, "normalizers"), i, step)
    {
        if (names_type(step, "Prepend"))
            return true;
    }
    return names_type(pre, "Metaspace") && (!scheme || strcmp(scheme, "never"));
}

/* For a vocabulary from SentencePiece's file, its own scores and types. */
static lm_code take_pieces(vocab *v)
{
    lm_sentencepiece sp;
    lm_code rc;

    if (!v->pieces)
        return LM_OK;
    rc = lm_sentencepiece_parse(v->pieces->data.data, v->pieces->data.len, v->where, &sp, v->e);
    for (size_t i = 0; !rc && i < sp.vocab.n && i < v->n; i++) {
        v->score[i] = sp.vocab.v[i].score;
        v->type[i] = sp.vocab.v[i].type;
    }
    if (!rc && !sp.steps.fallback)
        rc = lm_fail(v->e, LM_EUSAGE, v->where, "convert without a tokenizer",
                     "without byte fallback, which llama.cpp needs");
    lm_sentencepiece_fini(&sp);
    return rc;
}

/* llama.cpp only replaces spaces and adds one before the text. */
static bool normalises_more(const json_t *rest)
{
    const json_t *normal = json_object_get(rest, "normalizer"), *step;
    const json_t *list = json_object_get(normal, "normalizers");
    size_t i;

    if (!json_is_object(normal) || !names_type(normal, "Sequence"))
        return json_is_object(normal) && !names_type(normal, "Prepend") && !replaces_space(normal);
    json_array_foreach(list, i, step)
    {
        if (!names_type(step, "Prepend") && !replaces_space(step))
            return true;
    }
    return false;
}

static void put_fallback(vocab *v)
{
    if (normalises_more(v->rest))
        lm_log(v->m->sink, LM_LOG_WARN,
               "%s: llama.cpp will not normalise the text as this tokenizer does", v->where);
    lm_gguf_put_str(v->p, "tokenizer.ggml.model", "llama", 5);
    lm_gguf_put_str(v->p, "tokenizer.ggml.pre", "default", 7);
    lm_gguf_put_strs(v->p, "tokenizer.ggml.tokens", v->text, v->n);
    lm_gguf_put_f32s(v->p, "tokenizer.ggml.scores", v->score, v->n);
    lm_gguf_put_i32s(v->p, "tokenizer.ggml.token_type", v->type, v->n);
    lm_gguf_put_bool(v->p, "tokenizer.ggml.add_space_prefix", adds_space(v->rest));
}

/* ---- Special tokens ---- */

static void put_id(vocab *v, const char *key, int64_t of_tokenizer, int64_t of_config)
{
    int64_t id = of_tokenizer >= 0 ? of_tokenizer : of_config;

    if (id >= 0 && id < (int64_t)v->n)
        lm_gguf_put_u32(v->p, key, (uint32_t)id);
}

/* Ids that end a text besides `eos`: llama.cpp has keys for two more, and stops at each. */
static void put_more_eos(vocab *v, int64_t eos)
{
    static const char *const keys[2] = { "tokenizer.ggml.eot_token_id",
                                         "tokenizer.ggml.eom_token_id" };
    const lm_config *c = &v->m->config;
    int n = 0;

    for (int i = 0; i < c->n_eos; i++)
        if (c->eos[i] != eos && n++ < 2)
            put_id(v, keys[n - 1], c->eos[i], -1);
    if (n > 2)
        lm_log(v->m->sink, LM_LOG_WARN, "%s: GGUF has keys for 3 end tokens, the model has %d",
               v->m->path, n + 1);
}

/* The tokens around a text, and the masked one, which are no others there. */
static void put_around(vocab *v, const lm_ids *ids)
{
    put_id(v, "tokenizer.ggml.bos_token_id", ids->n > 2 ? (int64_t)ids->v[0] : -1, -1);
    put_id(v, "tokenizer.ggml.seperator_token_id", ids->n > 2 ? (int64_t)ids->v[ids->n - 1] : -1,
           -1);
    put_id(v, "tokenizer.ggml.unknown_token_id", lm_tokenizer_unk(v->tok), -1);
    put_id(v, "tokenizer.ggml.padding_token_id", lm_tokenizer_pad(v->tok), v->m->config.pad);
    put_id(v, "tokenizer.ggml.mask_token_id", lm_tokenizer_mask(v->tok), -1);
    lm_gguf_put_bool(v->p, "tokenizer.ggml.add_bos_token", ids->n > 2);
    lm_gguf_put_bool(v->p, "tokenizer.ggml.add_sep_token", ids->n > 2);
}

static lm_code put_wordpiece_special(vocab *v)
{
    lm_tok_scratch *s = NULL;
    lm_ids ids = { 0 };
    lm_code rc = lm_tok_scratch_new(v->tok, &s, v->e);
    if (!rc)
        rc = lm_tokenizer_encode(v->tok, s, "a", 1, true, &ids, v->e);
    if (!rc)
        put_around(v, &ids);
    lm_ids_fini(&ids);
    lm_tok_scratch_free(s);
    return rc;
}

static lm_code put_special(vocab *v)
{
    const lm_config *c = &v->m->config;
    int64_t bos = lm_tokenizer_bos(v->tok), eos = lm_tokenizer_eos(v->tok);
    lm_tok_scratch *s = NULL;
    lm_ids ids = { 0 };
    lm_code rc = lm_tok_scratch_new(v->tok, &s, v->e);

    bos = bos >= 0 ? bos : c->bos;
    eos = eos >= 0 ? eos : lm_config_eos(c);
    put_id(v, "tokenizer.ggml.bos_token_id", bos, -1);
    put_id(v, "tokenizer.ggml.eos_token_id", eos, -1);
    put_more_eos(v, eos);
    put_id(v, "tokenizer.ggml.unknown_token_id", lm_tokenizer_unk(v->tok), -1);
    put_id(v, "tokenizer.ggml.padding_token_id", lm_tokenizer_pad(v->tok), c->pad);
    if (!rc)
        rc = lm_tokenizer_encode(v->tok, s, "a", 1, true, &ids, v->e);
    if (!rc) {
        bool last = ids.n > 1 && (int64_t)ids.v[ids.n - 1] == eos;
        lm_gguf_put_bool(v->p, "tokenizer.ggml.add_bos_token",
                         ids.n > 1 && (int64_t)ids.v[0] == bos);
        lm_gguf_put_bool(v->p, "tokenizer.ggml.add_eos_token", last);
    }
    lm_ids_fini(&ids);
    lm_tok_scratch_free(s);
    return rc;
}

static lm_code put_model(vocab *v, const json_t *model, bool fallback, bool unigram, bool wordpiece)
{
    lm_gguf_words w = { v->p, v->m->sink, v->where, v->rest, v->text, v->type, v->score, v->n };
    if (unigram)
        return lm_gguf_put_unigram(&w, v->e);
    if (wordpiece)
        return lm_gguf_put_wordpiece(&w, v->m->config.types, v->e);
    if (!fallback)
        return put_byte_level(v, model);
    put_fallback(v);
    return LM_OK;
}

/* From tokenizer_config.json, or a separate file. */
static lm_code put_template(vocab *v, const lm_side_file *config)
{
    const lm_side_file *file = lm_import_side(v->m, "chat_template.jinja");
    json_t *tree = NULL, *text;
    lm_code rc = LM_OK;

    if (file) {
        lm_gguf_put_str(v->p, "tokenizer.chat_template", file->data.data, file->data.len);
        return LM_OK;
    }
    if (config)
        rc = lm_json_parse(config->data.data, config->data.len, "tokenizer_config.json", &tree,
                           v->e);
    text = json_object_get(tree, "chat_template");
    if (!rc && json_is_string(text))
        lm_gguf_put_str(v->p, "tokenizer.chat_template", json_string_value(text),
                        json_string_length(text));
    json_decref(tree);
    return rc;
}

lm_code lm_gguf_put_vocab(lm_gguf_plan *p, const lm_import *m, lm_err *e)
{
    const lm_side_file *config = lm_import_side(m, "tokenizer_config.json");
    vocab v = { .m = m, .p = p, .e = e, .n = (size_t)m->config.vocab };
    lm_code rc;

    if (!lm_import_side(m, "tokenizer.json"))
        v.pieces = lm_import_side(m, "tokenizer.model");
    if (!v.pieces && !lm_import_side(m, "tokenizer.json")) {
        lm_gguf_put_str(p, "tokenizer.ggml.model", "none", 4);
        put_id(&v, "tokenizer.ggml.bos_token_id", -1, m->config.bos);
        put_id(&v, "tokenizer.ggml.eos_token_id", -1, lm_config_eos(&m->config));
        put_more_eos(&v, lm_config_eos(&m->config));
        put_id(&v, "tokenizer.ggml.padding_token_id", -1, m->config.pad);
        return LM_OK;
    }
    rc = open_tokenizer(&v);
    if (!rc)
        rc = lm_alloc_n(&v.text, v.n, sizeof *v.text, "tokens", e);
    if (!rc)
        rc = lm_alloc_n(&v.type, v.n, sizeof *v.type, "types of tokens", e);
    if (!rc)
        rc = lm_alloc_n(&v.score, v.n, sizeof *v.score, "scores of tokens", e);
    const json_t *model = json_object_get(v.rest, "model");
    bool fallback = json_is_true(json_object_get(model, "byte_fallback"));
    const bool unigram = v.tok && !strcmp(lm_tokenizer_model(v.tok), "Unigram");
    const bool wordpiece = v.tok && !strcmp(lm_tokenizer_model(v.tok), "WordPiece");
    if (!rc)
        rc = fill_tokens(&v, fallback, unigram);
    if (!rc && fallback && !unigram)
        fill_scores(&v);
    if (!rc && !unigram)
        rc = take_pieces(&v);
    if (!rc)
        rc = put_model(&v, model, fallback, unigram, wordpiece);
    if (!rc)
        rc = wordpiece ? put_wordpiece_special(&v) : put_special(&v);
    if (!rc)
        rc = put_template(&v, config);
    lm_buf_fini(&v.names);
    lm_free(v.text);
    lm_free(v.type);
    lm_free(v.score);
    json_decref(v.rest);
    lm_lists_fini(&v.lists);
    lm_tokenizer_free(v.tok);
    return rc;
}
