/* SPDX-License-Identifier: Apache-2.0 */
/* bench_kv_serve.c -- continuous batching beside static batches of the same prompts, and the time to the first token of
 * prompts that begin alike.
 *
 * usage: bench_kv_serve [--quick] [--long] [--threads N]
 *
 * The model is a random Llama of 40 M parameters in BF16 (d 512, 8 layers, 2 of 8 heads for keys and values, vocabulary
 * 32000).  64 prompts of 32 to 512 tokens, with --long 32 to 1,024, get 16 to 256 new ones:
 *   static     batches of 8, in order; each waits for its slowest text
 *   refilled   8 slots, of which a free one gets the next prompt (generate without --serve-batch)
 *   served     64 sequences over pages; with memory for all, or a quarter of what they use, and the host or the disk
 * Goals: served at least twice the new tokens/s of static; pages and scheduling below 2 % of a step.
 * prefix: 32 prompts of 2,000 common tokens and 20 of their own, one behind another: the first beside the median of the
 * others; goal: 10 times. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/mem.h"
#include "model/paged.h"
#include "model/serve.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/random_model.h"

enum { VOCAB = 32000, MOST = 64, COMMON = 2000, OWN = 20, ALIKE = 32, CONTEXT = 2048 };

static int64_t spread = 481; /* of the lengths of prompts */

static const char config_text[] =
    "{\"model_type\":\"llama\",\"vocab_size\":32000,\"hidden_size\":512,\"intermediate_size\":1376,"
    "\"num_hidden_layers\":8,\"num_attention_heads\":8,\"num_key_value_heads\":2,"
    "\"max_position_embeddings\":4096,\"tie_word_embeddings\":true}";

static void check(lm_code rc, const lm_err *e)
{
    if (!rc)
        return;
    fprintf(stderr, "bench_kv_serve: %s: %s\n", e->where, e->what);
    exit(1);
}

static lm_tokenizer *words(void)
{
    static const char head[] = "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{",
                      tail[] = "}},\"decoder\":{\"type\":\"ByteLevel\"}}";
    lm_err e = { 0 };
    lm_tokenizer *tok = NULL;
    lm_buf json = { 0 };
    char word[64];
    check(lm_buf_add(&json, head, sizeof head - 1, &e), &e);
    for (int i = 0; i < VOCAB; i++) {
        int n = snprintf(word, sizeof word, "%s\"w%d\":%d", i ? "," : "", i, i);
        check(lm_buf_add(&json, word, (size_t)n, &e), &e);
    }
    check(lm_buf_add(&json, tail, sizeof tail - 1, &e), &e);
    check(lm_tokenizer_from_json(json.data, json.len, NULL, 0, "words", &tok, &e), &e);
    lm_buf_fini(&json);
    return tok;
}

/* ---- prompts ---- */

typedef struct {
    int64_t next, end; /* prompts */
    bool alike;
    double at[MOST]; /* when each was answered */
    double first;    /* seconds to the first token, summed */
} prompts;

static lm_code next_prompt(void *ctx, lm_completion *c, bool *got, lm_err *e)
{
    prompts *p = ctx;
    int64_t i = p->next, n = p->alike ? COMMON + OWN : 32 + i * 389 % spread;
    *got = i < p->end;
    if (!*got)
        return LM_OK;
    p->next++;
    if (lm_grow(&c->ids.v, &c->ids.cap, (size_t)n, sizeof *c->ids.v, "tokens", e))
        return e->code;
    for (int64_t k = 0; k < n; k++)
        c->ids.v[k] =
            (uint32_t)((p->alike && k < COMMON ? k * 7919 : (i + 1) * 1237 + k * 104729) % VOCAB);
    c->ids.n = (size_t)n;
    c->max_new = p->alike ? 1 : 16 + i * 101 % 241;
    return LM_OK;
}

static lm_code answered(void *ctx, lm_completion *c, lm_err *e)
{
    prompts *p = ctx;
    (void)e;
    p->at[c->index] = lm_now();
    p->first += c->first_seconds;
    return LM_OK;
}

/* ---- runs ---- */

typedef struct {
    lm_loaded w, served; /* served: in panels, as a loaded model */
    lm_backend *b;
    lm_tokenizer *tok;
    int64_t texts;
    double of_static; /* tokens/s */
} bench;

static const lm_complete_opts greedy = { .sample = { 0, 0, 1, 0, 1 }, .samples = 1 };

static void line(bench *t, const char *name, const lm_complete_stats *st, double seconds)
{
    double rate = (double)st->new_tokens / seconds;
    if (!t->of_static)
        t->of_static = rate;
    printf("  %-34s %6.2f s  %7.1f new tokens/s  %5.2f times", name, seconds, rate,
           rate / t->of_static);
}

