/* SPDX-License-Identifier: Apache-2.0 */
/* gkd.c -- steps that learn a teacher's distributions. */
#include "tune/align/gkd.h"

#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "tune/align/sums.h"

/* Texts of a round, their places, and what they gave. */
typedef struct {
    lm_align_text *text; /* [cap] */
    int64_t n;
    lm_texts places;
    lm_align_counts counts;
    lm_align_sums sums;
} lot;

struct lm_gkd {
    lm_gkd_opts o;
    lm_objective objective;
    lm_objective_site site;
    double lambda;
    lm_rollout *rollout;
    lm_arena *arena; /* ids of the step's samples */
    int64_t *record; /* [each] of the step */
    lot step, val;
    /* Of a micro-batch, an entry for each row. */
    lm_align_seq *seq;
    double *logp, *dlogp;
};

/* ---- texts ---- */

static lm_align_text text_of(const lm_text_answers *a, int64_t i)
{
    const lm_text_answer *x = lm_text_answers_at(a, i);
    return (lm_align_text){ x->ids, x->n, x->prompt };
}

/* The tokens of windows [0, windows). */
static void count_lot(lot *l, int64_t windows)
{
    l->counts = (lm_align_counts){ 0 };
    for (int64_t i = 0; i < l->n; i++)
        if (l->places.window[i] < windows) {
            l->counts.sequences++;
            l->counts.tokens += l->text[i].n - l->text[i].from;
        }
}

static lm_code place_lot(const lm_gkd *x, lot *l, lm_err *e)
{
    if (lm_texts_place(l->text, l->n, 1, x->site.seq, &l->places, e))
        return e->code;
    count_lot(l, l->places.windows);
    return LM_OK;
}

/* Each pass over the data in an order of its own. */
static void draw_records(lm_gkd *x, int64_t step)
{
    const uint64_t all = (uint64_t)lm_text_answers_count(x->o.train);
    for (int64_t k = 0; k < x->o.each; k++) {
        const uint64_t i = (uint64_t)(step * x->o.each + k);
        x->record[k] =
            (int64_t)lm_rng_permute(lm_rng_make(x->o.seed, "shuffle", i / all), i % all, all);
    }
}

static bool samples(const lm_gkd *x, int64_t step)
{
    return lm_rng_uniform(lm_rng_make(x->o.seed, "gkd", 0), (uint64_t)step) < x->lambda;
}

/* ---- completions of the student ---- */

/* The prompt of record k and what the student said. */
static lm_code join(lm_gkd *x, int64_t k, const lm_rollout_text *said, lm_err *e)
{
    const lm_align_text from = text_of(x->o.train, x->record[k]);
    uint32_t *ids;
    if (said->n < 1) /* nothing to learn from */
        return LM_OK;
    if (lm_arena_alloc(x->arena, &ids, (size_t)(from.from + said->n), sizeof *ids, e))
        return e->code;
    memcpy(ids, from.ids, (size_t)from.from * sizeof *ids);
    memcpy(ids + from.from, said->ids, (size_t)said->n * sizeof *ids);
    x->step.text[x->step.n++] = (lm_align_text){ ids, from.from + said->n, from.from };
    lm_align_metrics *m = &x->step.sums.metrics;
    lm_align_note(m, "completions/mean_length", (double)said->n, 1, LM_ALIGN_MEAN);
    lm_align_note(m, "completions/clipped_ratio", said->truncated, 1, LM_ALIGN_MEAN);
    return LM_OK;
}

