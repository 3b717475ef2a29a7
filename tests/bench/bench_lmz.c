/* SPDX-License-Identifier: Apache-2.0 */
/* bench_lmz -- chunks of .lmz files on one core, next to zstd on the same chunks, to memcpy, and to
 * published figures.
 *
 * bench_lmz [--quick] [--base FILE] [FILE.safetensors ...]: random-normal weights of sigma 0.02 in
 * each type, then the weights of the given files (or of those in WEIGHTS, separated by blanks; a
 * file with F32 only also rounded to the other types); with --base (or WEIGHTS_BASE) also as
 * differences to its tensors of the same name.  Rates are of raw bytes.  Every coder runs in each
 * of several rounds over all chunks, and the best time of each chunk counts, so that other work on
 * the machine disturbs little. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "format/lmz_chunk.h"
#include "format/safetensors.h"
#include "numeric/format.h"

enum { RANDOM_BYTES = 32 << 20, SLOW_BYTES = 1 << 20 };

/* Published figures for trained BF16 weights, one thread, on other machines. */
static const struct {
    const char *name, *percent, *in, *out, *source;
} published[] = {
    { "ZipNN", "66.3", "1120", "1660", "github.com/zipnn/zipnn README; arXiv:2411.05239" },
    { "zstd, as ZipNN saw it", "78.3", "785", "950", "the same" },
    { "DFloat11", "67.6-69.5", "-", "-", "arXiv:2504.11651; decoded on a GPU" },
};

enum { COPY, LMZ, FAST, DELTA, ZSTD, SLOW, CODERS };
static const char *const coder_name[CODERS] = { "memcpy",          "lmz",     "lmz -1",
                                                "lmz, difference", "zstd -3", "zstd -19" };

typedef struct {
    lm_lmz_kind kind;
    const uint8_t *raw, *base;
    size_t bytes;
    uint8_t *coded;
    size_t len, cap;
    struct {
        double in, out; /* seconds, the best */
        size_t coded;
    } by[CODERS];
} piece;

typedef struct {
    piece *v;
    size_t n, cap, bytes;
} pieces;

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

static void keep_best(piece *q, int coder, double start, double middle, double end)
{
    double in = middle - start, out = end - middle;
    q->by[coder].in = q->by[coder].coded && q->by[coder].in < in ? q->by[coder].in : in;
    q->by[coder].out = q->by[coder].coded && q->by[coder].out < out ? q->by[coder].out : out;
    q->by[coder].coded = q->len;
}

static void run_lmz(pieces *p, lm_lmz_coder *c, int coder, uint8_t *back)
{
    lm_err e = { 0 };
    for (piece *q = p->v; q < p->v + p->n; back += q++->bytes) {
        const void *base = coder == DELTA ? q->base : NULL;
        double start = lm_now(), middle;
        if (lm_lmz_encode(c, q->kind, q->raw, q->bytes, base, q->coded, q->cap, &q->len, &e))
            die(&e);
        middle = lm_now();
        if (lm_lmz_decode(c, q->kind, q->coded, q->len, base, back, q->bytes, &e))
            die(&e);
        keep_best(q, coder, start, middle, lm_now());
    }
}

static void run_zstd(pieces *p, ZSTD_CCtx *cc, ZSTD_DCtx *dc, int coder, uint8_t *back)
{
    int level = coder == SLOW ? 19 : 3;
    for (piece *q = p->v; q < p->v + p->n; back += q++->bytes) {
        double start = lm_now(), middle;
        q->len = ZSTD_compressCCtx(cc, q->coded, q->cap, q->raw, q->bytes, level);
        middle = lm_now();
        ZSTD_decompressDCtx(dc, back, q->bytes, q->coded, q->len);
        keep_best(q, coder, start, middle, lm_now());
    }
}

static void run_copy(pieces *p, uint8_t *back)
{
    for (piece *q = p->v; q < p->v + p->n; back += q++->bytes) {
        double start = lm_now(), middle;
        memcpy(q->coded, q->raw, q->bytes);
        middle = lm_now();
        memcpy(back, q->coded, q->bytes);
        q->len = q->bytes;
        keep_best(q, COPY, start, middle, lm_now());
    }
}

/* One line, of the first n chunks. */
static void show(const char *data, int coder, const pieces *p, size_t n)
{
    double in = 0, out = 0, coded = 0, bytes = 0;
    for (const piece *q = p->v; q < p->v + n; q++) {
        in += q->by[coder].in, out += q->by[coder].out;
        coded += (double)q->by[coder].coded, bytes += (double)q->bytes;
    }
    printf("%-22s %-16s %7.2f %9.0f %9.0f\n", data, coder_name[coder], 100 * coded / bytes,
           bytes / in / 1e6, bytes / out / 1e6);
}

static void check(const pieces *p, const uint8_t *back)
{
    for (size_t i = 0; i < p->n; back += p->v[i++].bytes)
        if (memcmp(back, p->v[i].raw, p->v[i].bytes)) {
            fprintf(stderr, "bench_lmz: chunk %zu is not restored\n", i);
            exit(1);
        }
}

