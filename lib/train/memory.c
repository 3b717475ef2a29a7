/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c -- the memory plan of a training run. */
#include "train/memory.h"

#include <stdio.h>
#include <string.h>

#include "kernels/comm.h"
#include "kernels/ring.h"
#include "model/rotary.h"
#include "numeric/format.h"
#include "op/ops.h"
#include "train/batch.h"
#include "train/buckets.h"
#include "train/leaves.h"
#include "train/memory_impl.h"
#include "train/monitor.h"
#include "train/state.h"

static void add_row(lm_memory_plan *p, const char *name, double bytes, bool device)
{
    lm_memory_row *r = &p->row[p->n_rows++];
    *r = (lm_memory_row){ .bytes = bytes, .device = device };
    snprintf(r->name, sizeof r->name, "%s", name);
}

void lm_memory_add(lm_memory_plan *p, const char *name, double bytes, bool device)
{
    if (bytes <= 0)
        return;
    add_row(p, name, bytes, device);
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

/* What a checkpoint holds: beside frozen weights only what an adapter's file does. */
static lm_tensors saved_of(const lm_model *m)
{
    return m->build.trainable || m->build.adapt ? LM_TENSORS_ADAPTER : LM_TENSORS_ALL;
}

/* A checkpoint is written directly from the blocks, or their snapshot, except tensors that are
 * stored transposed, which pass through a buffer. */
static double checkpoint_bytes(const lm_model *m)
{
    lm_tensors saved = saved_of(m);
    int64_t most = 0;
    for (int i = 0; i < m->n_slices; i++) {
        const lm_slice *s = &m->slice[i];
        int64_t n = s->transposed && lm_slice_is(s, saved) ? lm_slice_count(s) : 0;
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

/* Copies of the gradients for the sums of leaves. */
static int leaf_copies(const lm_memory_ask *ask)
{
    const int64_t leaves = memory_leaves(ask);
    return leaves > 1 ? lm_leaves_copies(leaves) : 0;
}

/* Add what another rank has. */
static void add_rank(lm_memory_plan *p, const lm_memory_plan *other)
{
    for (int k = 0; k < other->n_rows; k++) {
        const lm_memory_row *r = &other->row[k];
        int i = 0;
        while (i < p->n_rows && (p->row[i].device != r->device || strcmp(p->row[i].name, r->name)))
            i++;
        if (i == p->n_rows)
            add_row(p, r->name, 0, r->device);
        p->row[i].bytes += r->bytes;
    }
    p->total += other->total;
    p->device += other->device;
    p->later += other->later;
}

/* So many ranks, of what `of` have together; each has a device of its own. */
static void times_ranks(lm_memory_plan *p, int ranks, int of)
{
    for (int i = 0; i < p->n_rows; i++)
        p->row[i].bytes *= (p->row[i].device ? 1 : (double)ranks) / of;
    p->total *= (double)ranks / of;
    p->device /= of;
    p->later *= (double)ranks / of;
    p->ranks = ranks;
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

/* Tensors of which other ranks have parts, whole in the memory of the one that steps them, with their gradients. */
static double owned_bytes(const lm_program *p)
{
    const lm_update_constant *c;
    const int n = lm_update_constants(p->update, &c);
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += c[i].number ? 0 : (double)c[i].bytes;
    return sum;
}

/* Elements of a state in files, which hold it whole: of a part of the tensor it is a part, too. */
static int64_t state_count(const lm_model *m, const struct lm_state_part *p)
{
    const lm_cut *cut = &m->slice[p->tensor].cut;
    const int64_t own = lm_tensor_count(&p->shape);
    lm_tensor whole = p->shape;
    if (p->owned || cut->ranks <= 1 || own == 1 || cut->dim >= p->shape.ndim)
        return own;
    whole.dim[cut->dim] = cut->whole; /* this rank may have nothing of it */
    return lm_tensor_count(&whole);
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
            sum += (double)lm_plain_bytes(state[k].format, state_count(m, &state[k].part[i]));
    for (int i = 0; lm_update_shows(p->update) && i < m->n_slices; i++)
        if (m->slice[i].trains)
            sum += (double)lm_plain_bytes(LM_DTYPE_F32, lm_slice_count(&m->slice[i]));
    return sum;
}

/* Elements of the tensors that a checkpoint holds. */
static int64_t saved_count(const lm_model *m)
{
    lm_tensors saved = saved_of(m);
    int64_t sum = 0;
    for (int i = 0; i < m->n_slices; i++)
        sum += lm_slice_is(&m->slice[i], saved) ? lm_slice_count(&m->slice[i]) : 0;
    for (int i = 0; saved == LM_TENSORS_ALL && i < m->n_aside; i++)
        sum += m->aside[i].of_base ? m->aside[i].count : 0;
    return sum;
}

double lm_memory_checkpoint(const lm_program *p)
{
    return (double)lm_plain_bytes(LM_DTYPE_F32, saved_count(p->train)) + states_size(p);
}

void lm_memory_costs(const lm_program *p, int64_t accumulate, lm_memory_plan *out)
{
    const lm_model *m = p->train;
    lm_graph_cost_sum cost;
    double flops;
    out->params = lm_config_params(&m->config) +
                  (m->build.ahead != LM_AHEAD_NONE ? lm_config_ahead_params(&m->config) : 0);
    out->checkpoint = lm_memory_checkpoint(p);
    out->matmul_params = lm_config_matmul_params(&m->config);
    out->flops_per_token = lm_config_train_flops(&m->config, m->build.seq);
    out->tokens_per_step = m->build.batch * m->build.seq * accumulate;
    for (int i = 0; i < m->n_slices; i++)
        out->trained += m->slice[i].trains ? lm_slice_count(&m->slice[i]) : 0;
    lm_graph_cost(m->graph, &cost);
    for (int i = 0; i < LM_PHASE_UPDATE; i++)
        out->graph_flops[i] = cost.phase[i].flops;
    flops = cost.all.flops - out->graph_flops[LM_PHASE_RECOMPUTE];
    if (saved_of(m) != LM_TENSORS_ALL || lm_model_losses_ahead(m) || m->config.encoder)
        out->flops_per_token = flops / (double)(m->build.batch * m->build.seq);
}

/* Each format of the frozen weights, then what trains. */
static void add_weights(const lm_program *p, const size_t kept[LM_KEPT_ROLES], bool device,
                        lm_memory_plan *out)
{
    lm_store_part part[LM_STORE_FORMATS];
    char name[40];
    int n = lm_store_frozen(p->train, part);
    for (int i = 0; i < n; i++) {
        snprintf(name, sizeof name, "frozen (%s)", lm_format_show(part[i].format));
        lm_memory_add(out, name, (double)part[i].bytes, device);
    }
    lm_memory_add(out, n ? "trained (f32 master)" : "weights (f32 master)",
                  (double)kept[LM_KEPT_PARAM], device);
    lm_memory_add(out, n ? "trained (bf16)" : "weights (bf16)", (double)kept[LM_KEPT_DERIVED],
                  device);
}

/* Indices that the adapter's file holds: all graphs have the same ones. */
static double index_bytes(const lm_model *m)
{
    double sum = 0;
    for (int i = 0; i < m->n_aside; i++)
        sum += m->aside[i].slice < 0 ? (double)m->aside[i].count * sizeof *m->aside[i].number : 0;
    return sum;
}

/* ---- what ranks exchange ---- */

/* How many of the ranks have a number of a dimension of `len`, in the mean: several may share it. */
static double times_had(const lm_portions *p, int64_t len, int64_t ranks)
{
    int64_t sum = 0;
    if (!lm_portions_shared(p, (int)ranks))
        return 1;
    for (int r = 0; r < ranks; r++)
        sum += lm_portions_count(p, len, (int)ranks, r);
    return (double)sum / (double)len;
}

/* Bytes that a rank gives in an exchange of a list that is its own; the attributes of all of these begin with the axis. */
static double given_by(const lm_graph *g, const lm_node *n)
{
    const lm_exchange_attr *a = n->attr;
    if (n->op == &lm_op_all_to_all)
        return memory_value_bytes(g, n->in[0]) * times_had(&a->to_pieces, a->to_len, a->ranks);
    if (n->op == &lm_op_deal) /* the owner gives all parts, its own included */
        return n->in[0] >= 0
                   ? memory_value_bytes(g, n->in[0]) * times_had(&a->pieces, a->len, a->ranks)
                   : 0;
    if (n->op == &lm_op_all_reduce || n->op == &lm_op_reduce_scatter || n->op == &lm_op_collect)
        return memory_value_bytes(g, n->in[0]);
    if (n->op == &lm_op_all_gather)
        return memory_value_bytes(g, a->sum ? n->out[0] : n->in[0]);
    if (n->op == &lm_op_gather_begin) {
        const lm_gather_attr *own = n->attr;
        return own->part ? (double)own->part[own->rank] *
                               (double)lm_dtype_size(g->value[n->in[0]].t.dtype)
                         : 0;
    }
    if (n->op == &lm_op_sum_shared) /* as the sum of whole values */
        return memory_value_bytes(g, n->in[0]) / (double)g->value[n->in[0]].t.dim[a->dim] *
               (double)a->len;
    if (n->op == &lm_op_ring_pass && n->in[0] >= 0)
        return memory_value_bytes(g, n->in[0]) / (double)g->value[n->in[0]].t.dim[1] *
               (double)((const lm_ring_attr *)n->attr)->columns;
    if (n->op == &lm_op_expert_rows || n->op == &lm_op_expert_sum) {
        lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
        const lm_call c = lm_node_call(g, n, in, out);
        return lm_dispatch_bytes(&c);
    }
    return 0;
}

static void add_given_in(const lm_graph *g, size_t first, size_t last, double times,
                         double given[LM_AXES])
{
    for (size_t k = first; k < last; k++) {
        const double bytes = given_by(g, &g->node[k]);
        if (bytes > 0)
            given[*(const int *)g->node[k].attr] += times * bytes;
    }
}

const char *const lm_comm_bytes_names[LM_AXES] = {
    [LM_AXIS_DP] = "comm_bytes_dp", [LM_AXIS_PP] = "comm_bytes_pp", [LM_AXIS_CP] = "comm_bytes_cp",
    [LM_AXIS_TP] = "comm_bytes_tp", [LM_AXIS_EP] = "comm_bytes_ep",
};

/* Parameters that graphs read in F32. */
static double read_bytes(const lm_program *p)
{
    const lm_model *m = p->train;
    double sum = 0;
    for (int i = 0; i < m->n_params; i++)
        if (m->param[i].trains && m->graph->value[m->param[i].value].t.dtype == LM_DTYPE_F32)
            sum += (double)lm_plain_bytes(LM_DTYPE_F32, m->param[i].count);
    return sum;
}

/* What a rank gives of the parameters that it has updated, if ranks along dp share them: in the types in which graphs read
 * them. */
static double given_parameters(const lm_program *p)
{
    const int64_t *bound = lm_update_bounds(p->update);
    const int rank = bound ? p->o.mesh->rank[LM_AXIS_DP] : 0;
    const lm_model *m = p->train;
    const double low = bytes_of(p, LM_ROLE_DERIVED);
    double sum = 0;
    if (!bound || p->o.zero >= 3) /* graphs gather them */
        return 0;
    if (low > 0)
        sum += (double)(bound[rank + 1] - bound[rank]) * sizeof(uint16_t);
    for (int i = 0; i < m->n_params; i++) {
        const lm_param *x = &m->param[i];
        const int64_t from = x->offset > bound[rank] ? x->offset : bound[rank],
                      most = x->offset + x->count,
                      end = most < bound[rank + 1] ? most : bound[rank + 1];
        if (x->trains && m->graph->value[x->value].t.dtype == LM_DTYPE_F32 && from < end)
            sum += (double)(end - from) * sizeof(float);
    }
    return sum;
}

static void add_given(const lm_program *p, const lm_memory_ask *ask, lm_memory_plan *out)
{
    const int dp = ask->sharing > 1 ? ask->sharing : 1;
    const lm_graph *train = p->train->graph, *update = lm_update_graph(p->update);
    size_t first, last, end;
    lm_update_part_at(p->update, LM_UPDATE_NORM, &first, &last);
    lm_update_part_at(p->update, LM_UPDATE_STEP, &last, &end);
    add_given_in(train, 0, train->n_nodes, (double)(ask->accumulate / dp), out->given);
    add_given_in(update, first, end, 1, out->given);
    out->given[LM_AXIS_PP] += memory_given_to_stages(p, ask);
    if (dp > 1)
        out->given[LM_AXIS_DP] += bytes_of(p, LM_ROLE_GRAD) + given_parameters(p);
}

/* Gradients of a rank that has them whole for one micro-batch only, of which it adds up with the others what is complete. */
static size_t gradients_kept(const lm_program *p, const lm_memory_ask *ask, size_t all)
{
    const int ranks = ask->sharing;
    const bool once = ask->accumulate == ranks && (ask->leaves == 0 || ask->leaves == ranks);
    lm_bucket *b = NULL;
    lm_err unseen = { 0 };
    int n = 0;
    if (p->o.zero < 2 || !once || p->train->stages)
        return all;
    if (!lm_buckets_make(p->train, (int64_t)(all / sizeof(float)), &b, &n, &unseen) && n > 0) {
        const size_t most = (size_t)lm_buckets_most(b, n, ranks) * sizeof(float);
        all = most < all ? most : all;
    }
    lm_free(b);
    return all;
}

/* Of what the ranks along dp share, the part of one that has as much as another. */
static void share_out(const lm_program *p, const lm_memory_ask *ask, size_t kept[LM_KEPT_ROLES])
{
    if (lm_update_bounds(p->update))
        kept[LM_KEPT_GRAD] = gradients_kept(p, ask, kept[LM_KEPT_GRAD]);
    const size_t ranks = lm_update_bounds(p->update) ? (size_t)p->o.mesh->size[LM_AXIS_DP] : 1;
    const size_t read = ranks > 1 ? (size_t)read_bytes(p) : 0;
    if (ranks > 1 && p->o.zero >= 3) {
        kept[LM_KEPT_PARAM] = (kept[LM_KEPT_PARAM] + ranks - 1) / ranks;
        kept[LM_KEPT_DERIVED] = (kept[LM_KEPT_DERIVED] + ranks - 1) / ranks;
        kept[LM_KEPT_OPT] = (kept[LM_KEPT_OPT] + ranks - 1) / ranks;
        return;
    }
    kept[LM_KEPT_OPT] = (kept[LM_KEPT_OPT] + ranks - 1) / ranks;
    kept[LM_KEPT_PARAM] = read + (kept[LM_KEPT_PARAM] - read + ranks - 1) / ranks;
}

/* Bytes of blocks, by role. */
static void kept_of(const lm_program *p, const lm_memory_ask *ask, size_t kept[LM_KEPT_ROLES])
{
    memset(kept, 0, LM_KEPT_ROLES * sizeof *kept);
    kept[LM_KEPT_PARAM] = (size_t)bytes_of(p, LM_ROLE_PARAM);
    kept[LM_KEPT_DERIVED] = (size_t)bytes_of(p, LM_ROLE_DERIVED);
    kept[LM_KEPT_GRAD] = (size_t)bytes_of(p, LM_ROLE_GRAD);
    kept[LM_KEPT_OPT] = (size_t)bytes_of(p, LM_ROLE_OPT);
    share_out(p, ask, kept);
}

/* What one rank has, to be multiplied. */
static void of_rank(const lm_program *p, const lm_memory_ask *ask, lm_memory_plan *out)
{
    const lm_model *train = p->train, *eval = p->eval;
    size_t kept[LM_KEPT_ROLES];
    bool device = !p->backend->host_memory;
    int64_t rows = train->build.batch * train->build.seq;
    size_t batch =
        lm_batch_bytes(train->build.batch, train->build.seq, lm_update_n_numbers(p->update),
                       lm_model_losses_ahead(train), p->o.source);

    memset(out, 0, sizeof *out);
    kept_of(p, ask, kept);
    out->arena = (double)p->train_plan.bytes;
    out->lower_bound = (double)p->train_plan.lower_bound;
    if (!device)
        out->later = out->arena + (double)kept[LM_KEPT_GRAD] +
                     (p->o.states_in == LM_STATES_FILE ? 0 : (double)kept[LM_KEPT_OPT]);
    add_weights(p, kept, device, out);
    lm_memory_add(out, "gradients (f32)", (double)kept[LM_KEPT_GRAD], device);
    lm_memory_add(out, "gradients of leaves", (double)kept[LM_KEPT_GRAD] * leaf_copies(ask),
                  device);
    lm_memory_add(out, "gradients of tied weights", memory_of_addends(p), device);
    if (p->o.states_in == LM_STATES_FILE) /* the system takes these pages back when it needs them */
        add_row(out, "states in a file (beside)", (double)kept[LM_KEPT_OPT], device);
    else
        lm_memory_add(out, "optimiser states", (double)kept[LM_KEPT_OPT],
                      device && p->o.states_in == LM_STATES_NEAR);
    lm_memory_add(out, "tensors of owners (whole)", owned_bytes(p), device);
    lm_memory_add(out, "activations and scratch", out->arena, device);
    lm_memory_add(out, "micro-batches in flight", memory_of_slots(p, ask->pipe), device);
    if (eval)
        lm_memory_add(out, "validation", beyond(p, &p->eval_plan), device);
    lm_memory_add(out, "update", beyond(p, &p->update_plan), device);
    add_twin(
        out, "batches", "batches (host)",
        (double)batch * (double)(device && !p->o.halves ? 2 * ask->accumulate : 1) +
            (eval ? (double)lm_batch_bytes(train->build.batch, train->build.seq, 0, 0, p->o.source)
                  : 0),
        device);
    if (device)
        lm_memory_add(out, "batch under way", (double)batch, true);
    const double graphs = eval ? 2 : 1, constants = (double)lm_rotary_constants(train);
    lm_memory_add(out, train->config.ropes ? "rotary table" : "biases by distance",
                  ((double)lm_rotary_bytes(train) - constants) * graphs, device);
    lm_memory_add(out, "constants", constants * graphs, device);
    lm_memory_add(out, "numbers of constants (host)", (double)lm_rotary_numbers(train) * graphs,
                  false);
    lm_memory_add(out, "indices of the adapter (host)", index_bytes(train), false);
    if ((eval || p->o.halves) && device)
        lm_memory_add(out, "losses (host)",
                      (double)rows * sizeof(float) *
                          ((eval ? 1 + p->o.value + (p->o.entropy == LM_ENTROPY_COLLISION) : 0) +
                           (p->o.halves ? 1 + (p->o.entropy != LM_ENTROPY_NONE) + p->o.value : 0)),
                      false);
    add_twin(out, "samples of weights", "samples of weights (host)",
             (double)lm_monitor_bytes(train->train_end), device);
    if (eval && ask->ranks > 1)
        lm_memory_add(out, "losses of validation", (double)rows * sizeof(float), device);
}

void lm_memory_of(const lm_program *p, const lm_memory_ask *ask, lm_memory_plan *out)
{
    const int ranks = ask->ranks > 1 ? ask->ranks : 1;
    const bool device = !p->backend->host_memory;
    size_t kept[LM_KEPT_ROLES];
    lm_memory_plan other;

    of_rank(p, ask, out);
    add_given(p, ask, out);
    for (int i = 0; i < ask->n_others; i++) {
        of_rank(ask->others[i], ask, &other);
        add_rank(out, &other);
    }
    kept_of(p, ask, kept);
    times_ranks(out, ask->here > 0 && ask->here < ranks ? ask->here : ranks, 1 + ask->n_others);
    lm_memory_add(out, "checkpoint snapshot (host)",
                  (double)(1 + ask->places) *
                      (double)lm_ckpt_snapshot_bytes(p->backend, kept, lm_update_shows(p->update)),
                  false);
    lm_memory_add(out, "checkpoint buffer", checkpoint_bytes(p->train), false);
    if (device)
        lm_memory_add(out, "tensors being loaded",
                      staging_bytes(p->train) + checkpoint_bytes(p->train), false);
    lm_memory_add(out, "program", process_bytes, false);
}