/* `each` prompts in one run of 8 slots. */
static void slots(bench *t, const char *name, int64_t each)
{
    lm_err e = { 0 };
    lm_generator *g = NULL;
    lm_complete_stats st = { 0 };
    prompts p = { 0 };
    const lm_complete_hooks h = { .next = next_prompt, .done = answered, .ctx = &p };
    const lm_generator_opts o = { .dtype = LM_DTYPE_BF16, .batch = 8, .context = CONTEXT };
    check(lm_generator_new(&t->w, &o, t->b, &g, &e), &e);
    double start = lm_now();
    for (p.end = each; p.end <= t->texts; p.end += each)
        check(lm_complete_run(g, t->tok, &greedy, &h, &st, &e), &e);
    line(t, name, &st, lm_now() - start);
    printf("\n");
    lm_generator_free(g);
}

static size_t served(bench *t, const char *name, size_t memory, size_t host, size_t disk)
{
    lm_err e = { 0 };
    lm_paged *g = NULL;
    lm_complete_stats st = { 0 };
    lm_serve_stats kv;
    lm_serve_room room;
    prompts p = { .end = t->texts };
    const char *dir = getenv("TMPDIR");
    const lm_complete_hooks h = { .next = next_prompt, .done = answered, .ctx = &p };
    const lm_serve_sizes ask = {
        .sequences = 64,
        .context = CONTEXT,
        .memory = memory,
        .host = host,
        .disk = disk,
        .name = { "device", "host", "disk" },
    };
    check(lm_serve_choose(&t->served, LM_DTYPE_BF16, t->b, &ask, &room, &e), &e);
    room.tiers.dir = dir ? dir : "/tmp";
    const lm_serve_opts o = { .tiers = room.tiers, .measure = true };
    check(lm_paged_new(&t->served, LM_DTYPE_BF16, &room.pages, t->b, &g, &e), &e);
    double start = lm_now();
    check(lm_serve_run(g, &o, t->tok, &greedy, &h, &st, &kv, &e), &e);
    line(t, name, &st, lm_now() - start);
    printf("  pages %4.2f %% of steps, %.1f MB at most, moved %.1f MB, stalls %.3f s, recomputed "
           "%lld, first token %.2f s\n",
           100 * kv.pages_seconds / kv.seconds, (double)kv.peak_bytes * 1e-6, kv.tiers.bytes * 1e-6,
           kv.tiers.stalls, (long long)kv.sched.dropped_rows, p.first / (double)t->texts);
    lm_paged_free(g);
    return kv.peak_bytes;
}

static void prefix(bench *t)
{
    const lm_paged_opts o = {
        256 + 1, 1, COMMON + OWN + 64, 64, 200, NULL, 0, 0, NULL, NULL, NULL
    };
    const lm_serve_opts how = { 0 };
    lm_err e = { 0 };
    lm_paged *g = NULL;
    lm_complete_stats st = { 0 };
    prompts p = { .end = ALIKE, .alike = true };
    const lm_complete_hooks h = { .next = next_prompt, .done = answered, .ctx = &p };
    double rest[ALIKE];
    check(lm_paged_new(&t->served, LM_DTYPE_BF16, &o, t->b, &g, &e), &e);
    double start = lm_now();
    check(lm_serve_run(g, &how, t->tok, &greedy, &h, &st, NULL, &e), &e);
    for (int i = 1; i < ALIKE; i++)
        rest[i - 1] = p.at[i] - p.at[i - 1];
    double first = p.at[0] - start, median = lm_median(rest, ALIKE - 1);
    printf("  prefix of %d tokens: first token of the first prompt after %.1f ms, of the others "
           "%.1f ms: %.1f times\n",
           COMMON, first * 1e3, median * 1e3, first / median);
    lm_paged_free(g);
}

int main(int argc, char **argv)
{
    lm_err e = { 0 };
    lm_par *par = NULL;
    bench t = { .texts = MOST };
    int threads = 0;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--quick"))
            t.texts = 16;
        else if (!strcmp(argv[i], "--long"))
            spread = 993;
        else if (!strcmp(argv[i], "--threads") && i + 1 < argc)
            threads = atoi(argv[++i]);
    check(lm_par_new(&par, threads, &e), &e);
    check(lm_backend_cpu(lm_cpu_detect(), par, &t.b, &e), &e);
    check(random_model(config_text, t.b, false, &t.w, &e), &e);
    check(random_model(config_text, t.b, true, &t.served, &e), &e);
    t.tok = words();
    printf("llama 40M bf16, %lld prompts of 32 to %lld tokens, %s\n", (long long)t.texts,
           (long long)spread + 31, t.b->detail);
    slots(&t, "static batches of 8", 8);
    slots(&t, "8 slots, refilled", t.texts);
    size_t peak = served(&t, "served, 64 sequences", 0, 0, 0);
    served(&t, "served, a quarter", peak / 4, 0, 0);
    served(&t, "served, a quarter, host", peak / 4, peak, 0);
    served(&t, "served, a quarter, disk", peak / 4, 0, peak);
    prefix(&t);
    lm_tokenizer_free(t.tok);
    lm_loaded_fini(&t.w);
    lm_loaded_fini(&t.served);
    lm_backend_close(t.b);
    lm_par_free(par);
    return 0;
}
