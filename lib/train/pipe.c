/* SPDX-License-Identifier: Apache-2.0 */
/* pipe.c -- see pipe.h. */
#include "train/pipe.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/text.h"
#include "parallel/pipeline_run.h"

enum { FILE_MOST = 64 << 20 };

/* ---- the schedule ---- */

static lm_code read_file(const lm_train_pipe_ask *ask, lm_pipeline *out, lm_err *e)
{
    lm_buf text = { 0 };
    char todo[96];
    if (!lm_file_read(ask->schedule, FILE_MOST, &text, e))
        lm_pipeline_read(text.data ? text.data : "", text.len, lm_path_shown(ask->schedule), out,
                         e);
    lm_buf_fini(&text);
    const int ways = e->code ? 1 : lm_pipeline_ways(out);
    if (e->code || (out->ranks == ask->ranks && out->micros == ways * ask->micros))
        return e->code;
    snprintf(todo, sizeof todo, "use pp=%d and %d micro-batches for each leaf", (int)out->ranks,
             (int)out->micros / ways);
    return lm_fail(e, LM_EUSAGE, lm_path_shown(ask->schedule), todo,
                   "is a schedule of %d ranks and %d micro-batches, not of %d and %" PRId64,
                   (int)out->ranks, (int)out->micros, ask->ranks, ways * ask->micros);
}

static lm_code make_rows(const lm_train_pipe_ask *ask, lm_pipeline *out, lm_err *e)
{
    const char *spec = ask->schedule ? ask->schedule : "1f1b";
    if (!lm_pipeline_is_name(spec) && strpbrk(spec, "./"))
        read_file(ask, out, e);
    else
        lm_pipeline_make(spec, ask->ranks, lm_pipeline_ranks_of_stage(spec) * ask->micros, out, e);
    return e->code ? e->code : lm_pipeline_check_run(out, e);
}

/* ---- stages ---- */

/* Layers that can be first ones of a stage: those of modules that predict further on stay with the head. */
static int64_t layers_of(const lm_config *c)
{
    return c->layers + (c->encoder ? c->encoder->layers : 0);
}

static lm_code count_work(const lm_train_pipe_ask *ask, const lm_config *c, double *work, lm_err *e)
{
    const lm_build how = { .mode = LM_MODE_TRAIN,
                           .batch = ask->batch,
                           .seq = ask->seq,
                           .source = ask->source,
                           .precision = { .low = LM_DTYPE_F32 } };
    lm_model *m = NULL;
    if (lm_model_build(c, &how, &m, e))
        return e->code;
    for (size_t k = 0; k < m->graph->n_nodes; k++) {
        const lm_node *n = &m->graph->node[k];
        const int64_t last = layers_of(c) - 1, at = n->layer < 0 ? 0 : n->layer;
        lm_tensor in[LM_MAX_IN], o[LM_MAX_OUT];
        const lm_call call = lm_node_call(m->graph, n, in, o);
        lm_cost cost = { 0 };
        n->op->cost(&call, &cost);
        work[at < last ? at : last] += cost.flops;
    }
    lm_model_free(m);
    return LM_OK;
}

/* True if stages of at most so much work can have all layers, each of them one at least; *first: then the first ones. */
static bool fits(const double *work, int64_t layers, int stages, double most, int64_t *first)
{
    int64_t at = 0;
    for (int s = 0; s < stages; s++) {
        double sum = 0;
        first[s] = at;
        const int64_t end = layers - (stages - 1 - s); /* the others' layers */
        while (at < end && (at == first[s] || sum + work[at] <= most))
            sum += work[at++];
        if (sum > most)
            return false;
    }
    return at == layers;
}

lm_code lm_train_pipe_balance(const double *work, int64_t layers, int stages, int64_t *first,
                              lm_err *e)
{
    double least = 0;
    bool found = false;
    /* The least is the work of some layers behind each other. */
    for (int64_t i = 0; i < layers; i++) {
        double sum = 0;
        for (int64_t k = i; k < layers; k++) {
            sum += work[k];
            if ((!found || sum < least) && fits(work, layers, stages, sum, first)) {
                least = sum;
                found = true;
            }
        }
    }
    if (!found || !fits(work, layers, stages, least, first))
        return lm_fail(e, LM_EBUG, "stages", NULL, "%d of %" PRId64 " layers", stages, layers);
    return LM_OK;
}

