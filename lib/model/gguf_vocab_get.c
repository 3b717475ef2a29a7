/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_vocab_get.c -- a tokenizer.json made out of GGUF's tokenizer.* keys. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "model/gguf_merges.h"
#include "model/gguf_meta.h"
#include "text/pretok_scan.h"
#include "text/tokenizer.h"

typedef struct {
    const lm_gguf *g;
    lm_gguf_token *v;
    size_t n;
    int64_t bos, eos, unk, pad;
    bool add_bos, add_eos;
    lm_gguf_text chat;
    lm_err *e;
} vocab;

/* ---- Taking it in ---- */

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
        return bad(v, tokens, "is missing, or no list of strings");
    if (t->count > (uint64_t)c->vocab)
        return lm_fail(v->e, LM_EFORMAT, lm_gguf_path(v->g), NULL,
                       "it has %" PRIu64 " tokens, 'token_embd.weight' only %" PRId64 " rows",
                       t->count, c->vocab);
    if (type && (!type->array || type->kind != LM_GGUF_I32 || type->count != t->count))
        return bad(v, types, "is not one number for each token");
    if (score && (!score->array || score->kind != LM_GGUF_F32 || score->count != t->count))
        return bad(v, scores, "is not one number for each token");
    v->n = t->count;
    rc = lm_alloc_n(&v->v, v->n, sizeof *v->v, "tokens", v->e);
    for (size_t i = 0; !rc && i < v->n; i++) {
        lm_gguf_next_str(&it, &v->v[i].text);
        v->v[i].type = type ? (int)lm_gguf_number(type, i) : LM_GGUF_NORMAL;
        v->v[i].score = score ? (float)lm_gguf_number(score, i) : 0;
        if (isnan(v->v[i].score)) /* merges are sorted by them */
            rc = bad(v, scores, "has one that is not a number");
    }
    return rc;
}

/* In: what is taken when the key is missing. */
static lm_code read_id(vocab *v, const char *key, int64_t *id)
{
    lm_code rc = lm_gguf_i64_or(v->g, key, *id, 0, INT64_C(1) << 40, id, NULL, v->e);

    if (!rc && *id >= (int64_t)v->n)
        return bad(v, key, "is no token's number");
    return rc;
}

static lm_code read_special(vocab *v, bool fallback, bool bos_by_default)
{
    v->bos = fallback && v->n > 2 ? 1 : -1;
    v->eos = fallback && v->n > 2 ? 2 : -1;
    v->unk = fallback && v->n > 2 ? 0 : -1;
    v->pad = -1;
    if (read_id(v, "tokenizer.ggml.bos_token_id", &v->bos) ||
        read_id(v, "tokenizer.ggml.eos_token_id", &v->eos) ||
        read_id(v, "tokenizer.ggml.unknown_token_id", &v->unk) ||
        read_id(v, "tokenizer.ggml.padding_token_id", &v->pad) ||
        lm_gguf_bool_or(v->g, "tokenizer.ggml.add_bos_token", bos_by_default, &v->add_bos, NULL,
                        v->e) ||
        lm_gguf_bool_or(v->g, "tokenizer.ggml.add_eos_token", false, &v->add_eos, NULL, v->e))
        return v->e->code;
    v->add_bos = v->add_bos && v->bos >= 0;
    v->add_eos = v->add_eos && v->eos >= 0;
    return lm_gguf_str(v->g, "tokenizer.chat_template", &v->chat, v->e);
}

/* ---- Parts of tokenizer.json ---- */

static void name_type(lm_jw *w, const char *key, const char *type)
{
    lm_jw_obj(w, key);
    lm_jw_str(w, "type", type);
}

static void byte_level(lm_jw *w, const char *key, bool use_regex)
{
    name_type(w, key, "ByteLevel");
    lm_jw_bool(w, "add_prefix_space", false);
    lm_jw_bool(w, "trim_offsets", true);
    lm_jw_bool(w, "use_regex", use_regex);
    lm_jw_close_obj(w);
}

static void replace(lm_jw *w, const char *from, const char *to)
{
    name_type(w, NULL, "Replace");
    lm_jw_obj(w, "pattern");
    lm_jw_str(w, "String", from);
    lm_jw_close_obj(w);
    lm_jw_str(w, "content", to);
    lm_jw_close_obj(w);
}

