/* SPDX-License-Identifier: Apache-2.0 */
/* subword.c -- see subword.h. */
#include "text/subword.h"

#include <string.h>

#include "base/mem.h"
#include "base/text.h"
#include "text/pretok_class.h"

enum { UNKNOWN_PENALTY = 10 }; /* below the lowest score, as in SentencePiece */

void lm_subword_fini(lm_subword *s)
{
    lm_trie_fini(&s->trie);
    lm_free(s->score);
    lm_free(s->prefix);
    memset(s, 0, sizeof *s);
}

void lm_subword_scratch_fini(lm_subword_scratch *s)
{
    lm_free(s->best);
    memset(s, 0, sizeof *s);
}

lm_code lm_subword_index(lm_subword *s, const lm_bpe *vocab, const char *prefix, const char *where,
                         lm_err *e)
{
    lm_trie_string *v = NULL;
    size_t n = 0;
    lm_code rc = lm_alloc_n(&v, vocab->n_tokens, sizeof *v, "the vocabulary", e);

    for (size_t id = 0; id < vocab->n_ids && !rc; id++)
        if (vocab->tokens[id].off != LM_BPE_NONE)
            v[n++] = (lm_trie_string){ vocab->text + vocab->tokens[id].off, vocab->tokens[id].len,
                                       (uint32_t)id };
    if (!rc)
        rc = lm_trie_build(&s->trie, v, n, where, e);
    lm_free(v);
    s->inside = LM_TRIE_ROOT;
    if (!rc && prefix)
        rc = lm_strdup(&s->prefix, prefix, e);
    for (size_t i = 0; prefix && prefix[i] && !rc && s->inside != LM_TRIE_NONE; i++)
        s->inside = lm_trie_step(&s->trie, s->inside, (uint8_t)prefix[i]);
    return rc;
}

void lm_subword_set_unknown(lm_subword *s, const lm_bpe *vocab)
{
    double least = 0;
    bool any = false;

    for (size_t id = 0; id < vocab->n_ids; id++) {
        if (vocab->tokens[id].off == LM_BPE_NONE)
            continue;
        least = !any || s->score[id] < least ? s->score[id] : least;
        any = true;
    }
    s->unknown = least - UNKNOWN_PENALTY;
}

static lm_code need_unknown(const lm_bpe *vocab, lm_err *e)
{
    if (vocab->unk_id != LM_BPE_NONE)
        return LM_OK;
    if (vocab->unk_name)
        return lm_fail(e, LM_EFORMAT, "tokenizer", NULL,
                       "unk_token \"%s\" is needed and is not in the vocabulary", vocab->unk_name);
    return lm_fail(e, LM_EFORMAT, "tokenizer", NULL,
                   "a character has no token, and there is no unk_id");
}

/* ---- WordPiece ---- */

static bool is_longer(const uint8_t *p, const uint8_t *end, size_t most)
{
    size_t n = 0;

    if ((size_t)(end - p) <= most)
        return false;
    for (; p < end && n <= most; p++)
        n += (*p & 0xC0) != 0x80;
    return n > most;
}

static lm_code encode_wordpiece(const lm_subword *s, const lm_bpe *vocab, const char *word,
                                size_t len, uint32_t *ids, size_t *n, lm_err *e)
{
    const uint8_t *p = (const uint8_t *)word, *end = p + len;
    uint32_t node = LM_TRIE_ROOT;
    bool bad = is_longer(p, end, s->most_chars);

    *n = 0;
    while (p < end && !bad) {
        const uint8_t *longest = NULL;
        for (const uint8_t *q = p; q < end && node != LM_TRIE_NONE;) {
            node = lm_trie_step(&s->trie, node, *q++);
            if (node != LM_TRIE_NONE && s->trie.cell[node].id != LM_TRIE_NONE) {
                longest = q;
                ids[*n] = s->trie.cell[node].id;
            }
        }
        bad = !longest;
        *n += longest != NULL;
        p = longest ? longest : end;
        node = s->inside;
    }
    if (!bad)
        return LM_OK;
    ids[0] = vocab->unk_id;
    *n = 1;
    return need_unknown(vocab, e);
}

