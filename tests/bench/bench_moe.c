/* SPDX-License-Identifier: Apache-2.0 */
/* bench_moe.c -- the products of experts beside one dense product of the same rows and sizes, and a whole layer of a
 * mixture beside the dense MLP that does the same products.
 *
 * usage: bench_moe [--quick] [--json] [--threads N] [--f32 | --bf16] [NAME]     (only cases NAME*)
 *
 * T tokens go to K of E experts each, by random logits: R = T K rows, sorted by expert, R / E of an expert in the mean.
 *   products  [R,C] x w[e]^T, w [E,2F,C]: forward (y), and its gradients (dx, dw), beside those of linear with one
 *             matrix [2F,C] for all R rows, which reads and writes 1/E of the weights, and beside E calls of linear with the
 *             rows and the matrix of one expert each
 *   layer     router, choices, rows, products [2F,C], SwiGLU, products [C,F], weighted sums, forward and backward; beside
 *             linear, SwiGLU and linear with one matrix each for R rows: the products of the experts without the way there
 *             and back
 *
 * Contenders run in turn; ratios are medians over rounds of ratios within the round: 1 is the rate of the dense product, or
 * (the second one) of the dense products.
 * --json: a line for each case, times in seconds (scripts/bench-moe-peer reads it).  LM_CPU=LEVEL measures the kernels
 * of another level. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "base/rng.h"
#include "graph/exec.h"
#include "graph/passes.h"
#include "kernels/grouped.h"
#include "kernels/linear.h"
#include "kernels/matmul.h"
#include "kernels/route.h"
#include "op/fuse.h"
#include "op/ops.h"
#include "tests/bench/ceilings.h"

typedef struct {
    const char *name;
    int64_t tokens, width, ffn, experts, chosen; /* T, C, F, E, K */
} mixture;

/* Sizes of published models; the number of tokens chosen for the rows of an expert. */
static const mixture cases[] = {
    { "qwen3-30b/64", 1024, 2048, 768, 128, 8 },  { "qwen3-30b/16", 256, 2048, 768, 128, 8 },
    { "qwen3-30b/256", 4096, 2048, 768, 128, 8 }, { "mixtral/64", 256, 4096, 14336, 8, 2 },
    { "mixtral/256", 1024, 4096, 14336, 8, 2 },   { "gpt-oss-20b/128", 1024, 2880, 2880, 32, 4 },
    { "miniature/256", 1024, 256, 512, 8, 2 },
};
enum { CASES = sizeof(cases) / sizeof(cases[0]), MOST_ROUNDS = 9 };

static lm_par *par;
static lm_backend *backend;
static lm_ceilings *ceilings;
static bool quick, json;

static void check(lm_code rc, const lm_err *e)
{
    if (!rc)
        return;
    fprintf(stderr, "bench_moe: %s: %s\n", e->where, e->what);
    exit(1);
}

/* ---- a graph, and memory for what it reads and keeps ---- */

enum { MOST_MARKS = 8 };

typedef struct {
    lm_graph *g;
    lm_exec *x;
    lm_vid keep[8];
    int n_keep;
    size_t mark[MOST_MARKS]; /* ends of the parts that are timed */
} program;

static lm_vid value(program *p, lm_role role, lm_dtype type, int64_t rows, int64_t cols)
{
    lm_vid v = LM_NONE;
    lm_err e = { 0 };
    check(lm_graph_value(p->g, role, lm_shape2(type, rows, cols), NULL, &v, &e), &e);
    return v;
}

/* The first result; others, if `more` is not NULL, to more[0].. */
static lm_vid append(program *p, const lm_op *op, const void *attr, const lm_vid in[4],
                     lm_vid *more)
{
    lm_err e = { 0 };
    lm_vid out[LM_MAX_OUT] = { LM_NONE, LM_NONE, LM_NONE }, operand[LM_MAX_IN];
    for (int i = 0; i < LM_MAX_IN; i++)
        operand[i] = i < 4 ? in[i] : LM_NONE;
    check(lm_graph_append(p->g, op, attr, operand, out, &e), &e);
    for (int i = 1; more && i < lm_op_outs(op); i++)
        more[i - 1] = out[i];
    return out[0];
}

static program begin(void)
{
    lm_err e = { 0 };
    program p = { 0 };
    check(lm_graph_new(&p.g, &e), &e);
    return p;
}

static size_t bytes_of(const lm_tensor *t)
{
    return (size_t)lm_tensor_count(t) * lm_dtype_size(t->dtype);
}

