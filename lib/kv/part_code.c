/* SPDX-License-Identifier: Apache-2.0 */
/* part_code.c -- rows to codes and back. */
#include <string.h>

#include "base/cpu.h"
#include "base/mem.h"
#include "kernels/kv_code.h"
#include "kv/part.h"

enum { CODED = 64 /* tokens that are coded together, or a step of the format */ };

/* A pass over all heads and pages of a part; `rows` has all tokens. */
typedef struct {
    const lm_kv_shape *s;
    const lm_kv_code_kernels *k;
    char *rows, *pages;
    int64_t from, to, per_head; /* coded tokens; pages of a head */
    size_t page_bytes;
    float *range; /* [n,2], or NULL */
    float *work;  /* [threads][page, D] */
    bool decode;
} pass;

static char *row_of(const pass *p, int64_t h, int64_t t)
{
    return p->rows + (size_t)((h * p->s->n + t) * p->s->head_dim) * lm_dtype_size(p->s->act);
}

/* Coded tokens of page i: *first .. *first + n - 1. */
static int64_t tokens_of_page(const pass *p, int64_t i, int64_t *first)
{
    int64_t T = p->s->page, begin = i * T > p->from ? i * T : p->from;
    int64_t end = (i + 1) * T < p->to ? (i + 1) * T : p->to;
    *first = begin;
    return end - begin;
}

/* Encode or decode the tokens first .. first + n - 1 of head h, which lie in `page`; x: room for them. */
static void code_tokens(const pass *p, int64_t h, int64_t first, int64_t n, float *x, char *page)
{
    const lm_kv_shape *s = p->s;
    const lm_kv_side *f = s->form;
    int64_t T = s->page, D = s->head_dim;
    if (p->decode) {
        p->k->decode(f->format, T, D, h, page, first % T, n, x, D);
        p->k->store(s->act, f->rotate, D, x, n, row_of(p, h, first));
    } else {
        p->k->load(s->act, f->rotate, D, row_of(p, h, first), n, x);
        p->k->encode(f->format, T, D, h, x, D, first % T, n, p->range ? p->range + 2 * first : NULL,
                     page);
    }
}

static void code_pages(void *ctx, int64_t begin, int64_t end, int worker)
{
    const pass *p = ctx;
    const lm_kv_shape *s = p->s;
    int64_t step = lm_kv_step(s->form->format, s->page), first;
    int64_t part = (CODED + step - 1) / step * step;
    float *x = p->work + (int64_t)worker * s->page * s->head_dim;
    for (int64_t u = begin; u < end; u++) {
        int64_t h = u / p->per_head, i = u % p->per_head, n = tokens_of_page(p, i, &first);
        char *page = p->pages + (size_t)(i * s->kv_heads + h) * p->page_bytes;
        for (int64_t t = first, some; t < first + n; t += some) {
            some = part - t % s->page % part;
            some = some < first + n - t ? some : first + n - t;
            code_tokens(p, h, t, some, x, page);
        }
    }
}

/* The ranges of tokens over all heads (lm_kv_token_range). */
static lm_code set_ranges(pass *p, lm_err *e)
{
    const lm_kv_shape *s = p->s;
    int64_t C = s->kv_heads * s->head_dim;
    float *x = NULL;
    lm_code rc = lm_alloc_n(&p->range, 2 * (size_t)s->n, sizeof *p->range, "ranges", e);
    rc = rc ? rc : lm_alloc_n(&x, 2 * (size_t)C, sizeof *x, "a token", e);
    for (int64_t t = p->from; t < p->to && !rc; t++) {
        for (int64_t h = 0; h < s->kv_heads; h++)
            lm_convert(s->act, row_of(p, h, t), LM_DTYPE_F32, x + h * s->head_dim, s->head_dim);
        lm_kv_token_range(s->form->outliers, x, C, p->range + 2 * t, x + C);
    }
    lm_free(x);
    return rc;
}

