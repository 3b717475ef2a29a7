/* SPDX-License-Identifier: Apache-2.0 */
/* backend_cpu.c -- the host as a backend. */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/text.h"
#include "graph/backend.h"
#include "kernels/peak.h"

typedef struct {
    lm_backend b; /* first, so that the interface can be cast to this struct */
    char detail[64];
} cpu_backend;

static lm_code cpu_alloc(lm_backend *b, size_t bytes, const char *purpose, void **out, lm_err *e)
{
    (void)b;
    return lm_block_alloc(out, bytes, purpose, e);
}

static void cpu_free(lm_backend *b, void *p, size_t bytes)
{
    (void)b;
    lm_block_free(p, bytes);
}

typedef struct {
    char *dst;
    const char *src;
} move;

static void zero_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    (void)worker;
    memset(((move *)ctx)->dst + begin, 0, (size_t)(end - begin));
}

static void copy_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    move *m = ctx;
    (void)worker;
    memcpy(m->dst + begin, m->src + begin, (size_t)(end - begin));
}

static lm_code cpu_zero(lm_backend *b, void *p, size_t bytes, lm_stream *s, lm_err *e)
{
    (void)s, (void)e;
    lm_par_for(b->par, (int64_t)bytes, 1 << 22, zero_range, &(move){ .dst = p });
    return LM_OK;
}

static lm_code cpu_copy(lm_backend *b, void *dst, const void *src, size_t bytes, lm_stream *s,
                        lm_err *e)
{
    (void)s, (void)e;
    lm_par_for(b->par, (int64_t)bytes, 1 << 22, copy_range, &(move){ .dst = dst, .src = src });
    return LM_OK;
}

static lm_code cpu_sync(lm_backend *b, lm_stream *s, lm_err *e)
{
    (void)b, (void)s, (void)e;
    return LM_OK;
}

static lm_code cpu_memory(lm_backend *b, size_t *free_bytes, size_t *total, lm_err *e)
{
    (void)b, (void)e;
    *free_bytes = lm_mem_available();
    *total = *free_bytes + lm_rss_now();
    return LM_OK;
}

static lm_code cpu_stream_new(lm_backend *b, lm_stream **out, lm_err *e)
{
    (void)b, (void)e;
    *out = NULL;
    return LM_OK;
}

static void cpu_stream_free(lm_backend *b, lm_stream *s)
{
    (void)b, (void)s;
}

static lm_code cpu_follow(lm_backend *b, lm_stream *s, lm_stream *first, lm_err *e)
{
    (void)b, (void)s, (void)first, (void)e;
    return LM_OK;
}

static lm_code cpu_step(lm_backend *b, const lm_step *step, lm_stream *s, lm_err *e)
{
    (void)b, (void)step, (void)s, (void)e;
    return LM_OK;
}

struct lm_marks {
    double *at;
};

static lm_code cpu_marks_new(lm_backend *b, int n, lm_marks **out, lm_err *e)
{
    (void)b;
    if (lm_alloc_n(out, 1, sizeof **out, "marks in time", e))
        return e->code;
    if (lm_alloc_n(&(*out)->at, (size_t)n, sizeof(double), "marks in time", e)) {
        lm_free(*out);
        *out = NULL;
    }
    return e->code;
}

static void cpu_marks_free(lm_backend *b, lm_marks *m)
{
    (void)b;
    if (m)
        lm_free(m->at);
    lm_free(m);
}

static void cpu_mark(lm_backend *b, lm_marks *m, int i, lm_stream *s)
{
    (void)b, (void)s;
    m->at[i] = lm_now();
}

static lm_code cpu_marks_read(lm_backend *b, lm_marks *m, int n, double *seconds, lm_err *e)
{
    (void)b, (void)e;
    for (int i = 0; i < n; i++)
        seconds[i] = m->at[i] - m->at[0];
    return LM_OK;
}

static void cpu_range(lm_backend *b, const char *name)
{
    (void)b, (void)name;
}

