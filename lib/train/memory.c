/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c -- the memory plan of a training run. */
#include "train/memory.h"

#include <string.h>

#include "model/rotary.h"
#include "numeric/format.h"
#include "train/batch.h"
#include "train/monitor.h"
#include "train/state.h"

void lm_memory_add(lm_memory_plan *p, const char *name, double bytes, bool device)
{
    if (bytes <= 0)
        return;
    p->row[p->n_rows++] = (lm_memory_row){ name, bytes, device };
    *(device ? &p->device : &p->total) += bytes;
}

double lm_memory_usable(double device_free)
{
    return device_free / 64 * 63;
}

/* A mirror: on a device there is one on either side. */
static void add_twin(lm_memory_plan *p, const char *name, const char *host_name, double bytes,
                     bool device)
{
    lm_memory_add(p, name, bytes, device);
    if (device)
        lm_memory_add(p, host_name, bytes, false);
}

/* The program itself: code, libraries, graph, buffers of files.  Measured on small models. */
static const double process_bytes = 14.0 * (1 << 20);

/* A checkpoint is written directly from the blocks, or their snapshot, except tensors that are
 * stored transposed, which pass through a buffer. */
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

/* The largest tensor: what is loaded to a device passes through the host one by one, those that lie
 * transposed through a second place. */
static double staging_bytes(const lm_model *m)
{
    int64_t most = 0;
    for (int i = 0; i < m->n_slices; i++) {
        int64_t n = lm_slice_count(&m->slice[i]);
        most = n > most ? n : most;
    }
    return (double)most * sizeof(float);
}

/* What a graph needs beyond the arena of training, which it shares. */
static lm_code plan_sharing(const lm_graph *g, lm_backend *b, const lm_vid *keep, double arena,
                            double *out, lm_err *e)
{
    lm_plan plan;
    if (lm_plan_make(g, b, keep, keep != NULL, &plan, e))
        return e->code;
    *out = (double)plan.bytes > arena ? (double)plan.bytes : 0;
    lm_plan_fini(&plan);
    return LM_OK;
}

static lm_code plan_graphs(const lm_program *p, lm_memory_plan *out, double *eval_bytes,
                           double *update_bytes, lm_err *e)
{
    lm_plan plan;
    *eval_bytes = *update_bytes = 0;
    if (lm_plan_make(p->train->graph, p->backend, NULL, 0, &plan, e))
        return e->code;
    out->arena = (double)plan.bytes;
    out->lower_bound = (double)plan.lower_bound;
    lm_plan_fini(&plan);
    if (plan_sharing(lm_update_graph(p->update), p->backend, NULL, out->arena, update_bytes, e))
        return e->code;
    return p->eval
               ? plan_sharing(p->eval->graph, p->backend, &p->eval->loss, out->arena, eval_bytes, e)
               : LM_OK;
}

/* Of optimizer.safetensors. */
static double states_bytes(const lm_store_opts *keep, const lm_model *m)
{
    double sum = 0;
    for (int k = 0; k < keep->n_states; k++)
        for (int i = 0; i < keep->state[k].n_parts; i++)
            sum += (double)lm_plain_bytes(keep->state[k].format,
                                          lm_tensor_count(&keep->state[k].part[i].shape));
    for (int i = 0; keep->shown && i < m->n_slices; i++)
        sum += m->param[m->slice[i].param].trains ? (double)lm_slice_count(&m->slice[i]) * 4 : 0;
    return sum;
}

lm_code lm_memory_of(const lm_program *p, int64_t accumulate, lm_memory_plan *out, lm_err *e)
{
    const lm_model *train = p->train, *eval = p->eval;
    const lm_store_opts keep = lm_train_store(p);
    size_t kept[LM_KEPT_ROLES], batch;
    double eval_bytes, update_bytes;
    int64_t rows = train->build.batch * train->build.seq;
    bool device = !p->backend->host_memory;
    lm_graph_cost_sum cost;

    memset(out, 0, sizeof *out);
    if (plan_graphs(p, out, &eval_bytes, &update_bytes, e) ||
        lm_store_outlook(train, &keep, kept, e))
        return e->code;
    batch = lm_batch_bytes(train->build.batch, train->build.seq, lm_update_n_numbers(p->update));
    lm_memory_add(out, "weights (f32 master)", (double)kept[LM_KEPT_PARAM], device);
    lm_memory_add(out, "weights (bf16)", (double)kept[LM_KEPT_DERIVED], device);
    lm_memory_add(out, "gradients (f32)", (double)kept[LM_KEPT_GRAD], device);
    lm_memory_add(out, "optimiser states", (double)kept[LM_KEPT_OPT], device);
    lm_memory_add(out, "activations and scratch", out->arena, device);
    lm_memory_add(out, "validation", eval_bytes, device);
    lm_memory_add(out, "update", update_bytes, device);
    add_twin(out, "batches", "batches (host)",
             (double)batch * (double)(accumulate * (device ? 2 : 1)) +
                 (eval ? (double)lm_batch_bytes(train->build.batch, train->build.seq, 0) : 0),
             device);
    if (device)
        lm_memory_add(out, "batch under way", (double)batch, true);
    lm_memory_add(out, "rotary table", (double)lm_rotary_bytes(train) * (eval ? 2 : 1), device);
    if (eval && device)
        lm_memory_add(out, "losses (host)", (double)rows * sizeof(float), false);
    add_twin(out, "samples of weights", "samples of weights (host)",
             (double)lm_monitor_bytes(train->train_end), device);
    lm_memory_add(out, "checkpoint snapshot (host)",
                  (double)lm_ckpt_snapshot_bytes(p->backend, kept, keep.shown), false);
    lm_memory_add(out, "checkpoint buffer", checkpoint_bytes(train), false);
    if (device)
        lm_memory_add(out, "tensors being loaded", staging_bytes(train) + checkpoint_bytes(train),
                      false);
    lm_memory_add(out, "program", process_bytes, false);
    out->params = lm_config_params(&train->config);
    out->checkpoint = (double)out->params * sizeof(float) + states_bytes(&keep, train);
    out->matmul_params = lm_config_matmul_params(&train->config);
    out->flops_per_token = lm_config_train_flops(&train->config, train->build.seq);
    out->tokens_per_step = rows * accumulate;
    lm_graph_cost(train->graph, &cost);
    for (int i = 0; i < LM_PHASE_UPDATE; i++)
        out->graph_flops[i] = cost.phase[i].flops;
    return LM_OK;
}
