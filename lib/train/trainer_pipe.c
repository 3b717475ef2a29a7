/* SPDX-License-Identifier: Apache-2.0 */
/* trainer_pipe.c -- ranks that share the layers of a model: each runs its row of the schedule.
 *
 * The schedule is run once for each leaf of a rank's sums, so that a leaf is complete on all ranks when the next one begins.
 * Two ways through the stages are like two ranks along dp: either has half of the micro-batches and leaves, and the gradients
 * of both copies of a stage are added at the end of a step.
 * Within it each stage takes the micro-batches in their order, whatever the schedule, so that a gradient is the same sum as on
 * one rank.  One to which several stages add, of a tied embedding, is a sum for each stage, and their sum at the end of the
 * leaf. */
#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "parallel/pipeline_run.h"
#include "train/crossings.h"
#include "train/trainer_impl.h"

struct trainer_pipe {
    lm_trainer *t;
    const lm_train_pipe *is;
    lm_pipe_work train, eval;
    lm_pipe_runner *runner;
    slots *of_train, *of_eval;     /* [stages] */
    crossings *by_train, *by_eval; /* [stages]; NULL on the host, whose slots hold them */
    int64_t first[2];              /* by way: micro-batch of this rank with which the leaf begins */
    lm_comm
        *twins; /* this rank and the one that has the copies of its stages; NULL: there are none */
    double busy, all; /* seconds of the last step, of all ranks: computing, and until the end */
    double idle;      /* when this rank's last section ended; 0: none has */
};

static int rank_of(const trainer_pipe *p)
{
    return p->t->o.mesh.rank[LM_AXIS_PP];
}

/* ---- slots ---- */

static lm_code make_slots(trainer_pipe *p, const lm_plan *plan, bool one, slots **out, lm_err *e)
{
    lm_backend *b = p->t->b;
    const lm_pipeline *rows = &p->is->rows;
    if (lm_alloc_n(out, (size_t)rows->stages, sizeof **out, "stages", e))
        return e->code;
    for (int k = 0; k < rows->stages; k++) {
        slots *s = &(*out)[k];
        if (lm_pipeline_slots(rows, k, rank_of(p), &s->n, e))
            return e->code;
        if (!s->n)
            continue;
        s->n = one ? 1 : s->n;
        s->each = plan->slot_bytes[k];
        if (b->alloc(b, s->each * (size_t)s->n + 1, "micro-batches in flight", (void **)&s->data,
                     e))
            return e->code;
    }
    return LM_OK;
}

static void free_slots(trainer_pipe *p, slots *s)
{
    for (int k = 0; s && k < p->is->rows.stages; k++)
        if (s[k].data)
            p->t->b->free(p->t->b, s[k].data, s[k].each * (size_t)s[k].n + 1);
    lm_free(s);
}

static void use_slot(lm_exec *x, const slots *s, int stage, int slot)
{
    lm_exec_slot(x, stage, s[stage].data + s[stage].each * (size_t)slot);
}

/* ---- what crosses borders ---- */

static exchanged exchanged_of(const trainer_pipe *p, bool eval)
{
    const lm_program *of = p->t->program;
    return (exchanged){ .b = p->t->b,
                        .stages = p->is->rows.stages,
                        .m = eval ? of->eval : of->train,
                        .plan = eval ? &of->eval_plan : &of->train_plan,
                        .of = eval ? p->of_eval : p->of_train,
                        .by = eval ? p->by_eval : p->by_train };
}

static bool part_of_train(void *ctx, int border, bool up, bool sender, int slot, size_t k,
                          lm_pipe_part *out)
{
    const exchanged x = exchanged_of(ctx, false);
    return crossings_part(&x, border, up, sender, slot, k, out);
}

static bool part_of_eval(void *ctx, int border, bool up, bool sender, int slot, size_t k,
                         lm_pipe_part *out)
{
    const exchanged x = exchanged_of(ctx, true);
    return crossings_part(&x, border, up, sender, slot, k, out);
}

/* ---- steps of the schedule ---- */

