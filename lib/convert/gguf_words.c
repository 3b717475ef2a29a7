/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_words.c -- see gguf_words.h. */
#include "convert/gguf_words.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base64.h"
#include "base/mem.h"
#include "text/tokenizer.h"

static const char charsmap_key[] = "tokenizer.ggml.precompiled_charsmap",
                  prefix_key[] = "tokenizer.ggml.add_space_prefix",
                  strip_key[] = "tokenizer.ggml.remove_extra_whitespaces";

static const char mark[] = "\xe2\x96\x81"; /* U+2581 */
enum { MARK = sizeof mark - 1 };

/* ---- Unigram: writing ---- */

/* What the steps of a tokenizer.json do, as far as "t5" has words for it. */
typedef struct {
    bool prefix, strip, more; /* more: steps that it has not */
    const char *charsmap;
} steps;

static bool is_type(const json_t *step, const char *want)
{
    const char *type = json_string_value(json_object_get(step, "type"));
    return type && !strcmp(type, want);
}

/* A replacement of spaces: each by the mark, runs by one, or none at an end. */
static void see_replace(const json_t *step, steps *s)
{
    const json_t *pattern = json_object_get(step, "pattern");
    const char *text = json_string_value(json_object_get(pattern, "String"));
    const char *regex = json_string_value(json_object_get(pattern, "Regex"));
    if (regex && strstr(regex, " {2,}"))
        s->strip = true;
    else if (!(text && !strcmp(text, " ")) && !(regex && strstr(regex, "\\A +")))
        s->more = true;
}

static void see_step(const json_t *step, steps *s)
{
    const char *scheme = json_string_value(json_object_get(step, "prepend_scheme"));
    const char *map = json_string_value(json_object_get(step, "precompiled_charsmap"));
    if (is_type(step, "Precompiled"))
        s->charsmap = map;
    else if (is_type(step, "Prepend"))
        s->prefix = true;
    else if (is_type(step, "WhitespaceSplit") || is_type(step, "Strip"))
        s->strip = true;
    else if (is_type(step, "Metaspace"))
        s->prefix |= scheme ? strcmp(scheme, "never") != 0
                            : !json_is_false(json_object_get(step, "add_prefix_space"));
    else if (is_type(step, "Replace"))
        see_replace(step, s);
    else if (json_is_object(step))
        s->more = true;
}

/* A step, or each of a sequence of them. */
static void see_steps(const json_t *part, const char *list, steps *s)
{
    const json_t *step;
    size_t i;
    if (!is_type(part, "Sequence"))
        see_step(part, s);
    json_array_foreach(json_object_get(part, list), i, step)
    {
        see_step(step, s);
    }
}

lm_code lm_gguf_put_unigram(const lm_gguf_words *w, lm_err *e)
{
    steps s = { 0 };
    lm_buf map = { 0 };
    lm_code rc = LM_OK;

    see_steps(json_object_get(w->rest, "normalizer"), "normalizers", &s);
    see_steps(json_object_get(w->rest, "pre_tokenizer"), "pretokenizers", &s);
    if (s.more)
        lm_log(w->sink, LM_LOG_WARN,
               "%s: llama.cpp will not normalise the text as this tokenizer does", w->where);
    lm_gguf_put_str(w->p, "tokenizer.ggml.model", "t5", 2);
    lm_gguf_put_str(w->p, "tokenizer.ggml.pre", "default", 7);
    lm_gguf_put_strs(w->p, "tokenizer.ggml.tokens", w->text, w->n);
    lm_gguf_put_f32s(w->p, "tokenizer.ggml.scores", w->score, w->n);
    lm_gguf_put_i32s(w->p, "tokenizer.ggml.token_type", w->type, w->n);
    lm_gguf_put_bool(w->p, prefix_key, s.prefix);
    lm_gguf_put_bool(w->p, strip_key, s.strip);
    if (s.charsmap)
        rc = lm_base64_decode(s.charsmap, strlen(s.charsmap), w->where, &map, e);
    if (!rc && map.len)
        lm_gguf_put_u8s(w->p, charsmap_key, map.data, map.len);
    lm_buf_fini(&map);
    return rc;
}

/* ---- Unigram: reading ---- */

