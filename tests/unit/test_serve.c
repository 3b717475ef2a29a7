/* SPDX-License-Identifier: Apache-2.0 */
/* test_serve.c -- continuous batching over a scheduler and pages in three tiers: the same answers, to the bit, for any
 * memory, any number of sequences, any tiers and threads; samples are forked from one prompt; a disk that is full,
 * or changes bytes, costs time only.  pwritev and preadv below replace those of libc. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "generate_case.h"
#include "model/cache_plan.h"
#include "serve_case.h"

enum { CONTEXT = 200, PAGE = 16 };

static const char *const configs[] = {
    "{\"model_type\":\"llama\",\"vocab_size\":96,\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,"
    "\"max_position_embeddings\":700,\"initializer_range\":0.2}",
    "{\"model_type\":\"mistral\",\"vocab_size\":96,\"hidden_size\":128,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
    "\"max_position_embeddings\":700,\"sliding_window\":21,\"initializer_range\":0.2}",
    "{\"model_type\":\"llama\",\"vocab_size\":96,\"hidden_size\":128,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
    "\"max_position_embeddings\":700,\"initializer_range\":0.2}",
};

/* ---- the disk ---- */

static struct {
    int writes, reads;
    int full_at, damage_at; /* this write fails, this read returns another byte; 0: none */
} disk;

ssize_t pwritev(int fd, const struct iovec *v, int n, off_t at)
{
    if (++disk.writes == disk.full_at) {
        errno = ENOSPC;
        return -1;
    }
    return syscall(SYS_pwritev, fd, v, n, at & 0xffffffff, at >> 32);
}

ssize_t preadv(int fd, const struct iovec *v, int n, off_t at)
{
    ssize_t got = syscall(SYS_preadv, fd, v, n, at & 0xffffffff, at >> 32);
    if (++disk.reads == disk.damage_at)
        ((char *)v->iov_base)[0] ^= 1;
    return got;
}

/* Memory for all; for a half and a quarter of it, without and with lower tiers; a single sequence. */
static const setting settings[] = {
    { { 64 + 12, 12, CONTEXT, PAGE, 80, NULL, 0, 0, NULL, NULL, NULL }, 0, 0, false },
    { { 30 + 3, 3, CONTEXT, PAGE, 60, NULL, 0, 0, NULL, NULL, NULL }, 0, 0, true },
    { { 100 + 12, 12, CONTEXT, PAGE, 40, NULL, 0, 0, NULL, NULL, NULL }, 0, 0, false },
    { { 100 + 12, 12, CONTEXT, PAGE, 20, NULL, 0, 0, NULL, NULL, NULL }, 0, 0, false },
    { { 17, 1, CONTEXT, 64, 5, NULL, 0, 0, NULL, NULL, NULL }, 0, 0, false },
    { { 64 + 12, 12, CONTEXT, PAGE, 14, NULL, 0, 0, NULL, NULL, NULL }, 200, 0, false },
    { { 64 + 12, 12, CONTEXT, PAGE, 14, NULL, 0, 0, NULL, NULL, NULL }, 0, 200, false },
    { { 64 + 12, 12, CONTEXT, PAGE, 14, NULL, 0, 0, NULL, NULL, NULL }, 10, 90, false },
    { { 64 + 12, 12, CONTEXT, PAGE, 14, NULL, 0, 0, NULL, NULL, NULL }, 5, 5, true },
};
enum { SETTINGS = sizeof settings / sizeof *settings };

/* Coded caches: prompts are cut at multiples of 256 positions, whatever their company; forks copy tails, and so do prompts
 * that begin alike, from snapshots: the first run has none of these, and shares nothing. */