/* Every format that is decoded here: panels of codes become numbers inside the products, rows of them in
 * lookups. */
static bool cpu_codes(lm_backend *b, const char *op, int operand, lm_dtype act, const lm_format *f)
{
    static const struct {
        const char *op;
        int operand;
    } table[] = { { "linear", 1 },         { "linear_dx", 1 },        { "embed", 1 },
                  { "head_stats", 1 },     { "head_grad", 1 },        { "head_loss", 1 },
                  { "widen", 0 },          { "divergence", 3 },       { "divergence_grad", 3 },
                  { "grouped_linear", 1 }, { "grouped_linear_dx", 1 } };
    (void)b, (void)act;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(op, table[i].op) && operand == table[i].operand)
            return f->decode != NULL;
    return false;
}

/* Products of BF16 in pairs, which pack their weights otherwise, and lookups in what these share. */
static bool cpu_panels(lm_backend *b, const char *op, int operand, lm_dtype act)
{
    return b->cpu >= LM_CPU_BF16 && act == LM_DTYPE_BF16 && operand == 1 &&
           (!strcmp(op, "linear") || !strcmp(op, "linear_dx") || !strcmp(op, "grouped_linear") ||
            !strcmp(op, "grouped_linear_dx") || !strcmp(op, "embed"));
}

static const lm_kernel *cpu_kernel(lm_backend *b, const char *op, lm_dtype act)
{
    return lm_cpu_kernel(op, act, b->cpu);
}

/* The reference is never chosen as a faster alternative. */
static bool cpu_joins(lm_backend *b, const char *op, lm_dtype act, const lm_call *c)
{
    const lm_kernel *k = cpu_kernel(b, op, act);
    return k && k->level > LM_CPU_REF && (!k->work || k->work(c, b->threads) != SIZE_MAX);
}

static double cpu_peak_flops(lm_backend *b, lm_dtype act)
{
    return lm_cpu_peak(act, b->cpu, b->par);
}

static const char *cpu_shortfall(lm_backend *b)
{
    (void)b;
    return NULL;
}

static const char *cpu_advice(lm_backend *b)
{
    (void)b;
    return NULL;
}

static void cpu_close(lm_backend *b)
{
    lm_free(b);
}

lm_code lm_backend_cpu(lm_cpu_level level, lm_par *par, lm_backend **out, lm_err *e)
{
    cpu_backend *c = NULL;
    *out = NULL;
    if (lm_alloc_n(&c, 1, sizeof *c, "a backend", e))
        return e->code;
    c->b = (lm_backend){ .name = "cpu",
                         .device = lm_cpu_model(),
                         .detail = c->detail,
                         .par = par,
                         .threads = lm_par_threads(par),
                         .cpu = level,
                         .host_memory = true,
                         .alloc = cpu_alloc,
                         .free = cpu_free,
                         .host_alloc = cpu_alloc,
                         .host_free = cpu_free,
                         .memory = cpu_memory,
                         .zero = cpu_zero,
                         .copy = cpu_copy,
                         .stream_new = cpu_stream_new,
                         .stream_free = cpu_stream_free,
                         .follow = cpu_follow,
                         .sync = cpu_sync,
                         .step = cpu_step,
                         .marks_new = cpu_marks_new,
                         .marks_free = cpu_marks_free,
                         .mark = cpu_mark,
                         .marks_read = cpu_marks_read,
                         .range = cpu_range,
                         .kernel = cpu_kernel,
                         .codes = cpu_codes,
                         .panels = cpu_panels,
                         .joins = cpu_joins,
                         .peak_flops = cpu_peak_flops,
                         .shortfall = cpu_shortfall,
                         .advice = cpu_advice,
                         .close = cpu_close };
    snprintf(c->detail, sizeof c->detail, "%s, %d thread%s", lm_cpu_level_name(level), c->b.threads,
             lm_plural((uint64_t)c->b.threads));
    *out = &c->b;
    return LM_OK;
}

void lm_backend_close(lm_backend *b)
{
    if (b)
        b->close(b);
}
