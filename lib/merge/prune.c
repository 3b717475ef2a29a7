/* SPDX-License-Identifier: Apache-2.0 */
/* prune.c -- see prune.h. */
#include "merge/prune.h"

#include <math.h>
#include <string.h>

#include "base/hash.h"

/* A draw of 32 bits below this number keeps an element (draw < p 2^32). */
static uint64_t limit(double p)
{
    return p <= 0 ? 0 : p >= 1 ? UINT64_C(1) << 32 : (uint64_t)ceil(p * 0x1p32);
}

static lm_code ranked_range(const lm_merge_job *j, int i, const lm_prune_part *p, lm_err *e)
{
    if (p->density - p->epsilon > 0 && p->density + p->epsilon < 1)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, j->name, "choose a smaller epsilon",
                   "model %d: density %g -+ epsilon %g must stay between 0 and 1", i + 1,
                   p->density, p->epsilon);
}

lm_code lm_prune_plan(const lm_merge_job *j, int i, lm_prune how, lm_prune_part *p, lm_err *e)
{
    int64_t n = j->count, kept, most;
    double density = lm_merge_of(j, i, LM_MERGE_DENSITY, j->param[LM_MERGE_DENSITY]);
    double gamma = lm_merge_of(j, i, LM_MERGE_GAMMA, j->param[LM_MERGE_GAMMA]);
    bool expected = j->param[LM_MERGE_RESCALE] == LM_RESCALE_EXPECTED;
    *p = (lm_prune_part){ .of = &j->model[i], .how = how, .density = density, .scale = 1 };
    p->epsilon = lm_merge_of(j, i, LM_MERGE_EPSILON, j->param[LM_MERGE_EPSILON]);
    p->rng = lm_rng_make(j->seed, "merge", lm_hash_str(j->name) ^ (uint64_t)i);
    kept = (int64_t)(density * (double)n);
    if (!(density < 1))
        p->how = LM_PRUNE_NONE;
    else if (how == LM_PRUNE_SMALL)
        p->top.k = kept < 1 && density > 0 ? 1 : kept;
    else if (how == LM_PRUNE_BOTH_ENDS) {
        most = n - kept - (int64_t)(gamma * (double)n); /* dropped at the lower end */
        p->top.k = n - (most > 0 ? most : 0);
        p->out.k = p->top.k - kept;
    } else if (how == LM_PRUNE_RANKED && density > 0) {
        p->inverse = expected;
        if (ranked_range(j, i, p, e))
            return e->code;
    } else if (how == LM_PRUNE_DRAWN && expected && density > 0) {
        p->scale = 1 / density;
    }
    if (density <= 0 || (how == LM_PRUNE_BOTH_ENDS && p->how && !kept))
        lm_log(j->sink, LM_LOG_WARN, "%s: density %g keeps no element of model %d", j->name,
               density, i + 1);
    return LM_OK;
}

void lm_prune_block(const lm_blend *b, const lm_prune_part *p, void *d, int64_t at, int64_t n,
                    const void *keep, uint32_t *draw)
{
    switch (p->how) {
    case LM_PRUNE_NONE:
        break;
    case LM_PRUNE_SMALL:
        lm_merge_keep(b, d, at, n, &p->top, NULL, p->scale);
        break;
    case LM_PRUNE_BOTH_ENDS:
        lm_merge_keep(b, d, at, n, &p->top, &p->out, p->scale);
        break;
    case LM_PRUNE_DRAWN:
        b->draws(p->rng, at, draw, n);
        b->keep_drawn(d, draw, limit(p->density), p->scale, n);
        break;
    case LM_PRUNE_RANKED:
        b->keep_each(d, keep, n);
        break;
    }
}

enum { DIGIT = 11, DIGITS = 1 << DIGIT };

