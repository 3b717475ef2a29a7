/* SPDX-License-Identifier: Apache-2.0 */
/* The word table of bpe_count.h. */
#include "text/bpe_count.h"

#include <string.h>

#include "base/hash.h"
#include "base/mem.h"

static lm_word_cell *cell_of(const lm_words *w, const char *word, size_t len, uint32_t hash)
{
    size_t mask = w->n_cells - 1, i = hash & mask;

    for (; w->cells[i].count; i = (i + 1) & mask)
        if (w->cells[i].hash == hash && w->cells[i].len == len &&
            !memcmp(w->text + w->cells[i].off, word, len))
            break;
    return &w->cells[i];
}

static lm_code grow(lm_words *w, lm_err *e)
{
    lm_words big = { .n_cells = w->n_cells ? 2 * w->n_cells : 1 << 12 };
    lm_code rc = lm_alloc_n(&big.cells, big.n_cells, sizeof *big.cells, "word counts", e);

    if (rc)
        return rc;
    for (size_t i = 0; i < w->n_cells; i++) {
        if (!w->cells[i].count)
            continue;
        size_t k = w->cells[i].hash & (big.n_cells - 1);
        while (big.cells[k].count)
            k = (k + 1) & (big.n_cells - 1);
        big.cells[k] = w->cells[i];
    }
    lm_free(w->cells);
    w->cells = big.cells;
    w->n_cells = big.n_cells;
    return LM_OK;
}

lm_code lm_words_add(lm_words *w, const char *word, size_t len, int64_t count, lm_err *e)
{
    uint32_t hash = (uint32_t)lm_hash64(word, len, 0);
    lm_code rc;

    if (2 * w->n >= w->n_cells && (rc = grow(w, e)))
        return rc;
    lm_word_cell *s = cell_of(w, word, len, hash);
    if (s->count) {
        s->count += count;
        return LM_OK;
    }
    if (len > UINT32_MAX)
        return lm_fail(e, LM_ELIMIT, "training text", "use a pattern that cuts the text",
                       "a word of %zu bytes", len);
    rc = lm_grow(&w->text, &w->text_cap, w->text_len + len + 1, 1, "words", e);
    if (rc)
        return rc;
    memcpy(w->text + w->text_len, word, len);
    *s = (lm_word_cell){ w->text_len, (uint32_t)len, hash, count };
    w->text_len += len;
    w->n++;
    return LM_OK;
}

lm_word_cell *lm_words_find(const lm_words *w, const char *word, size_t len)
{
    lm_word_cell *s = w->n ? cell_of(w, word, len, (uint32_t)lm_hash64(word, len, 0)) : NULL;
    return s && s->count ? s : NULL;
}

lm_code lm_words_merge(lm_words *w, const lm_words *from, lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; i < from->n_cells && !rc; i++)
        if (from->cells[i].count)
            rc = lm_words_add(w, from->text + from->cells[i].off, from->cells[i].len,
                              from->cells[i].count, e);
    return rc;
}

void lm_words_fini(lm_words *w)
{
    lm_free(w->cells);
    lm_free(w->text);
    memset(w, 0, sizeof *w);
}
