/* SPDX-License-Identifier: Apache-2.0 */
/* bench_merge_models -- whole merges of three BF16 models next to a plain copy of the same bytes.
 *
 * bench_merge_models [--quick] [--rounds N] [--dir DIR]: models of 1.0 billion parameters (0.1 with
 * --quick, or what a third of the disk and of the free memory takes) are made in DIR (/var/tmp) and
 * merged by the merge-models on PATH.  The copy reads the same inputs through a buffer and writes
 * as many bytes as the result has, with fsync, on one thread: the minimum for moving these bytes.
 * Merges and copies alternate, and the best round of each counts, so all data are read from the
 * page cache.  Also prints the peak of the resident set and its bound. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "format/folder.h"

enum { WIDTH = 2048, FFN = 8192, VOCAB = 32000, MOST_LAYERS = 14, BUFFER = 4 << 20 };

typedef struct {
    const char *name, *args;
    double aim; /* share of the copy */
    double best, rss, bound;
} merge;

static merge merges[] = {
    { .name = "linear", .args = "-m linear m0 m1 m2", .aim = 0.8 },
    { .name = "ties", .args = "-m ties -b m0 m1 m2 --density 0.5", .aim = 0.4 },
    { .name = "dem", .args = "-m dem -b m0 m1:0.4 m2:0.7", .aim = 0.8 },
};
enum { MERGES = sizeof merges / sizeof *merges };

static void die(const char *where, const char *what)
{
    fprintf(stderr, "bench_merge_models: %s: %s\n", where, what);
    exit(1);
}

static void need(lm_code rc, const lm_err *e)
{
    if (rc)
        die(e->where, e->what);
}

/* ---- The models ---- */

static void plan(lm_st_plan *p, int layers)
{
    static const struct {
        const char *name;
        int64_t rows, cols;
    } part[] = { { "self_attn.q_proj", WIDTH, WIDTH }, { "self_attn.k_proj", WIDTH, WIDTH },
                 { "self_attn.v_proj", WIDTH, WIDTH }, { "self_attn.o_proj", WIDTH, WIDTH },
                 { "mlp.gate_proj", FFN, WIDTH },      { "mlp.up_proj", FFN, WIDTH },
                 { "mlp.down_proj", WIDTH, FFN } };
    int64_t table[2] = { VOCAB, WIDTH };
    lm_err e = { 0 };

    need(lm_st_plan_add(p, "model.embed_tokens.weight", LM_DTYPE_BF16, 2, table, &e), &e);
    for (int l = 0; l < layers; l++)
        for (size_t i = 0; i < sizeof part / sizeof *part; i++) {
            int64_t dim[2] = { part[i].rows, part[i].cols };
            char name[80];

            snprintf(name, sizeof name, "model.layers.%d.%s.weight", l, part[i].name);
            need(lm_st_plan_add(p, name, LM_DTYPE_BF16, 2, dim, &e), &e);
        }
}

/* Numbers of about 0.001 to 0.06, either sign: xorshift64, good enough to be merged. */
static void fill(uint16_t *v, size_t n, uint64_t *state)
{
    uint64_t x = *state;

    for (size_t i = 0; i < n; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        v[i] = (uint16_t)((x >> 20 & 0x807f) | (117 + (x >> 50 & 3) + (x >> 53 & 1)) << 7);
    }
    *state = x;
}

static uint64_t make_model(const char *path, uint64_t seed, int layers, uint16_t *buffer)
{
    static const char text[] = "{\"model_type\":\"llama\",\"tie_word_embeddings\":true}";
    lm_folder_spec spec = { .keep_order = true, .max_shard_bytes = (uint64_t)1 << 40 };
    lm_st_plan *p = NULL;
    lm_folder *f = NULL;
    json_t *c = NULL;
    lm_err e = { 0 };
    uint64_t state = seed * 0x9e3779b97f4a7c15u, bytes;
    const lm_st_tensor *t;

    need(lm_json_parse(text, sizeof text - 1, "config", &c, &e), &e);
    need(lm_st_plan_new(&p, &e), &e);
    plan(p, layers);
    bytes = lm_st_plan_data_bytes(p);
    spec.config = c;
    spec.plan = p;
    need(lm_folder_create(path, true, NULL, &spec, &f, &e), &e);
    while ((t = lm_folder_next(f)) != NULL)
        for (uint64_t left = t->bytes; left;) {
            size_t n = left < BUFFER ? (size_t)left : BUFFER;

            fill(buffer, n / 2, &state);
            need(lm_folder_write(f, buffer, n, &e), &e);
            left -= n;
        }
    need(lm_folder_commit(f, &e), &e);
    lm_st_plan_free(p);
    json_decref(c);
    return bytes;
}

