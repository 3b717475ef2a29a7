/* SPDX-License-Identifier: Apache-2.0 */
/* bench_kv_load.c -- the time to the first token of a question behind a long text: the text's cache is loaded from a file or a
 * pipe, or computed from its tokens.
 *
 * usage: bench_kv_load [--quick] [--threads N]
 *
 * The model is a random Llama of 125 M parameters in BF16 (d 768, 12 layers, 4 of 12 heads for keys and values, vocabulary
 * 32000): 12 KiB of cache a token.  Texts of 4,096 and 16,384 tokens, questions of 16.  Times run from the open of the
 * file to the choice of the first token; the model is loaded before.  Sources:
 *   file        just written, so it is in the page cache
 *   pipe        a process that sends at the rate given, as from another machine
 * Keys and values of random weights are not those of a language: CacheGen's bits for a number differ from those of a
 * trained model.  `kept` says whether the first token is that of the plain cache. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "kv/image.h"
#include "model/cache_about.h"
#include "model/cache_plan.h"
#include "model/generate_cache.h"
#include "tests/bench/random_model.h"

enum { VOCAB = 32000, QUESTION = 16, LONGEST = 16384 };

static const char config_text[] =
    "{\"model_type\":\"llama\",\"vocab_size\":32000,\"hidden_size\":768,\"intermediate_size\":2048,"
    "\"num_hidden_layers\":12,\"num_attention_heads\":12,\"num_key_value_heads\":4,"
    "\"max_position_embeddings\":32768}";

static const struct {
    const char *name, *spec; /* spec: of the caches; NULL: plain */
    int level;               /* of cachegen; negative: none */
} forms[] = {
    { "plain", NULL, -1 },     { "int8", "int8", -1 },    { "int4", "int4", -1 },
    { "cachegen 0", NULL, 0 }, { "cachegen 1", NULL, 1 }, { "cachegen 2", NULL, 2 },
    { "cachegen 3", NULL, 3 },
};
enum { FORMS = sizeof forms / sizeof *forms };

typedef struct {
    lm_loaded w;
    lm_par *par;
    lm_backend *b;
    lm_cache_about about;
    uint32_t ids[LONGEST + QUESTION];
    char path[256];
} bench;

static void check(lm_code rc, const lm_err *e)
{
    if (!rc)
        return;
    fprintf(stderr, "bench_kv_load: %s: %s\n", e->where, e->what);
    exit(1);
}

static lm_generator *open_generator(bench *t, const char *spec, int64_t n, lm_cache_plan *p)
{
    lm_err e = { 0 };
    lm_generator *g;
    *p = (lm_cache_plan){ 0 };
    if (spec)
        check(lm_cache_plan_open(spec, &t->w.config, LM_DTYPE_BF16, NULL, p, &e), &e);
    const lm_generator_opts o = {
        .dtype = LM_DTYPE_BF16, .batch = 1, .context = n + QUESTION + 1, .kv = p->plan
    };
    check(lm_generator_new(&t->w, &o, t->b, &g, &e), &e);
    return g;
}

static void close_generator(lm_generator *g, lm_cache_plan *p)
{
    lm_generator_free(g);
    lm_cache_plan_fini(p);
}

static int32_t first_token(lm_generator *g)
{
    static const lm_sample_attr greedy = { 0, 0, 1, 0, 1 };
    const double u = 0;
    const int32_t *id;
    lm_err e = { 0 };
    check(lm_generator_choose(g, &greedy, &u, &id, NULL, &e), &e);
    return *id;
}

/* ---- a link ---- */

/* A process that sends the file at `rate` bytes a second; returns the end to read from. */
static int send_file(const char *path, double rate, pid_t *child)
{
    int end[2];
    if (pipe(end))
        exit(1);
    *child = fork();
    if (*child) {
        close(end[1]);
        return end[0];
    }
    static char piece[1 << 16];
    FILE *f = fopen(path, "rb");
    double begin = lm_now(), sent = 0;
    for (size_t n; f && (n = fread(piece, 1, sizeof piece, f));) {
        double wait = begin + (sent += (double)n) / rate - lm_now();
        const struct timespec ts = { (time_t)wait, (long)((wait - (double)(time_t)wait) * 1e9) };
        if (wait > 0)
            nanosleep(&ts, NULL);
        if (write(end[1], piece, n) < 0)
            break;
    }
    _exit(0);
}

static lm_code read_link(void *ctx, void *dst, size_t cap, size_t *got, lm_err *e)
{
    ssize_t n = read(*(int *)ctx, dst, cap);
    *got = n > 0 ? (size_t)n : 0;
    return n < 0 ? lm_fail(e, LM_EIO, "pipe", NULL, "cannot read") : LM_OK;
}

/* ---- runs ---- */

static double compute(bench *t, int64_t n, int32_t *first)
{
    lm_err e = { 0 };
    lm_cache_plan p;
    lm_generator *g = open_generator(t, NULL, n, &p);
    check(lm_generator_prompt(g, 0, t->ids, 300, NULL, &e), &e); /* warm */
    double begin = lm_now();
    check(lm_generator_prompt(g, 0, t->ids, n + QUESTION, NULL, &e), &e);
    *first = first_token(g);
    double seconds = lm_now() - begin;
    close_generator(g, &p);
    return seconds;
}

/* The cache of the first n tokens, which the caller frees. */
static lm_kv_image *keep(bench *t, int64_t n)
{
    lm_err e = { 0 };
    lm_cache_plan p;
    lm_kv_image *m;
    lm_generator *g = open_generator(t, NULL, n, &p);
    check(lm_generator_prompt(g, 0, t->ids, n, NULL, &e), &e);
    check(lm_generator_save(g, 0, &t->about.about, t->par, &m, &e), &e);
    close_generator(g, &p);
    return m;
}