static void coded(void **state)
{
    static const char *const spec[] = { "bf16",
                                        "int8",
                                        "int4",
                                        "k=q8_0,v=int4:rotate=off",
                                        "kivi:bits=2",
                                        "k4v2",
                                        "fp8",
                                        "layers.0=int4;*=bf16",
                                        "k=int8:residual=64,v=int4:residual=96" };
    static const setting sizes[] = {
        { { 256 + 12, 12, LONG, 64, 160, NULL, 0, 0, NULL, NULL, NULL }, 0, 0, false },
        { { 256 + 3, 3, LONG, 64, 60, NULL, 0, 0, NULL, NULL, NULL }, 0, 0, true },
        { { 256 + 12, 12, LONG, 64, 26, NULL, 0, 0, NULL, NULL, NULL }, 0, 0, false },
        { { 256 + 12, 12, LONG, 64, 20, NULL, 0, 0, NULL, NULL, NULL }, 20, 60, false },
    };
    static answers want, got;
    int64_t dropped[2] = { 0 }, moved[2] = { 0 }; /* without and with tails */
    (void)state;
    stretch = 6;
    for (size_t i = 0; i < sizeof spec / sizeof *spec; i++) {
        lm_loaded w;
        lm_cache_plan plan;
        int64_t hits = 0;
        bool tails = strstr(spec[i], "ki") || strstr(spec[i], "k4") || strstr(spec[i], "res");
        loaded_of(configs[2], LM_DTYPE_BF16, par, host, &w);
        ok(lm_cache_plan_open(spec[i], &w.config, LM_DTYPE_BF16, NULL, &plan, &err));
        for (int k = 0; k < 4; k++) {
            setting o = sizes[k];
            lm_serve_stats kv;
            o.pages.kv = plan.plan;
            o.pages.pages = o.pages.pages * 64 / plan.plan->page;
            o.pages.page = plan.plan->page;
            o.pages.slots = k == 3 ? 20 : 0;
            o.pages.snapshots = tails && k ? 1 + 3 * k : 0;
            serve(&w, LM_DTYPE_BF16, host, &o, i % 2 ? 1 : SAMPLES, k ? &got : &want, &kv);
            if (k)
                check_same(&got, &want);
            dropped[tails] += kv.sched.dropped;
            moved[tails] += kv.tiers.up + kv.tiers.in;
            hits += kv.sched.hits;
            assert_true(k || tails == !hits);
        }
        assert_true(hits > 0);
        lm_cache_plan_fini(&plan);
        lm_loaded_fini(&w);
    }
    for (int i = 0; i < 2; i++)
        assert_true(dropped[i] > 0 && moved[i] > 0);
    stretch = 1;
}

static void any_memory(void **state)
{
    static answers want, got;
    (void)state;
    for (int bf = 0; bf < 2; bf++)
        for (int64_t samples = 1; samples <= SAMPLES; samples += 2) {
            lm_loaded w;
            lm_dtype type = bf ? LM_DTYPE_BF16 : LM_DTYPE_F32;
            lm_serve_stats sum = { 0 };
            size_t words = 0;
            loaded_of(configs[bf], type, par, host, &w);
            for (int i = 0; i < SETTINGS; i++) {
                const setting *o = &settings[i];
                lm_serve_stats kv;
                serve(&w, type, host, o, samples, i ? &got : &want, &kv);
                if (i)
                    check_same(&got, &want);
                const lm_tiers_stats *t = &kv.tiers;
                assert_int_equal(warnings, 0);
                assert_true(kv.peak_bytes <=
                            (size_t)(o->pages.pages + o->host + o->disk) * kv.page_bytes);
                assert_true(o->disk || !t->out);
                assert_true(t->bytes ==
                            (double)(t->down + t->up + t->out + t->in) * (double)kv.page_bytes);
                sum.sched.dropped += kv.sched.dropped;
                sum.sched.hits += kv.sched.hits;
                sum.tiers.down += t->down;
                sum.tiers.up += t->up;
                sum.tiers.out += t->out;
                sum.tiers.in += t->in;
                sum.tiers.copied += t->copied;
            }
            for (int i = 0; i < PROMPTS; i++)
                words += want.n[i][0];
            assert_true(words > 100 && sum.sched.dropped > 0 && sum.sched.hits > 0);
            assert_true(sum.tiers.down > 50 && sum.tiers.up > 20 && sum.tiers.out > 50 &&
                        sum.tiers.in > 20);
            assert_true((sum.tiers.copied > 0) == (samples > 1));
            lm_loaded_fini(&w);
        }
}

