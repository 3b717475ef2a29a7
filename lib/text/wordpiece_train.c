/* SPDX-License-Identifier: Apache-2.0 */
/* wordpiece_train.c -- WordPiece as the `tokenizers` library learns it: BPE's merges over the
 * characters of words, of which all but the first have the prefix.
 *
 * Ids: special tokens in order, the characters by code point, those with the prefix by code point,
 * then the merges.  `tokenizers` numbers the characters with the prefix in the order of a hash
 * table with a random seed, which decides between pairs of equal count: its vocabularies differ
 * from run to run in such tokens alone. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "text/train_impl.h"

typedef struct {
    uint32_t c;
    bool inside;   /* it occurs behind the beginning of a word */
    int64_t count; /* 0: it does not occur */
} letter;

static int by_count(const void *a, const void *b)
{
    const letter *x = a, *y = b;

    if (x->count != y->count)
        return x->count > y->count ? -1 : 1;
    return (x->c > y->c) - (x->c < y->c);
}

static int by_char(const void *a, const void *b)
{
    const letter *x = a, *y = b;
    return (x->c > y->c) - (x->c < y->c);
}

/* The characters of all words, the `limit` most frequent by code point; *n of them. */
static lm_code find_alphabet(const lm_words *words, int64_t limit, letter **out, size_t *n,
                             lm_err *e)
{
    letter *all = NULL;
    size_t k;
    lm_code rc = lm_alloc_n(&all, 0x110000, sizeof *all, "the alphabet", e);

    *n = 0;
    for (size_t i = 0; i < words->n_cells && !rc; i++) {
        const lm_word_cell *s = &words->cells[i];
        for (size_t at = 0; s->count && at < s->len; at += k) {
            uint32_t c = lm_utf8_get(words->text + s->off + at, s->len - at, &k);
            all[c].c = c;
            all[c].count += s->count;
            all[c].inside |= at > 0;
        }
    }
    for (size_t c = 0; c < 0x110000 && !rc; c++)
        if (all[c].count)
            all[(*n)++] = all[c];
    if (!rc && limit && *n > (size_t)limit) {
        qsort(all, *n, sizeof *all, by_count);
        *n = (size_t)limit;
        qsort(all, *n, sizeof *all, by_char);
    }
    *out = all;
    return rc;
}

/* One more token, unless it is there (as a special token). */
static lm_code add_token(lm_bpe *v, const char *s, size_t len, int64_t most, lm_err *e)
{
    if (lm_bpe_find(v, s, len) != LM_BPE_NONE)
        return LM_OK;
    if (v->n_tokens >= (size_t)most)
        return lm_fail(e, LM_EUSAGE, "vocabulary size", "give more, or limit the alphabet",
                       "%lld tokens cannot hold the characters of the text, at the beginning of a "
                       "word and inside",
                       (long long)most);
    return lm_bpe_add_token(v, s, len, (uint32_t)v->n_tokens, "the alphabet", e);
}

static lm_code begin_vocab(const lm_bpe_trainer *t, const letter *v, size_t n, lm_bpe *vocab,
                           lm_err *e)
{
    size_t prefix = strlen(LM_TRAIN_PREFIX);
    char s[16] = LM_TRAIN_PREFIX;
    lm_code rc = lm_bpe_begin_vocab(vocab, (size_t)t->vocab_size, (size_t)t->vocab_size, e);

    for (size_t i = 0; i < t->special.n && !rc; i++)
        rc = add_token(vocab, t->special.v[i].text, t->special.v[i].len, t->vocab_size, e);
    for (size_t i = 0; i < n && !rc; i++)
        rc = add_token(vocab, s + prefix, lm_utf8_put(v[i].c, s + prefix), t->vocab_size, e);
    for (size_t i = 0; i < n && !rc; i++)
        if (v[i].inside)
            rc = add_token(vocab, s, prefix + lm_utf8_put(v[i].c, s + prefix), t->vocab_size, e);
    if (!rc)
        lm_bpe_end_vocab(vocab);
    return rc;
}

static lm_code write_json(const lm_bpe_trainer *t, const lm_bpe *v, lm_buf *json, lm_err *e)
{
    const char *unk = lm_train_special(t, "<unk>") >= 0 ? "<unk>" : "[UNK]";
    char *key = NULL;
    lm_jw w;
    lm_code rc = LM_OK, end;

    lm_jw_begin(&w, json, 2, e);
    lm_subword_write(t, &w);
    lm_jw_obj(&w, "model");
    lm_jw_str(&w, "type", "WordPiece");
    lm_jw_str(&w, "unk_token", unk);
    lm_jw_str(&w, "continuing_subword_prefix", LM_TRAIN_PREFIX);
    lm_jw_int(&w, "max_input_chars_per_word", 100);
    lm_jw_obj(&w, "vocab");
    for (size_t i = 0; i < v->n_tokens && !rc; i++) {
        rc = lm_asprintf(&key, e, "%.*s", (int)v->tokens[i].len, v->text + v->tokens[i].off);
        if (!rc)
            lm_jw_int(&w, key, (int64_t)i);
        lm_free(key);
        key = NULL;
    }
    lm_jw_close_obj(&w);
    lm_jw_close_obj(&w);
    lm_jw_close_obj(&w);
    end = lm_jw_end(&w);
    return rc ? rc : end;
}

lm_code lm_wordpiece_train(const lm_bpe_trainer *t, const lm_words *words, lm_sink *sink,
                           lm_buf *json, lm_bpe_train_stats *stats, lm_err *e)
{
    lm_bpe_learned l = { .n_merges = 0 };
    letter *letters = NULL;
    size_t n = 0;
    lm_code rc = find_alphabet(words, t->limit_alphabet, &letters, &n, e);

    if (!rc)
        rc = begin_vocab(t, letters, n, &l.vocab, e);
    if (!rc)
        rc = lm_bpe_learn(&l, words, LM_TRAIN_PREFIX, t->vocab_size, t->min_frequency,
                          t->max_token_bytes, sink, e);
    if (!rc)
        rc = write_json(t, &l.vocab, json, e);
    stats->vocab_size = (int64_t)l.vocab.n_tokens;
    stats->merges = (int64_t)l.n_merges;
    lm_free(letters);
    lm_bpe_learned_fini(&l);
    return rc;
}
