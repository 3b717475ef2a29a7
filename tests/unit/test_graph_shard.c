/* SPDX-License-Identifier: Apache-2.0 */
/* Whole models, forward and backward, by thread ranks under tensor parallelism and under data parallelism with whole and with
 * split weights, against one rank: losses, and gradients that are gathered by their layouts; and the exchanges that follow from
 * the layouts of weights and tokens.  Small graphs: which copies serve which readers, and layouts that values cannot have. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/rng.h"
#include "comm/threads.h"
#include "graph/links.h"
#include "graph/shard.h"
#include "kernels/arrange.h"
#include "model_run.h"
#include "op/ops.h"
#include "parallel/layouts.h"

enum { LAYERS = 2, BATCH = 2, SEQ = 6, MOST_RANKS = 4, WORDS = 24 };

static const char *const models[] = {
    "{\"model_type\":\"gpt2\",\"vocab_size\":24,\"n_embd\":16,\"n_layer\":2,\"n_head\":4,"
    "\"n_positions\":16}",
    "{\"model_type\":\"llama\",\"vocab_size\":24,\"hidden_size\":16,\"intermediate_size\":20,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":8,\"num_key_value_heads\":4,"
    "\"max_position_embeddings\":32}",
    "{\"model_type\":\"qwen3\",\"vocab_size\":24,\"hidden_size\":16,\"intermediate_size\":24,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":4,\"head_dim\":6,"
    "\"max_position_embeddings\":32,\"tie_word_embeddings\":true}",
    /* fewer heads of keys than ranks */
    "{\"model_type\":\"llama\",\"vocab_size\":24,\"hidden_size\":16,\"intermediate_size\":20,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":8,\"num_key_value_heads\":2,"
    "\"max_position_embeddings\":32,\"attention_bias\":true}",
    "{\"model_type\":\"qwen3\",\"vocab_size\":24,\"hidden_size\":16,\"intermediate_size\":24,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":1,\"head_dim\":6,"
    "\"max_position_embeddings\":32}",
};
enum { N_MODELS = sizeof models / sizeof *models };

static void read_model(const char *text, lm_config *c)
{
    lm_err e = { 0 };
    json_t *o;
    must(lm_json_parse(text, strlen(text), "config", &o, &e), &e);
    must(lm_config_read(o, "config", c, &e), &e);
    json_decref(o);
}

static bool joins_nothing(lm_backend *b, const char *op, lm_dtype act, const lm_call *c)
{
    (void)b, (void)op, (void)act, (void)c;
    return false;
}

static float *random_block(const lm_model *m)
{
    float *block = room((size_t)m->block, sizeof *block);
    for (int i = 0; i < m->n_params; i++) {
        lm_rng r = lm_rng_make(9, "weights", (uint64_t)i);
        for (int64_t k = 0; k < m->param[i].count; k++)
            block[m->param[i].offset + k] = (float)(0.3 * lm_rng_normal(r, (uint64_t)k));
    }
    return block;
}

static void feed(runner *r)
{
    const lm_model *m = r->model;
    lm_rng rng = lm_rng_make(5, "tokens", 0);
    for (int64_t i = 0; i < BATCH * SEQ; i++) {
        ids_of(r, m->tokens)[i] = (int32_t)lm_rng_below(rng, (uint64_t)i * 2, WORDS);
        ids_of(r, m->targets)[i] =
            i % 5 == 3 ? -1 : (int32_t)lm_rng_below(rng, (uint64_t)i * 2 + 1, WORDS);
    }
}

/* ---- a team of ranks ---- */

typedef struct {
    lm_axis axis, then; /* passes in this order; `then` the same one: a single pass */
    const char *rows;   /* layout of tokens and targets */
    bool vocabulary;    /* tp: embedding and head are split by words */
    bool sharded;       /* dp: matrices are split */
} plan;

typedef struct {
    const lm_config *config;
    const lm_build *build;
    runner *whole; /* the run of one rank */
    const plan *plan;
    lm_graph *local;          /* of rank 0 */
    float *value[MOST_RANKS]; /* of each rank: losses, then each gradient, of the whole shapes */
} team;

