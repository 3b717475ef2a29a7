/* bench_lmz -- chunks of .lmz files on one core, next to zstd on the same chunks, to memcpy, and to
 * what others have published.
 *
 * bench_lmz [--quick] [--base FILE] [FILE.safetensors ...]: random-normal weights of sigma 0.02 in
 * each type, then the weights of the given files (or of those in WEIGHTS, separated by blanks);
 * with --base (or WEIGHTS_BASE) also as differences to the tensors of that name there.  Rates are of
 * raw bytes, the best of several rounds in which every coder has its turn. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/rng.h"
#include "format/lmz_chunk.h"
#include "format/safetensors.h"

enum { RANDOM_BYTES = 32 << 20, SLOW_BYTES = 1 << 20 };

/* Figures of others for trained BF16 weights, one thread, on their machines. */
static const struct {
    const char *name, *percent, *in, *out, *source;
} published[] = {
    { "ZipNN", "66.3", "1120", "1660", "github.com/zipnn/zipnn README; arXiv:2411.05239" },
    { "zstd, as ZipNN saw it", "78.3", "785", "950", "the same" },
    { "DFloat11", "67.6-69.5", "-", "-", "arXiv:2504.11651; decoded on a GPU" },
};

typedef struct {
    lm_lmz_kind kind;
    const uint8_t *raw, *base;
    size_t bytes;
    uint8_t *coded;
    size_t len, cap;
} piece;

typedef struct {
    piece *v;
    size_t n, cap, bytes;
} pieces;

typedef struct {
    double in, out; /* seconds, the best */
    size_t coded;
} result;

static int rounds = 7;

static void die(const lm_err *e)
{
    fprintf(stderr, "bench_lmz: %s: %s\n", e->where, e->what);
    exit(1);
}

static void *take(size_t bytes, const char *purpose)
{
    void *p = NULL;
    lm_err e = { 0 };
    if (lm_alloc_n(&p, bytes, 1, purpose, &e))
        die(&e);
    return p;
}

/* Cut `bytes` bytes of a kind into chunks. */
static void add(pieces *p, lm_lmz_kind kind, const uint8_t *raw, const uint8_t *base, size_t bytes)
{
    lm_err e = { 0 };
    for (size_t at = 0; at < bytes; at += LM_LMZ_CHUNK) {
        size_t len = bytes - at < LM_LMZ_CHUNK ? bytes - at : LM_LMZ_CHUNK;
        if (lm_grow(&p->v, &p->cap, p->n + 1, sizeof *p->v, "chunks", &e))
            die(&e);
        size_t cap = ZSTD_compressBound(len) + 64;
        p->v[p->n++] = (piece){ .kind = kind,
                                .raw = raw + at,
                                .base = base ? base + at : NULL,
                                .bytes = len,
                                .coded = take(cap, "a coded chunk"),
                                .cap = cap };
        p->bytes += len;
    }
}

static void drop(pieces *p)
{
    for (size_t i = 0; i < p->n; i++)
        lm_free(p->v[i].coded);
    lm_free(p->v);
    *p = (pieces){ 0 };
}

static void keep_best(result *r, double in, double out)
{
    r->in = r->in == 0 || in < r->in ? in : r->in;
    r->out = r->out == 0 || out < r->out ? out : r->out;
}

static void run_lmz(pieces *p, lm_lmz_coder *c, bool delta, uint8_t *back, result *r)
{
    lm_err e = { 0 };
    double start = lm_now(), in, out;
    size_t coded = 0;
    for (piece *q = p->v; q < p->v + p->n; q++) {
        if (lm_lmz_encode(c, q->kind, q->raw, q->bytes, delta ? q->base : NULL, q->coded, q->cap,
                          &q->len, &e))
            die(&e);
        coded += q->len;
    }
    in = lm_now() - start;
    start = lm_now();
    for (piece *q = p->v; q < p->v + p->n; back += q++->bytes)
        if (lm_lmz_decode(c, q->kind, q->coded, q->len, delta ? q->base : NULL, back, q->bytes, &e))
            die(&e);
    out = lm_now() - start;
    keep_best(r, in, out);
    r->coded = coded;
}

