/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_vocab_get.c -- builds a tokenizer.json from GGUF's tokenizer.* keys. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "convert/gguf_meta.h"
#include "convert/gguf_words.h"
#include "text/pretok_scan.h"
#include "text/scored.h"
#include "text/tokenizer.h"

typedef struct {
    const lm_gguf *g;
    lm_scored_vocab s;
    lm_gguf_text chat;
    lm_err *e;
} vocab;

/* ---- Reading the keys ---- */

static lm_code bad(const vocab *v, const char *key, const char *what)
{
    return lm_fail(v->e, LM_EFORMAT, lm_gguf_path(v->g), NULL, "'%s' %s", key, what);
}

static lm_code read_tokens(vocab *v, const lm_config *c)
{
    static const char tokens[] = "tokenizer.ggml.tokens", types[] = "tokenizer.ggml.token_type",
                      scores[] = "tokenizer.ggml.scores";
    const lm_gguf_value *t = lm_gguf_value_of(v->g, tokens);
    const lm_gguf_value *type = lm_gguf_value_of(v->g, types);
    const lm_gguf_value *score = lm_gguf_value_of(v->g, scores);
    lm_gguf_iter it = { .v = t };
    lm_code rc;

    if (!t || !t->array || t->kind != LM_GGUF_STRING)
        return bad(v, tokens, "is missing or not a list of strings");
    if (t->count > (uint64_t)c->vocab)
        return lm_fail(v->e, LM_EFORMAT, lm_gguf_path(v->g), NULL,
                       "it has %" PRIu64 " token%s, 'token_embd.weight' only %" PRId64 " row%s",
                       t->count, lm_plural(t->count), c->vocab, lm_plural(c->vocab));
    if (type && (!type->array || type->kind != LM_GGUF_I32 || type->count != t->count))
        return bad(v, types, "is not one number for each token");
    if (score && (!score->array || score->kind != LM_GGUF_F32 || score->count != t->count))
        return bad(v, scores, "is not one number for each token");
    v->s.n = t->count;
    rc = lm_alloc_n(&v->s.v, v->s.n, sizeof *v->s.v, "tokens", v->e);
    for (size_t i = 0; !rc && i < v->s.n; i++) {
        lm_gguf_text name;
        lm_gguf_next_str(&it, &name);
        v->s.v[i].text = name.text;
        v->s.v[i].len = name.len;
        v->s.v[i].type = type ? (int)lm_gguf_number(type, i) : LM_SCORED_NORMAL;
        v->s.v[i].score = score ? (float)lm_gguf_number(score, i) : 0;
        if (isnan(v->s.v[i].score)) /* merges are sorted by them */
            rc = bad(v, scores, "has one that is not a number");
    }
    return rc;
}

/* In: the default if the key is missing. */
static lm_code read_id(vocab *v, const char *key, int64_t *id)
{
    lm_code rc = lm_gguf_i64_or(v->g, key, *id, 0, INT64_C(1) << 40, id, NULL, v->e);

    if (!rc && *id >= (int64_t)v->s.n)
        return bad(v, key, "is not the number of a token");
    return rc;
}

/* llama.cpp's ids of a file that names none. */
typedef struct {
    int64_t bos, eos, unk, pad;
    bool add_bos, add_eos;
} usual_ids;

static lm_code read_special(vocab *v, const usual_ids *usual)
{
    const int64_t n = (int64_t)v->s.n;
    v->s.bos = usual->bos < n ? usual->bos : -1;
    v->s.eos = usual->eos < n ? usual->eos : -1;
    v->s.unk = usual->unk < n ? usual->unk : -1;
    v->s.pad = usual->pad < n ? usual->pad : -1;
    if (read_id(v, "tokenizer.ggml.bos_token_id", &v->s.bos) ||
        read_id(v, "tokenizer.ggml.eos_token_id", &v->s.eos) ||
        read_id(v, "tokenizer.ggml.unknown_token_id", &v->s.unk) ||
        read_id(v, "tokenizer.ggml.padding_token_id", &v->s.pad) ||
        lm_gguf_bool_or(v->g, "tokenizer.ggml.add_bos_token", usual->add_bos, &v->s.add_bos, NULL,
                        v->e) ||
        lm_gguf_bool_or(v->g, "tokenizer.ggml.add_eos_token", usual->add_eos, &v->s.add_eos, NULL,
                        v->e))
        return v->e->code;
    v->s.add_bos = v->s.add_bos && v->s.bos >= 0;
    v->s.add_eos = v->s.add_eos && v->s.eos >= 0;
    return lm_gguf_str(v->g, "tokenizer.chat_template", &v->chat, v->e);
}

