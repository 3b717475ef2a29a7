/* memory.c -- the memory plan of a training run. */
#include "train/memory.h"

#include <string.h>

void lm_memory_add(lm_memory_plan *p, const char *name, double bytes)
{
    if (bytes <= 0)
        return;
    p->row[p->n_rows++] = (lm_memory_row){ name, bytes };
    p->total += bytes;
}

/* The program itself: code, libraries, graph, buffers of files.  Measured on small models. */
static const double process_bytes = 14.0 * (1 << 20);

/* A checkpoint goes out straight from the blocks, but for the tensors that lie transposed in them:
 * those pass through a buffer. */
static double checkpoint_bytes(const lm_model *m)
{
    double most = 0;
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *s = &m->slice[i];
        double n = s->transposed ? (double)(s->dim[0] * s->dim[1]) : 0;
        most = n > most ? n : most;
    }
    return most * sizeof(float);
}

lm_code lm_memory_of(const lm_model *train, const lm_model *eval, lm_backend *b,
                     const lm_optim *optim, const lm_optim_hyper *h, int64_t accumulate,
                     lm_memory_plan *out, lm_err *e)
{
    double block = (double)train->block * sizeof(float), eval_bytes = 0;
    int64_t rows = train->build.batch * train->build.seq;
    lm_plan plan;
    lm_graph_cost_sum cost;

    memset(out, 0, sizeof *out);
    if (lm_plan_make(train->graph, b, &train->loss, 1, &plan, e))
        return e->code;
    out->arena = (double)plan.bytes;
    out->lower_bound = (double)plan.lower_bound;
    lm_plan_fini(&plan);
    if (eval) {
        if (lm_plan_make(eval->graph, b, &eval->loss, 1, &plan, e))
            return e->code;
        eval_bytes = (double)plan.bytes > out->arena ? (double)plan.bytes : 0;
        lm_plan_fini(&plan);
    }
    lm_memory_add(out, "weights (f32 master)", block);
    if (train->build.precision.low == LM_DTYPE_BF16)
        lm_memory_add(out, "weights (bf16)", block / 2);
    lm_memory_add(out, "gradients (f32)", block);
    lm_memory_add(out, "optimiser states", block * optim->states(h));
    lm_memory_add(out, "activations and scratch", out->arena);
    lm_memory_add(out, "validation", eval_bytes);
    lm_memory_add(out, "batches", (double)(rows * 4 * 4 * (accumulate + (eval ? 1 : 0))));
    lm_memory_add(out, "rotary table",
                  (double)(train->rope_rows * train->config.head_dim) * 4 * (eval ? 2 : 1));
    lm_memory_add(out, "checkpoint buffer", checkpoint_bytes(train));
    lm_memory_add(out, "program", process_bytes);
    out->params = lm_config_params(&train->config);
    out->matmul_params = lm_config_matmul_params(&train->config);
    out->flops_per_token = lm_config_train_flops(&train->config, train->build.seq);
    out->tokens_per_step = rows * accumulate;
    lm_graph_cost(train->graph, &cost);
    for (int i = 0; i < LM_PHASE_COUNT; i++)
        out->graph_flops[i] = cost.phase[i].flops;
    return LM_OK;
}
