/* SPDX-License-Identifier: Apache-2.0 */
/* scored_json.c -- the tokenizer.json of a scored vocabulary: see scored.h. */
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "text/added_list.h"
#include "text/scored.h"

enum { MOST_STRIP = 1 << 20 }; /* spaces before a decoded text: all */

#define UNDERSCORE "\xe2\x96\x81" /* U+2581, the replacement of a space */

void lm_scored_type(lm_jw *w, const char *key, const char *type)
{
    lm_jw_obj(w, key);
    lm_jw_str(w, "type", type);
}

void lm_scored_added(lm_jw *w, const lm_scored_vocab *v, bool after_normal)
{
    lm_jw_arr(w, "added_tokens");
    for (size_t i = 0; i < v->n; i++) {
        int type = v->v[i].type;
        if (type != LM_SCORED_CONTROL && type != LM_SCORED_USER && type != LM_SCORED_UNKNOWN)
            continue;
        lm_jw_obj(w, NULL);
        lm_jw_int(w, "id", (int64_t)i);
        lm_jw_strn(w, "content", v->v[i].text, v->v[i].len);
        lm_jw_bool(w, "single_word", false);
        lm_jw_bool(w, "lstrip", false);
        lm_jw_bool(w, "rstrip", false);
        lm_jw_bool(w, "normalized", type == LM_SCORED_USER && after_normal);
        lm_jw_bool(w, "special", type != LM_SCORED_USER);
        lm_jw_close_obj(w);
    }
    lm_added_list_write(w, v->extra, (int64_t)v->n, -1);
    lm_jw_close_arr(w);
}

/* ---- Post-processor ---- */

static void special_entry(lm_jw *w, const lm_scored_vocab *v, int64_t id)
{
    lm_jw_obj(w, NULL);
    lm_jw_obj(w, "SpecialToken");
    lm_jw_strn(w, "id", v->v[id].text, v->v[id].len);
    lm_jw_int(w, "type_id", 0);
    lm_jw_close_obj(w);
    lm_jw_close_obj(w);
}

static void template_of(lm_jw *w, const lm_scored_vocab *v, const char *key, bool pair)
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

