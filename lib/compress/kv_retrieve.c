/* SPDX-License-Identifier: Apache-2.0 */
/* kv_retrieve.c -- tasks in the slots of a generator, until each has its answer or a wrong token. */
#include "compress/kv_retrieve.h"

#include <inttypes.h>

#include "base/mem.h"
#include "base/stop.h"

typedef struct {
    lm_generator *g;
    const lm_kv_task *task; /* of the slots */
    int64_t n, batch;       /* slots with a task; all */
    int64_t *at;            /* [batch]: tokens of the task that the slot holds */
    bool *wrong;            /* [batch] */
    int32_t *next;          /* [batch] */
    double *u;              /* [batch]: draws, which the likeliest token ignores */
} run;

static int64_t length(const lm_kv_task *t)
{
    return t->context + t->question + t->answer;
}

static lm_code check(const lm_generator *g, const lm_kv_task *task, int64_t n, lm_err *e)
{
    for (int64_t i = 0; i < n; i++) {
        const lm_kv_task *t = &task[i];
        if (t->context < 1 || t->question < 1 || t->answer < 1)
            return lm_fail(e, LM_EUSAGE, "task", NULL,
                           "%" PRId64 ", %" PRId64 " and %" PRId64
                           " tokens of context, question and answer: each must be at least 1",
                           t->context, t->question, t->answer);
        if (length(t) > lm_generator_context(g))
            return lm_fail(e, LM_EUSAGE, "task", "use shorter ones",
                           "%" PRId64 " tokens, the context holds %" PRId64, length(t),
                           lm_generator_context(g));
    }
    return LM_OK;
}

/* Give each slot the next token of its task; false: all tasks have ended. */
static bool feed(run *r)
{
    bool any = false;

    for (int64_t s = 0; s < r->batch; s++) {
        const lm_kv_task *t = &r->task[s];
        r->next[s] = -1;
        /* the token before the last of the answer is the last that is read; a wrong one ends it */
        if (s >= r->n || r->wrong[s] || r->at[s] + 1 >= length(t))
            continue;
        r->next[s] = (int32_t)t->ids[r->at[s]++];
        any = true;
    }
    return any;
}

/* Compare the likeliest tokens with those of the answers. */
static lm_code judge(run *r, const int32_t *likeliest, lm_err *e)
{
    for (int64_t s = 0; s < r->n; s++) {
        const lm_kv_task *t = &r->task[s];
        if (r->next[s] < 0)
            continue;
        if (likeliest[s] < 0)
            return lm_fail(e, LM_ENUMERIC, "logits", "find what is not finite",
                           "not numbers behind token %" PRId64 " of a task", r->at[s]);
        if (r->at[s] >= t->context + t->question)
            r->wrong[s] |= (uint32_t)likeliest[s] != t->ids[r->at[s]];
    }
    return LM_OK;
}

static lm_code run_slots(run *r, lm_err *e)
{
    static const lm_sample_attr greedy = { 0, 0, 1, 0, 1 };

    for (int64_t s = 0; s < r->n; s++) {
        r->at[s] = r->task[s].context;
        r->wrong[s] = false;
        if (lm_generator_prompt(r->g, s, r->task[s].ids, r->at[s], NULL, e))
            return e->code;
    }
    while (feed(r)) {
        const int32_t *likeliest;
        if (lm_generator_next(r->g, r->next, &greedy, r->u, &likeliest, NULL, e) ||
            judge(r, likeliest, e))
            return e->code;
    }
    return LM_OK;
}

lm_code lm_kv_retrieve(lm_generator *g, const lm_kv_task *task, int64_t n, int64_t *solved,
                       int64_t *done, lm_err *e)
{
    run r = { .g = g, .batch = lm_generator_batch(g) };
    size_t slots = (size_t)r.batch;
    int64_t i = 0;

    if (check(g, task, n, e))
        return e->code;
    lm_code rc = lm_alloc_n(&r.at, slots, sizeof *r.at, "slots", e);
    if (!rc)
        rc = lm_alloc_n(&r.wrong, slots, sizeof *r.wrong, "slots", e);
    if (!rc)
        rc = lm_alloc_n(&r.next, slots, sizeof *r.next, "slots", e);
    if (!rc)
        rc = lm_alloc_n(&r.u, slots, sizeof *r.u, "draws", e);
    while (!rc && i < n && !lm_stopping()) {
        r.task = task + i;
        r.n = n - i < r.batch ? n - i : r.batch;
        rc = run_slots(&r, e);
        for (int64_t s = 0; !rc && s < r.n; s++)
            solved[r.task[s].cell] += !r.wrong[s];
        i += r.n;
    }
    if (done)
        *done = rc ? 0 : i;
    lm_free(r.at);
    lm_free(r.wrong);
    lm_free(r.next);
    lm_free(r.u);
    return rc;
}
