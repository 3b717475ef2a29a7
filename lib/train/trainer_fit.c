/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_fit.c -- plans, and checks that they fit. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "base/mem.h"
#include "base/text.h"
#include "parallel/fit.h"
#include "parallel/layouts.h"
#include "train/trainer_impl.h"

static lm_code make_program(const lm_trainer_opts *o, const lm_config *c, bool validation,
                            lm_backend *b, const lm_program *like, lm_program **out, lm_err *e)
{
    lm_program_opts p = { .batch = o->batch,
                          .seq = o->seq,
                          .source = o->source,
                          .precision = o->precision,
                          .documents = o->documents,
                          .dropout = o->dropout,
                          .halves = o->objective,
                          .entropy = o->entropy,
                          .value = o->value,
                          .groups = o->groups,
                          .clip_norm = o->clip_norm,
                          .clip_value = o->clip_value,
                          .build = o->build,
                          .zero = o->zero,
                          .gather_ahead = o->gather_ahead,
                          .mesh = &o->mesh,
                          .states_in = o->states_in,
                          .states_dir = o->states_dir,
                          .beside = o->beside };
    lm_layouts_share(&p.build, &o->mesh, o->rows);
    if (o->pipe) {
        p.build.mesh = &o->mesh;
        p.build.stages = &o->pipe->stages;
    }
    return lm_program_new(&p, c, validation, b, like, out, e);
}

lm_code lm_trainer_place(lm_trainer_opts *o, const lm_config *c, int rank, lm_err *e)
{
    for (int i = 0; i < LM_AXES; i++)
        o->mesh.size[i] = lm_mesh_along(&o->mesh, (lm_axis)i);
    lm_mesh_place(&o->mesh, rank);
    return lm_fit_mesh(c, &o->mesh, o->batch, o->seq, e);
}

lm_code lm_trainer_program(const lm_trainer_opts *o, const lm_config *c, bool validation,
                           lm_backend *b, lm_program **out, lm_err *e)
{
    return make_program(o, c, validation, b, NULL, out, e);
}

/* The programs of the other ranks along pp, which have other stages; *n: 0 if one cannot be made.  The meshes are theirs. */
static void make_others(const lm_trainer_opts *o, const lm_program *p, lm_trainer_opts *own,
                        lm_program **out, int *n)
{
    const int all = lm_mesh_along(&o->mesh, LM_AXIS_PP);
    lm_err unseen = { 0 };
    for (*n = 0; *n + 1 < all && !unseen.code; ++*n) {
        own[*n] = *o;
        own[*n].mesh.rank[LM_AXIS_PP] = *n + 1;
        make_program(&own[*n], p->config, p->eval, p->backend, NULL, &out[*n], &unseen);
    }
    for (int i = *n - 1; unseen.code && i >= 0; i--)
        lm_program_free(out[i]);
    *n = unseen.code ? 0 : *n;
}

/* here: of the ranks, 0: all.  others: of the ranks along pp that have other stages. */
static void memory_of(const lm_trainer_opts *o, const lm_program *p, int here,
                      lm_program *const *others, int n_others, lm_memory_plan *out)
{
    const lm_memory_ask ask = { .accumulate = o->accumulate,
                                .ranks = (int)lm_mesh_ranks(&o->mesh),
                                .sharing = lm_mesh_along(&o->mesh, LM_AXIS_DP),
                                .here = here,
                                .leaves = o->leaves,
                                .pipe = o->pipe,
                                .places = o->places,
                                .others = others,
                                .n_others = n_others };
    lm_memory_of(p, &ask, out);
}

static void add_checkpoints(const lm_trainer_opts *o, const lm_program *p, bool lmz,
                            lm_memory_plan *out)
{
    lm_memory_add(out, "checkpoint coder", lm_ckpt_coder_bytes(lmz) * (double)(1 + o->places),
                  false);
    lm_memory_add(out, "checkpoints in memory", (double)o->in_memory * lm_memory_checkpoint(p),
                  false);
    /* on a host, what is not touched until the first step has its place */
    lm_memory_add(out, "start of the adapter", o->adapt_keeps + fmax(o->adapt_room - out->later, 0),
                  false);
}