static void copy_part(const lm_tensor *whole, const lm_placement *p, int ranks, int rank, char *all,
                      char *part, bool out)
{
    size_t inner = lm_dtype_size(whole->dtype), bytes = inner;
    int64_t outer = 1;
    lm_range r;
    for (int d = 0; d < whole->ndim; d++) {
        bytes *= (size_t)whole->dim[d];
        if (p->share == LM_SPLIT && d < p->at)
            outer *= whole->dim[d];
        else if (p->share == LM_SPLIT && d > p->at)
            inner *= (size_t)whole->dim[d];
    }
    if (p->share != LM_SPLIT) {
        memcpy(out ? part : all, out ? all : part, bytes);
        return;
    }
    for (int64_t o = 0; o < outer; o++)
        for (int64_t k = 0; lm_portions_at(&p->pieces, whole->dim[p->at], ranks, rank, k, &r);
             k++) {
            size_t n = (size_t)r.count * inner;
            char *at = all + (size_t)(o * whole->dim[p->at] + r.from) * inner;
            memcpy(out ? part : at, out ? at : part, n);
            part += n;
        }
}

/* The lists of a rank: the model's, and those behind one pass or two; and the number of each value of the first in each. */
typedef struct {
    lm_mesh mesh;
    lm_graph *g[3];
    lm_vid *place[3];
    lm_axis axis[2];
    int passes;
    void **mem; /* by value of the model */
} stages;

/* The numbers of value v between the whole (stage 0) and this rank's part. */
static void move_parts(const stages *s, lm_vid v, void *whole, void *part, bool out)
{
    void *at[3] = { whole, NULL, NULL };
    if (s->passes == 2)
        at[1] = room((size_t)lm_tensor_count(&s->g[1]->value[s->place[1][v]].t), sizeof(double));
    at[s->passes] = part;
    for (int i = 0; i < s->passes; i++) {
        int k = out ? i : s->passes - 1 - i;
        const lm_value *value = &s->g[k]->value[s->place[k][v]];
        lm_axis a = s->axis[k];
        const lm_placement *p = &value->layout.axis[a];
        if (out || p->share != LM_REPLICATED || s->mesh.rank[a] == 0)
            copy_part(&value->t, p, s->mesh.size[a], s->mesh.rank[a], at[k], at[k + 1], out);
    }
    if (s->passes == 2)
        lm_free(at[1]);
}

/* Memory of the values of this rank that are not activations, with their parts of the whole run's numbers. */
static void bind_parts(const team *t, const stages *s, lm_exec *x)
{
    for (size_t v = 0; v < s->g[0]->n_values; v++) {
        const lm_value *value = &s->g[0]->value[v];
        if (value->role == LM_ROLE_ACT)
            continue;
        s->mem[v] = room((size_t)lm_tensor_count(&value->t), sizeof(double));
        if (value->role != LM_ROLE_GRAD)
            move_parts(s, (lm_vid)v, lm_exec_data(t->whole->exec, (lm_vid)v), s->mem[v], true);
        lm_exec_bind(x, s->place[s->passes][v], s->mem[v]);
    }
}

/* The loss and the gradients as whole values: zeros where this rank has none, and what others have too on the first alone. */
static void keep_results(const lm_model *m, const stages *s, const lm_exec *x, float *to)
{
    for (int i = -1; i < m->n_params; i++) {
        lm_vid v = i < 0 ? m->loss : m->grad[i];
        move_parts(s, v, to, lm_exec_data(x, s->place[s->passes][v]), false);
        to += lm_tensor_count(&m->graph->value[v].t);
    }
}

/* Split the matrices, and their gradients, along dp too, in the dimension that tp does not split. */
static lm_code shard_matrices(lm_graph *g, lm_err *e)
{
    for (size_t v = 0; v < g->n_values; v++) {
        lm_layout l = g->value[v].layout;
        const lm_placement *tp = &l.axis[LM_AXIS_TP];
        l.axis[LM_AXIS_DP] =
            (lm_placement){ .share = LM_SPLIT, .at = tp->share == LM_SPLIT && tp->at == 0 };
        if ((g->value[v].role == LM_ROLE_PARAM || g->value[v].role == LM_ROLE_GRAD) &&
            g->value[v].t.ndim == 2 && lm_graph_lay(g, (lm_vid)v, &l, e))
            return e->code;
    }
    return LM_OK;
}

