/* SPDX-License-Identifier: Apache-2.0 */
/* quantised.c -- see quantised.h. */
#include "tune/quantised.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "tune/apply.h"

struct lm_tune_quantised {
    const lm_tune_folder *f;
    lm_model_source *base;
    json_t *config;
    lm_buf header; /* of the file that is made */
    lm_st *st;
    bool below;             /* it has the weights of Q */
    pthread_mutex_t lock;   /* of what follows: tensors may be read by several threads */
    const lm_tune_part *at; /* whose Q is in `made`; NULL: none */
    float *made;            /* [out,in] as in the file of the base */
    size_t room;
};

static lm_code no_memory(lm_err *e)
{
    return lm_fail(e, LM_ELIMIT, "an adapter", NULL, "no memory");
}

/* W and Q [out,in] of a module. */
static lm_code compute(lm_tune_quantised *q, const lm_tune_part *p, double **w, double **into,
                       lm_err *e)
{
    size_t n = (size_t)(p->module.out * p->module.in);
    lm_tune_loaded l = { 0 };
    lm_code rc = lm_tune_base_weight(q->base, p->base, w, e);

    rc = rc ? rc : lm_alloc_n(into, n, sizeof **into, "a weight", e);
    rc = rc ? rc : lm_tune_load(q->f, p, &l, e);
    if (!rc) {
        memcpy(*into, *w, n * sizeof **w);
        rc = p->method->derive(&l.m, *into, l.v, l.given, e);
    }
    lm_tune_loaded_fini(&l);
    return rc;
}

/* Whether Q is another matrix than W, in F32. */
static lm_code differs(lm_tune_quantised *q, const lm_tune_part *p, bool *any, lm_err *e)
{
    double *w = NULL, *made = NULL;
    lm_code rc = compute(q, p, &w, &made, e);

    for (int64_t i = 0; !rc && i < p->module.out * p->module.in && !*any; i++)
        *any = (float)w[i] != (float)made[i];
    lm_free(w);
    lm_free(made);
    return rc;
}

static lm_code make_q(lm_tune_quantised *q, const lm_tune_part *p, lm_err *e)
{
    int64_t out = p->module.out, in = p->module.in;
    double *w = NULL, *made = NULL;
    lm_code rc;

    q->at = NULL;
    rc = lm_grow(&q->made, &q->room, (size_t)(out * in), sizeof *q->made, "a weight", e);
    rc = rc ? rc : compute(q, p, &w, &made, e);
    for (int64_t i = 0; !rc && i < out; i++)
        for (int64_t j = 0; j < in; j++)
            q->made[p->module.turned ? j * out + i : i * in + j] = (float)made[i * in + j];
    lm_free(w);
    lm_free(made);
    q->at = rc ? NULL : p;
    return rc;
}

static void name_of(const lm_tune_part *p, char out[700])
{
    snprintf(out, 700, "base_model.model.%.600s.base_layer.weight", p->module.name);
}

/* LoftQ starts no embedding. */
static bool has_q(const lm_tune_part *p)
{
    return !p->module.embedding && p->method->derive;
}

/* Bytes [from, from + bytes) of a tensor of the file that is made. */
static lm_code read_tensor(lm_tune_quantised *q, const lm_st_tensor *t, uint64_t from, void *dst,
                           size_t bytes, lm_err *e)
{
    const lm_st *own = lm_tune_folder_tensors(q->f);
    const lm_st_tensor *given = lm_st_find(own, t->name);
    char name[700];
    lm_code rc = LM_OK;

    if (given)
        return lm_st_read(own, given, from, dst, bytes, e);
    pthread_mutex_lock(&q->lock);
    if (q->at)
        name_of(q->at, name);
    for (size_t i = 0; (!q->at || strcmp(name, t->name)) && i < lm_tune_folder_parts(q->f); i++) {
        const lm_tune_part *p = lm_tune_folder_part(q->f, i);

        name_of(p, name);
        if (strcmp(name, t->name) != 0)
            continue;
        rc = make_q(q, p, e);
        break;
    }
    if (!rc)
        memcpy(dst, (const char *)q->made + from, bytes);
    pthread_mutex_unlock(&q->lock);
    return rc;
}