/* ---- Byte level ---- */

static void byte_level(lm_jw *w, const char *key, bool use_regex)
{
    lm_scored_type(w, key, "ByteLevel");
    lm_jw_bool(w, "add_prefix_space", false);
    lm_jw_bool(w, "trim_offsets", true);
    lm_jw_bool(w, "use_regex", use_regex);
    lm_jw_close_obj(w);
}

static void byte_level_post(lm_jw *w)
{
    byte_level(w, "post_processor", true);
}

typedef enum { PRE_SCAN, PRE_DIGITS, PRE_REGEX } pre_kind;

typedef struct {
    const char *names; /* of llama.cpp, each between spaces */
    pre_kind kind;
    lm_scan_kind scan;
    bool ignore_merges, bos;
    const char *regex;
} pre_tokenizer;

/* llama.cpp, src/llama-vocab.cpp: the names that share a pattern, and those that join a whole word
 * at once. */
static const pre_tokenizer pres[] = {
    { " gpt-2 phi-2 mpt olmo jais modern-bert mellum gigachat ", PRE_SCAN, LM_SCAN_GPT2, false,
      false, NULL },
    { " llama-bpe llama3 llama-v3 falcon3 lfm2 midm-2.0 ", PRE_SCAN, LM_SCAN_LLAMA3, true, true,
      NULL },
    { " smaug-bpe dbrx ", PRE_SCAN, LM_SCAN_LLAMA3, false, false, NULL },
    { " qwen2 deepseek-r1-qwen stablelm2 megrez ", PRE_SCAN, LM_SCAN_QWEN, false, false, NULL },
    { " gpt-4o llama4 ", PRE_SCAN, LM_SCAN_O200K, false, false, NULL },
    { " smollm starcoder refact command-r codeshell exaone minerva-7b ", PRE_DIGITS, LM_SCAN_GPT2,
      false, false, NULL },
    { " tekken ", PRE_REGEX, LM_SCAN_NONE, true, true,
      "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|"
      "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|"
      "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+" },
};

static lm_code find_pre(const vocab *v, const pre_tokenizer **out)
{
    lm_gguf_text name;
    char spaced[80] = "";
    lm_code rc = lm_gguf_str(v->g, "tokenizer.ggml.pre", &name, v->e);

    if (rc)
        return rc;
    if (name.text && name.len < 60)
        snprintf(spaced, sizeof spaced, " %.*s ", (int)name.len, name.text);
    for (size_t i = 0; i < sizeof pres / sizeof *pres && spaced[0]; i++)
        if (strstr(pres[i].names, spaced)) {
            *out = &pres[i];
            return LM_OK;
        }
    return lm_fail(v->e, LM_EUSAGE, lm_gguf_path(v->g), "give the model's own tokenizer, or none",
                   "its pre-tokeniser%s%.*s is unknown", name.text ? " " : " has no name and",
                   name.text ? (int)(name.len < 60 ? name.len : 60) : 0,
                   name.text ? name.text : "");
}

static void pre_steps(lm_jw *w, const pre_tokenizer *p)
{
    if (p->kind == PRE_SCAN && p->scan == LM_SCAN_GPT2) {
        byte_level(w, "pre_tokenizer", true);
        return;
    }
    lm_scored_type(w, "pre_tokenizer", "Sequence");
    lm_jw_arr(w, "pretokenizers");
    if (p->kind == PRE_DIGITS) {
        lm_scored_type(w, NULL, "Digits");
        lm_jw_bool(w, "individual_digits", true);
        lm_jw_close_obj(w);
        byte_level(w, NULL, true);
    } else {
        lm_scored_type(w, NULL, "Split");
        lm_jw_obj(w, "pattern");
        lm_jw_str(w, "Regex", p->regex ? p->regex : lm_scan_pattern(p->scan));
        lm_jw_close_obj(w);
        lm_jw_str(w, "behavior", "Isolated");
        lm_jw_bool(w, "invert", false);
        lm_jw_close_obj(w);
        byte_level(w, NULL, false);
    }
    lm_jw_close_arr(w);
    lm_jw_close_obj(w);
}