static lm_code run_sections(lm_trainer *t, const lm_pipe_step *s, const lm_step *step, lm_err *e)
{
    switch (s->kind) {
    case LM_PIPE_F:
        return lm_program_run_stage(t->program, s->stage, LM_STAGE_F, step, e);
    case LM_PIPE_W:
        return lm_program_run_stage(t->program, s->stage, LM_STAGE_W, step, e);
    case LM_PIPE_I:
        return lm_program_run_stage(t->program, s->stage, LM_STAGE_B, step, e);
    default:
        return lm_program_run_stage(t->program, s->stage, LM_STAGE_B, step, e) ||
                       lm_program_run_stage(t->program, s->stage, LM_STAGE_W, step, e)
                   ? e->code
                   : LM_OK;
    }
}

static lm_code compute(void *ctx, const lm_pipe_step *s, int slot, lm_err *e)
{
    trainer_pipe *p = ctx;
    lm_trainer *t = p->t;
    if (t->tracing && p->idle > 0)
        lm_trace_span(t->trace, TRACE_COMM, "other stages", p->idle, lm_now());
    const lm_pipeline *rows = &p->is->rows;
    const int way = lm_pipeline_way(rows, p->is->ways, s->micro);
    const int64_t in_leaf = s->micro - way * (rows->micros / 2), i = p->first[way] + in_leaf;
    const lm_step step = {
        .seed = t->o.seed, .step = t->s.step, .micro = t->first + i, .more = in_leaf > 0
    };
    const exchanged x = exchanged_of(p, false);
    use_slot(t->program->exec, p->of_train, s->stage, slot);
    if (crossings_receive(&x, s, slot, e) || trainer_hand_over(t, i, e) ||
        run_sections(t, s, &step, e) || crossings_hand_on(&x, s, slot, e))
        return e->code;
    if ((s->kind == LM_PIPE_B || s->kind == LM_PIPE_W) && i + 1 == t->micros)
        trainer_ahead_stage(t, s->stage);
    p->idle = lm_now();
    return LM_OK;
}

static lm_code compute_eval(void *ctx, const lm_pipe_step *s, int slot, lm_err *e)
{
    const trainer_pipe *p = ctx;
    const lm_stage *at = &p->t->eval.model->stages->stage[s->stage];
    const lm_step step = { 0 };
    const exchanged x = exchanged_of(p, true);
    return crossings_receive(&x, s, slot, e) ||
                   lm_exec_run_part(p->t->eval.exec, at->first[LM_STAGE_F], at->last[LM_STAGE_F],
                                    NULL, &step, e) ||
                   crossings_hand_on(&x, s, slot, e)
               ? e->code
               : LM_OK;
}

/* ---- a step ---- */

static lm_code clear_sums(lm_trainer *t, lm_err *e)
{
    lm_backend *b = t->b;
    return b->zero(b, t->numbers.dev, TRAINER_SUMS * sizeof(double), b->main, e) ||
                   (t->routed.bytes && b->zero(b, t->routed.dev, t->routed.bytes, b->main, e))
               ? e->code
               : LM_OK;
}

/* Those of a comm's ranks, in memory of the host. */
static lm_code add_sums(lm_trainer *t, lm_comm *c, lm_err *e)
{
    const size_t bytes = TRAINER_SUMS * sizeof(double);
    double *n = t->numbers.host;
    float *routed = t->routed.host;
    if (lm_mirror_pull(&t->numbers, bytes, NULL, e) ||
        (t->routed.bytes && lm_mirror_pull(&t->routed, t->routed.bytes, NULL, e)) ||
        t->b->sync(t->b, t->b->main, e) ||
        lm_comm_all_reduce(c, n, n, TRAINER_SUMS, LM_DTYPE_F64, LM_COMM_SUM, e) ||
        (t->routed.bytes && lm_comm_all_reduce(c, routed, routed, t->routed.bytes / sizeof *routed,
                                               LM_DTYPE_F32, LM_COMM_SUM, e)))
        return e->code;
    return lm_mirror_push(&t->numbers, bytes, NULL, e) ||
                   (t->routed.bytes && lm_mirror_push(&t->routed, t->routed.bytes, NULL, e)) ||
                   t->b->sync(t->b, t->b->main, e)
               ? e->code
               : LM_OK;
}