/* Small normal numbers, a block of them repeated. */
static void *fill(const lm_tensor *t, uint64_t sub)
{
    enum { DRAWN = 65521 };
    lm_err e = { 0 };
    void *p;
    check(lm_block_alloc(&p, bytes_of(t), "a bench operand", &e), &e);
    const lm_rng r = lm_rng_make(5, "bench", sub);
    const int64_t n = lm_tensor_count(t);
    const size_t size = lm_dtype_size(t->dtype);
    for (int64_t i = 0; i < n && i < DRAWN; i++)
        lm_set(t->dtype, p, i, 0.05 * lm_rng_normal(r, (uint64_t)i));
    for (int64_t i = DRAWN; i < n; i += DRAWN)
        memcpy((char *)p + (size_t)i * size, p, size * (size_t)(n - i < DRAWN ? n - i : DRAWN));
    return p;
}

static void end(program *p)
{
    lm_err e = { 0 };
    check(lm_exec_new(p->g, backend, p->keep, p->n_keep, &p->x, &e), &e);
    for (size_t v = 0; v < p->g->n_values; v++)
        if (p->g->value[v].role != LM_ROLE_ACT && p->g->value[v].of == LM_NONE)
            lm_exec_bind(p->x, (lm_vid)v, fill(&p->g->value[v].t, v));
}

static void drop(program *p)
{
    for (size_t v = 0; v < p->g->n_values; v++)
        if (p->g->value[v].role != LM_ROLE_ACT && p->g->value[v].of == LM_NONE)
            lm_block_free(lm_exec_data(p->x, (lm_vid)v), bytes_of(&p->g->value[v].t));
    lm_exec_free(p->x);
    lm_graph_free(p->g);
}

/* Seconds of nodes [first, last). */
static double seconds(program *p, size_t first, size_t last)
{
    static const lm_step step = { .seed = 1 };
    lm_err e = { 0 };
    const double from = lm_now();
    check(lm_exec_run_part(p->x, first, last, NULL, &step, &e), &e);
    return lm_now() - from;
}

/* ---- products ---- */

enum { Y, DX, DW, FORMS };
static const char *const form_name[FORMS] = { "y", "dx", "dw" };

/* Offsets of rows that random choices give to each expert. */
static void offsets_of(const mixture *m, int32_t *offsets)
{
    const lm_rng r = lm_rng_make(7, "bench", 0);
    memset(offsets, 0, sizeof *offsets * (size_t)(m->experts + 1));
    for (int64_t t = 0; t < m->tokens; t++)
        for (int64_t s = 0; s < m->chosen; s++) {
            const lm_rng token = { r.key, r.hi + (uint64_t)t };
            offsets[1 + lm_rng_permute(token, (uint64_t)s, (uint64_t)m->experts)]++;
        }
    for (int64_t e = 0; e < m->experts; e++)
        offsets[e + 1] += offsets[e];
}

/* True if training keeps the weights of an operator in panels. */
static bool in_panels(lm_dtype act, const char *op)
{
    return backend->panels && backend->panels(backend, op, 1, act);
}

/* y, dx and dw of experts, or of one matrix: a node each. */
static program products(const mixture *m, lm_dtype act, bool dense)
{
    program p = begin();
    const int64_t rows = m->tokens * m->chosen, out = 2 * m->ffn, n = dense ? 1 : m->experts;
    const lm_grouped_attr groups = { m->experts, out, LM_ACC_FIRST };
    const lm_linear_attr one = { LM_ACC_FIRST };
    const void *attr = dense ? (const void *)&one : &groups;
    const lm_vid x = value(&p, LM_ROLE_INPUT, act, rows, m->width);
    const lm_vid dy = value(&p, LM_ROLE_INPUT, act, rows, out);
    const lm_vid w = value(&p, LM_ROLE_PARAM, act, n * out, m->width);
    p.g->value[w].t.panels = in_panels(act, dense ? "linear" : "grouped_linear");
    lm_vid offsets = LM_NONE;
    lm_err e = { 0 };
    if (!dense)
        check(
            lm_graph_value(p.g, LM_ROLE_INPUT, lm_shape1(LM_DTYPE_I32, n + 1), NULL, &offsets, &e),
            &e);
    p.keep[0] = append(&p, dense ? &lm_op_linear : &lm_op_grouped_linear, attr,
                       (lm_vid[4]){ x, w, dense ? LM_NONE : offsets, LM_NONE }, NULL);
    p.keep[1] = append(&p, dense ? &lm_op_linear_dx : &lm_op_grouped_linear_dx, attr,
                       (lm_vid[4]){ dy, w, offsets, LM_NONE }, NULL);
    const lm_vid dw = value(&p, LM_ROLE_GRAD, LM_DTYPE_F32, n * out, m->width);
    lm_vid made[LM_MAX_OUT] = { dw, LM_SKIP };
    check(lm_graph_append(p.g, dense ? &lm_op_linear_dw : &lm_op_grouped_linear_dw, attr,
                          (lm_vid[LM_MAX_IN]){ dy, x, offsets, LM_NONE }, made, &e),
          &e);
    p.n_keep = 2;
    end(&p);
    if (!dense)
        offsets_of(m, lm_exec_data(p.x, offsets));
    return p;
}