static lm_code lay(lm_model *m, const plan *p, lm_err *e)
{
    lm_graph *g = m->graph;
    lm_layout rows;
    bool tensor = p->axis == LM_AXIS_TP || p->then == LM_AXIS_TP;
    if ((tensor && lm_layouts_apply(g, lm_layouts_tensor, e)) ||
        (p->vocabulary && lm_layouts_apply(g, lm_layouts_vocabulary, e)) ||
        (p->sharded && shard_matrices(g, e)) || lm_layout_read(p->rows, &rows, e) ||
        lm_graph_lay(g, m->tokens, &rows, e) || lm_graph_lay(g, m->targets, &rows, e))
        return e->code;
    return lm_graph_lay(g, g->node[0].out[0], &rows, e); /* the embedding's */
}

/* Ranks along the axes: all along one, or two by two. */
static lm_code make_mesh(stages *s, const plan *p, lm_comm *c, lm_comm *along[2], lm_err *e)
{
    int rank = lm_comm_rank(c);
    *s = (stages){ .mesh = lm_mesh_alone, .axis = { p->axis, p->then }, .passes = 1 };
    s->passes += p->axis != p->then;
    for (int k = 0; k < s->passes; k++) {
        int mine = s->passes == 1 ? rank : k ? rank % 2 : rank / 2;
        int color = s->passes == 1 ? 0 : k ? rank / 2 : rank % 2;
        if (lm_comm_split(c, color, mine, &along[k], e))
            return e->code;
        s->mesh.size[s->axis[k]] = lm_comm_size(along[k]);
        s->mesh.rank[s->axis[k]] = lm_comm_rank(along[k]);
    }
    return LM_OK;
}

static lm_code shard(stages *s, lm_model *m, lm_err *e)
{
    size_t n = m->graph->n_values;
    s->g[0] = m->graph;
    s->mem = room(n, sizeof *s->mem);
    for (int k = 0; k <= s->passes; k++)
        s->place[k] = room(n, sizeof **s->place);
    for (size_t v = 0; v < n; v++)
        s->place[0][v] = (lm_vid)v;
    for (int k = 0; k < s->passes; k++) {
        lm_vid *next = room(s->g[k]->n_values, sizeof *next);
        lm_pass_shard(s->g[k], s->axis[k], &s->mesh, &s->g[k + 1], next, e);
        for (size_t v = 0; v < n && !e->code; v++)
            s->place[k + 1][v] = s->place[k][v] >= 0 ? next[s->place[k][v]] : LM_NONE;
        lm_free(next);
        if (e->code)
            return e->code;
    }
    return LM_OK;
}

static void drop(stages *s, size_t n_values, lm_graph **kept)
{
    for (size_t v = 0; s->mem && v < n_values; v++)
        lm_free(s->mem[v]);
    lm_free(s->mem);
    for (int k = 0; k <= s->passes; k++)
        lm_free(s->place[k]);
    for (int k = 1; k < s->passes; k++)
        lm_graph_free(s->g[k]);
    if (kept)
        *kept = s->g[s->passes];
    else
        lm_graph_free(s->g[s->passes]);
}

static lm_code run_rank(void *ctx, lm_comm *c, lm_err *e)
{
    team *t = ctx;
    lm_comm *along[2] = { NULL };
    lm_links links[2], *by_axis[LM_AXES] = { NULL };
    lm_step step = t->whole->step;
    lm_model *m = NULL;
    lm_backend *b = NULL;
    lm_exec *x = NULL;
    stages s;
    if (make_mesh(&s, t->plan, c, along, e) || lm_backend_cpu(lm_cpu_detect(), NULL, &b, e) ||
        lm_model_build(t->config, t->build, &m, e) || lay(m, t->plan, e))
        return e->code;
    step.links = by_axis;
    for (int k = 0; k < s.passes; k++) {
        links[k] = lm_comm_links(along[k]);
        by_axis[s.axis[k]] = &links[k];
    }
    if (!shard(&s, m, e) && !lm_exec_new(s.g[s.passes], b, &s.place[s.passes][m->loss], 1, &x, e)) {
        bind_parts(t, &s, x);
        if (!lm_exec_run(x, &step, e))
            keep_results(m, &s, x, t->value[lm_comm_rank(c)]);
    }
    lm_exec_free(x);
    lm_backend_close(b);
    drop(&s, m->graph->n_values, lm_comm_rank(c) ? NULL : &t->local);
    lm_model_free(m);
    for (int k = 0; k < 2; k++)
        lm_comm_free(along[k]);
    return e->code;
}