static void run_zstd(pieces *p, ZSTD_CCtx *cc, ZSTD_DCtx *dc, int level, uint8_t *back, result *r)
{
    double start = lm_now(), in, out;
    size_t coded = 0;
    for (piece *q = p->v; q < p->v + p->n; q++)
        coded += q->len = ZSTD_compressCCtx(cc, q->coded, q->cap, q->raw, q->bytes, level);
    in = lm_now() - start;
    start = lm_now();
    for (piece *q = p->v; q < p->v + p->n; back += q++->bytes)
        ZSTD_decompressDCtx(dc, back, q->bytes, q->coded, q->len);
    out = lm_now() - start;
    keep_best(r, in, out);
    r->coded = coded;
}

static void run_copy(pieces *p, uint8_t *back, result *r)
{
    double start = lm_now();
    for (piece *q = p->v; q < p->v + p->n; back += q++->bytes)
        memcpy(back, q->raw, q->bytes);
    double t = lm_now() - start;
    keep_best(r, t, t);
    r->coded = p->bytes;
}

static void show(const char *data, const char *coder, size_t bytes, const result *r)
{
    printf("%-22s %-16s %7.2f %9.0f %9.0f\n", data, coder, 100.0 * (double)r->coded / (double)bytes,
           (double)bytes / r->in / 1e6, (double)bytes / r->out / 1e6);
}

static void check(const pieces *p, const uint8_t *back)
{
    for (size_t i = 0; i < p->n; back += p->v[i++].bytes)
        if (memcmp(back, p->v[i].raw, p->v[i].bytes)) {
            fprintf(stderr, "bench_lmz: chunk %zu came back changed\n", i);
            exit(1);
        }
}

/* zstd -19 sees the first bytes only: it takes seconds for each megabyte. */
static void run_slow(const char *name, const pieces *p, ZSTD_CCtx *cc, ZSTD_DCtx *dc, uint8_t *back)
{
    pieces few = { 0 };
    result r = { 0 };
    for (size_t i = 0; i < p->n && few.bytes < SLOW_BYTES; i++)
        add(&few, p->v[i].kind, p->v[i].raw, NULL, p->v[i].bytes);
    run_zstd(&few, cc, dc, 19, back, &r);
    for (int i = 0; i < rounds; i++) { /* time out, the best of more */
        double start = lm_now();
        uint8_t *at = back;
        for (piece *q = few.v; q < few.v + few.n; at += q++->bytes)
            ZSTD_decompressDCtx(dc, at, q->bytes, q->coded, q->len);
        keep_best(&r, r.in, lm_now() - start);
    }
    show(name, "zstd -19", few.bytes, &r);
    drop(&few);
}

static void compare(const char *name, pieces *p, bool delta)
{
    lm_lmz_coder *c;
    lm_err e = { 0 };
    ZSTD_CCtx *cc = ZSTD_createCCtx();
    ZSTD_DCtx *dc = ZSTD_createDCtx();
    result lmz = { 0 }, zstd = { 0 }, copy = { 0 }, diff = { 0 };
    uint8_t *back = take(p->bytes, "decoded bytes");
    if (!cc || !dc || lm_lmz_coder_new(3, lm_cpu_detect(), &c, &e))
        die(&e);
    memset(back, 1, p->bytes);
    for (int i = 0; i < rounds; i++) {
        run_copy(p, back, &copy);
        run_zstd(p, cc, dc, 3, back, &zstd);
        if (delta) {
            run_lmz(p, c, true, back, &diff);
            check(p, back);
        }
        run_lmz(p, c, false, back, &lmz);
        check(p, back);
    }
    show(name, "lmz", p->bytes, &lmz);
    if (delta)
        show(name, "lmz, difference", p->bytes, &diff);
    show(name, "zstd -3", p->bytes, &zstd);
    run_slow(name, p, cc, dc, back);
    show(name, "memcpy", p->bytes, &copy);
    ZSTD_freeCCtx(cc);
    ZSTD_freeDCtx(dc);
    lm_lmz_coder_free(c);
    lm_free(back);
}