/* A pread of lm_st_io: the header, and tensors by their places. */
static lm_code read_bytes(void *ctx, uint64_t from, void *dst, size_t bytes, lm_err *e)
{
    lm_tune_quantised *q = ctx;
    size_t head = from < q->header.len ? q->header.len - (size_t)from : 0;
    lm_code rc = LM_OK;

    head = head < bytes ? head : bytes;
    memcpy(dst, q->header.data + (head ? from : 0), head);
    for (size_t i = 0; !rc && head < bytes && q->st && i < lm_st_count(q->st); i++) {
        const lm_st_tensor *t = lm_st_at(q->st, i);
        uint64_t begin = q->header.len + t->offset, end = begin + t->bytes;
        uint64_t first = from + head > begin ? from + head : begin;
        uint64_t last = from + bytes < end ? from + bytes : end;

        if (first < last)
            rc = read_tensor(q, t, first - begin, (char *)dst + (first - from),
                             (size_t)(last - first), e);
    }
    return rc;
}

/* The file's header, and the file. */
static lm_code make_file(lm_tune_quantised *q, lm_err *e)
{
    const lm_st *own = lm_tune_folder_tensors(q->f);
    lm_st_plan *plan = NULL;
    uint64_t bytes = 0;
    lm_code rc = lm_st_plan_new(&plan, e);

    for (size_t i = 0; !rc && i < lm_st_count(own); i++)
        rc = lm_st_plan_add_like(plan, lm_st_at(own, i), e);
    for (size_t i = 0; !rc && i < lm_tune_folder_parts(q->f); i++) {
        const lm_tune_part *p = lm_tune_folder_part(q->f, i);
        bool turned = p->module.turned;
        char name[700];

        name_of(p, name);
        if (has_q(p) && !lm_st_find(own, name))
            rc = lm_st_plan_add(plan, name, LM_DTYPE_F32, 2,
                                (const int64_t[]){ turned ? p->module.in : p->module.out,
                                                   turned ? p->module.out : p->module.in },
                                e);
    }
    rc = rc ? rc : lm_st_plan_header(plan, &q->header, e);
    rc = rc ? rc : lm_st_plan_file_bytes(plan, &bytes, e);
    if (!rc) {
        const lm_st_io io = { read_bytes, q, bytes, NULL };

        rc = lm_st_open_on(&io, lm_tune_folder_path(q->f), &q->st, e);
    }
    lm_st_plan_free(plan);
    return rc;
}

lm_code lm_tune_quantised_new(const lm_tune_folder *f, lm_model_source *base,
                              lm_tune_quantised **out, lm_err *e)
{
    lm_tune_quantised *q = NULL;
    lm_code rc = lm_alloc_n(&q, 1, sizeof *q, "an adapter", e);

    *out = NULL;
    if (rc)
        return rc;
    *out = q;
    q->f = f;
    q->base = base;
    pthread_mutex_init(&q->lock, NULL);
    if (!lm_model_source_random(base))
        rc = lm_fail(e, LM_EUSAGE, lm_tune_folder_path(f), "give the model as a folder or a file",
                     "LoftQ quantises the weights of the base, which is read forward alone");
    q->config = rc ? NULL : json_deep_copy(lm_tune_folder_config(f));
    if (!rc && (!q->config || json_object_set_new(q->config, "init_lora_weights", json_true())))
        rc = no_memory(e);
    for (size_t i = 0; !rc && !q->below && i < lm_tune_folder_parts(f); i++)
        if (has_q(lm_tune_folder_part(f, i)))
            rc = differs(q, lm_tune_folder_part(f, i), &q->below, e);
    if (!rc && q->below)
        rc = make_file(q, e);
    if (rc) {
        lm_tune_quantised_free(q);
        *out = NULL;
    }
    return rc;
}

void lm_tune_quantised_free(lm_tune_quantised *q)
{
    if (!q)
        return;
    if (q->st)
        lm_st_close(q->st);
    pthread_mutex_destroy(&q->lock);
    json_decref(q->config);
    lm_buf_fini(&q->header);
    lm_free(q->made);
    lm_free(q);
}

const json_t *lm_tune_quantised_config(const lm_tune_quantised *q)
{
    return q->config;
}

const lm_st *lm_tune_quantised_tensors(const lm_tune_quantised *q)
{
    return q->st ? q->st : lm_tune_folder_tensors(q->f);
}

bool lm_tune_quantised_brings(const lm_tune_quantised *q)
{
    return q->below;
}

bool lm_tune_quantised_has(const lm_tune_quantised *q, const char *tensor)
{
    size_t n = strlen(tensor), k = sizeof ".weight" - 1;
    char module[600];
    const lm_tune_part *p;

    if (!q->below || n <= k || n - k >= sizeof module || strcmp(tensor + n - k, ".weight") != 0)
        return false;
    snprintf(module, sizeof module, "%.*s", (int)(n - k), tensor);
    p = lm_tune_folder_part_of(q->f, module);
    return p && has_q(p);
}
