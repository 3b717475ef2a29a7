/* SPDX-License-Identifier: Apache-2.0 */
/* kv_evaluate.c -- generators in step, their logits row by row. */
#include "compress/kv_evaluate.h"

#include <inttypes.h>
#include <math.h>

#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"

/* ---- one row ---- */

/* log sum exp and the first of the largest; false if there is no distribution. */
static bool normalise(const float *x, int64_t V, double *lse, int64_t *top)
{
    double sum = 0;

    *top = 0;
    for (int64_t k = 1; k < V; k++)
        if (x[k] > x[*top])
            *top = k;
    for (int64_t k = 0; k < V; k++)
        sum += exp((double)x[k] - (double)x[*top]);
    *lse = sum > 0 ? (double)x[*top] + log(sum) : NAN; /* one NaN makes the sum NaN; -Inf adds 0 */
    return isfinite(*lse);
}

bool lm_kv_compare_row(const float *reference, const float *logits, int64_t V, uint32_t next,
                       lm_kv_sums *sum)
{
    double lse_p, lse_q, kl = 0;
    int64_t top_p, top_q;

    if (!normalise(reference, V, &lse_p, &top_p) || !normalise(logits, V, &lse_q, &top_q))
        return false;
    for (int64_t k = 0; k < V && logits != reference; k++) {
        double p = (double)reference[k] - lse_p, q = (double)logits[k] - lse_q;
        if (p > -INFINITY)
            kl += exp(p) * (p - q);
    }
    kl = fmax(kl, 0); /* rounding of equal distributions */
    sum->tokens++;
    sum->nll += lse_q - (double)logits[next];
    sum->kl += kl;
    sum->kl_most = fmax(sum->kl_most, kl);
    sum->top1 += top_p == top_q;
    return true;
}

/* ---- rows of all generators ---- */

typedef struct {
    const lm_kv_candidate *c;
    int n;
    const lm_kv_text *t;
    int64_t V, slots;
    int64_t first;        /* window in slot 0 */
    int64_t at;           /* position whose next token is compared */
    const float **logits; /* [n]: rows of the slots, on the host */
    float **copy;         /* [n]: room for them, where the backend's memory is not the host's */
    int32_t *next;        /* [most slots of a generator] */
    lm_kv_sums *row;      /* [slots, n]: of the position alone */
    bool *good;           /* [slots, n] */
} run;

static uint32_t token(const run *r, int64_t slot, int64_t at)
{
    return r->t->ids[(r->first + slot) * r->t->length + at];
}

static void compare_slots(void *ctx, int64_t begin, int64_t end, int worker)
{
    const run *r = ctx;

    (void)worker;
    for (int64_t s = begin; s < end; s++)
        for (int i = 0; i < r->n; i++) {
            int64_t k = s * r->n + i;
            r->row[k] = (lm_kv_sums){ 0 };
            r->good[k] = lm_kv_compare_row(r->logits[0] + s * r->V, r->logits[i] + s * r->V, r->V,
                                           token(r, s, r->at + 1), &r->row[k]);
        }
}

static lm_code name_bad_row(const run *r, lm_err *e)
{
    for (int64_t k = 0; k < r->slots * r->n; k++)
        if (!r->good[k]) /* the reference's rows come first */
            return lm_fail(e, LM_ENUMERIC, "logits", "find what is not finite",
                           "%s: not numbers behind token %" PRId64 " of window %" PRId64,
                           r->c[k % r->n].name, r->at + 1, r->first + k / r->n + 1);
    return LM_OK;
}

/* Add the position r->at of all slots to the sums. */
static lm_code compare(run *r, lm_kv_sums *sum, lm_err *e)
{
    lm_par_for(r->t->par, r->slots, 1, compare_slots, r);
    if (name_bad_row(r, e))
        return e->code;
    for (int64_t s = 0; s < r->slots; s++)
        for (int i = 0; i < r->n; i++) {
            const lm_kv_sums *one = &r->row[s * r->n + i];
            sum[i].tokens += one->tokens;
            sum[i].nll += one->nll;
            sum[i].kl += one->kl;
            sum[i].kl_most = fmax(sum[i].kl_most, one->kl_most);
            sum[i].top1 += one->top1;
        }
    if (r->t->done)
        r->t->done(r->t->ctx, sum[0].tokens);
    return LM_OK;
}

/* Copy rows of generator i to the host: its row 0 becomes that of `slot`. */
static lm_code fetch(const run *r, int i, int64_t slot, int64_t rows, const float *from, lm_err *e)
{
    lm_backend *b = r->t->b;

    if (b->copy(b, r->copy[i] + slot * r->V, from, (size_t)(rows * r->V) * sizeof *from, b->main,
                e))
        return e->code;
    return b->sync(b, b->main, e);
}

