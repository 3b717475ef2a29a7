/* SPDX-License-Identifier: Apache-2.0 */
/* Training from documents to a finished tokenizer.json: cut, count, learn, write. */
#include "text/bpe_train.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/text.h"
#include "text/train_impl.h"

static lm_code check_opts(const lm_bpe_train_opts *o, lm_err *e)
{
    for (int i = 0; i < o->n_special; i++) {
        const char *s = o->special[i];
        if (!*s || lm_utf8_valid(s, strlen(s)) != strlen(s))
            return lm_fail(e, LM_EUSAGE, "special tokens", NULL,
                           "special token %d is empty or not UTF-8", i);
        for (int k = 0; k < i; k++)
            if (!strcmp(s, o->special[k]))
                return lm_fail(e, LM_EUSAGE, "special tokens", "name each token once",
                               "\"%s\" is given twice", s);
    }
    if (o->model != LM_TRAIN_BPE && o->vocab_size >= o->n_special && o->vocab_size <= 1 << 27)
        return LM_OK;
    if (o->vocab_size < 256 + o->n_special || o->vocab_size > 1 << 27)
        return lm_fail(e, LM_EUSAGE, "vocabulary size", NULL,
                       "%lld is not in %d (256 bytes and %d special tokens) to 134217728",
                       (long long)o->vocab_size, 256 + o->n_special, o->n_special);
    return LM_OK;
}

#define PATTERN_CURE "give gpt2, llama3, qwen, gpt4, gpt4o, or a PCRE2 pattern"

/* True for a text of letters, digits and signs as in names, which as a pattern would match only
 * itself. */
static bool is_bare_word(const char *s)
{
    bool letter = false;

    for (; *s; s++) {
        bool alpha = (*s >= 'a' && *s <= 'z') || (*s >= 'A' && *s <= 'Z');
        letter |= alpha;
        if (!alpha && !(*s >= '0' && *s <= '9') && !strchr("-_.", *s))
            return false;
    }
    return letter;
}

static lm_code refuse_name(const char *name, lm_err *e)
{
    const char *near = lm_nearest(name, lm_scan_names);
    char todo[64];

    snprintf(todo, sizeof todo, "did you mean %s?", near ? near : "");
    return lm_fail(e, LM_EUSAGE, "word pattern", near ? todo : PATTERN_CURE,
                   "no pattern is named '%.40s'", name);
}

static lm_code set_pattern(lm_bpe_trainer *t, const char *pattern, lm_err *e)
{
    lm_scan_kind k = lm_scan_of_name(pattern);
    lm_err bad = { 0 };
    lm_code rc;

    if (k == LM_SCAN_NONE)
        k = lm_scan_of_pattern(pattern);
    if (k == LM_SCAN_NONE && is_bare_word(pattern))
        return refuse_name(pattern, e);
    rc = lm_strdup(&t->pattern, k ? lm_scan_pattern(k) : pattern, e);
    if (rc)
        return rc;
    t->cut.kind = k ? LM_CUT_SCAN : LM_CUT_REGEX;
    t->cut.scan = k;
    if (k)
        return LM_OK;
    rc = lm_regex_new(pattern, strlen(pattern), false, "word pattern", &t->cut.regex, &bad);
    if (rc) /* the pattern is a request of the caller, not from a file */
        rc = lm_fail(e, rc == LM_EFORMAT ? LM_EUSAGE : rc, "word pattern", PATTERN_CURE, "%s",
                     bad.what);
    return rc;
}

static lm_code set_special(lm_bpe_trainer *t, const lm_bpe_train_opts *o, lm_err *e)
{
    lm_code rc =
        lm_alloc_n(&t->special.v, (size_t)o->n_special, sizeof *t->special.v, "special tokens", e);

    for (int i = 0; i < o->n_special && !rc; i++) {
        lm_added_token *a = &t->special.v[t->special.n++];
        a->id = (uint32_t)i;
        a->special = true;
        a->len = strlen(o->special[i]);
        rc = lm_strdup(&a->text, o->special[i], e);
    }
    return rc ? rc : lm_added_index(&t->special, e);
}

