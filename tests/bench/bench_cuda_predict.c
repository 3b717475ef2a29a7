/* SPDX-License-Identifier: Apache-2.0 */
/* bench_cuda_predict.c -- the least time that a training step or a token of decoding can take on
 * one H200 by the cost rules of the operators: neither a measurement nor an estimate of the real
 * time.
 *
 * usage: bench_cuda_predict [--path plain|tensor|tf32] [--device DEV] [--every-join] MODULES MODELS
 *                           [NAME]
 *
 * MODULES is the folder of libcore-cuda.so, MODELS that of the presets; NAME: only that model, with
 * the operators of decoding as well.  Nothing runs on the device, which only states the operators
 * that it joins; an emulated one suffices.  --every-join: as if it had a kernel for every joined
 * operator.
 *
 * An operator takes at least the longer of FLOPs / peak and bytes / bandwidth, both of the card's
 * data sheet; bytes are its operands, read and written once.  The sum over the operators of a graph
 * is a lower bound for kernels that run one after the other and pass tensors through memory.  MFU
 * at most: FLOPs as `train` counts them (6 a parameter, 12 L H Q T a token) in that time; they have
 * causal attention in full, operators by half, so long sequences may pass 100 %.  Two graphs are
 * compared: operators apart, and joined where the device has a kernel for it.  A call is one
 * operator; its kernel may launch more than once. */
#include <inttypes.h>

#include "graph/passes.h"
#include "kernels/head.h"
#include "model/model.h"
#include "model/preset.h"
#include "tests/bench/cuda_bench.h"

/* Data sheet of the H200 SXM: dense BF16, and HBM3e. */
static const double peak = 989e12, bandwidth = 4.8e12;

typedef struct {
    const char *preset;
    int64_t batch, seq;
} training;

static const training models[] = {
    { "gpt2-124m", 64, 1024 },
    { "gpt2-1.5b", 64, 1024 },
    { "llama-1b", 16, 4096 },
    { "llama-8b", 8, 8192 },
};
static const int64_t decoding[] = { 1, 64 };
enum { POSITIONS = 1024, ROWS = 48, APART = 0, JOINED = 1 };

typedef struct {
    double calls, flops, bytes, seconds;
    double waiting; /* of seconds: for memory */
} costs;

typedef struct {
    const char *op;
    costs of[2]; /* APART, JOINED */
} line;

typedef struct {
    line line[ROWS], sum;
    int n;
} sheet;

/* ---- counting ---- */

static void add(costs *to, double calls, double flops, double bytes)
{
    double by_flops = flops / peak, by_bytes = bytes / bandwidth;
    to->calls += calls;
    to->flops += flops;
    to->bytes += bytes;
    to->seconds += fmax(by_flops, by_bytes);
    to->waiting += by_bytes > by_flops ? by_bytes : 0;
}

static void count(sheet *s, int form, const char *op, double calls, double flops, double bytes)
{
    int i = 0;
    while (i < s->n && strcmp(s->line[i].op, op) != 0)
        i++;
    if (i == ROWS)
        return; /* more names than there are operators */
    if (i == s->n)
        s->line[s->n++] = (line){ .op = op };
    add(&s->line[i].of[form], calls, flops, bytes);
    add(&s->sum.of[form], calls, flops, bytes);
}

/* The cost rule counts the operands only.  Between the products of a chunk, logits are read as F32
 * and their gradients written in the type of activations; that the products write and read them too
 * takes less time than their FLOPs. */
static void count_logits(sheet *s, int form, const lm_call *c)
{
    const lm_head_attr *a = c->attr;
    double each = 4 + (double)lm_dtype_size(c->in[0].dtype);
    count(s, form, "(rows of logits)", 0, 0, each * (double)(c->in[0].dim[0] * a->vocab));
}

static void count_graph(sheet *s, int form, const lm_graph *g)
{
    for (size_t k = 0; k < g->n_nodes; k++) {
        const lm_node *n = &g->node[k];
        lm_tensor in[LM_MAX_IN], out[LM_MAX_OUT];
        lm_call c = lm_node_call(g, n, in, out);
        lm_cost cost = { 0 };
        n->op->cost(&c, &cost);
        count(s, form, n->op->name, 1, cost.flops, cost.bytes);
        if (!strcmp(n->op->name, "head_loss"))
            count_logits(s, form, &c);
    }
}

static bool joins_none(lm_backend *b, const char *op, lm_dtype act, const lm_call *c)
{
    (void)b, (void)op, (void)act, (void)c;
    return false;
}

/* Both graphs of a build, and the work outside them.  Apart: except the joins that every backend
 * makes. */
static void count_both(sheet *s, const lm_config *c, lm_build build, lm_backend *b)
{
    lm_err e = { 0 };
    bool (*joins)(lm_backend *, const char *, lm_dtype, const lm_call *) = b->joins;
    build.backend = b;
    for (int form = APART; form <= JOINED; form++) {
        lm_model *m;
        b->joins = form == JOINED ? joins : joins_none;
        bench_must(lm_model_build(c, &build, &m, &e), &e);
        count_graph(s, form, m->graph);
        if (build.mode == LM_MODE_TRAIN) { /* F32: 4 read, 3 written; and the BF16 copy */
            count(s, form, "sumsq", 1, 0, 4.0 * (double)m->block);
            count(s, form, "adamw", 1, 0, 30.0 * (double)m->block);
        } else
            count(s, form, "sample", 1, 0, 4.0 * (double)(build.batch * c->vocab));
        lm_model_free(m);
    }
    b->joins = joins;
}