/* Nodes of an operator in a phase. */
static int count(const lm_graph *g, const lm_op *op, bool forward)
{
    int n = 0;
    for (size_t k = 0; k < g->n_nodes; k++)
        n += g->node[k].op == op && (g->node[k].phase == LM_PHASE_FORWARD) == forward;
    return n;
}

/* Megatron's f and g, and their forms with rows that are split between the layers; three numbers of each row for the head.
 * Along dp nothing, or each matrix and table gathered once for the forward, those of layers and head once more for the
 * backward, and what a node adds to the gradient of one reduced. */
static void check_exchanges(const team *t)
{
    const lm_graph *g = t->local;
    const plan *p = t->plan;
    const bool rows = strcmp(p->rows, "replicated") != 0;
    const int words = p->vocabulary, matrices = 4 * LAYERS, tied = t->config->tied;
    int sums[2], parts[2], gathers[2], split = 0;
    for (size_t v = 0; v < g->n_values; v++)
        split += g->value[v].role == LM_ROLE_PARAM && g->value[v].t.ndim == 2;
    for (int f = 0; f < 2; f++) {
        sums[f] = count(g, &lm_op_all_reduce, f);
        parts[f] = count(g, &lm_op_reduce_scatter, f);
        gathers[f] = count(g, &lm_op_all_gather, f);
    }
    if (!rows || !words) /* otherwise the gradient of so small a table is cheaper by columns */
        assert_int_equal(count(g, &lm_op_all_to_all, true) + count(g, &lm_op_all_to_all, false), 0);
    if (p->axis != p->then) {
        assert_int_equal(sums[true], 2 * LAYERS);
        assert_int_equal(sums[false], 2 * LAYERS);
        assert_int_equal(gathers[true], p->sharded ? split : 0);
        assert_int_equal(gathers[false], p->sharded ? matrices + 1 : 0);
        assert_int_equal(parts[false], p->sharded ? split + tied : 0);
    } else if (p->axis == LM_AXIS_DP && !p->sharded) {
        assert_int_equal(sums[0] + sums[1] + parts[0] + parts[1] + gathers[0] + gathers[1], 0);
    } else if (p->axis == LM_AXIS_DP) {
        assert_int_equal(sums[0] + sums[1] + parts[true], 0);
        assert_int_equal(gathers[true], split);
        assert_int_equal(gathers[false], matrices + 1);
        assert_int_equal(parts[false], split + tied);
    } else if (rows) {
        assert_int_equal(parts[true], 2 * LAYERS + words);
        assert_int_equal(parts[false], 2 * LAYERS + words);
    } else {
        assert_int_equal(sums[true], 2 * LAYERS + 4 * words);
        assert_int_equal(sums[false], 2 * LAYERS + words);
        assert_int_equal(parts[0] + parts[1] + gathers[0] + gathers[1], 0);
        assert_int_equal(count(g, &lm_op_part, true) + count(g, &lm_op_part, false), 0);
    }
}

static void check_numbers(const team *t, int ranks, const char *name)
{
    const lm_model *m = t->whole->model;
    int64_t at = 0;
    for (int i = -1; i < m->n_params; i++) {
        lm_vid v = i < 0 ? m->loss : m->grad[i];
        int64_t n = lm_tensor_count(&m->graph->value[v].t);
        const float *want = lm_exec_data(t->whole->exec, v);
        for (int64_t k = 0; k < n; k++)
            for (int r = 1; r < ranks; r++)
                t->value[0][at + k] += t->value[r][at + k];
        double far = far_apart(t->value[0] + at, want, n);
        if (!(far <= 1e-5))
            fail_msg("%s, %d ranks, %s then %s%s, %s: relative error %.3g", name, ranks,
                     lm_axis_names[t->plan->axis], lm_axis_names[t->plan->then],
                     t->plan->sharded ? ", sharded" : "", i < 0 ? "loss" : m->graph->value[v].name,
                     far);
        at += n;
    }
}