/* WordPiece and Unigram: words are cut by the steps that their tokenizer.json will have. */
static lm_code set_steps(lm_bpe_trainer *t, lm_err *e)
{
    const char *text[2] = { lm_subword_normalizer(t), lm_subword_pretok(t) };
    json_t *tree = NULL;
    lm_code rc = lm_json_parse(text[0], strlen(text[0]), "normalizer", &tree, e);

    if (!rc)
        rc = lm_normal_new(tree, "normalizer", &t->normal, e);
    json_decref(tree);
    tree = NULL;
    if (!rc)
        rc = lm_json_parse(text[1], strlen(text[1]), "pre-tokenizer", &tree, e);
    if (!rc)
        rc = lm_pretok_new(tree, "pre-tokenizer", &t->pretok, e);
    json_decref(tree);
    return rc;
}

int lm_train_special(const lm_bpe_trainer *t, const char *name)
{
    for (size_t i = 0; i < t->special.n; i++)
        if (!strcmp(t->special.v[i].text, name))
            return (int)i;
    return -1;
}

lm_code lm_bpe_trainer_new(const lm_bpe_train_opts *o, int threads, lm_bpe_trainer **out, lm_err *e)
{
    lm_bpe_trainer *t = NULL;
    lm_code rc = check_opts(o, e);

    *out = NULL;
    if (!rc)
        rc = lm_alloc_n(&t, 1, sizeof *t, "the trainer", e);
    if (rc)
        return rc;
    t->vocab_size = o->vocab_size;
    t->min_frequency = o->min_frequency;
    t->max_token_bytes = o->max_token_bytes;
    t->model = o->model;
    t->cased = o->cased;
    t->limit_alphabet = o->limit_alphabet;
    rc = t->model == LM_TRAIN_BPE ? set_pattern(t, o->pattern, e) : set_steps(t, e);
    if (!rc)
        rc = set_special(t, o, e);
    if (!rc)
        rc = lm_alloc_n(&t->workers, (size_t)threads, sizeof *t->workers, "the trainer", e);
    for (t->threads = 0; !rc && t->threads < threads; t->threads++)
        rc = lm_regex_match_new(&t->workers[t->threads].match, e);
    if (rc)
        lm_bpe_trainer_free(t);
    else
        *out = t;
    return rc;
}

void lm_bpe_trainer_free(lm_bpe_trainer *t)
{
    if (!t)
        return;
    for (int i = 0; i < t->threads; i++) {
        lm_words_fini(&t->workers[i].words);
        lm_regex_match_free(t->workers[i].match);
        lm_free(t->workers[i].list.v);
        lm_free(t->workers[i].tmp.v);
        lm_pretok_scratch_fini(&t->workers[i].pretok);
        lm_buf_fini(&t->workers[i].normal[0]);
        lm_buf_fini(&t->workers[i].normal[1]);
    }
    lm_free(t->workers);
    lm_added_fini(&t->special);
    lm_regex_free(t->cut.regex);
    lm_normal_free(t->normal);
    lm_pretok_free(t->pretok);
    lm_free(t->pattern);
    lm_free(t);
}

/* The same through a normaliser and a pre-tokeniser. */
static lm_code count_steps(lm_bpe_trainer *t, lm_train_worker *w, const char *text, size_t len,
                           lm_err *e)
{
    const char *base;
    const lm_pieces *list;
    lm_code rc =
        lm_normal_run(t->normal, w->match, text, len, &w->normal[0], &w->normal[1], &text, &len, e);

    if (rc || !len)
        return rc;
    rc = lm_pretok_run(t->pretok, w->match, &w->pretok, text, len, true, &base, &list, e);
    for (size_t i = 0; !rc && i < list->n; i++)
        rc = lm_words_add(&w->words, base + list->v[i].off, list->v[i].len, 1, e);
    if (!rc)
        w->n_words += (int64_t)list->n;
    return rc;
}

/* Count the words of a stretch without special tokens. */
static lm_code count_words(lm_bpe_trainer *t, lm_train_worker *w, const char *text, size_t len,
                           lm_err *e)
{
    lm_piece whole = { 0, len, false };
    lm_pieces from = { &whole, 1, 1 };
    lm_code rc = LM_OK;

    if (t->model != LM_TRAIN_BPE)
        return count_steps(t, w, text, len, e);
    if (t->cut.kind == LM_CUT_SCAN) {
        for (const char *end = text + len; text < end && !rc; w->n_words++) {
            size_t n = lm_scan_word(t->cut.scan, text, end);
            rc = lm_words_add(&w->words, text, n, 1, e);
            text += n;
        }
        return rc;
    }
    w->list.n = 0;
    rc = lm_cut_all(&t->cut, w->match, text, &from, &w->tmp, &w->list, e);
    for (size_t i = 0; i < w->list.n && !rc; i++)
        rc = lm_words_add(&w->words, text + w->list.v[i].off, w->list.v[i].len, 1, e);
    w->n_words += (int64_t)w->list.n;
    return rc;
}