static lm_code sample(lm_gkd *x, int64_t step, bool *whole, lm_err *e)
{
    const int64_t n = x->o.each;
    const lm_rollout_text *said = NULL;
    lm_rollout_prompt *ask;
    lm_arena_free(x->arena);
    x->arena = NULL;
    if (lm_arena_new(&x->arena, 1 << 16, e) ||
        lm_arena_alloc(x->arena, &ask, (size_t)n, sizeof *ask, e))
        return e->code;
    for (int64_t k = 0; k < n; k++) {
        const lm_align_text from = text_of(x->o.train, x->record[k]);
        ask[k] = (lm_rollout_prompt){ from.ids, from.from };
    }
    if (lm_rollout_run(x->rollout, step, ask, n, 1, &said, whole, NULL, e) || !*whole)
        return e->code;
    for (int64_t k = 0; k < n; k++)
        if (join(x, k, &said[k], e))
            return e->code;
    return LM_OK;
}

/* ---- the objective ---- */

static lm_code make_step(lm_gkd *x, int64_t step, bool *whole, lm_err *e)
{
    lot *l = &x->step;
    const bool own = samples(x, step);
    *whole = true;
    l->n = 0;
    draw_records(x, step);
    lm_align_note(&l->sums.metrics, "on_policy", own, 1, LM_ALIGN_MEAN);
    if (own)
        return sample(x, step, whole, e);
    for (int64_t k = 0; k < x->o.each; k++)
        l->text[l->n++] = text_of(x->o.train, x->record[k]);
    return LM_OK;
}

static lot *lot_of(lm_gkd *x, const lm_round *r)
{
    return r->val ? &x->val : &x->step;
}

static lm_code gkd_begin(void *ctx, const lm_round *r, int64_t *micros, lm_err *e)
{
    lm_gkd *x = ctx;
    lot *l = lot_of(x, r);
    bool whole = true;
    *micros = 0;
    if (r->val && !x->o.val)
        return LM_OK;
    lm_align_sums_begin(&l->sums);
    if (!r->val && make_step(x, r->step, &whole, e)) {
        if (x->site.comm) /* the others wait for its completions */
            lm_comm_abort(x->site.comm, e);
        return e->code;
    }
    if (!whole) {
        *micros = -1;
        return LM_OK;
    }
    if (place_lot(x, l, e))
        return e->code;
    *micros = (l->places.windows + x->site.batch - 1) / x->site.batch;
    if (r->val && x->o.check && *micros > x->o.check) {
        *micros = x->o.check;
        count_lot(l, *micros * x->site.batch);
    }
    return LM_OK;
}

static lm_code gkd_fill(void *ctx, const lm_round *r, int64_t micro, lm_batch *b, lm_err *e)
{
    lm_gkd *x = ctx;
    lot *l = lot_of(x, r);
    return lm_texts_fill(&l->places, l->text, micro * b->batch, x->o.vocab, b, e)
               ? e->code
               : lm_teacher_run(x->o.teacher, b, e);
}

static lm_code gkd_grade(void *ctx, const lm_round *r, int64_t micro, const lm_batch *b,
                         const lm_row_results *rows, const lm_row_slopes *to, lm_err *e)
{
    lm_gkd *x = ctx;
    lot *l = lot_of(x, r);
    const lm_texts *p = &l->places;
    const int64_t w = micro * b->batch, end = w + b->batch < p->windows ? w + b->batch : p->windows;
    lm_align_metrics metrics = { .n = 0 };
    lm_align_batch run = { .counts = &l->counts, .seq = x->seq, .metrics = &metrics };
    for (int64_t j = p->first[w]; j < p->first[end]; j++) {
        const lm_align_text *t = &l->text[p->order[j]];
        const int64_t at = lm_texts_row(p, l->text, p->order[j], w, b->batch);
        for (int64_t k = 0; k < t->n - t->from; k++)
            x->logp[at + k] = -(double)rows->nll[at + k];
        x->seq[run.n++] =
            (lm_align_seq){ .n = t->n - t->from, .logp = x->logp + at, .dlogp = x->dlogp + at };
    }
    if (lm_align_run(x->o.spec, &run, e) || lm_align_sums_add(&l->sums, run.loss, &metrics, e))
        return e->code;
    for (int64_t q = 0; to && q < run.n; q++)
        for (int64_t k = 0, at = x->seq[q].dlogp - x->dlogp; k < x->seq[q].n; k++)
            to->nll[at + k] = (float)-x->dlogp[at + k];
    return LM_OK;
}

