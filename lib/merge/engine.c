/* SPDX-License-Identifier: Apache-2.0 */
/* engine.c -- merges one tensor of the plan: fetches its operands, runs the method. */
#include "merge/engine.h"

#include <stdint.h>
#include <string.h>

#include "base/mem.h"
#include "merge/engine_impl.h"
#include "merge/plan_impl.h"
#include "numeric/format.h"

static const lm_st *side_of(const lm_merge_model *m)
{
    return m->fisher ? m->fisher : m->gram;
}

/* ---- Buffers ---- */

lm_code lm_merge_buf_need(lm_merge_buf *b, size_t bytes, lm_err *e)
{
    lm_code rc;

    if (b->bytes >= bytes && b->data)
        return LM_OK;
    lm_merge_buf_fini(b);
    rc = lm_block_alloc(&b->data, bytes ? bytes : 1, "tensor to merge", e);
    if (!rc)
        b->bytes = bytes ? bytes : 1;
    return rc;
}

void lm_merge_buf_fini(lm_merge_buf *b)
{
    if (b->data)
        lm_block_free(b->data, b->bytes);
    *b = (lm_merge_buf){ 0 };
}

lm_code lm_merge_engine_new(const lm_merge_plan *plan, lm_par *par, lm_cpu_level cpu, lm_sink *sink,
                            lm_merge_engine **out, lm_err *e)
{
    lm_merge_engine *g = NULL;
    size_t inputs = (size_t)plan->recipe->n_inputs;
    lm_code rc = lm_alloc_n(&g, 1, sizeof *g, "merge engine", e);

    *out = NULL;
    if (rc)
        return rc;
    g->plan = plan;
    g->par = par;
    g->cpu = cpu;
    g->sink = sink;
    for (int64_t i = 0; i < plan->n; i++)
        if (g->n_held <= plan->tensor[i].n_models)
            g->n_held = plan->tensor[i].n_models + 1;
    rc = lm_alloc_n(&g->held, (size_t)g->n_held, sizeof *g->held, "merge engine", e);
    if (!rc)
        rc = lm_alloc_n(&g->operand, (size_t)g->n_held, sizeof *g->operand, "merge engine", e);
    if (!rc)
        rc = lm_alloc_n(&g->table, inputs, sizeof *g->table, "merge engine", e);
    if (!rc)
        rc = lm_alloc_n(&g->met, inputs, sizeof *g->met, "merge engine", e);
    if (rc) {
        lm_merge_engine_free(g);
        return rc;
    }
    *out = g;
    return LM_OK;
}

void lm_merge_engine_free(lm_merge_engine *g)
{
    if (!g)
        return;
    for (int k = 0; g->held && k < g->n_held; k++) {
        lm_merge_buf_fini(&g->held[k].read);
        lm_merge_buf_fini(&g->held[k].made);
        lm_merge_buf_fini(&g->held[k].next);
    }
    lm_merge_buf_fini(&g->work);
    lm_free(g->held);
    lm_free(g->operand);
    lm_free(g->table);
    lm_free(g->met);
    lm_free(g);
}

/* ---- Operands ---- */

/* A stream keeps the tensor that it returned last: go on to t when t is the next.  For any other
 * tensor the source spools the stream. */
static lm_code step_to(lm_merge_engine *g, int input, const lm_st_tensor *t, lm_err *e)
{
    lm_model_source *m = g->plan->model[input].source;
    const lm_st_tensor *got = NULL;

    for (int k = 0; k < input; k++) /* a shared source counts once */
        if (g->plan->model[k].source == m)
            input = k;
    if (lm_model_source_random(m) || g->met[input] >= lm_model_source_count(m) ||
        lm_model_source_at(m, g->met[input]) != t)
        return LM_OK;
    g->met[input]++;
    return lm_model_source_next(m, &got, e);
}

