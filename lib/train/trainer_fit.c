/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_fit.c -- plans, and whether they fit. */
#include <inttypes.h>
#include <stdio.h>

#include "base/mem.h"
#include "base/text.h"
#include "train/trainer_impl.h"

lm_build trainer_build(const lm_trainer_opts *o, lm_mode mode, lm_backend *b)
{
    return (lm_build){ .mode = mode,
                       .batch = o->batch,
                       .seq = o->seq,
                       .precision = o->precision,
                       .documents = o->documents,
                       .dropout = o->dropout,
                       .backend = b };
}

lm_code lm_trainer_plan(const lm_trainer_opts *o, const lm_config *c, bool validation, bool lmz,
                        lm_backend *b, lm_memory_plan *out, lm_err *e)
{
    lm_build tb = trainer_build(o, LM_MODE_TRAIN, b), eb = trainer_build(o, LM_MODE_EVAL, b);
    lm_model *train = NULL, *eval = NULL;
    lm_code rc = lm_model_build(c, &tb, &train, e);
    if (!rc && validation)
        rc = lm_model_build(c, &eb, &eval, e);
    if (!rc)
        rc = lm_memory_of(train, eval, b, o->optim, &o->hyper, o->accumulate, out, e);
    if (!rc)
        lm_memory_add(out, "checkpoint coder", lm_ckpt_coder_bytes(lmz), false);
    lm_model_free(train);
    lm_model_free(eval);
    return rc;
}

lm_code lm_trainer_dump(const lm_trainer_opts *o, const lm_config *c, lm_backend *b, lm_buf *out,
                        lm_err *e)
{
    lm_build build = trainer_build(o, LM_MODE_TRAIN, b);
    lm_model *m = NULL;
    lm_code rc = lm_model_build(c, &build, &m, e);
    if (!rc)
        rc = lm_graph_dump(m->graph, out, e);
    lm_model_free(m);
    return rc;
}

static lm_code plan_of(const lm_trainer *t, const lm_trainer_opts *o, lm_memory_plan *p, lm_err *e)
{
    return lm_trainer_plan(o, t->io.config, t->io.val && t->o.eval_every, t->io.checkpoint.lmz,
                           t->b, p, e);
}

typedef struct {
    double host, device; /* bytes; 0: unknown */
} room;

static bool fits(const lm_memory_plan *p, const room *free)
{
    return (free->host <= 0 || p->total <= free->host) &&
           p->device <= lm_memory_usable(free->device);
}

/* Halve the micro-batch as long as that leaves the step as it is.  True: *o fits. */
static bool halve(const lm_trainer *t, lm_trainer_opts *o, const room *free, lm_memory_plan *p)
{
    lm_err unseen = { 0 };
    for (;; o->batch /= 2, o->accumulate *= 2) {
        if (plan_of(t, o, p, &unseen))
            return false;
        if (fits(p, free))
            return true;
        if (o->batch % 2)
            return false;
    }
}

/* What to ask for instead. */
static void advise(const lm_trainer *t, const room *free, bool device, char *out, size_t size)
{
    lm_trainer_opts o = t->o;
    lm_memory_plan p;
    char bytes[32], batch[96] = "";
    bool low = t->o.precision.low == LM_DTYPE_BF16, found = halve(t, &o, free, &p);
    if (!found && !low) {
        o = t->o;
        o.precision.low = LM_DTYPE_BF16;
        found = halve(t, &o, free, &p);
    }
    if (!found) {
        snprintf(out, size,
                 "no smaller --batch-size%s would do: use shorter --seq-len or a smaller model",
                 low ? "" : ", nor --dtype bf16,");
        return;
    }
    if (o.batch != t->o.batch)
        snprintf(batch, sizeof batch,
                 "--batch-size %" PRId64 " --gradient-accumulation-steps %" PRId64, o.batch,
                 o.accumulate);
    snprintf(out, size, "%s%s%s would need %s", batch,
             *batch && o.precision.low != t->o.precision.low ? " " : "",
             o.precision.low != t->o.precision.low ? "--dtype bf16" : "",
             lm_show_bytes(device ? p.device : p.total, bytes));
}

lm_code trainer_fit(const lm_trainer *t, lm_err *e)
{
    room free = { .host = (double)lm_mem_available() };
    char need[32], have[32], todo[200];
    if (!t->b->host_memory)
        free.device = (double)t->free_before;
    if (fits(&t->plan, &free))
        return LM_OK;
    bool device = t->plan.device > lm_memory_usable(free.device);
    advise(t, &free, device, todo, sizeof todo);
    return lm_fail(e, LM_ELIMIT, device ? t->b->name : "memory", todo,
                   "the run needs %s%s, %s are free",
                   lm_show_bytes(device ? t->plan.device : t->plan.total, need),
                   device && t->plan.device <= free.device ? " and room for kernels" : "",
                   lm_show_bytes(device ? free.device : free.host, have));
}