static lm_code gkd_finish(void *ctx, const lm_round *r, double *loss, lm_err *e)
{
    lm_gkd *x = ctx;
    lm_align_sums *s = &lot_of(x, r)->sums;
    lm_code rc = lm_align_sums_join(s, x->site.comm, e);
    *loss = s->loss;
    return rc;
}

static void gkd_report(void *ctx, const lm_round *r, lm_metrics *m)
{
    const lm_align_metrics *x = &lot_of(ctx, r)->sums.metrics;
    for (int i = 0; i < x->n; i++)
        lm_metrics_f32(m, x->item[i].name, lm_align_value(&x->item[i]));
}

/* ---- life ---- */

static lm_code gkd_ready(void *ctx, const lm_objective_site *site, lm_err *e)
{
    lm_gkd *x = ctx;
    const size_t rows = (size_t)(site->batch * site->seq);
    const lm_rollout_site at = { .backend = site->backend,
                                 .comm = site->comm,
                                 .par = site->par,
                                 .config = site->config,
                                 .store = site->store,
                                 .model = site->model,
                                 .tokenizer = x->o.tokenizer };
    x->site = *site;
    if (lm_alloc_n(&x->seq, rows, sizeof *x->seq, "sequences", e) ||
        lm_alloc_n(&x->logp, rows, sizeof *x->logp, "divergences", e) ||
        lm_alloc_n(&x->dlogp, rows, sizeof *x->dlogp, "divergences", e) ||
        lm_teacher_load(x->o.teacher, site, e))
        return e->code;
    return x->lambda > 0 ? lm_rollout_new(&at, &x->o.rollout, &x->rollout, e) : LM_OK;
}

static lm_code make_lots(lm_gkd *x, lm_err *e)
{
    const int64_t each = x->o.each, val = x->o.val ? lm_text_answers_count(x->o.val) : 0;
    if (lm_alloc_n(&x->record, (size_t)each, sizeof *x->record, "records of a step", e) ||
        lm_alloc_n(&x->step.text, (size_t)each, sizeof *x->step.text, "records of a step", e) ||
        lm_alloc_n(&x->val.text, (size_t)val + 1, sizeof *x->val.text, "answers", e))
        return e->code;
    for (int64_t i = 0; i < val; i++)
        x->val.text[x->val.n++] = text_of(x->o.val, i);
    return LM_OK;
}

lm_code lm_gkd_new(const lm_gkd_opts *o, lm_gkd **out, lm_err *e)
{
    lm_gkd *x = NULL;
    *out = NULL;
    if (lm_alloc_n(&x, 1, sizeof *x, "distillation", e))
        return e->code;
    x->o = *o;
    x->lambda = lm_align_hyper(o->spec, "lambda", 0);
    x->objective = (lm_objective){ .ctx = x,
                                   .ready = gkd_ready,
                                   .begin = gkd_begin,
                                   .fill = gkd_fill,
                                   .grade = gkd_grade,
                                   .finish = gkd_finish,
                                   .report = gkd_report };
    if (make_lots(x, e)) {
        lm_gkd_free(x);
        return e->code;
    }
    *out = x;
    return LM_OK;
}

static void free_lot(lot *l)
{
    lm_free(l->text);
    lm_texts_fini(&l->places);
    lm_align_sums_fini(&l->sums);
}

void lm_gkd_free(lm_gkd *x)
{
    if (!x)
        return;
    lm_rollout_free(x->rollout);
    lm_arena_free(x->arena);
    free_lot(&x->step);
    free_lot(&x->val);
    lm_free(x->record);
    lm_free(x->seq);
    lm_free(x->logp);
    lm_free(x->dlogp);
    lm_free(x);
}

const lm_objective *lm_gkd_objective(const lm_gkd *x)
{
    return &x->objective;
}