static lm_code special_def(lm_jw *w, const lm_scored_vocab *v, int64_t id, lm_err *e)
{
    lm_buf name = { 0 };
    lm_code rc = lm_buf_add(&name, v->v[id].text, v->v[id].len, e);

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

lm_code lm_scored_post(lm_jw *w, const lm_scored_vocab *v, void (*plain)(lm_jw *w), lm_err *e)
{
    lm_code rc = LM_OK;

    if (!v->add_bos && !v->add_eos) {
        if (plain)
            plain(w);
        else
            lm_jw_str(w, "post_processor", NULL);
        return rc;
    }
    lm_scored_type(w, "post_processor", "TemplateProcessing");
    template_of(w, v, "single", false);
    template_of(w, v, "pair", true);
    lm_jw_obj(w, "special_tokens");
    if (v->add_bos)
        rc = special_def(w, v, v->bos, e);
    if (!rc && v->add_eos && (!v->add_bos || v->eos != v->bos))
        rc = special_def(w, v, v->eos, e);
    lm_jw_close_obj(w);
    lm_jw_close_obj(w);
    return rc;
}

/* ---- Model ---- */

void lm_scored_model(lm_jw *w, const lm_scored_vocab *v, bool fallback, bool with_unk,
                     bool ignore_merges)
{
    lm_scored_type(w, "model", "BPE");
    lm_jw_str(w, "dropout", NULL);
    if (with_unk && v->unk >= 0)
        lm_jw_strn(w, "unk_token", v->v[v->unk].text, v->v[v->unk].len);
    else
        lm_jw_str(w, "unk_token", NULL);
    lm_jw_str(w, "continuing_subword_prefix", NULL);
    lm_jw_str(w, "end_of_word_suffix", NULL);
    lm_jw_bool(w, "fuse_unk", with_unk);
    lm_jw_bool(w, "byte_fallback", fallback);
    lm_jw_bool(w, "ignore_merges", ignore_merges);
}

lm_code lm_scored_names(lm_jw *w, const lm_scored_vocab *v, bool unused, lm_err *e)
{
    lm_buf name = { 0 };
    lm_code rc = LM_OK;

    lm_jw_obj(w, "vocab");
    for (size_t i = 0; !rc && i < v->n; i++) {
        if (v->v[i].type == LM_SCORED_UNUSED && !unused)
            continue;
        name.len = 0;
        rc = lm_buf_add(&name, v->v[i].text, v->v[i].len, e);
        if (!rc &&
            (memchr(name.data, 0, name.len) || lm_utf8_valid(name.data, name.len) != name.len))
            rc = lm_fail(e, LM_EFORMAT, v->where, NULL,
                         "token %zu is not UTF-8, or has a NUL in it", i);
        if (!rc)
            lm_jw_int(w, name.data, (int64_t)i);
    }
    lm_jw_close_obj(w);
    lm_buf_fini(&name);
    return rc;
}

void lm_scored_merge_pair(lm_jw *w, const char *left, size_t n_left, const char *right,
                          size_t n_right)
{
    lm_jw_arr(w, NULL);
    lm_jw_strn(w, NULL, left, n_left);
    lm_jw_strn(w, NULL, right, n_right);
    lm_jw_close_arr(w);
}

static lm_code write_merges(lm_jw *w, const lm_scored_vocab *v, lm_err *e)
{
    lm_scored_merge *all = NULL;
    size_t n = 0;
    lm_code rc = lm_scored_merges(v->v, v->n, &all, &n, e);

    lm_jw_arr(w, "merges");
    for (size_t i = 0; !rc && i < n; i++) {
        const lm_scored_token *t = &v->v[all[i].id];
        lm_scored_merge_pair(w, t->text, all[i].n_left, t->text + all[i].n_left,
                             t->len - all[i].n_left);
    }
    lm_jw_close_arr(w);
    lm_free(all);
    return rc;
}

/* ---- Normaliser and decoder ---- */

static void replace(lm_jw *w, const char *kind, const char *from, const char *to)
{
    lm_scored_type(w, NULL, "Replace");
    lm_jw_obj(w, "pattern");
    lm_jw_str(w, kind, from);
    lm_jw_close_obj(w);
    lm_jw_str(w, "content", to);
    lm_jw_close_obj(w);
}

static void write_normalizer(lm_jw *w, const lm_scored_steps *s)
{
    const char *mark = s->escape ? UNDERSCORE : " ";

    lm_scored_type(w, "normalizer", "Sequence");
    lm_jw_arr(w, "normalizers");
    if (s->charsmap) {
        lm_scored_type(w, NULL, "Precompiled");
        lm_jw_str(w, "precompiled_charsmap", s->charsmap);
        lm_jw_close_obj(w);
    }
    if (s->strip) {
        /* At the end of a text, U+2581 in the text itself is treated as a space. */
        replace(w, "Regex", s->escape ? "\\A +|[ " UNDERSCORE "]+\\z" : "\\A +| +\\z", "");
        replace(w, "Regex", " {2,}", " ");
    }
    if (s->prefix && !s->first_only) {
        lm_scored_type(w, NULL, "Prepend");
        lm_jw_str(w, "prepend", mark);
        lm_jw_close_obj(w);
    }
    if (s->escape)
        replace(w, "String", " ", UNDERSCORE);
    lm_jw_close_arr(w);
    lm_jw_close_obj(w);
}

static void write_pretok(lm_jw *w, const lm_scored_steps *s)
{
    if (s->unigram && s->split) {
        lm_scored_type(w, "pre_tokenizer", "Metaspace");
        lm_jw_str(w, "replacement", UNDERSCORE);
        lm_jw_str(w, "prepend_scheme", s->prefix && s->first_only ? "first" : "never");
        lm_jw_bool(w, "split", true);
        lm_jw_close_obj(w);
        return;
    }
    if (!s->prefix || !s->first_only) {
        lm_jw_str(w, "pre_tokenizer", NULL);
        return;
    }
    lm_scored_type(w, "pre_tokenizer", "Metaspace");
    lm_jw_str(w, "replacement", UNDERSCORE);
    lm_jw_str(w, "prepend_scheme", "first");
    lm_jw_bool(w, "split", false);
    lm_jw_close_obj(w);
}

static lm_code write_unigram(lm_jw *w, const lm_scored_vocab *v, const lm_scored_steps *s,
                             lm_err *e)
{
    lm_code rc = LM_OK;

    lm_scored_type(w, "model", "Unigram");
    lm_jw_int(w, "unk_id", v->unk);
    lm_jw_bool(w, "byte_fallback", s->fallback);
    lm_jw_arr(w, "vocab");
    for (size_t i = 0; i < v->n && !rc; i++) {
        if (lm_utf8_valid(v->v[i].text, v->v[i].len) != v->v[i].len)
            rc = lm_fail(e, LM_EFORMAT, v->where, NULL, "token %zu is not UTF-8", i);
        lm_jw_arr(w, NULL);
        lm_jw_strn(w, NULL, v->v[i].text, v->v[i].len);
        lm_jw_f64(w, NULL, (double)v->v[i].score);
        lm_jw_close_arr(w);
    }
    lm_jw_close_arr(w);
    return rc;
}

static lm_code write_bpe(lm_jw *w, const lm_scored_vocab *v, const lm_scored_steps *s, lm_err *e)
{
    lm_code rc;

    lm_scored_model(w, v, s->fallback, true, false);
    rc = lm_scored_names(w, v, s->unused, e);
    return rc ? rc : write_merges(w, v, e);
}

static void write_decoder(lm_jw *w, const lm_scored_steps *s)
{
    lm_scored_type(w, "decoder", "Sequence");
    lm_jw_arr(w, "decoders");
    if (s->escape)
        replace(w, "String", UNDERSCORE, " ");
    lm_scored_type(w, NULL, "ByteFallback");
    lm_jw_close_obj(w);
    lm_scored_type(w, NULL, "Fuse");
    lm_jw_close_obj(w);
    if (s->prefix || s->strip) {
        lm_scored_type(w, NULL, "Strip");
        lm_jw_str(w, "content", " ");
        lm_jw_int(w, "start", s->strip ? MOST_STRIP : 1);
        lm_jw_int(w, "stop", 0);
        lm_jw_close_obj(w);
    }
    lm_jw_close_arr(w);
    lm_jw_close_obj(w);
}

lm_code lm_scored_write(const lm_scored_vocab *v, const lm_scored_steps *s, lm_buf *out, lm_err *e)
{
    lm_jw w;
    lm_code rc, end;

    lm_jw_begin(&w, out, 0, e);
    lm_jw_obj(&w, NULL);
    lm_jw_str(&w, "version", "1.0");
    lm_jw_str(&w, "truncation", NULL);
    lm_jw_str(&w, "padding", NULL);
    lm_scored_added(&w, v, s->first_only);
    write_normalizer(&w, s);
    write_pretok(&w, s);
    rc = lm_scored_post(&w, v, NULL, e);
    write_decoder(&w, s);
    if (!rc)
        rc = s->unigram ? write_unigram(&w, v, s, e) : write_bpe(&w, v, s, e);
    lm_jw_close_obj(&w);
    lm_jw_close_obj(&w);
    end = lm_jw_end(&w);
    rc = rc ? rc : end;
    return rc ? rc : lm_buf_add(out, "\n", 1, e);
}