/* Write it in a form, as quantize-kv does; returns the bytes of the file. */
static double save(bench *t, const lm_kv_image *plain, int form)
{
    lm_err e = { 0 };
    lm_cache_plan p = { 0 };
    lm_kv_image *m = NULL;
    const lm_kv_out to = { .path = t->path, .force = true };
    unsigned levels = forms[form].level < 0 ? 0 : 1u << forms[form].level;
    if (forms[form].spec)
        check(lm_cache_plan_open(forms[form].spec, &t->w.config, LM_DTYPE_BF16, NULL, &p, &e), &e);
    check(lm_kv_image_convert(plain, p.plan, lm_cpu_detect(), t->par, &m, &e), &e);
    check(lm_kv_file_write(&to, &m->about, &m->content, levels, lm_cpu_detect(), t->par, &e), &e);
    lm_kv_image_free(m);
    lm_cache_plan_fini(&p);
    FILE *f = fopen(t->path, "rb");
    if (!f || fseek(f, 0, SEEK_END))
        exit(1);
    double bytes = (double)ftell(f);
    fclose(f);
    return bytes;
}

/* Load and run the question; rate 0: from the file. */
static double load(bench *t, int64_t n, int form, double rate, int32_t *first)
{
    const lm_kv_reading r = { .vocab = VOCAB, .context = n + QUESTION, .level = LM_KV_FILE_BEST };
    lm_err e = { 0 };
    lm_cache_plan p;
    lm_kv_file *f;
    lm_kv_image *m;
    pid_t child = 0;
    lm_generator *g = open_generator(t, forms[form].spec, n, &p);
    check(lm_generator_prompt(g, 0, t->ids, 300, NULL, &e), &e); /* warm */
    double begin = lm_now();
    int fd = rate > 0 ? send_file(t->path, rate, &child) : -1;
    if (fd < 0)
        check(lm_kv_file_open(t->path, &f, &e), &e);
    else
        check(lm_kv_file_open_on(read_link, &fd, "pipe", &f, &e), &e);
    check(lm_kv_file_match(f, &t->about.about, n + QUESTION, &e), &e);
    check(lm_kv_image_read(f, &r, lm_cpu_detect(), t->par, &m, &e), &e);
    check(lm_generator_resume(g, 0, m, t->ids + n, QUESTION, t->par, &e), &e);
    *first = first_token(g);
    double seconds = lm_now() - begin;
    lm_kv_image_free(m);
    lm_kv_file_close(f);
    if (fd >= 0) {
        close(fd);
        waitpid(child, NULL, 0);
    }
    close_generator(g, &p);
    return seconds;
}

static void measure(bench *t, int64_t n)
{
    static const double rates[] = { 0, 1e9 / 8, 1e8 / 8 };
    int32_t want, got;
    double computed = compute(t, n, &want);
    lm_kv_image *plain = keep(t, n);
    printf("%lld tokens and %d more: first token after %.0f ms when computed; loaded:\n"
           "  %-11s %9s  kept  %18s  %18s  %18s\n",
           (long long)n, QUESTION, computed * 1e3, "cache", "bytes", "file", "pipe, 1 Gbit/s",
           "pipe, 100 Mbit/s");
    for (int i = 0; i < FORMS; i++) {
        double bytes = save(t, plain, i);
        printf("  %-11s %6.1f MB", forms[i].name, bytes * 1e-6);
        for (size_t k = 0; k < sizeof rates / sizeof *rates; k++) {
            if (rates[k] > 0 && bytes / rates[k] > 8) { /* no need to wait for what is known */
                printf("  %8.0f ms, of its bytes", bytes / rates[k] * 1e3);
                continue;
            }
            double s = load(t, n, i, rates[k], &got);
            if (!k)
                printf("  %-4s", got == want ? "yes" : "no");
            printf("  %8.0f ms %5.2f x", s * 1e3, computed / s);
            fflush(stdout);
        }
        printf("\n");
    }
    lm_kv_image_free(plain);
}

int main(int argc, char **argv)
{
    static bench t;
    static const uint8_t digest[16] = { 1 };
    const char *dir = getenv("TMPDIR");
    lm_err e = { 0 };
    int threads = 0;
    bool quick = false;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--quick"))
            quick = true;
        else if (!strcmp(argv[i], "--threads") && i + 1 < argc)
            threads = atoi(argv[++i]);
    check(lm_par_new(&t.par, threads, &e), &e);
    check(lm_backend_cpu(lm_cpu_detect(), t.par, &t.b, &e), &e);
    check(random_model(config_text, t.b, false, &t.w, &e), &e);
    for (int64_t i = 0; i < LONGEST + QUESTION; i++)
        t.ids[i] = (uint32_t)(i * 7919 % VOCAB);
    snprintf(t.path, sizeof t.path, "%s/bench_kv_load.%d.kv", dir ? dir : "/tmp", (int)getpid());
    printf("llama 125M bf16, %s\n", t.b->detail);
    for (int64_t n = 4096; n <= (quick ? 4096 : LONGEST); n *= 4) {
        check(lm_cache_about_model(&t.w.config, digest, n + QUESTION + 1, LM_DTYPE_BF16, &t.about,
                                   &e),
              &e);
        measure(&t, n);
        lm_cache_about_fini(&t.about);
    }
    remove(t.path);
    lm_loaded_fini(&t.w);
    lm_backend_close(t.b);
    lm_par_free(t.par);
    return 0;
}