/* v: room for one number more than there are stages. */
static lm_code take_layers(const char *text, int64_t layers, lm_train_pipe *p, double *v, lm_err *e)
{
    int n = 0;
    int64_t sum = 0;
    bool ok = lm_parse_list(text, v, (int)p->rows.stages + 1, &n);
    for (int k = 0; ok && k < n; k++)
        ok = v[k] >= 1 && v[k] <= (double)layers && v[k] == (double)(int64_t)v[k];
    if (!ok)
        return lm_fail(e, LM_EUSAGE, "stages", "write the layers of each stage: 3,4,4,3",
                       "'%.60s' is not a list of %d numbers of layers, at least 1 each", text,
                       (int)p->rows.stages);
    for (int k = 0; k < n; k++) {
        if (k < p->rows.stages)
            p->first[k] = sum;
        sum += (int64_t)v[k];
    }
    if (n != p->rows.stages)
        return lm_fail(e, LM_EUSAGE, "stages", NULL,
                       "'%.60s' has %d stages, and the schedule has %d", text, n,
                       (int)p->rows.stages);
    return sum == layers ? LM_OK
                         : lm_fail(e, LM_EUSAGE, "stages", NULL,
                                   "'%.60s' has %" PRId64 " layers, and the model has %" PRId64,
                                   text, sum, layers);
}

static lm_code read_layers(const char *text, int64_t layers, lm_train_pipe *p, lm_err *e)
{
    double *v = NULL;
    if (!lm_alloc_n(&v, (size_t)p->rows.stages + 1, sizeof *v, "stages", e))
        take_layers(text, layers, p, v, e);
    lm_free(v);
    return e->code;
}

static lm_code set_stages(const lm_train_pipe_ask *ask, const lm_config *c, lm_train_pipe *p,
                          lm_err *e)
{
    const int64_t layers = layers_of(c);
    const size_t n = (size_t)p->rows.stages;
    double *work = NULL;
    if (p->rows.stages > layers) {
        char todo[64];
        const int64_t each = p->rows.stages / p->rows.ranks;
        snprintf(todo, sizeof todo, "use pp=%" PRId64 " or less", layers / each);
        return lm_fail(e, LM_EUSAGE, "stages", layers / each > 1 ? todo : "use dp or tp",
                       "%d stages, and the model has %" PRId64 " layer%s", (int)p->rows.stages,
                       layers, lm_plural((uint64_t)layers));
    }
    p->ways = lm_pipeline_ways(&p->rows);
    if (lm_alloc_n(&p->first, n, sizeof *p->first, "stages", e))
        return e->code;
    for (int way = 0; way < p->ways; way++) {
        if (lm_alloc_n(&p->rank[way], n, sizeof *p->rank[way], "stages", e))
            return e->code;
        lm_pipeline_ranks(&p->rows, way, p->rank[way]);
    }
    p->stages = (lm_stages){ .n = (int)p->rows.stages,
                             .first = p->first,
                             .rank = p->rank[0],
                             .twin = p->rank[1],
                             .apart = lm_pipeline_is_apart(&p->rows) };
    if (ask->stages)
        return read_layers(ask->stages, layers, p, e);
    if (!lm_alloc_n(&work, (size_t)layers, sizeof *work, "stages", e) &&
        !count_work(ask, c, work, e))
        lm_train_pipe_balance(work, layers, (int)p->rows.stages, p->first, e);
    lm_free(work);
    return e->code;
}

lm_code lm_train_pipe_new(const lm_train_pipe_ask *ask, const lm_config *c, lm_train_pipe **out,
                          lm_err *e)
{
    lm_train_pipe *p = NULL;
    *out = NULL;
    if (lm_alloc_n(&p, 1, sizeof *p, "stages", e))
        return e->code;
    if (make_rows(ask, &p->rows, e) || set_stages(ask, c, p, e)) {
        lm_train_pipe_free(p);
        return e->code;
    }
    *out = p;
    return LM_OK;
}

void lm_train_pipe_free(lm_train_pipe *p)
{
    if (!p)
        return;
    lm_pipeline_fini(&p->rows);
    lm_free(p->first);
    lm_free(p->rank[0]);
    lm_free(p->rank[1]);
    lm_free(p);
}