/* One thread, which makes the moves itself. */
static void one_thread(void **state)
{
    static answers want, got;
    lm_backend *b = NULL;
    lm_serve_stats kv;
    lm_loaded w;
    (void)state;
    loaded_of(configs[0], LM_DTYPE_BF16, par, host, &w);
    serve(&w, LM_DTYPE_BF16, host, &settings[0], 1, &want, &kv);
    lm_loaded_fini(&w);
    ok(lm_backend_cpu(lm_cpu_detect(), NULL, &b, &err));
    loaded_of(configs[0], LM_DTYPE_BF16, NULL, b, &w);
    for (int i = 5; i < 8; i++) {
        serve(&w, LM_DTYPE_BF16, b, &settings[i], 1, &got, &kv);
        check_same(&got, &want);
        assert_true(kv.tiers.in + kv.tiers.up > 10 && kv.tiers.stalls > 0);
    }
    lm_loaded_fini(&w);
    lm_backend_close(b);
}

/* The memory of a device that the host cannot read. */
static void on_device(void **state)
{
    static answers want, got;
    lm_loaded w;
    (void)state;
    loaded_of(configs[0], LM_DTYPE_BF16, par, plain, &w);
    for (int i = 5; i < 8; i++) {
        lm_serve_stats kv;
        serve(&w, LM_DTYPE_BF16, plain, &settings[i], 1, i > 5 ? &got : &want, &kv);
        if (i > 5)
            check_same(&got, &want);
        assert_true(kv.tiers.up + kv.tiers.in > 10);
    }
    lm_loaded_fini(&w);
}

/* The sum of differences of log-probabilities up to the first token that differs, and how many tokens these are. */
static double distance(const answers *a, const answers *b, int64_t *n)
{
    double sum = 0;
    for (int i = 0; i < PROMPTS; i++)
        for (size_t k = 0; k < a->n[i][0] && a->ids[i][0][k] == b->ids[i][0][k]; k++, ++*n)
            sum += fabs((double)a->logprob[i][0][k] - (double)b->logprob[i][0][k]);
    return sum;
}

/* Pages that are coded on the way down: the same room holds more of them, answers differ by the error of the codes. */
static void coded_below(void **state)
{
    static const char *const spec[] = { "int8", "int4:rotate=on", "k=int8", "q8_0" };
    static answers want, got;
    (void)state;
    for (int i = 0; i < 4; i++) {
        lm_backend *b = i < 2 ? host : plain;
        lm_dtype type = i % 2 ? LM_DTYPE_BF16 : LM_DTYPE_F32;
        lm_cache_plan plan;
        lm_loaded w;
        lm_serve_stats kv;
        int64_t same = 0, again = 0;
        setting o = settings[i % 2 ? 6 : 7]; /* the disk; both */
        loaded_of(configs[2], type, par, b, &w);
        ok(lm_cache_plan_open(spec[i], &w.config, type, NULL, &plan, &err));
        serve(&w, type, b, &settings[0], 1, &want, &kv);
        o.pages.down = plan.plan;
        serve(&w, type, b, &o, 1, &got, &kv);
        const lm_tiers_stats *t = &kv.tiers;
        const double moved = (double)(t->down + t->up + t->out + t->in) * (double)kv.page_bytes;
        assert_true(t->up + t->in > 10 && t->lost == 0);
        assert_true(t->bytes + t->saved == moved && t->bytes < (i == 2 ? 0.8 : 0.6) * moved);
        double far = distance(&got, &want, &same);
        distance(&want, &want, &again);
        assert_true(same > again / 4 && far > 0 && far / (double)same < 0.05);
        lm_cache_plan_fini(&plan);
        lm_loaded_fini(&w);
    }
}

