/* prune.c -- see prune.h. */
#include "merge/prune.h"

#include <math.h>
#include <string.h>

#include "base/hash.h"

/* Keep what is below it: a draw is 32 bits. */
static uint64_t limit(double p)
{
    return p <= 0 ? 0 : p >= 1 ? UINT64_C(1) << 32 : (uint64_t)(p * 0x1p32);
}

static lm_code ranked_range(const lm_merge_job *j, int i, const lm_prune_part *p, lm_err *e)
{
    if (p->density - p->epsilon > 0 && p->density + p->epsilon < 1)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, j->name, "take a smaller epsilon",
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
        lm_log(j->sink, LM_LOG_WARN, "%s: density %g keeps nothing of model %d", j->name, density,
               i + 1);
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

/* Entries by their bits, ascending, equal ones as they came; the result is in a. */
static void sort(lm_blend_entry *a, lm_blend_entry *other, int64_t n, int bits)
{
    lm_blend_entry *from = a, *to = other;
    for (int shift = 0; shift < bits; shift += DIGIT) {
        uint32_t start[DIGITS] = { 0 }, sum = 0;
        for (int64_t i = 0; i < n; i++)
            start[from[i].bits >> shift & (DIGITS - 1)]++;
        for (int k = 0; k < DIGITS; k++) {
            uint32_t here = start[k];
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

void lm_prune_row(const lm_blend *b, const lm_prune_part *p, const void *d, int64_t at,
                  int64_t cols, void *keep, lm_blend_entry *order)
{
    lm_dtype real = b->real == 8 ? LM_DTYPE_F64 : LM_DTYPE_F32;
    uint64_t bits[256];
    uint32_t draw[256];
    for (int64_t k = 0; k < cols; k += 256) { /* of equal ones the lower index ranks higher */
        int64_t n = cols - k < 256 ? cols - k : 256;
        b->bits((const char *)d + (size_t)k * b->real, bits, n);
        for (int64_t i = 0; i < n; i++)
            order[cols - 1 - k - i] = (lm_blend_entry){ bits[i], k + i };
    }
    sort(order, order + cols, cols, b->real == 8 ? 63 : 31);
    for (int64_t r = 0; r < cols; r++) {
        double share = cols > 1 ? (double)r / (double)(cols - 1) : 0.5;
        double chance = p->density > 0 ? p->density - p->epsilon + 2 * p->epsilon * share : 0;
        lm_set(real, keep, order[r].index, chance);
    }
    for (int64_t k = 0; k < cols; k += 256) {
        int64_t n = cols - k < 256 ? cols - k : 256;
        b->draws(p->rng, at + k, draw, n);
        for (int64_t i = 0; i < n; i++) {
            double chance = lm_get(real, keep, k + i);
            bool kept = draw[i] < limit(chance);
            lm_set(real, keep, k + i, kept ? p->scale / (p->inverse ? chance : 1) : 0);
        }
    }
}