/* The map in base 64; empty: none. */
static lm_code read_map(const lm_gguf *g, lm_buf *out, lm_err *e)
{
    const lm_gguf_value *v = lm_gguf_value_of(g, charsmap_key);
    if (!v)
        return LM_OK;
    if (!v->array || (v->kind != LM_GGUF_U8 && v->kind != LM_GGUF_I8))
        return lm_fail(e, LM_EFORMAT, lm_gguf_path(g), NULL, "'%s' is not a list of bytes",
                       charsmap_key);
    return v->count ? lm_base64_encode(v->data, v->bytes, out, e) : LM_OK;
}

/* Scores of tokens that no text is cut into are not below the others': the lowest decides about unknown characters. */
static lm_code check_scores(const lm_gguf *g, lm_scored_vocab *v, lm_scored_steps *s, lm_err *e)
{
    float least = 0;
    bool any = false;

    for (size_t i = 0; i < v->n; i++) {
        const lm_scored_token *t = &v->v[i];
        if (!isfinite(t->score))
            return lm_fail(e, LM_EFORMAT, lm_gguf_path(g), NULL, "the score of token %zu is %g", i,
                           (double)t->score);
        s->fallback |= t->type == LM_SCORED_BYTE;
        s->first_only |= t->type == LM_SCORED_USER;
        if (t->type != LM_SCORED_NORMAL)
            continue;
        least = !any || t->score < least ? t->score : least;
        any = true;
        if (t->len > MARK && memmem(t->text + 1, t->len - 1, mark, MARK))
            s->split = false;
    }
    for (size_t i = 0; i < v->n; i++)
        if (v->v[i].score < least)
            v->v[i].score = least;
    return LM_OK;
}

lm_code lm_gguf_get_unigram(const lm_gguf *g, lm_scored_vocab *v, lm_buf *json, lm_err *e)
{
    lm_scored_steps s = { .escape = true, .unused = true, .unigram = true, .split = true };
    lm_buf map = { 0 };
    lm_code rc = check_scores(g, v, &s, e);

    while (v->n && v->v[v->n - 1].type == LM_SCORED_UNUSED) /* names of rows without a token */
        v->n--;
    if (!rc && v->unk < 0)
        rc = lm_fail(e, LM_EFORMAT, lm_gguf_path(g), NULL,
                     "'tokenizer.ggml.unknown_token_id' is not the number of a token");
    if (!rc)
        rc = lm_gguf_bool_or(g, prefix_key, true, &s.prefix, NULL, e);
    if (!rc)
        rc = lm_gguf_bool_or(g, strip_key, false, &s.strip, NULL, e);
    if (!rc)
        rc = read_map(g, &map, e);
    s.charsmap = map.len ? map.data : NULL;
    if (!rc)
        rc = lm_scored_write(v, &s, json, e);
    lm_buf_fini(&map);
    return rc;
}

/* ---- WordPiece ---- */

static lm_code mark_words(lm_gguf_words *w, lm_buf *names, lm_err *e)
{
    size_t bytes = 0;
    for (size_t i = 0; i < w->n; i++)
        bytes += w->text[i].len + MARK;
    if (lm_buf_room(names, bytes, e)) /* texts point into it */
        return e->code;
    for (size_t i = 0; i < w->n; i++) {
        lm_gguf_text *t = &w->text[i];
        const size_t at = names->len;
        const bool inside = t->len > 1 && !memcmp(t->text, "##", 2);
        if (w->type[i] == LM_SCORED_CONTROL)
            continue;
        if ((!inside && lm_buf_add(names, mark, MARK, e)) ||
            lm_buf_add(names, t->text + 2 * inside, t->len - 2 * (size_t)inside, e))
            return e->code;
        *t = (lm_gguf_text){ names->data + at, names->len - at };
    }
    return LM_OK;
}

lm_code lm_gguf_put_wordpiece(lm_gguf_words *w, int64_t types, lm_err *e)
{
    const json_t *normal = json_object_get(w->rest, "normalizer");
    lm_buf names = { 0 };
    lm_code rc = mark_words(w, &names, e);

    if (!is_type(normal, "BertNormalizer") || !json_is_true(json_object_get(normal, "lowercase")))
        lm_log(w->sink, LM_LOG_WARN,
               "%s: llama.cpp makes all letters small and cuts off their accents, unlike this "
               "tokenizer",
               w->where);
    if (types)
        lm_gguf_put_u32(w->p, "tokenizer.ggml.token_type_count", (uint32_t)types);
    lm_gguf_put_str(w->p, "tokenizer.ggml.model", "bert", 4);
    lm_gguf_put_str(w->p, "tokenizer.ggml.pre", "default", 7);
    lm_gguf_put_strs(w->p, "tokenizer.ggml.tokens", w->text, w->n);
    lm_gguf_put_i32s(w->p, "tokenizer.ggml.token_type", w->type, w->n);
    lm_buf_fini(&names);
    return rc;
}