lm_code lm_bpe_trainer_add(lm_bpe_trainer *t, int worker_at, const char *text, size_t len,
                           lm_err *e)
{
    lm_train_worker *w = &t->workers[worker_at];
    lm_added_walk walk = { .added = &t->special, .group = LM_ADDED_RAW, .text = text, .len = len };
    size_t valid = lm_utf8_valid(text, len);
    lm_code rc = LM_OK;

    if (valid != len)
        return lm_fail(e, LM_EFORMAT, "training text", "convert the text to UTF-8",
                       "invalid UTF-8 at byte %zu of %zu", valid, len);
    w->documents++;
    w->bytes += (int64_t)len;
    while (!rc && lm_added_next(&walk))
        if (walk.begin > walk.gap)
            rc = count_words(t, w, text + walk.gap, walk.begin - walk.gap, e);
    if (!rc && len > walk.gap)
        rc = count_words(t, w, text + walk.gap, len - walk.gap, e);
    return rc;
}

static int by_char(const void *a, const void *b)
{
    uint32_t x = lm_byte_char(*(const uint8_t *)a), y = lm_byte_char(*(const uint8_t *)b);
    return x < y ? -1 : x > y;
}

/* Ids: specials in order, then the byte characters by code point (a character that is also a
 * special token keeps its id). */
static lm_code begin_vocab(const lm_bpe_trainer *t, lm_bpe *v, lm_err *e)
{
    uint8_t order[256];
    lm_code rc = lm_bpe_begin_vocab(v, (size_t)t->vocab_size, (size_t)t->vocab_size, e);

    for (size_t i = 0; i < t->special.n && !rc; i++)
        rc = lm_bpe_add_token(v, t->special.v[i].text, t->special.v[i].len, (uint32_t)v->n_tokens,
                              "special tokens", e);
    for (int i = 0; i < 256; i++)
        order[i] = (uint8_t)i;
    qsort(order, 256, 1, by_char);
    for (int i = 0; i < 256 && !rc; i++) {
        char c[4];
        size_t n = lm_byte_utf8(order[i], c);
        if (lm_bpe_find(v, c, n) == LM_BPE_NONE)
            rc = lm_bpe_add_token(v, c, n, (uint32_t)v->n_tokens, "bytes", e);
    }
    if (!rc)
        lm_bpe_end_vocab(v);
    return rc;
}

lm_code lm_bpe_trainer_finish(lm_bpe_trainer *t, lm_sink *sink, lm_buf *json,
                              lm_bpe_train_stats *stats, lm_err *e)
{
    lm_bpe_learned l = { .n_merges = 0 };
    lm_words *all = &t->workers[0].words;
    lm_code rc = LM_OK;

    *stats = (lm_bpe_train_stats){ 0 };
    for (int i = 0; i < t->threads && !rc; i++) {
        stats->documents += t->workers[i].documents;
        stats->bytes += t->workers[i].bytes;
        stats->words += t->workers[i].n_words;
        if (i)
            rc = lm_words_merge(all, &t->workers[i].words, e);
        if (i)
            lm_words_fini(&t->workers[i].words);
    }
    stats->unique_words = (int64_t)all->n;
    if (!rc && !all->n)
        rc = lm_fail(e, LM_EUSAGE, "training text", "give documents with text",
                     "no word in %lld document%s", (long long)stats->documents,
                     lm_plural((uint64_t)stats->documents));
    if (!rc && t->model == LM_TRAIN_WORDPIECE)
        return lm_wordpiece_train(t, all, sink, json, stats, e);
    if (!rc && t->model == LM_TRAIN_UNIGRAM)
        return lm_unigram_train(t, all, sink, json, stats, e);
    if (!rc)
        rc = begin_vocab(t, &l.vocab, e);
    if (!rc)
        rc = lm_bpe_learn(&l, all, NULL, t->vocab_size, t->min_frequency, t->max_token_bytes, sink,
                          e);
    if (!rc)
        rc = lm_bpe_learned_write(&l, &t->special, t->cut.scan, t->pattern, json, e);
    stats->vocab_size = (int64_t)l.vocab.n_tokens;
    stats->merges = (int64_t)l.n_merges;
    lm_bpe_learned_fini(&l);
    return rc;
}