static lm_code put_merges(lm_jw *w, const vocab *v)
{
    static const char key[] = "tokenizer.ggml.merges";
    const lm_gguf_value *list = lm_gguf_value_of(v->g, key);
    lm_gguf_iter it = { .v = list };
    lm_gguf_text m;

    if (!list || !list->array || list->kind != LM_GGUF_STRING)
        return bad(v, key, "is missing or not a list of strings");
    lm_jw_arr(w, "merges");
    while (lm_gguf_next_str(&it, &m)) {
        const char *space = m.len > 1 ? memchr(m.text + 1, ' ', m.len - 1) : NULL;
        if (!space || space == m.text + m.len - 1)
            return bad(v, key, "has an entry that is not two parts");
        lm_scored_merge_pair(w, m.text, (size_t)(space - m.text), space + 1,
                             m.len - 1 - (size_t)(space - m.text));
    }
    lm_jw_close_arr(w);
    return LM_OK;
}

static lm_code write_byte_level(lm_jw *w, vocab *v, const pre_tokenizer *p)
{
    lm_code rc;

    lm_scored_added(w, &v->s, false);
    if (p->scan == LM_SCAN_QWEN) {
        lm_scored_type(w, "normalizer", "NFC");
        lm_jw_close_obj(w);
    } else {
        lm_jw_str(w, "normalizer", NULL);
    }
    pre_steps(w, p);
    rc = lm_scored_post(w, &v->s, byte_level_post, v->e);
    byte_level(w, "decoder", true);
    lm_scored_model(w, &v->s, false, false, p->ignore_merges);
    rc = rc ? rc : lm_scored_names(w, &v->s, false, v->e);
    rc = rc ? rc : put_merges(w, v);
    lm_jw_close_obj(w);
    return rc;
}

/* ---- tokenizer_config.json ---- */

static void config_token(lm_jw *w, const vocab *v, const char *key, int64_t id)
{
    if (id >= 0)
        lm_jw_strn(w, key, v->s.v[id].text, v->s.v[id].len);
}

static lm_code write_config(const vocab *v, const lm_config *c, lm_buf *out)
{
    lm_jw w;

    lm_jw_begin(&w, out, 2, v->e);
    lm_jw_obj(&w, NULL);
    lm_jw_bool(&w, "add_bos_token", v->s.add_bos);
    lm_jw_bool(&w, "add_eos_token", v->s.add_eos);
    config_token(&w, v, "bos_token", v->s.bos);
    config_token(&w, v, "eos_token", v->s.eos);
    config_token(&w, v, "pad_token", v->s.pad);
    config_token(&w, v, "unk_token", v->s.unk);
    if (v->chat.text)
        lm_jw_strn(&w, "chat_template", v->chat.text, v->chat.len);
    lm_jw_bool(&w, "clean_up_tokenization_spaces", false);
    lm_jw_int(&w, "model_max_length", c->max_positions);
    lm_jw_str(&w, "tokenizer_class", "PreTrainedTokenizerFast");
    lm_jw_close_obj(&w);
    lm_code rc = lm_jw_end(&w);
    return rc ? rc : lm_buf_add(out, "\n", 1, v->e);
}

/* ---- The tokenizer ---- */

