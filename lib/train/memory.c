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
    int64_t most = 0;
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *s = &m->slice[i];
        int64_t n = s->transposed ? lm_slice_count(s) : 0;
        most = n > most ? n : most;
    }
    return (double)lm_plain_bytes(LM_DTYPE_F32, most);
}

/* The largest tensor: tensors for a device pass through the host one by one, transposed ones
 * through a second buffer. */
static double staging_bytes(const lm_model *m)
{
    int64_t most = 0;
    for (int i = 0; i < m->n_slices; i++) {
        int64_t n = lm_slice_count(&m->slice[i]);
        most = n > most ? n : most;
    }
    return (double)lm_plain_bytes(LM_DTYPE_F32, most);
}

/* The memory of a graph beyond the arena of training, which it shares. */
static double beyond(const lm_program *p, const lm_plan *plan)
{
    return plan->bytes > p->train_plan.bytes ? (double)plan->bytes : 0;
}

/* Values of the update that are not views, by role. */
static double bytes_of(const lm_program *p, lm_role role)
{
    const lm_graph *g = lm_update_graph(p->update);
    double sum = 0;
    for (size_t v = 0; v < g->n_values; v++) {
        const lm_value *x = &g->value[v];
        if (x->role == role && x->of == LM_NONE)
            sum += (double)lm_value_bytes(x, &lm_mesh_alone);
    }
    return sum;
}

/* Size of optimizer.safetensors. */
static double states_size(const lm_program *p)
{
    const lm_store_state *state;
    const lm_vid *value;
    const lm_model *m = p->train;
    int n = lm_update_states(p->update, &state, &value);
    double sum = 0;
    for (int k = 0; k < n; k++)
        for (int i = 0; i < state[k].n_parts; i++)
            sum +=
                (double)lm_plain_bytes(state[k].format, lm_tensor_count(&state[k].part[i].shape));
    for (int i = 0; lm_update_shows(p->update) && i < m->n_slices; i++)
        if (m->param[m->slice[i].param].trains)
            sum += (double)lm_plain_bytes(LM_DTYPE_F32, lm_slice_count(&m->slice[i]));
    return sum;
}

void lm_memory_costs(const lm_program *p, int64_t accumulate, lm_memory_plan *out)
{
    const lm_model *m = p->train;
    lm_graph_cost_sum cost;
    out->params = lm_config_params(&m->config);
    out->checkpoint = (double)lm_plain_bytes(LM_DTYPE_F32, out->params) + states_size(p);
    out->matmul_params = lm_config_matmul_params(&m->config);
    out->flops_per_token = lm_config_train_flops(&m->config, m->build.seq);
    out->tokens_per_step = m->build.batch * m->build.seq * accumulate;
    lm_graph_cost(m->graph, &cost);
    for (int i = 0; i < LM_PHASE_UPDATE; i++)
        out->graph_flops[i] = cost.phase[i].flops;
}

void lm_memory_of(const lm_program *p, int64_t accumulate, lm_memory_plan *out)
{
    const lm_model *train = p->train, *eval = p->eval;
    const size_t kept[LM_KEPT_ROLES] = {
        [LM_KEPT_PARAM] = (size_t)bytes_of(p, LM_ROLE_PARAM),
        [LM_KEPT_DERIVED] = (size_t)bytes_of(p, LM_ROLE_DERIVED),
        [LM_KEPT_GRAD] = (size_t)bytes_of(p, LM_ROLE_GRAD),
        [LM_KEPT_OPT] = (size_t)bytes_of(p, LM_ROLE_OPT),
    };
    bool device = !p->backend->host_memory;
    int64_t rows = train->build.batch * train->build.seq;
    size_t batch =
        lm_batch_bytes(train->build.batch, train->build.seq, lm_update_n_numbers(p->update));

    memset(out, 0, sizeof *out);
    out->arena = (double)p->train_plan.bytes;
    out->lower_bound = (double)p->train_plan.lower_bound;
    lm_memory_add(out, "weights (f32 master)", (double)kept[LM_KEPT_PARAM], device);
    lm_memory_add(out, "weights (bf16)", (double)kept[LM_KEPT_DERIVED], device);
    lm_memory_add(out, "gradients (f32)", (double)kept[LM_KEPT_GRAD], device);
    lm_memory_add(out, "optimiser states", (double)kept[LM_KEPT_OPT], device);
    lm_memory_add(out, "activations and scratch", out->arena, device);
    if (eval)
        lm_memory_add(out, "validation", beyond(p, &p->eval_plan), device);
    lm_memory_add(out, "update", beyond(p, &p->update_plan), device);
    add_twin(out, "batches", "batches (host)",
             (double)batch * (double)(device ? 2 * accumulate : 1) +
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
                  (double)lm_ckpt_snapshot_bytes(p->backend, kept, lm_update_shows(p->update)),
                  false);
    lm_memory_add(out, "checkpoint buffer", checkpoint_bytes(train), false);
    if (device)
        lm_memory_add(out, "tensors being loaded", staging_bytes(train) + checkpoint_bytes(train),
                      false);
    lm_memory_add(out, "program", process_bytes, false);
}