/* The gradients of both copies of a stage, and the sums of both ways. */
static lm_code add_twins(trainer_pipe *p, lm_err *e)
{
    lm_trainer *t = p->t;
    float *g = lm_store_flat(t->s.store, LM_KEPT_GRAD, 0);
    const double began = lm_now();
    if (!p->twins)
        return LM_OK;
    if (lm_comm_all_reduce(p->twins, g, g,
                           (size_t)lm_store_find(t->s.store, LM_KEPT_GRAD, 0)->count, LM_DTYPE_F32,
                           LM_COMM_SUM, e) ||
        add_sums(t, p->twins, e))
        return e->code;
    if (t->tracing)
        lm_trace_span(t->trace, TRACE_COMM, "gradients of copies", began, lm_now());
    return LM_OK;
}

/* What each rank has of the sums of a step, others have zeros of; of twins one gives them. */
static lm_code share_sums(trainer_pipe *p, lm_err *e)
{
    if (p->twins && lm_comm_rank(p->twins) && clear_sums(p->t, e))
        return e->code;
    return add_sums(p->t, p->t->along[LM_AXIS_PP], e);
}

static lm_code share_times(trainer_pipe *p, double busy, double all, lm_err *e)
{
    double n[] = { busy, all };
    lm_comm_all_reduce(p->t->along[LM_AXIS_PP], n, n, 2, LM_DTYPE_F64, LM_COMM_SUM, e);
    p->busy = n[0];
    p->all = n[1];
    return e->code;
}

/* Number k of the leaves of each way. */
static lm_code run_leaf(trainer_pipe *p, int64_t k, lm_err *e)
{
    lm_trainer *t = p->t;
    const int64_t leaf = t->o.accumulate / t->o.leaves;
    for (int way = 0; way < p->is->ways; way++)
        p->first[way] = way * (t->micros / 2) + k * leaf;
    const lm_step step = { .seed = t->o.seed,
                           .step = t->s.step,
                           .micro = t->first + (k + 1) * leaf - 1 };
    if (clear_sums(t, e))
        return e->code;
    trainer_addends_clear(t);
    return lm_pipe_runner_run(p->runner, e) || trainer_addends_join(t, e) ||
                   trainer_ranks_leaf(t, k, &step, e)
               ? e->code
               : LM_OK;
}

lm_code trainer_pipe_step(lm_trainer *t, lm_err *e)
{
    trainer_pipe *p = t->pipe;
    const int64_t leaves = t->o.leaves / t->ranks / p->is->ways;
    const lm_pipe_use before = lm_pipe_runner_used(p->runner);
    p->idle = 0;
    for (int64_t k = 0; k < leaves; k++)
        if (run_leaf(p, k, e))
            return e->code;
    if (add_twins(p, e) || trainer_ranks_sum(t, e))
        return e->code;
    const lm_pipe_use after = lm_pipe_runner_used(p->runner);
    return share_sums(p, e) || share_times(p, after.busy - before.busy, after.all - before.all, e)
               ? e->code
               : LM_OK;
}

double trainer_pipe_bubble(const lm_trainer *t)
{
    const trainer_pipe *p = t->pipe;
    return p && p->all > 0 ? 1 - p->busy / p->all : NAN;
}

void trainer_pipe_use(const lm_trainer *t, rank_use *sum)
{
    if (!t->pipe)
        return;
    const lm_pipe_use use = lm_pipe_runner_used(t->pipe->runner);
    sum->seconds += use.all - use.busy;
    sum->bytes[LM_AXIS_PP] += use.bytes;
    if (t->pipe->twins) {
        const lm_comm_use twins = lm_comm_used(t->pipe->twins);
        sum->seconds += twins.seconds;
        sum->bytes[LM_AXIS_PP] += twins.bytes;
    }
}