static void added_tokens(lm_jw *w, const vocab *v)
{
    lm_jw_arr(w, "added_tokens");
    for (size_t i = 0; i < v->n; i++) {
        int type = v->v[i].type;
        if (type != LM_GGUF_CONTROL && type != LM_GGUF_USER && type != LM_GGUF_UNKNOWN)
            continue;
        lm_jw_obj(w, NULL);
        lm_jw_int(w, "id", (int64_t)i);
        lm_jw_strn(w, "content", v->v[i].text.text, v->v[i].text.len);
        lm_jw_bool(w, "single_word", false);
        lm_jw_bool(w, "lstrip", false);
        lm_jw_bool(w, "rstrip", false);
        lm_jw_bool(w, "normalized", false);
        lm_jw_bool(w, "special", type != LM_GGUF_USER);
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
}

static void special_entry(lm_jw *w, const vocab *v, int64_t id)
{
    lm_jw_obj(w, NULL);
    lm_jw_obj(w, "SpecialToken");
    lm_jw_strn(w, "id", v->v[id].text.text, v->v[id].text.len);
    lm_jw_int(w, "type_id", 0);
    lm_jw_close_obj(w);
    lm_jw_close_obj(w);
}

static void template_of(lm_jw *w, const vocab *v, const char *key, bool pair)
{
    lm_jw_arr(w, key);
    for (int i = 0; i < (pair ? 2 : 1); i++) {
        if (v->add_bos)
            special_entry(w, v, v->bos);
        lm_jw_obj(w, NULL);
        lm_jw_obj(w, "Sequence");
        lm_jw_str(w, "id", i ? "B" : "A");
        lm_jw_int(w, "type_id", i);
        lm_jw_close_obj(w);
        lm_jw_close_obj(w);
        if (v->add_eos)
            special_entry(w, v, v->eos);
    }
    lm_jw_close_arr(w);
}

static lm_code special_def(lm_jw *w, const vocab *v, int64_t id)
{
    lm_buf name = { 0 };
    lm_code rc = lm_buf_add(&name, v->v[id].text.text, v->v[id].text.len, v->e);

    if (!rc) {
        lm_jw_obj(w, name.data);
        lm_jw_str(w, "id", name.data);
        lm_jw_arr(w, "ids");
        lm_jw_int(w, NULL, id);
        lm_jw_close_arr(w);
        lm_jw_arr(w, "tokens");
        lm_jw_str(w, NULL, name.data);
        lm_jw_close_arr(w);
        lm_jw_close_obj(w);
    }
    lm_buf_fini(&name);
    return rc;
}

static lm_code post_processor(lm_jw *w, const vocab *v, bool fallback)
{
    lm_code rc = LM_OK;

    if (!v->add_bos && !v->add_eos) {
        if (fallback)
            lm_jw_str(w, "post_processor", NULL);
        else
            byte_level(w, "post_processor", true);
        return rc;
    }
    name_type(w, "post_processor", "TemplateProcessing");
    template_of(w, v, "single", false);
    template_of(w, v, "pair", true);
    lm_jw_obj(w, "special_tokens");
    if (v->add_bos)
        rc = special_def(w, v, v->bos);
    if (!rc && v->add_eos && (!v->add_bos || v->eos != v->bos))
        rc = special_def(w, v, v->eos);
    lm_jw_close_obj(w);
    lm_jw_close_obj(w);
    return rc;
}

/* Added tokens too: the `tokenizers` library gives them the ids that the vocabulary says. */
static lm_code model_vocab(lm_jw *w, const vocab *v)
{
    lm_buf name = { 0 };
    lm_code rc = LM_OK;

    lm_jw_obj(w, "vocab");
    for (size_t i = 0; !rc && i < v->n; i++) {
        if (v->v[i].type == LM_GGUF_UNUSED)
            continue;
        name.len = 0;
        rc = lm_buf_add(&name, v->v[i].text.text, v->v[i].text.len, v->e);
        if (!rc &&
            (memchr(name.data, 0, name.len) || lm_utf8_valid(name.data, name.len) != name.len))
            rc = lm_fail(v->e, LM_EFORMAT, lm_gguf_path(v->g), NULL,
                         "token %zu is not UTF-8, or has a NUL in it", i);
        if (!rc)
            lm_jw_int(w, name.data, (int64_t)i);
    }
    lm_jw_close_obj(w);
    lm_buf_fini(&name);
    return rc;
}

static void put_merge(lm_jw *w, const char *left, size_t n_left, const char *right, size_t n_right)
{
    lm_jw_arr(w, NULL);
    lm_jw_strn(w, NULL, left, n_left);
    lm_jw_strn(w, NULL, right, n_right);
    lm_jw_close_arr(w);
}

static void model_head(lm_jw *w, const vocab *v, bool fallback, bool ignore_merges)
{
    bool unk = fallback && v->unk >= 0;

    name_type(w, "model", "BPE");
    lm_jw_str(w, "dropout", NULL);
    if (unk)
        lm_jw_strn(w, "unk_token", v->v[v->unk].text.text, v->v[v->unk].text.len);
    else
        lm_jw_str(w, "unk_token", NULL);
    lm_jw_str(w, "continuing_subword_prefix", NULL);
    lm_jw_str(w, "end_of_word_suffix", NULL);
    lm_jw_bool(w, "fuse_unk", fallback);
    lm_jw_bool(w, "byte_fallback", fallback);
    lm_jw_bool(w, "ignore_merges", ignore_merges);
}

/* ---- Byte level ---- */

typedef enum { PRE_SCAN, PRE_DIGITS, PRE_REGEX } pre_kind;

typedef struct {
    const char *names; /* of llama.cpp, each between spaces */
    pre_kind kind;
    lm_scan_kind scan;
    bool ignore_merges, bos;
    const char *regex;
} pre_tokenizer;

/* llama.cpp, src/llama-vocab.cpp: which names share a pattern, and who joins a whole word at once. */
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
    return lm_fail(v->e, LM_EUSAGE, lm_gguf_path(v->g),
                   "give the model's own tokenizer with --tokenizer, or --tokenizer none",
                   "its pre-tokeniser%s%.*s is not known", name.text ? " " : " has no name and",
                   name.text ? (int)(name.len < 60 ? name.len : 60) : 0,
                   name.text ? name.text : "");
}

