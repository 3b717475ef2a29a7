/* SPDX-License-Identifier: Apache-2.0 */
/* mlm.c -- masked language modelling. */
#include "train/mlm.h"

#include <string.h>

#include "base/mem.h"
#include "base/rng.h"

static const double to_mask = 0.8, to_mask_or_drawn = 0.9;

lm_code lm_mlm_init(lm_mlm *m, const lm_tokenizer *t, int64_t vocab, const char *where, lm_err *e)
{
    static const char word_piece[] = "WordPiece", continues[] = "##";
    uint8_t *kind = NULL;
    m->mask = lm_tokenizer_mask(t);
    m->words = 0;
    if (m->mask < 0 || m->mask >= vocab)
        return lm_fail(e, LM_EUSAGE, where, "use a model whose tokenizer has one, such as [MASK]",
                       "its tokenizer has no mask token");
    if (m->whole_words && strcmp(lm_tokenizer_model(t), word_piece) != 0)
        return lm_fail(e, LM_EUSAGE, where, "leave whole words out",
                       "its tokenizer has a %s model: words are known of %s alone",
                       lm_tokenizer_model(t), word_piece);
    if (lm_alloc_n(&kind, (size_t)vocab, 1, "kinds of tokens", e))
        return e->code;
    for (int64_t i = 0; i < vocab; i++) {
        size_t len = 0;
        const char *token = lm_tokenizer_token(t, (uint32_t)i, &len);
        if (token)
            m->words = i + 1;
        if (!token || lm_tokenizer_is_special(t, (uint32_t)i))
            kind[i] = LM_MLM_SPECIAL;
        else if (len > strlen(continues) && !memcmp(token, continues, strlen(continues)))
            kind[i] = LM_MLM_CONTINUES;
    }
    /* also where the tokenizer's file does not call them special */
    const int64_t also[] = { m->mask, lm_tokenizer_bos(t), lm_tokenizer_eos(t), lm_tokenizer_pad(t),
                             lm_tokenizer_unk(t) };
    for (size_t i = 0; i < sizeof also / sizeof *also; i++)
        if (also[i] >= 0 && also[i] < vocab)
            kind[also[i]] = LM_MLM_SPECIAL;
    m->kind = kind;
    return LM_OK;
}

void lm_mlm_fini(lm_mlm *m)
{
    lm_free((void *)(uintptr_t)m->kind);
    m->kind = NULL;
}

static unsigned kind_of(const lm_mlm *m, int32_t token)
{
    if (!m->kind)
        return 0;
    return token < m->words ? m->kind[token] : LM_MLM_SPECIAL;
}

/* What stands in the place of `token`; number i of the draws that follow each other. */
static int32_t replaced(const lm_mlm *m, lm_rng r, uint64_t i, int32_t token)
{
    double u = lm_rng_uniform(r, i);
    if (u < to_mask)
        return (int32_t)m->mask;
    return u < to_mask_or_drawn ? (int32_t)lm_rng_below(r, i + 1, (uint64_t)m->words) : token;
}

int64_t lm_mlm_apply(const lm_mlm *m, uint64_t seed, int64_t index, int64_t n,
                     const uint8_t *trains, int32_t *tokens, int32_t *targets)
{
    enum { DRAWS = 3 }; /* of a place */
    const lm_rng r = lm_rng_make(seed, "mlm", (uint64_t)index);
    bool word = false, open = false; /* the word is chosen; a piece may continue it */
    int64_t chosen = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t draw = (uint64_t)i * DRAWS;
        unsigned kind = kind_of(m, tokens[i]);
        bool special = kind & LM_MLM_SPECIAL;
        if (!m->whole_words || !open || !(kind & LM_MLM_CONTINUES))
            word = lm_rng_uniform(r, draw) < m->share;
        open = !special;
        targets[i] = -1;
        if (special || !word || (trains && !trains[i]))
            continue;
        targets[i] = tokens[i];
        tokens[i] = replaced(m, r, draw + 1, tokens[i]);
        chosen++;
    }
    return chosen;
}