void trainer_plan_rank(const lm_trainer_opts *o, const lm_program *p, bool lmz, lm_memory_plan *out)
{
    memory_of(o, p, 1, NULL, 0, out);
    add_checkpoints(o, p, lmz, out);
}

static void plan_memory(const lm_trainer_opts *o, const lm_program *p, bool lmz,
                        lm_memory_plan *out)
{
    const int pp =
        o->pipe && o->mesh.rank[LM_AXIS_PP] == 0 ? lm_mesh_along(&o->mesh, LM_AXIS_PP) : 1;
    lm_trainer_opts *own = NULL;
    lm_program **others = NULL;
    lm_err unseen = { 0 };
    int n = 0;
    if (pp > 1 && !lm_alloc_n(&own, (size_t)pp, sizeof *own, "a plan", &unseen) &&
        !lm_alloc_n(&others, (size_t)pp, sizeof *others, "a plan", &unseen))
        make_others(o, p, own, others, &n);
    memory_of(o, p, o->ranks_here, others, n, out);
    for (int i = 0; i < n; i++)
        lm_program_free(others[i]);
    lm_free(others);
    lm_free(own);
    add_checkpoints(o, p, lmz, out);
}

void lm_trainer_plan(const lm_trainer_opts *o, const lm_program *p, bool lmz, lm_memory_plan *out)
{
    plan_memory(o, p, lmz, out);
    lm_memory_costs(p, o->accumulate, out);
}

/* The planned training and its device. */
typedef struct {
    const lm_trainer_opts *o;
    const lm_program *p;
    bool lmz;
    double host, device; /* free bytes; 0: unknown or none */
} job;

static bool fits(const job *j, const lm_memory_plan *p)
{
    return (j->host <= 0 || p->total <= j->host) && p->device <= lm_memory_usable(j->device);
}

/* The memory with other options. */
static lm_code replan(const job *j, const lm_trainer_opts *o, lm_memory_plan *out, lm_err *e)
{
    lm_program *p = NULL;
    lm_code rc = make_program(o, j->p->config, j->p->eval, j->p->backend, j->p, &p, e);
    if (!rc)
        plan_memory(o, p, j->lmz, out);
    lm_program_free(p);
    return rc;
}

/* Fewer ranks, with which the bits of the run are the same.  True: *o fits. */
static bool drop_ranks(const job *j, lm_trainer_opts *o, lm_memory_plan *p)
{
    int *ranks = &o->mesh.size[LM_AXIS_DP];
    const int64_t leaves = o->leaves > 0 ? o->leaves : *ranks;
    lm_err unseen = { 0 };
    for (o->leaves = leaves; --*ranks > 0;) {
        if (!lm_trainer_ranks_fit(o, *ranks, leaves))
            continue;
        if (replan(j, o, p, &unseen))
            return false;
        if (fits(j, p))
            return true;
    }
    return false;
}

/* Halve the micro-batch, which does not change the step.  True: *o fits. */
static bool halve(const job *j, lm_trainer_opts *o, lm_memory_plan *p)
{
    lm_err unseen = { 0 };
    for (;; o->batch /= 2, o->accumulate *= 2) {
        if (replan(j, o, p, &unseen))
            return false;
        if (fits(j, p))
            return true;
        if (o->batch % 2)
            return false;
    }
}

/* Halve the sequences, with one per micro-batch, down to a useful minimum. */
static bool shorten(const job *j, lm_trainer_opts *o, lm_memory_plan *p)
{
    enum { SHORTEST = 16 };
    lm_err unseen = { 0 };
    o->accumulate *= o->batch;
    o->batch = 1;
    while ((o->seq /= 2) >= SHORTEST) {
        if (replan(j, o, p, &unseen))
            return false;
        if (fits(j, p))
            return true;
    }
    return false;
}