/* Node `f` of expert e: linear, its dx or its dw, of its rows of x and dy and its matrix. */
static void append_one(program *p, int f, const lm_vid in[2], lm_vid dw)
{
    static const lm_op *const op[FORMS] = { &lm_op_linear, &lm_op_linear_dx, &lm_op_linear_dw };
    const lm_linear_attr attr = { LM_ACC_FIRST };
    const lm_vid operand[LM_MAX_IN] = { in[0], in[1], LM_NONE, LM_NONE };
    lm_vid made[LM_MAX_OUT] = { f == DW ? dw : LM_NONE, LM_SKIP };
    lm_err e = { 0 };
    check(lm_graph_append(p->g, op[f], &attr, operand, made, &e), &e);
}

static lm_vid rows_of(program *p, lm_vid whole, int64_t first, int64_t rows, int64_t cols)
{
    lm_vid v = LM_NONE;
    lm_err e = { 0 };
    const lm_tensor shape = lm_shape2(p->g->value[whole].t.dtype, rows, cols);
    check(lm_graph_view(p->g, whole, first * cols, shape, NULL, &v, &e), &e);
    p->g->value[v].t.panels = p->g->value[whole].t.panels;
    return v;
}

/* A call for each expert that has rows; the nodes of form f begin at mark[f]. */
static program separate(const mixture *m, lm_dtype act)
{
    program p = begin();
    const int64_t rows = m->tokens * m->chosen, out = 2 * m->ffn, all = m->experts * out;
    int32_t *offsets;
    lm_err e = { 0 };
    check(lm_alloc_n(&offsets, (size_t)m->experts + 1, sizeof *offsets, "offsets", &e), &e);
    offsets_of(m, offsets);
    const lm_vid x = value(&p, LM_ROLE_INPUT, act, rows, m->width);
    const lm_vid dy = value(&p, LM_ROLE_INPUT, act, rows, out);
    const lm_vid w = value(&p, LM_ROLE_PARAM, act, all, m->width);
    const lm_vid dw = value(&p, LM_ROLE_GRAD, LM_DTYPE_F32, all, m->width);
    p.g->value[w].t.panels = in_panels(act, "linear");
    for (int f = 0; f < FORMS; f++, p.mark[f] = p.g->n_nodes)
        for (int64_t i = 0; i < m->experts; i++) {
            const int64_t first = offsets[i], n = offsets[i + 1] - first;
            if (!n)
                continue;
            const lm_vid xi = rows_of(&p, x, first, n, m->width),
                         dyi = rows_of(&p, dy, first, n, out);
            const lm_vid wi = rows_of(&p, w, i * out, out, m->width);
            append_one(&p, f, (lm_vid[2]){ f == Y ? xi : dyi, f == DW ? xi : wi },
                       f == DW ? rows_of(&p, dw, i * out, out, m->width) : LM_NONE);
        }
    lm_free(offsets);
    end(&p);
    return p;
}

static void measure_products(const mixture *m, lm_dtype act, int rounds)
{
    program grouped = products(m, act, false), dense = products(m, act, true);
    program each = separate(m, act);
    const double flops = 4.0 * (double)(m->tokens * m->chosen) * (double)m->ffn * (double)m->width;
    double ours[FORMS][MOST_ROUNDS], ratio[FORMS][MOST_ROUNDS], of_each[FORMS][MOST_ROUNDS];
    for (int i = -1; i < rounds; i++)
        for (int f = 0; f < FORMS; f++) {
            const double a = seconds(&grouped, (size_t)f, (size_t)f + 1);
            const double b = seconds(&dense, (size_t)f, (size_t)f + 1);
            const double c = seconds(&each, each.mark[f], each.mark[f + 1]);
            if (i >= 0) {
                ours[f][i] = a;
                ratio[f][i] = b / a;
                of_each[f][i] = c / a;
            }
        }
    for (int f = 0; f < FORMS; f++) {
        const double t = lm_median(ours[f], rounds), of = lm_median(ratio[f], rounds);
        if (json)
            printf(",\"%s\":%.6g", form_name[f], t);
        else
            printf("  %s %6.0f (%.2f, %.2f)", form_name[f], flops / t * 1e-9, of,
                   lm_median(of_each[f], rounds));
    }
    drop(&grouped);
    drop(&dense);
    drop(&each);
}

