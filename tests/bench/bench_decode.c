/* SPDX-License-Identifier: Apache-2.0 */
/* bench_decode.c -- tokens/s of decoding at batch 1, and the bytes that it must read for each token
 * as a share of the memory read bandwidth measured in the same run; prefill as a share of the GEMM
 * ceiling.
 *
 * usage: bench_decode [--quick] [--threads N]
 *
 * The model is a random Llama of 134 M parameters in BF16: d 768, 12 layers, ffn 2048, vocabulary
 * 32000.  Bytes for a token: every weight once (of the embedding one row, which does not count) and
 * the caches as far as filled. Target: 60 %. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "model/generate.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/random_model.h"

static const char config_text[] =
    "{\"model_type\":\"llama\",\"vocab_size\":32000,\"hidden_size\":768,\"intermediate_size\":2048,"
    "\"num_hidden_layers\":12,\"num_attention_heads\":12,\"max_position_embeddings\":2048}";

static void check(lm_code rc, const lm_err *e)
{
    if (!rc)
        return;
    fprintf(stderr, "bench_decode: %s: %s\n", e->where, e->what);
    exit(1);
}

/* Median seconds of a step after a prompt of `n` tokens; *bytes: bytes that the middle step
 * reads. */
static double decode(lm_generator *g, int64_t n, int steps, double *bytes, double *prompt)
{
    lm_err e = { 0 };
    const float *logits;
    uint32_t *ids = NULL;
    double *t = NULL, from;
    check(lm_alloc_n(&ids, (size_t)n, sizeof *ids, "a prompt", &e), &e);
    check(lm_alloc_n(&t, (size_t)steps, sizeof *t, "times", &e), &e);
    for (int64_t i = 0; i < n; i++)
        ids[i] = (uint32_t)(i * 7919 % 32000);
    check(lm_generator_prompt(g, 0, ids, n, &logits, &e), &e);
    from = lm_now();
    check(lm_generator_prompt(g, 0, ids, n, &logits, &e), &e);
    *prompt = lm_now() - from;
    uint64_t allocated = lm_alloc_count();
    for (int i = 0; i < steps; i++) {
        int32_t next = (int32_t)(i * 104729 % 32000);
        from = lm_now();
        check(lm_generator_decode(g, &next, &logits, &e), &e);
        t[i] = lm_now() - from;
        if (i == steps / 2)
            *bytes = lm_generator_step_bytes(g);
    }
    if (lm_alloc_count() != allocated)
        fprintf(stderr, "bench_decode: decoding allocates memory\n");
    double median = lm_median(t, steps);
    lm_free(ids);
    lm_free(t);
    return median;
}

int main(int argc, char **argv)
{
    static const int64_t prompts[] = { 16, 512, 1900 };
    lm_err e = { 0 };
    lm_loaded w = { 0 };
    lm_par *par = NULL;
    lm_ceilings *c = NULL;
    lm_backend *b = NULL;
    lm_generator *g = NULL;
    int threads = 0, steps = 100;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--quick"))
            steps = 20;
        else if (!strcmp(argv[i], "--threads") && i + 1 < argc)
            threads = atoi(argv[++i]);
    check(lm_par_new(&par, threads, &e), &e);
    check(lm_ceilings_new(&c, par, &e), &e);
    check(lm_backend_cpu(lm_cpu_detect(), par, &b, &e), &e);
    check(random_model(config_text, b, false, &w, &e), &e);
    check(lm_generator_new(
              &w, &(lm_generator_opts){ .dtype = LM_DTYPE_BF16, .batch = 1, .context = 2048 }, b,
              &g, &e),
          &e);
    printf("llama 134M bf16, batch 1, %s\n", b->detail);
    for (size_t i = 0; i < sizeof prompts / sizeof *prompts; i++) {
        double bytes = 0, prompt = 0, read = lm_ceiling_read(c);
        double s = decode(g, prompts[i], steps, &bytes, &prompt);
        double after = lm_ceiling_read(c);
        read = after > read ? after : read;
        printf("  behind %4lld tokens: %7.1f tokens/s  %6.1f MB a token  %5.1f GB/s, %5.1f %% of "
               "%.1f   "
               "prompt %7.0f tokens/s\n",
               (long long)prompts[i], 1 / s, bytes * 1e-6, bytes / s * 1e-9, 100 * bytes / s / read,
               read * 1e-9, (double)prompts[i] / prompt);
    }
    const lm_exec_time *lines;
    size_t n = lm_exec_times(lm_generator_exec(g), &lines);
    for (size_t i = 0; i < n && i < 6; i++)
        printf("    %-18s %8.1f us a token\n", lines[i].op,
               lines[i].seconds * 1e6 / (double)(3 * steps));
    lm_generator_free(g);
    lm_loaded_fini(&w);
    lm_backend_close(b);
    lm_ceilings_free(c);
    lm_par_free(par);
    return 0;
}
