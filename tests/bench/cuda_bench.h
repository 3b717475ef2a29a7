/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_bench.h -- shared by the benchmarks of a CUDA device: opening it on a path of its kernels,
 * times by marks, and rows of results.
 *
 * A row is a line of JSON on standard output; scripts/bench-cuda prints them as a table. */
#ifndef LM_BENCH_CUDA_BENCH_H
#define LM_BENCH_CUDA_BENCH_H

#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/rng.h"
#include "graph/backend.h"
#include "tests/bench/ceilings.h"

enum { PATHS = 3, MOST_TIMES = 15, FEWEST_TIMES = 7 };
static const char *const path_names[PATHS] = { "plain", "tensor", "tf32" };

typedef struct {
    double median, least, most; /* seconds of one call */
    int n;                      /* number of times; each may be the mean of several calls */
} timing;

/* ---- rows ---- */

typedef struct {
    const char *part, *name, *shape, *dtype, *path;
    timing t;
    double rate; /* in the unit of `unit`: 10^9 bytes/s, 10^12 FLOP/s, tokens/s */
    const char *unit;
    double share; /* of the ceiling; 0: unknown */
    const char *of;
    double parts;    /* seconds of the operators that a joined operator replaces; 0: not measured */
    size_t launches; /* launches of a step; 0: unknown */
} row;

static inline void put_row(const row *r)
{
    printf("{\"part\":\"%s\",\"name\":\"%s\",\"shape\":\"%s\",\"dtype\":\"%s\",\"path\":\"%s\","
           "\"n\":%d,\"seconds\":%.6g,\"seconds_min\":%.6g,\"seconds_max\":%.6g,\"rate\":%.6g,"
           "\"unit\":\"%s\"",
           r->part, r->name, r->shape, r->dtype, r->path, r->t.n, r->t.median, r->t.least,
           r->t.most, r->rate, r->unit);
    if (r->share > 0)
        printf(",\"share\":%.4f,\"of\":\"%s\"", r->share, r->of);
    if (r->parts > 0)
        printf(",\"parts\":%.6g", r->parts);
    if (r->launches)
        printf(",\"launches\":%zu", r->launches);
    printf("}\n");
    fflush(stdout);
}

LM_PRINTF(1, 2) static inline void put_note(const char *fmt, ...)
{
    char text[600];
    va_list a;
    va_start(a, fmt);
    vsnprintf(text, sizeof text, fmt, a);
    va_end(a);
    for (char *p = text; *p; p++)
        if (*p == '"' || *p == '\\' || *p < ' ')
            *p = '\'';
    printf("{\"part\":\"note\",\"text\":\"%s\"}\n", text);
    fflush(stdout);
}

static inline void bench_must(lm_code rc, const lm_err *e)
{
    if (!rc)
        return;
    fprintf(stderr, "bench-cuda: %s: %s%s%s\n", e->where, e->what, *e->todo ? ": " : "", e->todo);
    exit(1);
}

/* ---- the device ---- */

/* Open one of the paths, on the module in `folder`.  *out is NULL, with a note, if only the
 * libraries of that path are missing. */
static inline void open_path(const char *folder, const char *device, int path, lm_backend **out)
{
    const char *const folders[] = { folder, NULL };
    const lm_backend_opts o = { .device = device, .kernels = path_names[path], .modules = folders };
    lm_err e = { 0 };
    lm_code rc = lm_backend_open(&o, out, &e);
    if (rc && path == 0)
        bench_must(rc, &e);
    if (rc)
        put_note("%s left out: %s: %s", path_names[path], e.where, e.what);
}

/* The symbol that the open module in the folder exports under this name; NULL if none. */
static inline void *cuda_symbol(const char *folder, const char *name)
{
    char path[4200];
    snprintf(path, sizeof path, "%s/libcore-cuda.so", folder);
    void *m = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    return m ? dlsym(m, name) : NULL;
}

static inline double span_of(double from, double to)
{
    return to > from ? to - from : 1e-9;
}

/* Time run(arg), which enqueues work on main, within about `budget` seconds: one call to warm up,
 * one to estimate the time, then as many as the budget allows, at most MOST_TIMES.  Calls shorter
 * than 0.2 ms are timed in groups. */
static inline lm_code time_calls(lm_backend *b, void (*run)(void *), void *arg, double budget,
                                 timing *out, lm_err *e)
{
    double at[MOST_TIMES + 1] = { 0 }, t[MOST_TIMES], one;
    lm_marks *m = NULL;
    int n, inner;
    run(arg);
    lm_code rc = b->sync(b, NULL, e);
    rc = rc ? rc : b->marks_new(b, MOST_TIMES + 1, &m, e);
    if (rc)
        return rc;
    b->mark(b, m, 0, b->main);
    run(arg);
    b->mark(b, m, 1, b->main);
    rc = b->marks_read(b, m, 2, at, e);
    one = span_of(at[0], at[1]);
    inner = one < 2e-4 ? (int)fmin(64, ceil(2e-4 / one)) : 1;
    n = (int)fmin(MOST_TIMES, budget / (one * inner));
    if (n < FEWEST_TIMES && FEWEST_TIMES * one * inner < 2 * budget)
        n = FEWEST_TIMES;
    if (n < 2) {
        *out = (timing){ one, one, one, 1 };
        b->marks_free(b, m);
        return rc;
    }
    b->mark(b, m, 0, b->main);
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < inner; k++)
            run(arg);
        b->mark(b, m, i + 1, b->main);
    }
    rc = rc ? rc : b->marks_read(b, m, n + 1, at, e);
    b->marks_free(b, m);
    for (int i = 0; i < n; i++)
        t[i] = span_of(at[i], at[i + 1]) / inner;
    out->median = lm_median(t, n);
    out->least = t[0]; /* in order now */
    out->most = t[n - 1];
    out->n = n;
    return rc;
}

/* ---- the ceiling of memory ---- */

typedef struct {
    lm_backend *b;
    void *to, *from;
    size_t bytes;
} copying;

static inline void copy_once(void *arg)
{
    copying *c = arg;
    lm_err unseen = { 0 }; /* the device keeps the error, and reading the marks reports it */
    c->b->copy(c->b, c->to, c->from, c->bytes, c->b->main, &unseen);
}

/* Bytes/s, read and written ones counted, of a copy within the device. */
static inline double copy_ceiling(lm_backend *b, size_t bytes, const char *name)
{
    copying c = { .b = b, .bytes = bytes };
    lm_err e = { 0 };
    timing t;
    bench_must(b->alloc(b, 2 * bytes, "the copy's memory", &c.from, &e), &e);
    c.to = (char *)c.from + bytes;
    bench_must(time_calls(b, copy_once, &c, 0.3, &t, &e), &e);
    b->free(b, c.from, 2 * bytes);
    double rate = 2 * (double)bytes / t.median;
    char shape[32];
    snprintf(shape, sizeof shape, "%zu MiB", bytes >> 20);
    put_row(&(row){ .part = "ceiling",
                    .name = name,
                    .shape = shape,
                    .dtype = "",
                    .path = "",
                    .t = t,
                    .rate = rate * 1e-9,
                    .unit = "GB/s" });
    return rate;
}

#endif