/* The list of tokens as BERT's vocab.txt has it.  cased: some have capitals. */
static lm_code write_list(const lm_gguf *g, const lm_scored_vocab *v, lm_buf *list, bool *cased,
                          lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; !rc && i < v->n; i++) {
        const lm_scored_token *t = &v->v[i];
        const bool control = t->type == LM_SCORED_CONTROL || t->type == LM_SCORED_UNUSED;
        const bool begins = t->len > MARK && !memcmp(t->text, mark, MARK);
        const size_t cut = begins && !control ? MARK : 0;
        if (memchr(t->text, '\n', t->len))
            return lm_fail(e, LM_EUSAGE, lm_gguf_path(g), "convert without a tokenizer",
                           "token %zu has the end of a line in it", i);
        for (size_t k = cut; !control && k < t->len; k++)
            *cased |= isupper((unsigned char)t->text[k]) != 0;
        if (!control && !begins)
            rc = lm_buf_add(list, "##", 2, e);
        rc = rc ? rc : lm_buf_add(list, t->text + cut, t->len - cut, e);
        rc = rc ? rc : lm_buf_add(list, "\n", 1, e);
    }
    return rc;
}

static void name_token(lm_jw *w, const lm_scored_vocab *v, const char *key, int64_t id)
{
    if (id >= 0)
        lm_jw_strn(w, key, v->v[id].text, v->v[id].len);
}

/* The id under a key; -1: none. */
static lm_code read_id(const lm_gguf *g, const lm_scored_vocab *v, const char *key, int64_t *id,
                       lm_err *e)
{
    if (v->n == 0)
        return lm_fail(e, LM_EFORMAT, lm_gguf_path(g), NULL, "it has no tokens");
    return lm_gguf_i64_or(g, key, -1, 0, (int64_t)v->n - 1, id, NULL, e);
}

static lm_code write_config(const lm_gguf *g, const lm_scored_vocab *v, bool cased, lm_buf *out,
                            lm_err *e)
{
    int64_t cls, sep, mask;
    lm_jw w;

    if (read_id(g, v, "tokenizer.ggml.bos_token_id", &cls, e) ||
        read_id(g, v, "tokenizer.ggml.seperator_token_id", &sep, e) ||
        read_id(g, v, "tokenizer.ggml.mask_token_id", &mask, e))
        return e->code;
    lm_jw_begin(&w, out, 2, e);
    lm_jw_obj(&w, NULL);
    name_token(&w, v, "cls_token", cls);
    name_token(&w, v, "mask_token", mask);
    name_token(&w, v, "pad_token", v->pad);
    name_token(&w, v, "sep_token", sep);
    name_token(&w, v, "unk_token", v->unk);
    lm_jw_bool(&w, "do_lower_case", !cased);
    lm_jw_str(&w, "tokenizer_class", "BertTokenizer");
    lm_jw_close_obj(&w);
    lm_code rc = lm_jw_end(&w);
    return rc ? rc : lm_buf_add(out, "\n", 1, e);
}

lm_code lm_gguf_get_wordpiece(const lm_gguf *g, const lm_scored_vocab *v, lm_buf *json,
                              lm_buf *config, lm_err *e)
{
    lm_buf list = { 0 };
    lm_tokenizer *t = NULL;
    bool cased = false;
    char where[200];
    size_t len = 0;
    lm_code rc = write_list(g, v, &list, &cased, e);

    snprintf(where, sizeof where, "%.140s: vocab.txt", lm_gguf_path(g));
    rc = rc ? rc : write_config(g, v, cased, config, e);
    rc = rc ? rc : lm_tokenizer_from_text(list.data, list.len, config, where, &t, e);
    if (!rc) {
        const char *text = lm_tokenizer_json(t, &len);
        rc = lm_buf_add(json, text, len, e);
    }
    lm_tokenizer_free(t);
    lm_buf_fini(&list);
    return rc;
}