/* ---- Unigram ---- */

static inline void improve(lm_subword_scratch *w, size_t from, size_t to, double score, uint32_t id)
{
    double sum = score + w->best[from].score;

    if (w->best[to].from == LM_TRIE_NONE || sum > w->best[to].score) {
        w->best[to].score = sum;
        w->best[to].from = (uint32_t)from;
        w->best[to].id = id;
    }
}

/* The best cuts that end at each position of the word. */
static lm_code find_best(const lm_subword *s, const lm_bpe *vocab, lm_subword_scratch *w,
                         const uint8_t *p, size_t len, lm_err *e)
{
    unsigned k;
    lm_code rc;

    for (size_t i = 0; i <= len; i++)
        w->best[i].from = LM_TRIE_NONE;
    w->best[0].score = 0;
    for (size_t from = 0; from < len; from += k) {
        uint32_t node = LM_TRIE_ROOT;
        bool single = false;
        lm_class_get(p + from, &k);
        for (size_t to = from; to < len;) {
            node = lm_trie_step(&s->trie, node, p[to++]);
            if (node == LM_TRIE_NONE)
                break;
            uint32_t id = s->trie.cell[node].id;
            if (id == LM_TRIE_NONE)
                continue;
            improve(w, from, to, s->score[id], id);
            single |= to - from == k;
        }
        if (single)
            continue;
        if (vocab->unk_id == LM_BPE_NONE && (rc = need_unknown(vocab, e)))
            return rc;
        improve(w, from, from + k, s->unknown, vocab->unk_id);
    }
    return LM_OK;
}

/* One token of the cut, or a run of unknown characters, in front of ids[at..): returns the new
 * start.  A run may be a token itself, when its score is lower than theirs. */
static size_t put_part(const lm_bpe *vocab, const char *part, size_t len, uint32_t id,
                       uint32_t *ids, size_t at)
{
    bool bytes = vocab->byte_fallback;

    if (id == vocab->unk_id) {
        uint32_t whole = lm_bpe_find(vocab, part, len);
        id = whole != LM_BPE_NONE ? whole : id;
        bytes &= whole == LM_BPE_NONE;
    } else {
        bytes = false;
    }
    for (size_t i = 0; i < len && bytes; i++)
        bytes = vocab->fallback_id[(uint8_t)part[i]] != LM_BPE_NONE;
    if (!bytes) {
        ids[--at] = id;
        return at;
    }
    for (size_t i = len; i--;)
        ids[--at] = vocab->fallback_id[(uint8_t)part[i]];
    return at;
}

static lm_code encode_unigram(const lm_subword *s, const lm_bpe *vocab, lm_subword_scratch *w,
                              const char *word, size_t len, uint32_t *ids, size_t *n, lm_err *e)
{
    size_t at = len + 1, end = len;
    lm_code rc = len >= LM_TRIE_NONE
                     ? lm_fail(e, LM_ELIMIT, "encoding", "split the text into documents",
                               "a word of %zu bytes is too long", len)
                     : lm_grow(&w->best, &w->cap, len + 1, sizeof *w->best, "a word", e);

    if (!rc)
        rc = find_best(s, vocab, w, (const uint8_t *)word, len, e);
    if (rc)
        return rc;
    /* from the end of the word: parts are stored from the end of ids, then moved to its start */
    while (end) {
        size_t from = w->best[end].from;
        uint32_t id = w->best[end].id;
        while (id == vocab->unk_id && from && w->best[from].id == id)
            from = w->best[from].from;
        at = put_part(vocab, word + from, end - from, id, ids, at);
        end = from;
    }
    *n = len + 1 - at;
    memmove(ids, ids + at, *n * sizeof *ids);
    return LM_OK;
}

lm_code lm_subword_encode(const lm_subword *s, const lm_bpe *vocab, lm_subword_scratch *w,
                          const char *word, size_t len, uint32_t *ids, size_t *n, lm_err *e)
{
    if (s->kind == LM_SUBWORD_WORDPIECE)
        return encode_wordpiece(s, vocab, word, len, ids, n, e);
    return encode_unigram(s, vocab, w, word, len, ids, n, e);
}