static void check_model(int i, int ranks, const plan *p)
{
    lm_err e = { 0 };
    lm_config c;
    lm_build b = { .mode = LM_MODE_TRAIN,
                   .batch = BATCH,
                   .seq = SEQ,
                   .cache = SEQ,
                   .precision = { .low = LM_DTYPE_F32 } };
    runner r;
    read_model(models[i], &c);
    runner_new_joining(&r, &c, &b, lm_cpu_detect(), 1, joins_nothing);
    float *block = random_block(r.model);
    runner_weights(&r, block);
    feed(&r);
    runner_run(&r);
    team t = { .config = &c, .build = &b, .whole = &r, .plan = p };
    for (int k = 0; k < ranks; k++)
        t.value[k] = room((size_t)(r.model->block + BATCH * SEQ), sizeof *t.value[k]);
    if (lm_threads_run(ranks, 60, run_rank, &t, &e))
        fail_msg("model %d, %d ranks: %s: %s", i, ranks, e.where, e.what);
    check_numbers(&t, ranks, models[i]);
    check_exchanges(&t);
    lm_graph_free(t.local);
    for (int k = 0; k < ranks; k++)
        lm_free(t.value[k]);
    lm_free(block);
    runner_free(&r);
    lm_config_fini(&c);
}

static void check_all(plan p)
{
    bool both = p.axis != p.then;
    int most = p.axis == LM_AXIS_DP && !both ? BATCH : MOST_RANKS;
    for (int i = 0; i < N_MODELS; i++)
        for (int ranks = both ? 4 : 2; ranks <= most; ranks += 2)
            check_model(i, ranks, &p);
}

static void test_tensor_parallel(void **state)
{
    (void)state;
    check_all((plan){ .axis = LM_AXIS_TP, .then = LM_AXIS_TP, .rows = "replicated" });
}

static void test_rows_between(void **state)
{
    (void)state;
    check_all((plan){ .axis = LM_AXIS_TP, .then = LM_AXIS_TP, .rows = "tp=split0" });
}

static void test_vocabulary(void **state)
{
    (void)state;
    check_all(
        (plan){ .axis = LM_AXIS_TP, .then = LM_AXIS_TP, .rows = "replicated", .vocabulary = true });
    check_all(
        (plan){ .axis = LM_AXIS_TP, .then = LM_AXIS_TP, .rows = "tp=split0", .vocabulary = true });
}

static void test_data_parallel(void **state)
{
    (void)state;
    check_all((plan){ .axis = LM_AXIS_DP, .then = LM_AXIS_DP, .rows = "dp=split0" });
    check_all(
        (plan){ .axis = LM_AXIS_DP, .then = LM_AXIS_DP, .rows = "dp=split0", .sharded = true });
}

/* Two by two ranks, in both orders of the passes. */
static void test_both(void **state)
{
    (void)state;
    for (int sharded = 0; sharded < 2; sharded++) {
        plan p = {
            .axis = LM_AXIS_DP, .then = LM_AXIS_TP, .rows = "dp=split0", .sharded = sharded
        };
        check_all(p);
        p.axis = LM_AXIS_TP;
        p.then = LM_AXIS_DP;
        check_all(p);
    }
}

/* ---- graphs of a few nodes, of rank 0 of 2 along tp ---- */

enum { ROWS = 6, COLS = 8 };

static const lm_mesh two = { .size = { 1, 1, 1, 2, 1 } };

static lm_graph *new_graph(lm_role role, const char *name, const char *layout, lm_vid *x)
{
    lm_graph *g;
    lm_layout l;
    lm_err e = { 0 };
    must(lm_graph_new(&g, &e), &e);
    must(lm_graph_value(g, role, lm_shape2(LM_DTYPE_F32, ROWS, COLS), name, x, &e), &e);
    must(lm_layout_read(layout, &l, &e), &e);
    must(lm_graph_lay(g, *x, &l, &e), &e);
    return g;
}

/* A reader that takes whole values alone. */
static lm_vid append_reader(lm_graph *g, lm_vid x, lm_phase phase, int when)
{
    const lm_window_attr attr = { .row = 1, .rows = ROWS, .cols = COLS };
    lm_vid y = LM_NONE;
    lm_err e = { 0 };
    g->phase = phase;
    g->when = when;
    must(lm_graph_append(g, &lm_op_window, &attr, &x, &y, &e), &e);
    return y;
}

/* Copies of a split value that a list of readers takes. */
static int copies_for(int n, const lm_phase *phase, const int *when)
{
    lm_vid x, place[8];
    lm_graph *local, *g = new_graph(LM_ROLE_INPUT, "x", "tp=split0", &x);
    lm_err e = { 0 };
    for (int i = 0; i < n; i++)
        append_reader(g, x, phase[i], when[i]);
    assert_in_range(g->n_values, 1, 8);
    must(lm_pass_shard(g, LM_AXIS_TP, &two, &local, place, &e), &e);
    int made = count(local, &lm_op_all_gather, true) + count(local, &lm_op_all_gather, false);
    lm_graph_free(local);
    lm_graph_free(g);
    return made;
}