/* No change keeps the step the same. */
static void advise_shorter(const job *j, bool device, char *out, size_t size)
{
    lm_trainer_opts o = *j->o;
    lm_memory_plan p;
    char bytes[32];
    const char *nor = o.precision.low == LM_DTYPE_BF16 ? "" : ", nor computing in BF16,";
    o.precision.low = LM_DTYPE_BF16;
    if (o.source) /* its lengths go together */
        snprintf(
            out, size,
            "no smaller batch size%s would do: use a shorter sequence length or a smaller model",
            nor);
    else if (shorten(j, &o, &p))
        snprintf(out, size,
                 "no smaller batch size%s would do: a sequence length of %" PRId64
                 " and a batch size of 1%s would need %s",
                 nor, o.seq, *nor ? ", computing in BF16," : "",
                 lm_show_bytes(device ? p.device : p.total, bytes));
    else
        snprintf(
            out, size,
            "no smaller batch size%s nor a shorter sequence length would do: %suse a smaller model",
            nor, o.build.adapt ? "lower the rank of the adapter, or " : "");
}

/* The quantities to choose instead. */
static void advise(const job *j, bool device, char *out, size_t size)
{
    lm_trainer_opts o = *j->o;
    lm_memory_plan p;
    char bytes[32], batch[96] = "";
    if (drop_ranks(j, &o, &p)) {
        snprintf(out, size, "a number of ranks of %d would need %s", (int)lm_mesh_ranks(&o.mesh),
                 lm_show_bytes(device ? p.device : p.total, bytes));
        return;
    }
    o = *j->o;
    bool low = o.precision.low == LM_DTYPE_BF16, found = halve(j, &o, &p);
    if (!found && !low) {
        o = *j->o;
        o.precision.low = LM_DTYPE_BF16;
        found = halve(j, &o, &p);
    }
    if (!found) {
        advise_shorter(j, device, out, size);
        return;
    }
    if (o.batch != j->o->batch)
        snprintf(batch, sizeof batch,
                 "a batch size of %" PRId64 " and a gradient accumulation of %" PRId64, o.batch,
                 o.accumulate);
    snprintf(out, size, "%s%s%s would need %s", batch,
             *batch && o.precision.low != j->o->precision.low ? ", " : "",
             o.precision.low != j->o->precision.low ? "computing in BF16" : "",
             lm_show_bytes(device ? p.device : p.total, bytes));
}

lm_code lm_trainer_verdict(const lm_trainer_opts *o, const lm_program *p, bool lmz,
                           const lm_memory_plan *plan, lm_train_verdict *out, lm_err *e)
{
    size_t available = lm_mem_available();
    lm_backend *b = p->backend;
    job j = { o, p, lmz, available < SIZE_MAX ? (double)available : 0, 0 };
    size_t left = 0, total;
    if (!b->host_memory && b->memory(b, &left, &total, e))
        return e->code;
    j.device = (double)left;
    *out =
        (lm_train_verdict){ .fits = fits(&j, plan), .host_free = j.host, .device_free = j.device };
    if (out->fits)
        return LM_OK;
    out->device = plan->device > lm_memory_usable(j.device);
    advise(&j, out->device, out->cure, sizeof out->cure);
    return LM_OK;
}

lm_code trainer_fit(const lm_trainer *t, lm_err *e)
{
    lm_train_verdict v;
    char need[32], have[32];
    if (lm_trainer_verdict(&t->o, t->program, t->io.checkpoint.lmz, &t->plan, &v, e))
        return e->code;
    if (v.fits)
        return LM_OK;
    return lm_fail(e, LM_ELIMIT, v.device ? t->b->name : "memory", v.cure,
                   "the run needs %s%s, %s are free",
                   lm_show_bytes(v.device ? t->plan.device : t->plan.total, need),
                   v.device && t->plan.device <= v.device_free ? " and room for kernels" : "",
                   lm_show_bytes(v.device ? v.device_free : v.host_free, have));
}
