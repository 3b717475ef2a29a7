/* SPDX-License-Identifier: Apache-2.0 */
/* search_weights.c -- merges and validates candidates in memory. */
#include "merge/search_weights.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/stop.h"
#include "base/text.h"
#include "merge/search_log.h"
#include "numeric/format.h"
#include "text/tokenizer_source.h"
#include "train/window.h"

typedef struct {
    const lm_merge_plan *p;
    lm_merge_engine *g;
    const lm_merge_search_opts *o;
    lm_validator *v;
    int n;
    double *weight; /* [inputs] of the candidate */
    void *tensor;   /* the largest that the model has */
    size_t room;
    lm_buf line;
    int64_t seen, total; /* total: 0: unknown */
    double best;
    bool said; /* why a candidate could not be merged: reported once, unless verbose */
} work;

/* The plan was checked with the weights of the operands, so a refusal now is due to the candidate's
 * weights: those that add up to 0 have no mean.  Such a point has no loss, and the search
 * continues. */
static lm_code pass_over(work *w, lm_candidate *c, const lm_err *why, double seconds)
{
    lm_log(w->o->sink, w->said ? LM_LOG_INFO : LM_LOG_NOTICE, "candidate %lld has no loss: %s: %s",
           (long long)c->index, why->where, why->what);
    w->said = true;
    for (int i = 0; i < c->sets; i++)
        c->loss[i] = NAN;
    c->objective = NAN;
    c->seconds = seconds;
    return LM_OK;
}

/* One pass over the tensors, then one validation. */
static lm_code measure(void *ctx, lm_candidate *c, lm_err *e)
{
    work *w = ctx;
    double start = lm_now();
    lm_err why = { 0 };
    for (int k = 0; k < w->n; k++)
        w->weight[lm_merge_recipe_nth(w->p->recipe, k)] = c->weight[k];
    for (int64_t i = 0; i < w->p->n && !lm_stopping(); i++) {
        const lm_merge_tensor *t = &w->p->tensor[i];
        if (!lm_validator_wants(w->v, t->name))
            continue;
        lm_code rc = lm_merge_engine_tensor(w->g, i, w->weight, t->dtype, w->tensor, &why);
        if (rc == LM_EUSAGE)
            return pass_over(w, c, &why, lm_now() - start);
        if (rc) {
            *e = why;
            return rc;
        }
        if (lm_validator_put(w->v, t->name, t->ndim, t->dim, t->dtype, w->tensor, e))
            return e->code;
    }
    if (lm_stopping())
        return LM_OK;
    if (lm_validator_run(w->v, c->loss, NULL, e))
        return e->code;
    c->objective = lm_validator_mean(w->v, c->loss, w->o->equal);
    c->seconds = lm_now() - start;
    return LM_OK;
}

static lm_code write_line(work *w, lm_err *e)
{
    if (lm_buf_add(&w->line, "\n", 1, e))
        return e->code;
    lm_code rc = w->o->write(w->o->ctx, w->line.data, w->line.len, e);
    w->line.len = 0;
    return rc;
}

static lm_code report(void *ctx, const lm_candidate *c, lm_err *e)
{
    work *w = ctx;
    char note[64];
    w->seen = c->index + 1;
    w->best = c->best ? c->objective : w->best;
    snprintf(note, sizeof note, "best %.4f", w->best);
    lm_progress(w->o->sink, "search", (double)w->seen, (double)w->total, "candidates", note);
    return lm_search_log_candidate(c, &w->line, e) ? e->code : write_line(w, e);
}

/* The weights of the operands, when every model has a plain one. */
static bool find_start(const lm_merge_recipe *r, int n, double *start)
{
    for (int k = 0; k < n; k++) {
        const lm_merge_slice *s = &r->slice[0];
        int i = 0;
        while (i < s->n && s->source[i].input != lm_merge_recipe_nth(r, k))
            i++;
        const lm_merge_value *v = i < s->n ? &s->source[i].set.param[LM_MERGE_WEIGHT] : NULL;
        if (!v || v->n != 1 || v->at->n != 1)
            return false;
        start[k] = v->at->v[0];
    }
    return true;
}

static lm_code check(const lm_merge_recipe *r, int n, const lm_merge_search_opts *o, lm_err *e)
{
    if (!(r->method->takes >> LM_MERGE_WEIGHT & 1))
        return lm_fail(e, LM_EUSAGE, "weight search", "choose a method with weights, such as dem",
                       "method %s has no weights", r->method->name);
    if (o->val.sets < 1)
        return lm_fail(e, LM_EUSAGE, "weight search", "give held-out data",
                       "no data for validation are given");
    if (n > LM_SEARCH_MAX_DIM)
        return lm_fail(e, LM_EUSAGE, "weight search", NULL, "%d model%s, at most %d are allowed", n,
                       lm_plural(n), LM_SEARCH_MAX_DIM);
    return LM_OK;
}

static lm_code prepare(work *w, lm_err *e)
{
    if (lm_alloc_n(&w->weight, (size_t)w->p->recipe->n_inputs, sizeof *w->weight, "weights", e))
        return e->code;
    for (int i = 0; i < w->p->recipe->n_inputs; i++)
        w->weight[i] = NAN;
    for (int64_t i = 0; i < w->p->n; i++) {
        const lm_merge_tensor *t = &w->p->tensor[i];
        if (!lm_validator_wants(w->v, t->name))
            continue;
        if (t->dtype == LM_DTYPE_NONE || !lm_dtype_is_float(t->dtype))
            return lm_fail(e, LM_EFORMAT, t->name, NULL, "has dtype %s, not a float type",
                           t->dtype_name);
        size_t bytes = lm_plain_bytes(t->dtype, t->count);
        w->room = bytes > w->room ? bytes : w->room;
    }
    return lm_block_alloc(&w->tensor, w->room, "a merged tensor", e);
}