static void pre_steps(lm_jw *w, const pre_tokenizer *p)
{
    if (p->kind == PRE_SCAN && p->scan == LM_SCAN_GPT2) {
        byte_level(w, "pre_tokenizer", true);
        return;
    }
    name_type(w, "pre_tokenizer", "Sequence");
    lm_jw_arr(w, "pretokenizers");
    if (p->kind == PRE_DIGITS) {
        name_type(w, NULL, "Digits");
        lm_jw_bool(w, "individual_digits", true);
        lm_jw_close_obj(w);
        byte_level(w, NULL, true);
    } else {
        name_type(w, NULL, "Split");
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
        return bad(v, key, "is missing, or no list of strings");
    lm_jw_arr(w, "merges");
    while (lm_gguf_next_str(&it, &m)) {
        const char *space = m.len > 1 ? memchr(m.text + 1, ' ', m.len - 1) : NULL;
        if (!space || space == m.text + m.len - 1)
            return bad(v, key, "has an entry that is not two parts");
        put_merge(w, m.text, (size_t)(space - m.text), space + 1,
                  m.len - 1 - (size_t)(space - m.text));
    }
    lm_jw_close_arr(w);
    return LM_OK;
}

static lm_code write_byte_level(lm_jw *w, vocab *v, const pre_tokenizer *p)
{
    lm_code rc;

    added_tokens(w, v);
    if (p->scan == LM_SCAN_QWEN) {
        name_type(w, "normalizer", "NFC");
        lm_jw_close_obj(w);
    } else {
        lm_jw_str(w, "normalizer", NULL);
    }
    pre_steps(w, p);
    rc = post_processor(w, v, false);
    byte_level(w, "decoder", true);
    model_head(w, v, false, p->ignore_merges);
    rc = rc ? rc : model_vocab(w, v);
    rc = rc ? rc : put_merges(w, v);
    lm_jw_close_obj(w);
    return rc;
}

/* ---- Byte fallback ---- */

static lm_code put_found_merges(lm_jw *w, vocab *v)
{
    lm_gguf_merge *all = NULL;
    size_t n = 0;
    lm_code rc = lm_gguf_find_merges(v->v, v->n, &all, &n, v->e);

    lm_jw_arr(w, "merges");
    for (size_t i = 0; !rc && i < n; i++) {
        const lm_gguf_text *t = &v->v[all[i].id].text;
        put_merge(w, t->text, all[i].n_left, t->text + all[i].n_left, t->len - all[i].n_left);
    }
    lm_jw_close_arr(w);
    lm_free(all);
    return rc;
}

#define UNDERSCORE "\xe2\x96\x81" /* U+2581, what stands for a space */

static void fallback_steps(lm_jw *w, bool space)
{
    name_type(w, "normalizer", "Sequence");
    lm_jw_arr(w, "normalizers");
    if (space) {
        name_type(w, NULL, "Prepend");
        lm_jw_str(w, "prepend", UNDERSCORE);
        lm_jw_close_obj(w);
    }
    replace(w, " ", UNDERSCORE);
    lm_jw_close_arr(w);
    lm_jw_close_obj(w);
    lm_jw_str(w, "pre_tokenizer", NULL);
}

static void fallback_decoder(lm_jw *w, bool space)
{
    name_type(w, "decoder", "Sequence");
    lm_jw_arr(w, "decoders");
    replace(w, UNDERSCORE, " ");
    name_type(w, NULL, "ByteFallback");
    lm_jw_close_obj(w);
    name_type(w, NULL, "Fuse");
    lm_jw_close_obj(w);
    if (space) {
        name_type(w, NULL, "Strip");
        lm_jw_str(w, "content", " ");
        lm_jw_int(w, "start", 1);
        lm_jw_int(w, "stop", 0);
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
    lm_jw_close_obj(w);
}

static lm_code write_fallback(lm_jw *w, vocab *v)
{
    bool space;
    lm_code rc = lm_gguf_bool_or(v->g, "tokenizer.ggml.add_space_prefix", true, &space, NULL, v->e);

    if (rc)
        return rc;
    added_tokens(w, v);
    fallback_steps(w, space);
    rc = post_processor(w, v, true);
    fallback_decoder(w, space);
    model_head(w, v, true, false);
    rc = rc ? rc : model_vocab(w, v);
    rc = rc ? rc : put_found_merges(w, v);
    lm_jw_close_obj(w);
    return rc;
}

/* ---- tokenizer_config.json ---- */

static void config_token(lm_jw *w, const vocab *v, const char *key, int64_t id)
{
    if (id >= 0)
        lm_jw_strn(w, key, v->v[id].text.text, v->v[id].text.len);
}

static lm_code write_config(const vocab *v, const lm_config *c, lm_buf *out)
{
    lm_jw w;

    lm_jw_begin(&w, out, 2, v->e);
    lm_jw_obj(&w, NULL);
    lm_jw_bool(&w, "add_bos_token", v->add_bos);
    lm_jw_bool(&w, "add_eos_token", v->add_eos);
    config_token(&w, v, "bos_token", v->bos);
    config_token(&w, v, "eos_token", v->eos);
    config_token(&w, v, "pad_token", v->pad);
    config_token(&w, v, "unk_token", v->unk);
    if (v->chat.text)
        lm_jw_strn(&w, "chat_template", v->chat.text, v->chat.len);
    lm_jw_bool(&w, "clean_up_tokenization_spaces", false);
    lm_jw_int(&w, "model_max_length", c->max_positions);
    lm_jw_str(&w, "tokenizer_class", "PreTrainedTokenizerFast");
    lm_jw_close_obj(&w);
    lm_code rc = lm_jw_end(&w);
    return rc ? rc : lm_buf_add(out, "\n", 1, v->e);
}

/* ---- The whole ---- */

static lm_code write_tokenizer(vocab *v, bool fallback, const pre_tokenizer *pre, lm_buf *out)
{
    lm_jw w;
    lm_code rc;

    lm_jw_begin(&w, out, 0, v->e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "version", "1.0");
    lm_jw_str(&w, "truncation", NULL);
    lm_jw_str(&w, "padding", NULL);
    rc = fallback ? write_fallback(&w, v) : write_byte_level(&w, v, pre);
    lm_jw_close_obj(&w);
    if (!rc)
        rc = lm_jw_end(&w);
    return rc ? rc : lm_buf_add(out, "\n", 1, v->e);
}

/* A tokenizer.json that our own reader refuses is none. */
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

lm_code lm_gguf_get_vocab(const lm_gguf *g, const lm_config *c, lm_buf *json, lm_buf *config,
                          bool *found, lm_err *e)
{
    vocab v = { .g = g, .e = e };
    const pre_tokenizer *pre = NULL;
    lm_gguf_text model;
    bool fallback;
    lm_code rc = lm_gguf_str(g, "tokenizer.ggml.model", &model, e);

    *found = false;
    if (rc || !model.text || (model.len == 4 && !memcmp(model.text, "none", 4)))
        return rc;
    fallback = model.len == 5 && !memcmp(model.text, "llama", 5);
    if (!fallback && !(model.len == 4 && !memcmp(model.text, "gpt2", 4)))
        return lm_fail(e, LM_EUSAGE, lm_gguf_path(g),
                       "give the model's own tokenizer with --tokenizer, or --tokenizer none",
                       "a tokenizer of kind '%.*s', known are gpt2 and llama",
                       (int)(model.len < 40 ? model.len : 40), model.text);
    if (!fallback)
        rc = find_pre(&v, &pre);
    if (!rc)
        rc = read_tokens(&v, c);
    if (!rc)
        rc = read_special(&v, fallback, fallback || pre->bos);
    if (!rc)
        rc = write_tokenizer(&v, fallback, pre, json);
    if (!rc)
        rc = write_config(&v, c, config);
    if (!rc)
        rc = prove(&v, json, config);
    *found = !rc;
    lm_free(v.v);
    return rc;
}