void trainer_pipe_patience(lm_trainer *t, double seconds)
{
    if (!t->pipe)
        return;
    lm_pipe_runner_patience(t->pipe->runner, seconds);
    if (t->pipe->twins)
        lm_comm_patience(t->pipe->twins, seconds);
}

lm_code trainer_pipe_evaluate(lm_trainer *t, lm_eval_sum *sum, const float **rows, lm_err *e)
{
    lm_evaluator *v = &t->eval;
    const lm_train_pipe *is = t->pipe->is;
    if (lm_batch_push(&v->batch, NULL, e) ||
        lm_pipe_runner_forward(t->pipe->runner, &t->pipe->eval, e) ||
        is->rank[0][is->rows.stages - 1] != rank_of(t->pipe) || lm_evaluator_losses(v, rows, e))
        return e->code;
    lm_evaluator_add(v, *rows, sum);
    return LM_OK;
}

lm_code trainer_pipe_evaluated(lm_trainer *t, lm_eval_sum *sum, lm_err *e)
{
    double n[] = { sum->nll, (double)sum->tokens };
    if (!t->pipe)
        return LM_OK;
    if (lm_comm_all_reduce(t->along[LM_AXIS_PP], n, n, 2, LM_DTYPE_F64, LM_COMM_SUM, e))
        return e->code;
    sum->nll = n[0];
    sum->tokens = (int64_t)n[1];
    return LM_OK;
}

/* ---- life ---- */

/* The rank with the copies of its stages; -1: stages have no copies. */
static int twin_of(const lm_train_pipe *is, int rank)
{
    for (int k = 0; is->ways == 2 && k < is->rows.stages; k++)
        if (is->rank[0][k] == rank)
            return is->rank[1][k];
    return -1;
}

static lm_code make_crossings(trainer_pipe *p, lm_err *e)
{
    const exchanged train = exchanged_of(p, false), eval = exchanged_of(p, true);
    return crossings_make(&train, &p->by_train, e) ||
                   (p->t->eval.exec && crossings_make(&eval, &p->by_eval, e))
               ? e->code
               : LM_OK;
}

static lm_code ready(trainer_pipe *p, lm_err *e)
{
    lm_trainer *t = p->t;
    const lm_program *of = t->program;
    p->train = (lm_pipe_work){ p, compute, part_of_train };
    p->eval = (lm_pipe_work){ p, compute_eval, part_of_eval };
    if (make_slots(p, &of->train_plan, false, &p->of_train, e) ||
        (t->eval.exec && make_slots(p, &of->eval_plan, true, &p->of_eval, e)) ||
        make_crossings(p, e))
        return e->code;
    for (int k = 0; k < p->is->rows.stages; k++) {
        if (p->of_train[k].data)
            use_slot(of->exec, p->of_train, k, 0);
        if (p->of_eval && p->of_eval[k].data)
            use_slot(t->eval.exec, p->of_eval, k, 0);
    }
    const int rank = rank_of(p), twin = twin_of(p->is, rank);
    if (twin >= 0 &&
        lm_comm_split(t->along[LM_AXIS_PP], rank < twin ? rank : twin, rank, &p->twins, e))
        return e->code;
    return lm_pipe_runner_new(&p->is->rows, &p->train, t->along[LM_AXIS_PP], &p->runner, e);
}

lm_code trainer_pipe_new(lm_trainer *t, lm_err *e)
{
    trainer_pipe *p = NULL;
    if (!t->o.pipe)
        return LM_OK;
    if (lm_alloc_n(&p, 1, sizeof *p, "a pipeline", e))
        return e->code;
    p->t = t;
    p->is = t->o.pipe;
    t->pipe = p;
    return ready(p, e);
}

void trainer_pipe_fini(lm_trainer *t)
{
    trainer_pipe *p = t->pipe;
    if (!p)
        return;
    lm_pipe_runner_free(p->runner);
    lm_comm_free(p->twins);
    free_slots(p, p->of_train);
    free_slots(p, p->of_eval);
    for (int i = 0; i < 2; i++) {
        const exchanged x = exchanged_of(p, i);
        crossings_free(&x);
    }
    lm_free(p);
    t->pipe = NULL;
}