static lm_code write_tokenizer(vocab *v, bool fallback, const pre_tokenizer *pre, lm_buf *out)
{
    lm_scored_steps steps = { .escape = true, .fallback = true };
    lm_jw w;
    lm_code rc;

    if (fallback) {
        rc = lm_gguf_bool_or(v->g, "tokenizer.ggml.add_space_prefix", true, &steps.prefix, NULL,
                             v->e);
        return rc ? rc : lm_scored_write(&v->s, &steps, out, v->e);
    }
    lm_jw_begin(&w, out, 0, v->e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "version", "1.0");
    lm_jw_str(&w, "truncation", NULL);
    lm_jw_str(&w, "padding", NULL);
    rc = write_byte_level(&w, v, pre);
    lm_jw_close_obj(&w);
    if (!rc)
        rc = lm_jw_end(&w);
    return rc ? rc : lm_buf_add(out, "\n", 1, v->e);
}

/* Fail if our own reader refuses the tokenizer.json. */
static lm_code prove(const vocab *v, const lm_buf *json, const lm_buf *config)
{
    lm_tokenizer *t = NULL;
    char where[200];

    snprintf(where, sizeof where, "%.140s: tokenizer", lm_gguf_path(v->g));
    lm_code rc =
        lm_tokenizer_from_json(json->data, json->len, config->data, config->len, where, &t, v->e);
    lm_tokenizer_free(t);
    return rc;
}

/* The kinds of tokenizers, by llama.cpp's names. */
typedef enum { KIND_NONE, KIND_BYTES, KIND_FALLBACK, KIND_UNIGRAM, KIND_WORDPIECE } vocab_kind;

static vocab_kind kind_of(const lm_gguf_text *model)
{
    static const struct {
        const char *name;
        vocab_kind kind;
    } known[] = { { "gpt2", KIND_BYTES },
                  { "llama", KIND_FALLBACK },
                  { "t5", KIND_UNIGRAM },
                  { "bert", KIND_WORDPIECE } };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (model->len == strlen(known[i].name) && !memcmp(model->text, known[i].name, model->len))
            return known[i].kind;
    return KIND_NONE;
}

static lm_code write_all(vocab *v, vocab_kind kind, const pre_tokenizer *pre, const lm_config *c,
                         lm_buf *json, lm_buf *config)
{
    if (kind == KIND_WORDPIECE)
        return lm_gguf_get_wordpiece(v->g, &v->s, json, config, v->e);
    lm_code rc = kind == KIND_UNIGRAM ? lm_gguf_get_unigram(v->g, &v->s, json, v->e)
                                      : write_tokenizer(v, kind == KIND_FALLBACK, pre, json);
    return rc ? rc : write_config(v, c, config);
}

lm_code lm_gguf_get_vocab(const lm_gguf *g, const lm_config *c, lm_buf *json, lm_buf *config,
                          bool *found, lm_err *e)
{
    static const usual_ids usual[] = { [KIND_BYTES] = { -1, -1, -1, -1, false, false },
                                       [KIND_FALLBACK] = { 1, 2, 0, -1, true, false },
                                       [KIND_UNIGRAM] = { -1, 1, 2, 0, false, true },
                                       [KIND_WORDPIECE] = { 101, -1, 100, 0, true, false } };
    vocab v = { .g = g, .s = { .where = lm_gguf_path(g) }, .e = e };
    const pre_tokenizer *pre = NULL;
    lm_gguf_text model;
    lm_code rc = lm_gguf_str(g, "tokenizer.ggml.model", &model, e);

    *found = false;
    if (rc || !model.text || (model.len == 4 && !memcmp(model.text, "none", 4)))
        return rc;
    const vocab_kind kind = kind_of(&model);
    if (kind == KIND_NONE)
        return lm_fail(e, LM_EUSAGE, lm_gguf_path(g), "give the model's own tokenizer, or none",
                       "a tokenizer of kind '%.*s', gpt2, llama, t5 and bert are supported",
                       (int)(model.len < 40 ? model.len : 40), model.text);
    if (kind == KIND_BYTES)
        rc = find_pre(&v, &pre);
    if (!rc)
        rc = read_tokens(&v, c);
    usual_ids ids = usual[kind];
    ids.add_bos = pre ? pre->bos : ids.add_bos;
    if (!rc)
        rc = read_special(&v, &ids);
    if (!rc)
        rc = write_all(&v, kind, pre, c, json, config);
    if (!rc)
        rc = prove(&v, json, config);
    *found = !rc;
    lm_free(v.s.v);
    return rc;
}