/* The leading tokens of each window: a generator holds the logits of one prompt at a time. */
static lm_code run_prompts(run *r, lm_err *e)
{
    for (int i = 0; i < r->n; i++) {
        r->logits[i] = r->copy[i];
        for (int64_t s = 0; s < r->slots; s++) {
            const float *got;
            const uint32_t *ids = r->t->ids + (r->first + s) * r->t->length;
            if (lm_generator_prompt(r->c[i].g, s, ids, r->t->prompt, &got, e) ||
                fetch(r, i, s, 1, got, e))
                return e->code;
        }
    }
    r->at = r->t->prompt - 1;
    return LM_OK;
}

static lm_code decode(run *r, lm_err *e)
{
    r->at++;
    for (int64_t s = 0; s < r->slots; s++)
        r->next[s] = (int32_t)token(r, s, r->at);
    for (int i = 0; i < r->n; i++) {
        const float *got;
        int64_t all = lm_generator_batch(r->c[i].g);
        for (int64_t s = r->slots; s < all; s++)
            r->next[s] = -1;
        if (lm_generator_decode(r->c[i].g, r->next, &got, e) ||
            (!r->t->b->host_memory && fetch(r, i, 0, r->slots, got, e)))
            return e->code;
        r->logits[i] = r->t->b->host_memory ? got : r->copy[i];
    }
    return LM_OK;
}

static lm_code run_windows(run *r, lm_kv_sums *sum, lm_err *e)
{
    if (run_prompts(r, e) || compare(r, sum, e))
        return e->code;
    while (r->at + 2 < r->t->length && !lm_stopping())
        if (decode(r, e) || compare(r, sum, e))
            return e->code;
    return LM_OK;
}

/* ---- all windows ---- */

/* The slots that all generators have, and the most that one has. */
static lm_code check(run *r, int64_t *most, lm_err *e)
{
    const lm_kv_text *t = r->t;

    r->V = lm_generator_vocab(r->c[0].g);
    r->slots = t->windows;
    *most = 1;
    for (int i = 0; i < r->n; i++) {
        const lm_generator *g = r->c[i].g;
        int64_t all = lm_generator_batch(g);
        if (lm_generator_vocab(g) != r->V)
            return lm_fail(e, LM_EUSAGE, r->c[i].name, "compare caches of one model",
                           "%" PRId64 " tokens in its vocabulary, %" PRId64 " in that of %s",
                           lm_generator_vocab(g), r->V, r->c[0].name);
        if (lm_generator_context(g) < t->length)
            return lm_fail(e, LM_EUSAGE, r->c[i].name, "use shorter windows",
                           "a context of %" PRId64 " token%s, windows of %" PRId64,
                           lm_generator_context(g), lm_plural(lm_generator_context(g)), t->length);
        r->slots = all < r->slots ? all : r->slots;
        *most = all > *most ? all : *most;
    }
    if (t->windows < 1 || t->length < 2 || t->prompt < 1 || t->prompt >= t->length)
        return lm_fail(e, LM_EUSAGE, "windows", "use at least two tokens, one of them as a prompt",
                       "%" PRId64 " of %" PRId64 " tokens, %" PRId64 " of them as a prompt",
                       t->windows, t->length, t->prompt);
    return LM_OK;
}

static lm_code make_room(run *r, int64_t most, lm_err *e)
{
    size_t n = (size_t)r->n, rows = (size_t)r->slots * n;

    if (lm_alloc_n(&r->logits, n, sizeof *r->logits, "logits", e) ||
        lm_alloc_n(&r->copy, n, sizeof *r->copy, "logits", e) ||
        lm_alloc_n(&r->next, (size_t)most, sizeof *r->next, "slots", e) ||
        lm_alloc_n(&r->row, rows, sizeof *r->row, "rows", e) ||
        lm_alloc_n(&r->good, rows, sizeof *r->good, "rows", e))
        return e->code;
    for (size_t i = 0; i < n; i++)
        if (lm_alloc_n(&r->copy[i], (size_t)(r->slots * r->V), sizeof **r->copy, "logits", e))
            return e->code;
    return LM_OK;
}

static void drop_room(run *r)
{
    for (int i = 0; r->copy && i < r->n; i++)
        lm_free(r->copy[i]);
    lm_free(r->copy);
    lm_free((void *)r->logits);
    lm_free(r->next);
    lm_free(r->row);
    lm_free(r->good);
}

lm_code lm_kv_compare(const lm_kv_candidate *c, int n, const lm_kv_text *t, lm_kv_sums *sum,
                      lm_err *e)
{
    run r = { .c = c, .n = n, .t = t };
    int64_t most, slots;

    if (check(&r, &most, e))
        return e->code;
    slots = r.slots;
    lm_code rc = make_room(&r, most, e);
    for (; !rc && r.first < t->windows && !lm_stopping(); r.first += r.slots) {
        r.slots = t->windows - r.first < slots ? t->windows - r.first : slots;
        rc = run_windows(&r, sum, e);
    }
    drop_room(&r);
    return rc;
}