/* Entries by their bits, ascending, equal ones in their order; the result is in a. */
static void sort(lm_blend_entry *a, lm_blend_entry *other, int64_t n)
{
    lm_blend_entry *from = a, *to = other;
    for (int shift = 0; shift < 63; shift += DIGIT) {
        int64_t start[DIGITS] = { 0 }, sum = 0;
        for (int64_t i = 0; i < n; i++)
            start[from[i].bits >> shift & (DIGITS - 1)]++;
        for (int k = 0; k < DIGITS; k++) {
            int64_t here = start[k];
            start[k] = sum;
            sum += here;
        }
        for (int64_t i = 0; i < n; i++)
            to[start[from[i].bits >> shift & (DIGITS - 1)]++] = from[i];
        lm_blend_entry *t = from;
        from = to;
        to = t;
    }
    if (from != a)
        memcpy(a, from, (size_t)n * sizeof *a);
}

/* The same for 31 bits in the upper half of a word: three digits, counted in one pass. */
static void sort_words(uint64_t *a, uint64_t *other, int64_t n)
{
    uint32_t start[3][DIGITS] = { 0 };
    for (int64_t i = 0; i < n; i++)
        for (int d = 0; d < 3; d++)
            start[d][a[i] >> (32 + d * DIGIT) & (DIGITS - 1)]++;
    for (int d = 0; d < 3; d++) {
        uint32_t sum = 0;
        for (int k = 0; k < DIGITS; k++) {
            uint32_t here = start[d][k];
            start[d][k] = sum;
            sum += here;
        }
        for (int64_t i = 0; i < n; i++)
            other[start[d][a[i] >> (32 + d * DIGIT) & (DIGITS - 1)]++] = a[i];
        uint64_t *t = a;
        a = other;
        other = t;
    }
    /* after three passes the result is in the other array */
    memcpy(other, a, (size_t)n * sizeof *a);
}

/* Columns of a row by magnitude, ascending; of equal ones the lower index ranks higher.  True:
 * their indices are the low halves of words at `order`; otherwise they are in the entries. */
static bool rank(const lm_blend *b, const void *d, int64_t cols, lm_blend_entry *order)
{
    bool words = b->real == 4 && cols <= UINT32_MAX;
    uint64_t bits[256], *word = (uint64_t *)order;
    for (int64_t k = 0; k < cols; k += 256) {
        int64_t n = cols - k < 256 ? cols - k : 256;
        b->bits((const char *)d + (size_t)k * b->real, bits, n);
        for (int64_t i = 0; i < n; i++)
            if (words)
                word[cols - 1 - k - i] = bits[i] << 32 | (uint64_t)(k + i);
            else
                order[cols - 1 - k - i] = (lm_blend_entry){ bits[i], k + i };
    }
    if (words)
        sort_words(word, word + cols, cols);
    else
        sort(order, order + cols, cols);
    return words;
}

void lm_prune_row(const lm_blend *b, const lm_prune_part *p, const void *d, int64_t at,
                  int64_t cols, void *keep, lm_blend_entry *order)
{
    bool words = rank(b, d, cols, order);
    const uint64_t *word = (const uint64_t *)order;
    double *chance = (double *)(order + cols); /* ranks are taken from the first half only */
    uint32_t *draw = (void *)(chance + cols);
    double low = p->density - p->epsilon, step = 2 * p->epsilon;
    if (cols == 1 || p->density <= 0) {
        low = p->density;
        step = 0;
    } else {
        step /= (double)(cols - 1);
    }
    for (int64_t r = 0; r < cols; r++)
        chance[words ? (int64_t)(uint32_t)word[r] : order[r].index] = low + step * (double)r;
    for (int64_t k = 0; k < cols; k += LM_BLEND_BLOCK)
        b->draws(p->rng, at + k, draw + k, cols - k < LM_BLEND_BLOCK ? cols - k : LM_BLEND_BLOCK);
    for (int64_t i = 0; i < cols; i++) {
        double by = p->inverse ? p->scale / chance[i] : p->scale;
        chance[i] = (double)draw[i] < chance[i] * 0x1p32 ? by : 0;
    }
    for (int64_t k = 0; k < cols; k += LM_BLEND_BLOCK)
        b->load(LM_DTYPE_F64, chance, k, (char *)keep + (size_t)k * b->real,
                cols - k < LM_BLEND_BLOCK ? cols - k : LM_BLEND_BLOCK);
}