/* Methods that code several tokens together, policies, and what codes nothing. */
static void refused_below(void **state)
{
    static const char *const spec[] = { "kivi:bits=2", "k4v2", "int2", "h2o:keep=0.5", "bf16" };
    (void)state;
    for (size_t i = 0; i < sizeof spec / sizeof *spec; i++) {
        lm_cache_plan plan;
        lm_loaded w;
        lm_paged_sizes sizes;
        lm_paged_opts o = settings[0].pages;
        loaded_of(configs[2], LM_DTYPE_BF16, par, host, &w);
        ok(lm_cache_plan_open(spec[i], &w.config, LM_DTYPE_BF16, NULL, &plan, &err));
        o.down = plan.plan;
        assert_int_equal(lm_paged_measure(&w, LM_DTYPE_BF16, &o, host, &sizes, &err), LM_EUSAGE);
        assert_string_equal(err.where, plan.plan->text);
        err = (lm_err){ 0 };
        lm_cache_plan_fini(&plan);
        lm_loaded_fini(&w);
    }
}

/* The prompt of all samples is computed once. */
static void samples_share(void **state)
{
    static answers x;
    lm_serve_stats one, all;
    lm_loaded w;
    (void)state;
    loaded_of(configs[0], LM_DTYPE_F32, par, host, &w);
    serve(&w, LM_DTYPE_F32, host, &settings[0], 1, &x, &one);
    int64_t new = 0, prompts = 0;
    for (int i = 0; i < PROMPTS; i++) {
        new += (int64_t)x.n[i][0];
        prompts += i == 7 ? 0 : prompt_length(i);
    }
    assert_true(one.sched.rows <= prompts + new);
    serve(&w, LM_DTYPE_F32, host, &settings[0], SAMPLES, &x, &all);
    new = 0;
    for (int i = 0; i < PROMPTS; i++)
        for (int k = 0; k < SAMPLES; k++)
            new += (int64_t)x.n[i][k];
    assert_true(all.sched.rows <= prompts + new);
    lm_loaded_fini(&w);
}

static void serve_disk(lm_loaded *w, const setting *o, answers *out, lm_serve_stats *kv)
{
    disk.writes = disk.reads = 0;
    serve(w, LM_DTYPE_BF16, host, o, 1, out, kv);
}

/* A disk that is full, or changes bytes, is closed with one warning; what it lost is computed again. */
static void bad_disk(void **state)
{
    static answers want, got;
    lm_serve_stats kv;
    lm_loaded w;
    (void)state;
    loaded_of(configs[0], LM_DTYPE_BF16, par, host, &w);
    serve_disk(&w, &settings[6], &want, &kv);
    int writes = disk.writes, reads = disk.reads;
    assert_true(writes > 30 && reads > 10);
    for (int i = 0; i < 8; i++) {
        disk.full_at = i % 2 ? 0 : 1 + i * writes / 10;
        disk.damage_at = i % 2 ? 1 + i * reads / 10 : 0;
        serve_disk(&w, &settings[i < 4 ? 6 : 7], &got, &kv);
        check_same(&got, &want);
        if (i < 4)
            assert_true(warnings == 1 && kv.tiers.lost > 0 && kv.sched.dropped > 0);
        assert_true(warnings <= 1 && disk.writes < writes + 200);
    }
    disk.full_at = disk.damage_at = 0;
    lm_loaded_fini(&w);
}

static void no_folder(void **state)
{
    const lm_tiers_opts o = { 0, 4, "/nonexistent" };
    lm_tiers *t = NULL;
    lm_paged *g = NULL;
    lm_loaded w;
    (void)state;
    loaded_of(configs[0], LM_DTYPE_F32, par, host, &w);
    ok(lm_paged_new(&w, LM_DTYPE_F32, &settings[0].pages, host, &g, &err));
    assert_int_equal(lm_tiers_new(g, &o, &t, &err), LM_EIO);
    assert_null(t);
    err = (lm_err){ 0 };
    lm_paged_free(g);
    lm_loaded_fini(&w);
}

static int open_all(void **state)
{
    open_both(state);
    tok = letters();
    return 0;
}

static int close_all(void **state)
{
    lm_tokenizer_free(tok);
    return close_both(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(coded),         cmocka_unit_test(any_memory),
        cmocka_unit_test(one_thread),    cmocka_unit_test(on_device),
        cmocka_unit_test(samples_share), cmocka_unit_test(bad_disk),
        cmocka_unit_test(no_folder),     cmocka_unit_test(coded_below),
        cmocka_unit_test(refused_below),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
