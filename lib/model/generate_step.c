/* SPDX-License-Identifier: Apache-2.0 */
/* generate_step.c -- decoding: appends a token to each active slot, in rows up to the last active
 * one; and moves slots together so that few rows are needed. */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "model/generate_impl.h"

int generator_widths(int64_t batch, int64_t width[MOST_WIDTHS])
{
    int n = 0;
    for (int64_t rows = 1; rows < batch && n < MOST_WIDTHS - 1; n++) {
        width[n] = rows;
        if (rows < 8)
            rows++;
        else
            rows += (rows & (rows - 1)) ? rows / 3 : rows / 2; /* 8, 12, 16, 24, 32, 48, ... */
    }
    width[n] = batch;
    return n + 1;
}

/* ---- recordings ---- */

void generator_forget_recordings(lm_generator *g)
{
    for (int i = 0; i < g->n_decode; i++) {
        decode_width *d = &g->decode[i];
        if (d->recorded)
            g->b->recording_free(g->b, d->recorded);
        d->recorded = NULL;
        d->ran = false;
    }
    g->replayed = NULL;
}

/* All work of a token: only numbers in memory change between steps. */
static lm_code put_step(lm_generator *g, decode_width *d, lm_err *e)
{
    return generator_put_graph(&d->s, e) ? e->code : generator_put_choice(g, &g->chosen, e);
}

/* Steps with another choice need another recording, made after their kernels have run once. */
static void take_choice(lm_generator *g, const lm_choice *c)
{
    if (!memcmp(&g->chosen.how, &c->how, sizeof c->how) && g->chosen.logprob == c->logprob)
        return;
    generator_forget_recordings(g);
    g->chosen = *c;
}

typedef struct {
    lm_generator *g;
    decode_width *d;
} step_of;

static lm_code put_recorded(void *ctx, lm_err *e)
{
    const step_of *s = ctx;
    return put_step(s->g, s->d, e);
}

/* Record a step if the backend supports it and nodes are not timed. */
static void record_step(lm_generator *g, decode_width *d)
{
    step_of s = { g, d };
    lm_exec_span timed;
    g->unrecorded = !g->b->record_begin || lm_exec_span_at(d->s.x, 0, &timed) ||
                    lm_record(g->b, put_recorded, &s, &d->recorded, &g->refused);
}

/* ---- steps ---- */

decode_width *generator_width_of(lm_generator *g, const int32_t *next)
{
    int64_t rows = g->batch;
    int i = 0;
    while (rows > 1 && next[rows - 1] < 0)
        rows--;
    while (g->decode[i].rows < rows)
        i++;
    return &g->decode[i];
}

/* Write the inputs of the next step of all slots. */
static lm_code set_step(lm_generator *g, const int32_t *next, decode_width **out, lm_err *e)
{
    decode_width *d = generator_width_of(g, next);
    row_graph *s = &d->s;
    if (generator_wait_for_last(g, e))
        return e->code;
    for (int64_t i = 0; i < d->rows; i++)
        if (next[i] >= 0 && g->used[i] >= g->context)
            return lm_fail(e, LM_EUSAGE, "context", "give a longer one",
                           "%" PRId64 " tokens are its capacity", g->context);
    if (g->keep && generator_keep_step(g, &s->keep, next, d->rows, e))
        return e->code;
    for (int64_t i = 0; i < d->rows; i++) {
        bool on = next[i] >= 0;
        s->tokens[i] = on ? next[i] : 0;
        s->pos[i] = on ? (int32_t)(g->keep ? generator_keep_rank(g, i) : g->used[i]) : 0;
        s->used[i] = on ? (int32_t)g->used[i] : 0;
        s->fresh[i] = on;
        s->rows[i] = (int32_t)i;
        if (on)
            ((int32_t *)g->choice.seen.host)[i * g->context + g->used[i]] = next[i];
        g->used[i] += on;
    }
    g->last = s;
    g->last_slot = 0;
    *out = d;
    return LM_OK;
}

lm_code lm_generator_decode(lm_generator *g, const int32_t *next, const float **logits, lm_err *e)
{
    decode_width *d;
    if (set_step(g, next, &d, e))
        return e->code;
    g->b->range(g->b, "decode");
    lm_code rc = generator_put_graph(&d->s, e);
    g->b->range(g->b, NULL);
    if (!rc && logits)
        *logits = lm_exec_data(d->s.x, d->s.m->logits);
    return rc;
}

lm_code lm_generator_next(lm_generator *g, const int32_t *next, const lm_sample_attr *o,
                          const double *u, const int32_t **ids, const double **logprob, lm_err *e)
{
    const lm_choice what = { *o, logprob != NULL };
    decode_width *d;
    if (set_step(g, next, &d, e) || generator_ask(g, &what, u, e))
        return e->code;
    take_choice(g, &what);
    if (d->ran && !d->recorded && !g->unrecorded)
        record_step(g, d);
    d->ran = true;
    g->replayed = d->recorded;
    g->b->range(g->b, "decode"); /* a profiler does not show the parts of a recording */
    lm_code rc = d->recorded ? g->b->replay(g->b, d->recorded, g->b->main, e) : put_step(g, d, e);
    g->b->range(g->b, NULL);
    return rc ? rc : generator_answer(g, ids, logprob, e);
}

/* ---- slots ---- */

/* Copy the filled rows of each head, the pages that have some, or the tail. */
static lm_code copy_slot(const lm_generator *g, const lm_cache_state *c, const slot_cache *y,
                         int64_t from, int64_t to, lm_err *e)
{
    size_t bytes = y->piece_bytes;
    int64_t n = y->pieces;
    if (y->page)
        n = ((g->keep ? generator_keep_used(g, from, c->layer) : g->used[from]) + y->page - 1) /
            y->page;
    else if (c->paged)
        bytes = bytes / (size_t)g->context * (size_t)g->used[from];
    for (int64_t i = 0; bytes && i < n; i++) {
        char *at = g->cache + y->at + (size_t)i * y->piece_bytes;
        if (g->b->copy(g->b, at + (size_t)to * y->slot_bytes, at + (size_t)from * y->slot_bytes,
                       bytes, g->b->main, e))
            return e->code;
    }
    return LM_OK;
}

lm_code lm_generator_copy(lm_generator *g, int64_t from, int64_t to, lm_err *e)
{
    int32_t *seen = g->choice.seen.host;
    if (from == to)
        return LM_OK;
    if (generator_wait_for_last(g, e))
        return e->code;
    for (int i = 0; i < generator_model(g)->n_caches; i++)
        if (copy_slot(g, &generator_model(g)->cache[i], &g->caches[i], from, to, e))
            return e->code;
    if ((g->keep && generator_keep_copy(g, from, to, e)) ||
        (g->draft && generator_draft_copy(g, from, to, e)) ||
        (g->source && generator_source_copy(g, from, to, e)))
        return e->code;
    memcpy(seen + to * g->context, seen + from * g->context, (size_t)g->used[from] * sizeof *seen);
    g->used[to] = g->used[from];
    g->choice.sent[to] = 0;
    return LM_OK;
}