static lm_code begin_pass(const lm_kv_shape *s, const void *rows, lm_cpu_level cpu, lm_par *par,
                          pass *p, lm_err *e)
{
    size_t each = (size_t)(s->page * s->head_dim), bytes;
    *p = (pass){ .s = s, .k = lm_kv_code_at(cpu), .rows = (char *)(uintptr_t)rows };
    lm_kv_part_range(s, &p->from, &p->to);
    p->per_head = (p->to + s->page - 1) / s->page;
    p->page_bytes = lm_kv_page_bytes(s->form->format, s->page, s->head_dim);
    if (!lm_mul_ok((size_t)(p->per_head * s->kv_heads), p->page_bytes, &bytes))
        return lm_fail(e, LM_ELIMIT, "", NULL, "the size of a cache cannot be counted");
    if (lm_alloc_n(&p->pages, bytes, 1, "pages of a cache", e) ||
        lm_alloc_n(&p->work, (size_t)lm_par_threads(par) * each, sizeof *p->work, "a page", e))
        return e->code;
    return LM_OK;
}

static void end_pass(pass *p)
{
    lm_free(p->pages);
    lm_free(p->work);
    lm_free(p->range);
}

/* Plain tokens first .. first + n - 1, to a section or back. */
static void copy_plain(const pass *p, void *section, int64_t first, int64_t n, bool back)
{
    const lm_kv_shape *s = p->s;
    size_t bytes = (size_t)(n * s->head_dim) * lm_dtype_size(s->act);
    int64_t D = s->head_dim;
    float x[LM_KV_MAX_DIM];
    for (int64_t h = 0; h < s->kv_heads && n > 0; h++) {
        char *a = row_of(p, h, first), *b = (char *)section + (size_t)h * bytes;
        if (back)
            memcpy(a, b, bytes);
        else
            memcpy(b, a, bytes);
        for (int64_t t = 0; t < n && s->form->rotate; t++) {
            char *row = (back ? a : b) + (size_t)(t * D) * lm_dtype_size(s->act);
            lm_convert(s->act, row, LM_DTYPE_F32, x, D);
            p->k->store(s->act, true, D, x, 1, row);
        }
    }
}

lm_code lm_kv_part_encode(const lm_kv_shape *s, const void *rows, lm_kv_part *out, lm_cpu_level cpu,
                          lm_par *par, lm_err *e)
{
    pass p;
    if (!s->form->format) {
        memcpy(out->data[LM_KV_PLAIN], rows,
               (size_t)(s->kv_heads * s->n * s->head_dim) * lm_dtype_size(s->act));
        return LM_OK;
    }
    lm_code rc = begin_pass(s, rows, cpu, par, &p, e);
    if (!rc && s->form->outliers >= 0)
        rc = set_ranges(&p, e);
    if (!rc) {
        const lm_kv_memory m = { .pages = p.pages };
        lm_par_for(par, p.per_head * s->kv_heads, 1, code_pages, &p);
        rc = lm_kv_part_get(s, &m, out, cpu, par, e);
        copy_plain(&p, out->data[LM_KV_FIRST], 0, p.from, false);
        copy_plain(&p, out->data[LM_KV_TAIL], p.to, s->n - p.to, false);
    }
    end_pass(&p);
    return rc;
}

lm_code lm_kv_part_decode(const lm_kv_shape *s, const lm_kv_part *in, void *rows, lm_cpu_level cpu,
                          lm_par *par, lm_err *e)
{
    pass p;
    if (!s->form->format) {
        memcpy(rows, in->data[LM_KV_PLAIN],
               (size_t)(s->kv_heads * s->n * s->head_dim) * lm_dtype_size(s->act));
        return LM_OK;
    }
    lm_code rc = begin_pass(s, rows, cpu, par, &p, e);
    if (!rc) {
        const lm_kv_memory m = { .pages = p.pages };
        rc = lm_kv_part_put(s, in, &m, cpu, par, e);
        p.decode = true;
        lm_par_for(par, p.per_head * s->kv_heads, 1, code_pages, &p);
        copy_plain(&p, in->data[LM_KV_FIRST], 0, p.from, true);
        copy_plain(&p, in->data[LM_KV_TAIL], p.to, s->n - p.to, true);
    }
    end_pass(&p);
    return rc;
}
