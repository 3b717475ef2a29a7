/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_train.c -- all ranks of a run: processes, each of which is one, or threads of this one. */
#include "comm/threads.h"
#include "train/trainer_impl.h"

typedef struct {
    const lm_trainer_opts *o;
    const lm_trainer_io *io;
    lm_backend *b; /* of rank 0 */
    lm_code (*ready)(void *ctx, lm_err *e);
    void *ctx;
    lm_trainer **out;
    lm_train_result *r;
} training;

static lm_code lead(const training *x, lm_comm *c, lm_err *e)
{
    lm_trainer_io io = *x->io;
    io.comm = c;
    lm_code rc = lm_trainer_new(x->o, &io, x->b, x->out, e);
    if (!rc && x->ready)
        rc = x->ready(x->ctx, e);
    if (!rc)
        rc = lm_trainer_run(*x->out, x->r, e);
    if (*x->out && !x->io->comm) { /* it outlives the ranks */
        trainer_pipe_fini(*x->out);
        trainer_ranks_leave(*x->out);
        (*x->out)->io.comm = NULL;
    }
    return rc;
}

/* A rank that only computes: on threads with a program of its own.  Beside weights that do not train, each process reads the
 * model itself: they may stay in the file. */
static lm_code follow(const training *x, lm_comm *c, lm_backend *b, lm_program *program,
                      const lm_objective *objective, lm_trainer **out, lm_err *e)
{
    lm_trainer_opts o = *x->o;
    const bool reads = program && x->o->build.codes;
    const lm_trainer_io io = { .config = x->io->config,
                               .comm = c,
                               .program = program,
                               .par = program ? x->io->par : NULL,
                               .weights = reads ? x->io->weights : NULL,
                               .adapt = x->io->adapt,
                               .adapt_ctx = x->io->adapt_ctx,
                               .after = x->io->after,
                               .resume = x->io->resume,
                               .objective = objective,
                               .train = x->io->train,
                               .val = x->io->val,
                               .packed = x->io->packed,
                               .val_packed = x->io->val_packed,
                               .ids = x->io->ids,
                               .checkpoint = x->io->checkpoint,
                               .tiers = x->io->tiers,
                               .trace = x->io->trace };
    lm_train_result r;
    if (!o.zero && !o.pipe) /* samples of what ranks share, and of all stages, are gathered */
        o.log_every = 0;
    return lm_trainer_new(&o, &io, b, out, e) || lm_trainer_run(*out, &r, e) ? e->code : LM_OK;
}

/* A pool of the same size, or the next device. */
static lm_code open_rank(const training *x, int rank, lm_par **par, lm_backend **b, lm_err *e)
{
    if (!x->b->host_memory)
        return x->b->behind(x->b, rank, b, e);
    return lm_par_new(par, lm_par_threads(x->b->par), e) || lm_backend_cpu(x->b->cpu, *par, b, e)
               ? e->code
               : LM_OK;
}

static lm_code follow_on_thread(const training *x, lm_comm *c, lm_err *e)
{
    lm_par *par = NULL;
    lm_backend *b = NULL;
    lm_trainer *t = NULL;
    const lm_objective *of = x->io->objective, *own = NULL;
    if (!open_rank(x, lm_comm_rank(c), &par, &b, e) && !(of && of->twin(of->ctx, &own, e)))
        follow(x, c, b, NULL, own, &t, e);
    lm_trainer_free(t);
    if (own)
        own->drop(own->ctx);
    lm_backend_close(b);
    lm_par_free(par);
    return e->code;
}

static lm_code run_rank(void *ctx, lm_comm *c, lm_err *e)
{
    return lm_comm_rank(c) ? follow_on_thread(ctx, c, e) : lead(ctx, c, e);
}

lm_code lm_trainer_train(const lm_trainer_opts *o, const lm_trainer_io *io, lm_backend *b,
                         lm_code (*ready)(void *ctx, lm_err *e), void *ctx, lm_trainer **out,
                         lm_train_result *r, lm_err *e)
{
    training x = { o, io, b, ready, ctx, out, r };
    lm_comm *c = io->comm;
    *out = NULL;
    if (c &&
        (lm_comm_rank(c) ? follow(&x, c, b, io->program, io->objective, out, e) : lead(&x, c, e)))
        lm_comm_abort(c, e);
    const int ranks = (int)lm_mesh_ranks(&o->mesh);
    if (c || ranks <= 1)
        return c ? e->code : lead(&x, NULL, e);
    if (io->adapt || o->build.codes)
        return lm_fail(e, LM_EUSAGE, "ranks", "start processes",
                       "threads cannot share what reads an adapter's base");
    if (io->objective && !io->objective->twin)
        return lm_fail(e, LM_EUSAGE, "ranks", "start processes",
                       "threads cannot share what the loss is computed with");
    /* what no rank can do is refused once, not as the failure of a rank */
    const lm_trainer asks = {
        .o = *o, .io = *io, .b = b, .ranks = lm_mesh_along(&o->mesh, LM_AXIS_DP)
    };
    return trainer_ranks_check(&asks, e) ? e->code : lm_threads_run(ranks, 0, run_rank, &x, e);
}