/* ---- a layer ---- */

/* The backward of y with respect to everything that is read, behind the forward; p->mark[0] and [1] are the ends. */
static void add_backward(program *p, lm_vid y, const lm_vid *wrt, int n)
{
    lm_err e = { 0 };
    const lm_tensor *t = &p->g->value[y].t;
    p->mark[0] = p->g->n_nodes;
    const lm_vid seed = value(p, LM_ROLE_INPUT, t->dtype, t->dim[0], t->dim[1]);
    const lm_backward b = { .root = y, .seed = seed, .wrt = wrt, .n_wrt = n };
    check(lm_pass_backward(p->g, &b, &e), &e);
    p->mark[1] = p->g->n_nodes;
    p->keep[p->n_keep++] = y;
}

static program layer(const mixture *m, lm_dtype act)
{
    program p = begin();
    const lm_err none = { 0 };
    lm_err e = none;
    const lm_matmul_attr turn = { .turn_b = true };
    const lm_route_attr choose = { .k = m->chosen, .normalise = true, .scale = 1 };
    const lm_route_plan_attr plan = { .experts = m->experts };
    const lm_grouped_attr up = { m->experts, 2 * m->ffn, LM_ACC_FIRST },
                          down = { m->experts, m->width, LM_ACC_FIRST };
    const lm_vid x = value(&p, LM_ROLE_INPUT, LM_DTYPE_F32, m->tokens, m->width);
    const lm_vid router = value(&p, LM_ROLE_PARAM, LM_DTYPE_F32, m->experts, m->width);
    const lm_vid w = value(&p, LM_ROLE_PARAM, LM_DTYPE_F32, m->experts * 2 * m->ffn, m->width);
    const lm_vid v = value(&p, LM_ROLE_PARAM, LM_DTYPE_F32, m->experts * m->width, m->ffn);
    lm_vid more[LM_MAX_OUT];
    const lm_vid z =
        append(&p, &lm_op_matmul, &turn, (lm_vid[4]){ x, router, LM_NONE, LM_NONE }, NULL);
    const lm_vid weight =
        append(&p, &lm_op_route_choose, &choose, (lm_vid[4]){ z, LM_NONE, LM_NONE, LM_NONE }, more);
    const lm_vid offsets = append(&p, &lm_op_route_plan, &plan,
                                  (lm_vid[4]){ more[0], LM_NONE, LM_NONE, LM_NONE }, more);
    const lm_vid from = more[0], place = more[1];
    lm_vid y =
        append(&p, &lm_op_route_rows, NULL, (lm_vid[5]){ x, from, place, LM_NONE, LM_NONE }, NULL);
    y = append(&p, &lm_op_grouped_linear, &up, (lm_vid[4]){ y, w, offsets, LM_NONE }, NULL);
    y = append(&p, &lm_op_swiglu, NULL, (lm_vid[4]){ y, LM_NONE, LM_NONE, LM_NONE }, NULL);
    y = append(&p, &lm_op_grouped_linear, &down, (lm_vid[4]){ y, v, offsets, LM_NONE }, NULL);
    y = append(&p, &lm_op_route_sum, NULL, (lm_vid[5]){ y, from, place, weight, LM_NONE }, NULL);
    check(lm_pass_precision(p.g, &(lm_precision){ .low = act }, &e), &e);
    add_backward(&p, y, &x, 1);
    end(&p);
    return p;
}

static program mlp(const mixture *m, lm_dtype act)
{
    program p = begin();
    lm_err e = { 0 };
    const lm_linear_attr one = { LM_ACC_FIRST };
    const int64_t rows = m->tokens * m->chosen;
    const lm_vid x = value(&p, LM_ROLE_INPUT, LM_DTYPE_F32, rows, m->width);
    const lm_vid w = value(&p, LM_ROLE_PARAM, LM_DTYPE_F32, 2 * m->ffn, m->width);
    const lm_vid v = value(&p, LM_ROLE_PARAM, LM_DTYPE_F32, m->width, m->ffn);
    lm_vid y = append(&p, &lm_op_linear, &one, (lm_vid[4]){ x, w, LM_NONE, LM_NONE }, NULL);
    y = append(&p, &lm_op_swiglu, NULL, (lm_vid[4]){ y, LM_NONE, LM_NONE, LM_NONE }, NULL);
    y = append(&p, &lm_op_linear, &one, (lm_vid[4]){ y, v, LM_NONE, LM_NONE }, NULL);
    check(lm_pass_precision(p.g, &(lm_precision){ .low = act }, &e), &e);
    add_backward(&p, y, &x, 1);
    end(&p);
    return p;
}