static void random_weights(size_t bytes)
{
    static const lm_dtype types[] = { LM_DTYPE_BF16, LM_DTYPE_F16, LM_DTYPE_F32, LM_DTYPE_F8E4M3,
                                      LM_DTYPE_F8E5M2 };
    lm_rng r = lm_rng_make(1, "bench weights", 0);
    uint8_t *x = take(bytes, "random weights");
    for (int t = 0; t < 5; t++) {
        pieces p = { 0 };
        char name[64];
        size_t n = bytes / lm_dtype_size(types[t]);
        for (size_t i = 0; i < n; i++)
            lm_set(types[t], x, (int64_t)i, 0.02 * lm_rng_normal(r, i));
        add(&p, lm_lmz_kind_of(types[t]), x, NULL, bytes);
        snprintf(name, sizeof name, "random %s", lm_dtype_st_name(types[t]));
        compare(name, &p, false);
        drop(&p);
    }
    lm_free(x);
}

static void trained_weights(const char *path, const char *base_path)
{
    lm_st *s, *b = NULL;
    pieces p = { 0 };
    lm_err e = { 0 };
    const char *name = strrchr(path, '/');
    if (lm_st_open(path, &s, &e) || (base_path && lm_st_open(base_path, &b, &e)))
        die(&e);
    for (size_t i = 0; i < lm_st_count(s); i++) {
        const lm_st_tensor *t = lm_st_at(s, i), *u = b ? lm_st_find(b, t->name) : NULL;
        bool alike = u && u->dtype == t->dtype && u->bytes == t->bytes;
        add(&p, lm_lmz_kind_of(t->dtype), lm_st_data(s, t), alike ? lm_st_data(b, u) : NULL,
            t->bytes);
    }
    if (p.bytes)
        compare(name ? name + 1 : path, &p, b != NULL);
    drop(&p);
    lm_st_close(s);
    if (b)
        lm_st_close(b);
}

int main(int argc, char **argv)
{
    const char *base = getenv("WEIGHTS_BASE"), *env = getenv("WEIGHTS");
    size_t bytes = RANDOM_BYTES;
    bool files = false;

    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick"))
            rounds = 3, bytes = 4 << 20;
        else if (!strcmp(argv[i], "--base") && i + 1 < argc)
            base = argv[++i];
        else if (!strcmp(argv[i], "--threads") && i + 1 < argc)
            i++;
    }
    printf("one core, %s, chunks of %d KiB, zstd %s, best of %d rounds\n",
           lm_cpu_level_name(lm_cpu_detect()), LM_LMZ_CHUNK >> 10, ZSTD_versionString(), rounds);
    printf("%-22s %-16s %7s %9s %9s\n", "weights", "coder", "size %", "MB/s in", "MB/s out");
    random_weights(bytes);
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--base") || !strcmp(argv[i], "--threads"))
            i++;
        else if (strcmp(argv[i], "--quick"))
            trained_weights(argv[i], base && *base ? base : NULL), files = true;
    }
    char *list = !files && env ? strdup(env) : NULL;
    for (char *at = list, *path; at && (path = strsep(&at, " "));)
        if (*path)
            trained_weights(path, base && *base ? base : NULL);
    free(list);
    for (size_t i = 0; i < sizeof published / sizeof *published; i++)
        printf("%-22s %-16s %7s %9s %9s  %s\n", "published, BF16", published[i].name,
               published[i].percent, published[i].in, published[i].out, published[i].source);
    return 0;
}