static void test_copies(void **state)
{
    const lm_phase F = LM_PHASE_FORWARD, I = LM_PHASE_BACKWARD_INPUT, W = LM_PHASE_BACKWARD_WEIGHT;
    static const int always[] = { 0, 0, 0 }, sometimes[] = { 1, 0, 0 }, others[] = { 1, 2, 1 };
    (void)state;
    assert_int_equal(copies_for(3, (const lm_phase[]){ F, F, F }, always), 1);
    assert_int_equal(copies_for(3, (const lm_phase[]){ F, I, I }, always), 2);
    assert_int_equal(copies_for(3, (const lm_phase[]){ I, W, W }, always), 1);
    assert_int_equal(copies_for(3, (const lm_phase[]){ W, I, W }, always), 2);
    assert_int_equal(copies_for(3, (const lm_phase[]){ F, F, F }, sometimes), 2);
    assert_int_equal(copies_for(3, (const lm_phase[]){ F, F, F }, others), 2);
}

static void check_refused(lm_graph *g, const char *where, const char *what)
{
    lm_vid place[8];
    lm_graph *local;
    lm_err e = { 0 };
    assert_int_equal(lm_pass_shard(g, LM_AXIS_TP, &two, &local, place, &e), LM_EUSAGE);
    assert_null(local);
    if (strcmp(e.where, where) != 0 || !strstr(e.what, what))
        fail_msg("%s: %s", e.where, e.what);
    lm_graph_free(g);
}

/* A layout that a value cannot have, of what is there before and of what is made. */
static void test_layouts(void **state)
{
    static const lm_role role[] = { LM_ROLE_INPUT, LM_ROLE_PARAM, LM_ROLE_ACT };
    lm_err e = { 0 };
    lm_vid x;
    (void)state;
    for (int i = 0; i < 3; i++) {
        lm_graph *g = new_graph(role[i], "x", "replicated", &x);
        g->value[x].layout.axis[LM_AXIS_TP] = (lm_placement){
            .share = LM_SPLIT, .at = 1, .pieces = { .n = 1, .run = { { 1, COLS + 1, 1 } } }
        };
        check_refused(g, "x", "other pieces");
        g = new_graph(role[i], "x", "replicated", &x);
        g->value[x].t.dim[0] = 1;
        g->value[x].layout.axis[LM_AXIS_TP] = (lm_placement){ .share = LM_SPLIT };
        check_refused(g, "x", "fewer units");
        g = new_graph(role[i], "x", "replicated", &x);
        g->value[x].layout.axis[LM_AXIS_TP].share = LM_ON;
        check_refused(g, "x", "on one rank");
    }
    lm_graph *g = new_graph(LM_ROLE_STATE, "all", "replicated", &x);
    lm_vid view;
    must(lm_graph_view(g, x, 0, lm_shape1(LM_DTYPE_F32, COLS), "part", &view, &e), &e);
    check_refused(g, "part", "a view");
}

/* Of a weight without a reader that packs it, through more paths than could be followed one by one. */
static void test_many_paths(void **state)
{
    enum { DEEP = 60 };
    lm_vid x, *place;
    lm_graph *local, *g = new_graph(LM_ROLE_PARAM, "w", "tp=split0", &x);
    lm_err e = { 0 };
    (void)state;
    for (int i = 0; i < DEEP; i++) {
        lm_vid in[] = { x, x }, out = LM_NONE;
        must(lm_graph_append(g, &lm_op_add, NULL, in, &out, &e), &e);
        x = out;
    }
    place = room(g->n_values, sizeof *place);
    must(lm_pass_shard(g, LM_AXIS_TP, &two, &local, place, &e), &e);
    assert_int_equal(local->n_nodes, DEEP);
    lm_free(place);
    lm_graph_free(local);
    lm_graph_free(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tensor_parallel),
        cmocka_unit_test(test_rows_between),
        cmocka_unit_test(test_vocabulary),
        cmocka_unit_test(test_data_parallel),
        cmocka_unit_test(test_both),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_many_paths),
    };
    return cmocka_run_group_tests_name("graph_shard", tests, NULL, NULL);
}