static void measure_layer(const mixture *m, lm_dtype act, int rounds)
{
    program moe = layer(m, act), dense = mlp(m, act);
    const double flops = 6.0 * (double)(m->tokens * m->chosen) * (double)m->ffn * (double)m->width;
    double fwd[MOST_ROUNDS], all[MOST_ROUNDS], fwd_ratio[MOST_ROUNDS], ratio[MOST_ROUNDS];
    for (int i = -1; i < rounds; i++) {
        const double a = seconds(&moe, 0, moe.mark[0]), b = seconds(&moe, moe.mark[0], moe.mark[1]);
        const double c = seconds(&dense, 0, dense.mark[0]);
        const double d = seconds(&dense, dense.mark[0], dense.mark[1]);
        if (i < 0)
            continue;
        fwd[i] = a, all[i] = a + b;
        fwd_ratio[i] = c / a, ratio[i] = (c + d) / (a + b);
    }
    const double f = lm_median(fwd, rounds), t = lm_median(all, rounds);
    if (json)
        printf(",\"forward\":%.6g,\"step\":%.6g", f, t);
    else
        printf("  layer %6.0f (%.2f), forward %6.0f (%.2f)", 3 * flops / t * 1e-9,
               lm_median(ratio, rounds), flops / f * 1e-9, lm_median(fwd_ratio, rounds));
    drop(&moe);
    drop(&dense);
}

/* ---- all cases ---- */

static void measure(const mixture *m, lm_dtype act)
{
    const int rounds = quick ? 3 : 7;
    if (json)
        printf("{\"case\":\"%s\",\"dtype\":\"%s\",\"tokens\":%" PRId64 ",\"width\":%" PRId64
               ",\"ffn\":%" PRId64 ",\"experts\":%" PRId64 ",\"chosen\":%" PRId64,
               m->name, lm_dtype_name(act), m->tokens, m->width, m->ffn, m->experts, m->chosen);
    else
        printf("%-16s %-4s R %5" PRId64, m->name, lm_dtype_name(act), m->tokens * m->chosen);
    measure_products(m, act, rounds);
    measure_layer(m, act, rounds);
    if (json) {
        puts("}");
    } else {
        const double peak =
            act == LM_DTYPE_BF16 ? lm_ceiling_amx_l1(ceilings) : lm_ceiling_fma_f32(ceilings);
        if (peak > 0)
            printf("  of %.0f", peak * 1e-9);
        putchar('\n');
    }
    fflush(stdout);
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };
    int threads = 0;
    bool f32 = true, bf16 = true;
    const char *only = "";
    lm_cpu_level level = lm_cpu_detect();
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick"))
            quick = true;
        else if (!strcmp(argv[i], "--json"))
            json = true;
        else if (!strcmp(argv[i], "--f32"))
            bf16 = false;
        else if (!strcmp(argv[i], "--bf16"))
            f32 = false;
        else if (!strcmp(argv[i], "--threads") && i + 1 < argc)
            threads = atoi(argv[++i]);
        else
            only = argv[i];
    }
    if (getenv("LM_CPU"))
        check(lm_cpu_level_parse(getenv("LM_CPU"), &level, &e), &e);
    check(lm_par_new(&par, threads, &e), &e);
    check(lm_backend_cpu(level, par, &backend, &e), &e);
    check(lm_ceilings_new(&ceilings, par, &e), &e);
    if (!json)
        printf(
            "%s, level %s, %d threads; GFLOP/s (ratio to dense products of R rows, of R/E rows)\n",
            lm_cpu_model(), lm_cpu_level_name(level), lm_par_threads(par));
    for (int i = 0; i < CASES; i++) {
        if (strncmp(cases[i].name, only, strlen(only)))
            continue;
        if (bf16)
            measure(&cases[i], LM_DTYPE_BF16);
        if (f32 && (!quick || cases[i].width < 1024))
            measure(&cases[i], LM_DTYPE_F32);
    }
    lm_ceilings_free(ceilings);
    lm_backend_close(backend);
    lm_par_free(par);
    return 0;
}
