/* SPDX-License-Identifier: Apache-2.0 */
/* buckets.c -- see buckets.h. */
#include "train/buckets.h"

#include <stdlib.h>

#include "base/mem.h"

enum { LEAST = 1 << 16 }; /* elements: fewer would wait more for each other than they send */

static int by_place(const void *a, const void *b)
{
    const lm_bucket *x = a, *y = b;
    return x->from < y->from ? -1 : x->from > y->from;
}

static int by_end(const void *a, const void *b)
{
    const lm_bucket *x = a, *y = b;
    if (x->late != y->late)
        return x->late - y->late;
    return x->last != y->last ? (x->last < y->last ? -1 : 1) : by_place(a, b);
}

/* The gradient of a parameter, in whatever view, as a node has it. */
static void see(const lm_graph *g, size_t k, const int *param, lm_bucket *of)
{
    const lm_node *n = &g->node[k];
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        lm_vid v = i < n->n_in ? n->in[i] : n->out[i - n->n_in];
        v = v >= 0 && g->value[v].of >= 0 ? g->value[v].of : v;
        if (v < 0 || !param[v])
            continue;
        lm_bucket *b = &of[param[v] - 1];
        b->first = b->first == SIZE_MAX ? k : b->first;
        b->last = k;
    }
}

static int stage_of(const lm_model *m, size_t node)
{
    for (int i = 0; m->stages && i < m->stages->n; i++)
        for (int kind = 0; kind < LM_STAGE_KINDS; kind++)
            if (node >= m->stages->stage[i].first[kind] && node < m->stages->stage[i].last[kind])
                return i;
    return 0;
}

static bool is_sum_of_two(const lm_model *m, lm_vid grad)
{
    bool is = false;
    for (size_t i = 0; i < m->addends.n; i++)
        is |= m->addends.of[i].grad == grad;
    return is;
}

/* One for each parameter that trains; returns their number. */
static int of_params(const lm_model *m, int *param, lm_bucket *of)
{
    const lm_graph *g = m->graph;
    int n = 0;
    for (int i = 0; i < m->n_params; i++) {
        of[i] = (lm_bucket){ .from = m->param[i].offset,
                             .end = m->param[i].offset + m->param[i].count,
                             .first = SIZE_MAX };
        if (m->grad[i] >= 0)
            param[m->grad[i]] = 1 + i;
    }
    for (size_t k = 0; k < g->n_nodes; k++)
        see(g, k, param, of);
    for (int i = 0; i < m->n_params; i++) {
        const bool late = m->grad[i] >= 0 && is_sum_of_two(m, m->grad[i]);
        if (m->grad[i] < 0 || (of[i].first == SIZE_MAX && !late))
            continue;
        of[n] = of[i];
        of[n].stage = late ? 0 : stage_of(m, of[i].last);
        of[n].first = of[i].first == SIZE_MAX ? 0 : of[i].first;
        of[n++].late = late;
    }
    return n;
}

static bool are_alike(const lm_bucket *a, const lm_bucket *b)
{
    return a->stage == b->stage && a->late == b->late;
}

/* Neighbours become one until they are large enough; what is between and behind them is theirs. */
static int join(lm_bucket *b, int n, int64_t count)
{
    int left = 0;
    qsort(b, (size_t)n, sizeof *b, by_place);
    for (int i = 0; i < n; i++) {
        lm_bucket *last = left ? &b[left - 1] : NULL;
        if (!last || !are_alike(last, &b[i]) || b[i].from - last->from >= LEAST) {
            if (last)
                last->end = b[i].from;
            b[left++] = b[i];
            continue;
        }
        last->first = b[i].first < last->first ? b[i].first : last->first;
        last->last = b[i].last > last->last ? b[i].last : last->last;
    }
    if (left) {
        b[0].from = 0;
        b[left - 1].end = count;
    }
    return left;
}

lm_code lm_buckets_make(const lm_model *m, int64_t count, lm_bucket **out, int *n, lm_err *e)
{
    int *param = NULL;
    *out = NULL;
    *n = 0;
    if (lm_alloc_n(&param, m->graph->n_values, sizeof *param, "values", e) ||
        lm_alloc_n(out, (size_t)m->n_params + 1, sizeof **out, "buckets of gradients", e)) {
        lm_free(param);
        return e->code;
    }
    *n = join(*out, of_params(m, param, *out), count);
    qsort(*out, (size_t)*n, sizeof **out, by_end);
    lm_free(param);
    return LM_OK;
}

int64_t lm_buckets_most(const lm_bucket *b, int n, int ranks)
{
    int64_t most = 0;
    for (int i = 0; i < n; i++) { /* when it is complete, and not yet added up */
        int64_t now = 0;
        for (int k = 0; k < n; k++) {
            const int64_t all = b[k].end - b[k].from;
            now += k < i ? all / ranks : b[k].first <= b[i].last ? all : 0;
        }
        most = now > most ? now : most;
    }
    return most;
}
