/* SPDX-License-Identifier: Apache-2.0 */
/* bench_cuda_decode.c -- tokens/s of generating text on a CUDA device, and the bytes that a step
 * must read as a share of what a copy within the device moves in the same run; batch 1 and 64, each
 * behind two lengths of prompt.
 *
 * usage: bench_cuda_decode [--quick] [--toy] [--seconds N] [--paths LIST] [--device DEV] MODULES
 * MODEL
 *
 * MODULES is the folder of libcore-cuda.so.  A step includes the model, the choice of a token for
 * each sequence on the device, and its id on the host.  Bytes: every weight once and the filled
 * part of the caches, without intermediate results.  Launches: kernels, copies and fills of the
 * whole step, which one launch of a recording enqueues.  --toy: lengths and batches that are small
 * enough for the emulated device. */
#include "base/mem.h"
#include "model/generate.h"
#include "tests/bench/cuda_bench.h"

enum { STEPS = 64 };

typedef struct {
    int64_t batch, prompt, context;
} setup;

static const setup setups[] = {
    { 1, 128, 512 },
    { 1, 8000, 8192 },
    { 64, 128, 256 },
    { 64, 2048, 2176 },
};
static const setup toys[] = { { 1, 5, 24 }, { 3, 7, 24 } };

static struct {
    const char *modules, *model, *paths, *device;
    double deadline, copy;
    bool quick, toy;
    int left_out;
    size_t (*nodes)(const lm_recording *); /* as declared in lib/graph/cuda/cuda.h; may be NULL */
} bench;

static void prompts(lm_generator *g, const setup *s)
{
    lm_err e = { 0 };
    uint32_t *ids;
    int64_t vocab = lm_generator_vocab(g);
    bench_must(lm_alloc_n(&ids, (size_t)s->prompt, sizeof *ids, "a prompt", &e), &e);
    for (int64_t slot = 0; slot < s->batch; slot++) {
        for (int64_t i = 0; i < s->prompt; i++)
            ids[i] = (uint32_t)((i * 7919 + slot * 104729) % vocab);
        bench_must(lm_generator_prompt(g, slot, ids, s->prompt, NULL, &e), &e);
    }
    lm_free(ids);
}

/* Seconds of a step; *bytes: bytes that the middle step reads. */
static timing decode(lm_generator *g, const setup *s, double *bytes)
{
    static const lm_sample_attr greedy = { .temperature = 0, .top_p = 1, .repetition_penalty = 1 };
    double u[64] = { 0 }, t[STEPS];
    int32_t next[64] = { 0 };
    int steps = bench.toy ? 3 : bench.quick ? STEPS / 2 : STEPS, warm = bench.toy ? 1 : 8;
    int64_t vocab = lm_generator_vocab(g);
    const int32_t *ids;
    lm_err e = { 0 };
    prompts(g, s);
    for (int i = -warm; i < steps; i++) {
        double from = lm_now();
        bench_must(lm_generator_next(g, next, &greedy, u, &ids, NULL, &e), &e);
        if (i >= 0)
            t[i] = lm_now() - from;
        for (int64_t k = 0; k < s->batch; k++)
            next[k] = (int32_t)((ids[k] + 104729 * (i + k + 99)) % vocab);
        if (i == steps / 2)
            *bytes = lm_generator_step_bytes(g);
    }
    timing out = { .median = lm_median(t, steps), .n = steps };
    out.least = t[0];
    out.most = t[steps - 1];
    return out;
}

/* Number of launches of a step: copies, kernels, the choice. */
static size_t launches(const lm_generator *g)
{
    const lm_recording *r = lm_generator_recorded(g);
    return bench.nodes && r ? bench.nodes(r) : 0;
}

static void measure(lm_loaded *w, lm_backend *b, const setup *s, const char *path)
{
    lm_generator *g = NULL;
    lm_err e = { 0 };
    char shape[64], of[64];
    double bytes = 0;
    if (lm_generator_new(w,
                         &(lm_generator_opts){
                             .dtype = LM_DTYPE_BF16, .batch = s->batch, .context = s->context },
                         b, &g, &e)) {
        put_note("decoding B=%lld left out: %s: %s", (long long)s->batch, e.where, e.what);
        return;
    }
    timing t = decode(g, s, &bytes);
    if (lm_generator_unrecorded(g))
        put_note("decoding B=%lld is not recorded: %s", (long long)s->batch,
                 lm_generator_unrecorded(g));
    snprintf(shape, sizeof shape, "B=%lld behind %lld", (long long)s->batch, (long long)s->prompt);
    snprintf(of, sizeof of, "copy, %.4g GB/s", bench.copy * 1e-9);
    put_row(&(row){ .part = "decode",
                    .name = bench.toy ? "toy" : "llama-1b",
                    .shape = shape,
                    .dtype = "bf16",
                    .path = path,
                    .t = t,
                    .rate = (double)s->batch / t.median,
                    .unit = "tokens/s",
                    .share = bytes / bench.copy / t.median,
                    .of = of,
                    .launches = launches(g) });
    lm_generator_free(g);
}

static void on_path(int path)
{
    lm_backend *b = NULL;
    lm_loaded w = { 0 };
    lm_err e = { 0 };
    const setup *s = bench.toy ? toys : setups;
    size_t n = bench.toy ? sizeof toys / sizeof *toys : sizeof setups / sizeof *setups;
    open_path(bench.modules, bench.device, path, &b);
    if (!b)
        return;
    *(void **)&bench.nodes = cuda_symbol(bench.modules, "lm_cuda_recording_nodes");
    if (bench.copy <= 0)
        bench.copy = copy_ceiling(b, bench.toy ? 1 << 20 : (size_t)2 << 30, "copy");
    bench_must(lm_loaded_open(bench.model, NULL, &w, &e), &e);
    for (size_t i = 0; i < n; i++) {
        if (lm_now() > bench.deadline)
            bench.left_out++;
        else
            measure(&w, b, &s[i], path_names[path]);
    }
    lm_loaded_fini(&w);
    lm_backend_close(b);
}

int main(int argc, char **argv)
{
    double seconds = 60;
    bench.paths = "plain,tensor";
    bench.device = "cuda:0";
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--quick"))
            bench.quick = true;
        else if (!strcmp(argv[i], "--toy"))
            bench.toy = true;
        else if (!strcmp(argv[i], "--seconds") && ++i)
            seconds = atof(value);
        else if (!strcmp(argv[i], "--paths") && ++i)
            bench.paths = value;
        else if (!strcmp(argv[i], "--device") && ++i)
            bench.device = value;
        else if (!bench.modules)
            bench.modules = argv[i];
        else
            bench.model = argv[i];
    }
    if (!bench.model) {
        fprintf(stderr, "bench-cuda: name the folder of the module, and a model\n");
        return 2;
    }
    bench.deadline = lm_now() + seconds;
    for (int i = 0; i < 2; i++)
        if (strstr(bench.paths, path_names[1 - i]))
            on_path(1 - i);
    if (bench.left_out)
        put_note("%d rows of decoding left out: the time was over", bench.left_out);
    return 0;
}