/* zstd -19 codes the first bytes only, and once: it takes a second per megabyte. */
static size_t run_slow(pieces *p, ZSTD_CCtx *cc, ZSTD_DCtx *dc, uint8_t *back)
{
    pieces few = { .v = p->v };
    while (few.n < p->n && few.bytes < SLOW_BYTES)
        few.bytes += p->v[few.n++].bytes;
    run_zstd(&few, cc, dc, SLOW, back);
    for (int i = 1; i < rounds; i++) {
        for (piece *q = few.v; q < few.v + few.n; q++) {
            double start = lm_now();
            ZSTD_decompressDCtx(dc, back, q->bytes, q->coded, q->len);
            keep_best(q, SLOW, start - q->by[SLOW].in, start, lm_now());
        }
    }
    return few.n;
}

static void compare(const char *name, pieces *p, bool delta)
{
    lm_lmz_coder *c, *fast;
    lm_err e = { 0 };
    ZSTD_CCtx *cc = ZSTD_createCCtx();
    ZSTD_DCtx *dc = ZSTD_createDCtx();
    uint8_t *back = take(p->bytes, "decoded bytes");
    if (!cc || !dc || lm_lmz_coder_new(3, lm_cpu_detect(), &c, &e) ||
        lm_lmz_coder_new(1, lm_cpu_detect(), &fast, &e))
        die(&e);
    memset(back, 1, p->bytes);
    for (int i = 0; i < rounds; i++) {
        run_copy(p, back);
        run_zstd(p, cc, dc, ZSTD, back);
        if (delta) {
            run_lmz(p, c, DELTA, back);
            check(p, back);
        }
        run_lmz(p, fast, FAST, back);
        check(p, back);
        run_lmz(p, c, LMZ, back);
        check(p, back);
    }
    show(name, LMZ, p, p->n);
    show(name, FAST, p, p->n);
    if (delta)
        show(name, DELTA, p, p->n);
    show(name, ZSTD, p, p->n);
    show(name, SLOW, p, run_slow(p, cc, dc, back));
    show(name, COPY, p, p->n);
    ZSTD_freeCCtx(cc);
    ZSTD_freeDCtx(dc);
    lm_lmz_coder_free(c);
    lm_lmz_coder_free(fast);
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

/* The tensors of a file, and of a base beside them, as elements of `to`; NONE: as they are. */
static void trained_as(const char *name, const lm_st *s, const lm_st *b, lm_dtype to)
{
    size_t n = lm_st_count(s);
    uint8_t **cast = take(2 * n * sizeof *cast, "list of tensors");
    pieces p = { 0 };
    lm_err e = { 0 };

    for (size_t i = 0; i < n; i++) {
        const lm_st_tensor *t = lm_st_at(s, i), *u = b ? lm_st_find(b, t->name) : NULL;
        bool alike = u && u->dtype == t->dtype && u->bytes == t->bytes;
        const void *now = lm_st_data(s, t), *before = alike ? lm_st_data(b, u) : NULL;
        size_t bytes = t->bytes;
        cast[2 * i] = cast[2 * i + 1] = NULL;
        if (to != LM_DTYPE_NONE) {
            bytes = lm_plain_bytes(to, t->count);
            now = cast[2 * i] = take(bytes, "tensor");
            if (lm_st_load(s, t, to, cast[2 * i], &e))
                die(&e);
            if (alike) {
                before = cast[2 * i + 1] = take(bytes, "tensor");
                if (lm_st_load(b, u, to, cast[2 * i + 1], &e))
                    die(&e);
            }
        }
        add(&p, lm_lmz_kind_of(to == LM_DTYPE_NONE ? t->dtype : to), now, before, bytes);
    }
    if (p.bytes)
        compare(name, &p, b != NULL);
    drop(&p);
    for (size_t i = 0; i < 2 * n; i++)
        lm_free(cast[i]);
    lm_free(cast);
}

static void trained_weights(const char *path, const char *base_path)
{
    static const lm_dtype types[] = { LM_DTYPE_BF16, LM_DTYPE_F16, LM_DTYPE_F32, LM_DTYPE_F8E4M3,
                                      LM_DTYPE_F8E5M2 };
    lm_st *s, *b = NULL;
    lm_err e = { 0 };
    if (lm_st_open(path, &s, &e) || (base_path && lm_st_open(base_path, &b, &e)))
        die(&e);
    bool master = true; /* all F32: the other types are rounded from it */
    for (size_t i = 0; i < lm_st_count(s); i++)
        master = master && lm_st_at(s, i)->dtype == LM_DTYPE_F32;
    for (int t = 0; master && t < 5; t++) {
        char name[64];
        snprintf(name, sizeof name, "trained %s", lm_dtype_st_name(types[t]));
        trained_as(name, s, b, types[t]);
    }
    if (!master)
        trained_as(lm_path_base(path), s, b, LM_DTYPE_NONE);
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
    printf("one core, %s, chunks of %d KiB, zstd %s, best of %d rounds for each chunk\n",
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