lm_code lm_engine_fetch(lm_merge_engine *g, const lm_merge_ref *ref, lm_merge_buf *read,
                        const void **data, lm_err *e)
{
    const lm_merge_model *m = &g->plan->model[ref->input];
    const lm_st_tensor *t = ref->tensor;
    lm_code rc;

    if (m->lora && lm_lora_effect_on(m->lora, t) == LM_LORA_REPLACED) {
        lm_lora_replacement(m->lora, t, data);
        return LM_OK;
    }
    t = lm_lora_stored(m->lora, t);
    rc = step_to(g, ref->input, t, e);
    *data = NULL;
    /* With slices, two layers of one model may be needed at the same time. */
    if (!rc && g->plan->recipe->sliced)
        *data = lm_model_source_data(m->source, t);
    else if (!rc)
        rc = lm_model_source_borrow(m->source, t, data, e);
    if (rc || *data)
        return rc;
    rc = lm_merge_buf_need(read, (size_t)t->bytes, e);
    if (!rc)
        rc = lm_model_source_read(m->source, t, 0, read->data, (size_t)t->bytes, e);
    *data = read->data;
    return rc;
}

/* The tensor of its model, with its LoRA applied. */
static lm_code hold(lm_merge_engine *g, const lm_merge_ref *ref, lm_merge_held *h, lm_err *e)
{
    const lm_merge_model *m = &g->plan->model[ref->input];
    const lm_st_tensor *t = ref->tensor;
    lm_code rc = lm_engine_fetch(g, ref, &h->read, &h->data, e);

    h->dtype = lm_plan_effective(m, t)->dtype;
    if (rc || !m->lora || lm_lora_effect_on(m->lora, t) != LM_LORA_ADDED)
        return rc;
    h->dtype = lm_lora_dtype(t->dtype);
    rc = lm_merge_buf_need(&h->made, lm_plain_bytes(h->dtype, t->count), e);
    if (!rc)
        rc = lm_lora_add(m->lora, t, h->data, h->made.data, g->par, e);
    lm_model_source_forget(m->source, lm_lora_stored(m->lora, t));
    h->data = h->made.data;
    return rc;
}

static const lm_merge_ref *ref_at(const lm_merge_tensor *t, int k)
{
    return k ? &t->model[k - 1] : t->base;
}

/* Reorder the rows of every operand by the merged vocabulary. */
static lm_code remap(lm_merge_engine *g, const lm_merge_tensor *t, lm_err *e)
{
    const lm_merge_plan *p = g->plan;
    int64_t cols = t->dim[0] ? t->count / t->dim[0] : 1;
    lm_code rc = LM_OK;

    memset(g->table, 0, (size_t)p->recipe->n_inputs * sizeof *g->table);
    for (int k = 0; k <= t->n_models; k++) {
        const lm_merge_ref *ref = ref_at(t, k);

        if (ref)
            g->table[ref->input] =
                (lm_vocab_table){ g->held[k].data, g->held[k].dtype,
                                  lm_plan_effective(&p->model[ref->input], ref->tensor)->dim[0] };
    }
    for (int k = 0; k <= t->n_models && !rc; k++) {
        const lm_merge_ref *ref = ref_at(t, k);
        lm_merge_held *h = &g->held[k];

        if (!ref)
            continue;
        rc = lm_merge_buf_need(&h->next, lm_plain_bytes(h->dtype, t->count), e);
        if (!rc)
            rc = lm_vocab_operand(p->vocab, ref->input, g->table, cols, t->name, h->dtype,
                                  h->next.data, g->par, e);
    }
    /* up to here the models were needed as sources */
    for (int k = 0; k <= t->n_models && !rc; k++) {
        const lm_merge_ref *ref = ref_at(t, k);
        lm_merge_held *h = &g->held[k];

        if (!ref)
            continue;
        lm_merge_buf_fini(&h->made);
        lm_merge_buf_fini(&h->read);
        lm_model_source_forget(p->model[ref->input].source, ref->tensor);
        h->made = h->next;
        h->next = (lm_merge_buf){ 0 };
        h->data = h->made.data;
    }
    return rc;
}