/* ---- Turns ---- */

static double copy(char *buffer)
{
    double from = lm_now();
    int out = open("copy", O_WRONLY | O_CREAT | O_TRUNC, 0666);

    for (int i = 0; i < 3; i++) {
        char path[40];
        int in;
        ssize_t n;

        snprintf(path, sizeof path, "m%d/model.safetensors", i);
        in = open(path, O_RDONLY);
        while ((n = read(in, buffer, BUFFER)) > 0)
            if (i == 0 && write(out, buffer, (size_t)n) != n)
                die("copy", "cannot write");
        if (in < 0 || n < 0)
            die(path, "cannot read");
        close(in);
    }
    if (out < 0 || fsync(out) || close(out))
        die("copy", "cannot write");
    from = lm_now() - from;
    unlink("copy");
    return from;
}

static double number(const char *json, const char *key)
{
    const char *at = strstr(json, key);

    if (!at)
        die("merge-models", "its --json lacks a number");
    return strtod(at + strlen(key), NULL);
}

static void run(merge *m)
{
    char line[200], json[4096] = "";
    double from = lm_now(), t;
    lm_err e = { 0 };
    FILE *f;

    snprintf(line, sizeof line, "merge-models -q --json %s -o out", m->args);
    f = popen(line, "r");
    if (!f || !fgets(json, sizeof json, f) || pclose(f))
        die(line, "failed");
    t = lm_now() - from;
    if (!m->best || t < m->best)
        m->best = t;
    m->rss = number(json, "\"peak_rss\":");
    m->bound = number(json, "\"memory_bound\":");
    need(lm_rm_rf("out", &e), &e);
}

static int layers_that_fit(bool quick)
{
    const double layer = 2.0 * (4.0 * WIDTH * WIDTH + 3.0 * WIDTH * FFN);
    double room = (double)lm_mem_available() / 3, disk = room;
    struct statvfs fs;
    int n;

    if (!statvfs(".", &fs))
        disk = (double)fs.f_bavail * (double)fs.f_frsize / 3;
    n = (int)((room < disk ? room : disk) / 5 / layer);
    n = n > MOST_LAYERS ? MOST_LAYERS : n;
    return quick || n < 1 ? 1 : n;
}

static void measure(int rounds, uint64_t bytes, char *buffer)
{
    double best = 0;

    for (int r = 0; r < rounds; r++) {
        double t = copy(buffer);

        if (!best || t < best)
            best = t;
        for (size_t i = 0; i < MERGES; i++)
            run(&merges[i]);
    }
    printf("%-8s %8s %10s %10s %6s %12s %12s\n", "", "seconds", "MB/s moved", "of a copy", "aim",
           "peak RSS MiB", "bound MiB");
    printf("%-8s %8.2f %10.0f\n", "copy", best, (double)bytes * 4 / best / 1e6);
    for (size_t i = 0; i < MERGES; i++)
        printf("%-8s %8.2f %10.0f %9.0f%% %5.0f%% %12.0f %12.0f\n", merges[i].name, merges[i].best,
               (double)bytes * 4 / merges[i].best / 1e6, 100 * best / merges[i].best,
               100 * merges[i].aim, merges[i].rss / 1048576, merges[i].bound / 1048576);
}

int main(int argc, char **argv)
{
    char *dir = "/var/tmp", *work = NULL;
    bool quick = false;
    int rounds = 3, layers;
    uint16_t *buffer = NULL;
    uint64_t bytes = 0;
    lm_err e = { 0 };

    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick"))
            quick = true;
        else if (!strcmp(argv[i], "--rounds") && i + 1 < argc)
            rounds = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--dir") && i + 1 < argc)
            dir = argv[++i];
        else
            die(argv[i], "usage: bench_merge_models [--quick] [--rounds N] [--dir DIR]");
    }
    need(lm_asprintf(&work, &e, "%s/lm-bench-XXXXXX", dir), &e);
    if (!mkdtemp(work) || chdir(work))
        die(work, "cannot make this folder");
    need(lm_alloc_n(&buffer, BUFFER / 2, sizeof *buffer, "buffer", &e), &e);
    layers = layers_that_fit(quick);
    for (int i = 0; i < 3; i++) {
        char name[8];

        snprintf(name, sizeof name, "m%d", i);
        bytes = make_model(name, (uint64_t)i + 1, layers, buffer);
    }
    printf("three BF16 models of %.2f billion parameters, from the page cache, best of %d\n",
           (double)bytes / 2e9, rounds);
    measure(rounds, bytes, (char *)buffer);
    lm_free(buffer);
    if (chdir("/") || lm_rm_rf(work, &e))
        die(work, "cannot remove this folder");
    lm_free(work);
    return 0;
}
