/* SPDX-License-Identifier: Apache-2.0 */
/* The word table of bpe_count.h. */
#include "text/bpe_count.h"

#include <string.h>

#include "base/hash.h"
#include "base/mem.h"

static lm_word_slot *slot_of(const lm_words *w, const char *word, size_t len, uint32_t hash)
{
    size_t mask = w->n_slots - 1, i = hash & mask;

    for (; w->slots[i].count; i = (i + 1) & mask)
        if (w->slots[i].hash == hash && w->slots[i].len == len &&
            !memcmp(w->text + w->slots[i].off, word, len))
            break;
    return &w->slots[i];
}

static lm_code grow(lm_words *w, lm_err *e)
{
    lm_words big = { .n_slots = w->n_slots ? 2 * w->n_slots : 1 << 12 };
    lm_code rc = lm_alloc_n(&big.slots, big.n_slots, sizeof *big.slots, "word counts", e);

    if (rc)
        return rc;
    for (size_t i = 0; i < w->n_slots; i++) {
        if (!w->slots[i].count)
            continue;
        size_t k = w->slots[i].hash & (big.n_slots - 1);
        while (big.slots[k].count)
            k = (k + 1) & (big.n_slots - 1);
        big.slots[k] = w->slots[i];
    }
    lm_free(w->slots);
    w->slots = big.slots;
    w->n_slots = big.n_slots;
    return LM_OK;
}

lm_code lm_words_add(lm_words *w, const char *word, size_t len, int64_t count, lm_err *e)
{
    uint32_t hash = (uint32_t)lm_hash64(word, len, 0);
    lm_code rc;

    if (2 * w->n >= w->n_slots && (rc = grow(w, e)))
        return rc;
    lm_word_slot *s = slot_of(w, word, len, hash);
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
    *s = (lm_word_slot){ w->text_len, (uint32_t)len, hash, count };
    w->text_len += len;
    w->n++;
    return LM_OK;
}

lm_code lm_words_merge(lm_words *w, const lm_words *from, lm_err *e)
{
    lm_code rc = LM_OK;

    for (size_t i = 0; i < from->n_slots && !rc; i++)
        if (from->slots[i].count)
            rc = lm_words_add(w, from->text + from->slots[i].off, from->slots[i].len,
                              from->slots[i].count, e);
    return rc;
}

void lm_words_fini(lm_words *w)
{
    lm_free(w->slots);
    lm_free(w->text);
    memset(w, 0, sizeof *w);
}
