/* SPDX-License-Identifier: Apache-2.0 */
/* sums.c -- see sums.h. */
#include "tune/align/sums.h"

#include <stdio.h>

#include "base/mem.h"

void lm_align_sums_begin(lm_align_sums *s)
{
    s->loss = 0;
    s->metrics.n = 0;
    s->n = 0;
}

lm_code lm_align_sums_add(lm_align_sums *s, double loss, const lm_align_metrics *m, lm_err *e)
{
    if (lm_grow(&s->micro, &s->cap, (size_t)s->n + 1, sizeof *s->micro, "sums of a step", e))
        return e->code;
    s->micro[s->n++] = (lm_align_micro_sums){ loss, *m };
    return LM_OK;
}

static void add_own(lm_align_sums *s)
{
    for (int64_t i = 0; i < s->n; i++) {
        s->loss += s->micro[i].loss;
        lm_align_join(&s->metrics, &s->micro[i].metrics);
    }
}

/* The sums so far, as one rank sends them to the others. */
typedef struct {
    double loss;
    int64_t n;
    struct {
        char name[LM_ALIGN_SUMS_NAME];
        double sum, weight;
        int64_t fold;
    } item[LM_ALIGN_METRICS];
} message;

static void write_message(const lm_align_sums *s, message *to)
{
    *to = (message){ .loss = s->loss, .n = s->metrics.n };
    for (int i = 0; i < s->metrics.n; i++) {
        const lm_align_metric *m = &s->metrics.item[i];
        snprintf(to->item[i].name, LM_ALIGN_SUMS_NAME, "%s", m->name);
        to->item[i].sum = m->sum;
        to->item[i].weight = m->weight;
        to->item[i].fold = m->fold;
    }
}

static void read_message(lm_align_sums *s, const message *from)
{
    s->loss = from->loss;
    s->metrics.n = (int)from->n;
    for (int i = 0; i < s->metrics.n; i++) {
        snprintf(s->name[i], LM_ALIGN_SUMS_NAME, "%s", from->item[i].name);
        s->metrics.item[i] = (lm_align_metric){ s->name[i], from->item[i].sum, from->item[i].weight,
                                                (lm_align_fold)from->item[i].fold };
    }
}

/* Rank by rank: each adds its own to the sums of those before it. */
static lm_code join_ranks(lm_align_sums *s, lm_comm *c, message *m, lm_err *e)
{
    for (int r = 0; r < lm_comm_size(c); r++) {
        const bool own = r == lm_comm_rank(c);
        if (own) {
            add_own(s);
            write_message(s, m);
        }
        if (lm_comm_broadcast(c, m, sizeof *m, r, e))
            return e->code;
        if (!own)
            read_message(s, m);
    }
    return LM_OK;
}

lm_code lm_align_sums_join(lm_align_sums *s, lm_comm *c, lm_err *e)
{
    message *m = NULL;
    if (!c) {
        add_own(s);
        return LM_OK;
    }
    if (!lm_alloc_n(&m, 1, sizeof *m, "sums of ranks", e))
        join_ranks(s, c, m, e);
    lm_free(m);
    return e->code;
}

void lm_align_sums_fini(lm_align_sums *s)
{
    lm_free(s->micro);
    s->micro = NULL;
    s->cap = 0;
}