void lm_engine_release(lm_merge_engine *g, const lm_merge_tensor *t)
{
    for (int k = 0; k <= t->n_models; k++) {
        const lm_merge_ref *ref = ref_at(t, k);

        if (ref)
            lm_model_source_forget(g->plan->model[ref->input].source, ref->tensor);
        if (ref && ref->extra)
            lm_st_forget(side_of(&g->plan->model[ref->input]), ref->extra);
        if (t->table) /* as large as the tensor, and not needed again soon */
            lm_merge_buf_fini(&g->held[k].made);
    }
}

/* ---- Running ---- */

/* The address of operand k, from element `at` on. */
static void place(lm_merge_engine *g, const lm_merge_ref *ref, int k, int64_t at, int64_t count)
{
    const lm_merge_model *of = &g->plan->model[ref->input];
    lm_merge_operand *o = &g->operand[k];

    o->dtype = g->held[k].dtype;
    o->data = (const char *)g->held[k].data + (size_t)at * lm_dtype_size(o->dtype);
    if (!ref->extra)
        return;
    o->extra = lm_st_data(side_of(of), ref->extra);
    o->extra_dtype = ref->extra->dtype;
    o->extra_count = ref->extra->count;
    if (o->extra_count == count && count > 1) { /* one for each element */
        o->extra = (const char *)o->extra + (size_t)at * lm_dtype_size(o->extra_dtype);
    }
}

lm_code lm_engine_part(lm_merge_engine *g, const lm_merge_tensor *t, int64_t at, int64_t n,
                       const double *weight, lm_dtype dtype, void *out, lm_err *e)
{
    const lm_merge_plan *p = g->plan;
    const lm_merge_method *m = p->recipe->method;
    lm_merge_job job;
    lm_code rc;

    lm_plan_job(p, t, g->operand + 1, g->operand, &job);
    for (int k = 0; k <= t->n_models; k++) {
        const lm_merge_ref *ref = ref_at(t, k);

        if (!ref)
            continue;
        place(g, ref, k, at, t->count);
        if (k && weight && m->takes >> LM_MERGE_WEIGHT & 1)
            g->operand[k].param[LM_MERGE_WEIGHT] = weight[ref->input];
    }
    if (n != t->count) {
        job.count = n;
        job.ndim = 1;
        job.dim = &job.count;
        job.transposed = false;
    }
    job.out = out;
    job.out_dtype = dtype;
    job.par = g->par;
    job.cpu = g->cpu;
    job.sink = g->sink;
    if (m->work) {
        rc = lm_merge_buf_need(&g->work, m->work(&job, lm_par_threads(g->par)), e);
        if (rc)
            return rc;
        job.work = g->work.data;
    }
    return m->run(&job, e);
}

lm_code lm_engine_hold(lm_merge_engine *g, const lm_merge_tensor *t, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int k = 0; k <= t->n_models; k++)
        memset(&g->operand[k], 0, sizeof g->operand[k]);
    for (int k = 0; k <= t->n_models && !rc; k++)
        if (ref_at(t, k))
            rc = hold(g, ref_at(t, k), &g->held[k], e);
    return !rc && t->table ? remap(g, t, e) : rc;
}

lm_code lm_merge_engine_tensor(lm_merge_engine *g, int64_t i, const double *weight, lm_dtype dtype,
                               void *out, lm_err *e)
{
    const lm_merge_tensor *t = &g->plan->tensor[i];
    const void *data = NULL;
    lm_code rc = LM_OK;

    if (t->copy) {
        rc = lm_engine_fetch(g, &t->model[0], &g->held[0].read, &data, e);
        if (!rc && t->bytes)
            memcpy(out, data, (size_t)t->bytes);
        lm_model_source_forget(g->plan->model[t->model[0].input].source, t->model[0].tensor);
        return rc;
    }
    rc = lm_engine_hold(g, t, e);
    if (!rc)
        rc = lm_engine_part(g, t, 0, t->count, weight, dtype, out, e);
    lm_engine_release(g, t);
    return rc;
}