/* ---- the table ---- */

static void put_costs(const costs *c)
{
    if (c->seconds > 0)
        printf("  %6.0f %11.1f %9.3f %9.3f", c->calls, c->flops * 1e-9, c->bytes * 1e-9,
               c->seconds * 1e3);
    else
        printf("  %6s %11s %9s %9s", "", "", "", ".");
}

static void put_line(const char *name, const line *l)
{
    printf("%-18s", name);
    put_costs(&l->of[APART]);
    put_costs(&l->of[JOINED]);
    printf("\n");
}

static void put_sheet(const sheet *s, bool operators)
{
    printf("%-18s  %38s  %38s\n%-18s", "", "apart", "joined", "operator");
    for (int i = 0; i < 2; i++)
        printf("  %6s %11s %9s %9s", "calls", "GFLOP", "GB", "least ms");
    printf("\n");
    for (int i = 0; operators && i < s->n; i++)
        put_line(s->line[i].op, &s->line[i]);
    put_line("sum", &s->sum);
}

static void train_sheet(const training *t, const lm_config *c, lm_backend *b)
{
    const lm_build build = { .mode = LM_MODE_TRAIN,
                             .batch = t->batch,
                             .seq = t->seq,
                             .precision = { .low = LM_DTYPE_BF16 } };
    const double tokens = (double)(t->batch * t->seq);
    sheet s = { 0 };
    count_both(&s, c, build, b);
    printf("\n%s: a training step of %" PRId64 " x %" PRId64 " tokens\n", t->preset, t->batch,
           t->seq);
    put_sheet(&s, true);
    for (int form = APART; form <= JOINED; form++) {
        const costs *k = &s.sum.of[form];
        printf("%s: at most %.0f tokens/s, MFU %.1f %%; %.0f %% of that time goes to memory\n",
               form ? "joined" : "apart", tokens / k->seconds,
               100 * tokens * lm_config_train_flops(c, t->seq) / k->seconds / peak,
               100 * k->waiting / k->seconds);
    }
}

static void decode_sheet(const char *name, const lm_config *c, int64_t batch, bool operators,
                         lm_backend *b)
{
    const lm_build build = { .mode = LM_MODE_GENERATE,
                             .batch = batch,
                             .seq = 1,
                             .cache = POSITIONS,
                             .precision = { .low = LM_DTYPE_BF16 } };
    sheet s = { 0 };
    count_both(&s, c, build, b);
    printf("\n%s: a token of each of %" PRId64 " sequences, caches of %d full\n", name, batch,
           POSITIONS);
    put_sheet(&s, operators);
    printf("at most %.0f tokens/s apart, %.0f joined\n", (double)batch / s.sum.of[APART].seconds,
           (double)batch / s.sum.of[JOINED].seconds);
}

static void predict(const training *t, const char *folder, bool alone, lm_backend *b)
{
    const char *const dirs[] = { folder, NULL };
    json_t *object;
    lm_config c;
    lm_err e = { 0 };
    bench_must(lm_preset_load(dirs, t->preset, &object, NULL, &e), &e);
    if (!strncmp(t->preset, "gpt2", 4)) /* padded, as `bench-cuda` trains it */
        bench_must(lm_config_set(object, "vocab_size=50304", &e), &e);
    bench_must(lm_config_read(object, t->preset, &c, &e), &e);
    train_sheet(t, &c, b);
    for (size_t i = 0; i < sizeof decoding / sizeof *decoding; i++)
        decode_sheet(t->preset, &c, decoding[i], alone, b);
    lm_config_fini(&c);
    json_decref(object);
}

static bool joins_all(lm_backend *b, const char *op, lm_dtype act, const lm_call *c)
{
    (void)b, (void)op, (void)act, (void)c;
    return true;
}

int main(int argc, char **argv)
{
    const char *path = "tensor", *device = "cuda:0", *given[3] = { NULL, NULL, NULL };
    lm_backend *b = NULL;
    int n = 0, found = 0, level = 0;
    bool every = false;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--path") && i + 1 < argc)
            path = argv[++i];
        else if (!strcmp(argv[i], "--device") && i + 1 < argc)
            device = argv[++i];
        else if (!strcmp(argv[i], "--every-join"))
            every = true;
        else if (n < 3)
            given[n++] = argv[i];
    }
    while (level < PATHS && strcmp(path, path_names[level]) != 0)
        level++;
    if (n < 2 || level == PATHS) {
        fprintf(stderr,
                "bench-cuda: name the folders of the module and of the presets; the path is "
                "plain, tensor or tf32\n");
        return 2;
    }
    open_path(given[0], device, level, &b);
    if (!b)
        return 1;
    printf(
        "least time by cost rules at %.0f TFLOP/s (BF16) and %.0f GB/s, an H200 by its data sheet; "
        "nothing was measured\nkernels: %s, %s\n",
        peak * 1e-12, bandwidth * 1e-9, b->device, b->detail);
    if (every) {
        b->joins = joins_all;
        printf("joined: as if there were a kernel for every joined operator\n");
    }
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        if (!given[2] || !strcmp(models[i].preset, given[2])) {
            predict(&models[i], given[1], given[2] != NULL, b);
            found++;
        }
    lm_backend_close(b);
    if (!found) {
        fprintf(stderr, "bench-cuda: %s: unknown model: choose from", given[2]);
        for (size_t i = 0; i < sizeof models / sizeof *models; i++)
            fprintf(stderr, " %s", models[i].preset);
        fprintf(stderr, "\n");
        return 2;
    }
    return 0;
}