/* Write the first line, run the candidates, write the last line. */
static lm_code try_all(work *w, const lm_search_opts *s, const lm_candidates *known,
                       const lm_buf *head, double *best, lm_err *e)
{
    lm_search_hooks hooks = { measure, report, w };
    double objective = NAN, start = lm_now();
    int sets = w->o->val.sets;
    for (int64_t i = 0; i < known->count; i++)
        known->objective[i] = lm_validator_mean(w->v, known->loss + i * sets, w->o->equal);
    if (w->o->resume)
        lm_log(w->o->sink, LM_LOG_INFO, "%s: holds %" PRId64 " candidate%s", w->o->resume,
               known->count, lm_plural((uint64_t)known->count));
    lm_code rc = lm_buf_add(&w->line, head->data, head->len, e);
    if (!rc)
        rc = write_line(w, e);
    if (!rc)
        rc = lm_search_run(s, sets, known, &hooks, best, &objective, e);
    if (rc || lm_stopping())
        return rc;
    rc = lm_search_log_best(w->n, best, objective, w->seen, lm_now() - start, &w->line, e);
    return rc ? rc : write_line(w, e);
}

static lm_code run(work *w, const lm_search_opts *s, double *best, lm_err *e)
{
    lm_candidates known = { 0 };
    lm_buf head = { 0 };
    lm_code rc = prepare(w, e);
    if (!rc)
        rc = lm_search_log_head(w->p, w->o, w->v, &head, e);
    if (!rc && w->o->resume)
        rc = lm_search_log_read(w->o->resume, &head, w->n, w->o->val.sets, &known, e);
    if (!rc && !w->o->check_only)
        rc = try_all(w, s, &known, &head, best, e);
    lm_candidates_fini(&known);
    lm_buf_fini(&head);
    return rc;
}

/* Set the best weights in plan and recipe. */
static lm_code take_best(lm_merge_recipe *r, lm_merge_plan *p, int n, const double *best, lm_err *e)
{
    for (int k = 0; k < n; k++) {
        int input = lm_merge_recipe_nth(r, k);
        if (lm_merge_recipe_weight(r, input, best[k], e))
            return e->code;
        for (int64_t i = 0; i < p->n; i++)
            for (int m = 0; m < p->tensor[i].n_models; m++)
                if (p->tensor[i].model[m].input == input)
                    p->tensor[i].model[m].param[LM_MERGE_WEIGHT] = best[k];
    }
    return LM_OK;
}

/* The tokenizer of the merged model; the caller frees *own; both NULL: none. */
static lm_code find_tokenizer(const lm_merge_plan *p, const lm_tokenizer **tok, lm_tokenizer **own,
                              lm_err *e)
{
    *tok = p->vocab ? lm_vocab_tokenizer(p->vocab) : NULL;
    if (*tok)
        return LM_OK;
    lm_code rc = lm_tokenizer_of(p->model[p->tokenizer].source, own, e);
    *tok = *own;
    return rc;
}

lm_code lm_merge_search(lm_merge_recipe *r, lm_merge_plan *p, lm_merge_engine *g, lm_backend *b,
                        const lm_merge_search_opts *o, double *best, lm_err *e)
{
    int n = lm_merge_recipe_models(r);
    double start[LM_SEARCH_MAX_DIM];
    lm_search_opts s = o->search;
    lm_config config = { 0 };
    work w = { .p = p, .g = g, .o = o, .n = n, .best = NAN };
    lm_search *trial = NULL;
    lm_validator_opts val = o->val;
    lm_tokenizer *own = NULL;
    if (check(r, n, o, e))
        return e->code;
    s.n = n;
    if (!s.start && find_start(r, n, start))
        s.start = start;
    /* errors in the options of the search are reported before anything is opened */
    lm_code rc = lm_search_new(&s, &trial, e);
    if (!rc && (s.max || s.kind == LM_SEARCH_GRID || s.kind == LM_SEARCH_SIMPLEX))
        w.total = lm_search_total(trial); /* the others end when they converge */
    lm_search_free(trial);
    if (!rc)
        rc = lm_config_read(p->config, "config.json", &config, e);
    if (!rc)
        lm_config_see(&config, p->model[p->lead].source);
    if (!rc && !val.tok)
        rc = find_tokenizer(p, &val.tok, &own, e);
    if (!rc && !val.seq)
        rc = lm_window_default(p->model[p->lead].source, config.max_positions, &val.seq, NULL, e);
    if (!rc)
        rc = lm_validator_new(&val, &config, b, &w.v, e);
    if (!rc)
        rc = run(&w, &s, best, e);
    if (!rc && !o->check_only && !lm_stopping())
        rc = take_best(r, p, n, best, e);
    lm_block_free(w.tensor, w.room);
    lm_free(w.weight);
    lm_buf_fini(&w.line);
    lm_validator_free(w.v);
    lm_tokenizer_free(own);
    lm_config_fini(&config);
    return rc;
}
