/* SPDX-License-Identifier: Apache-2.0 */
/* convert_rows.c -- matrices recast row by row. */
#include "model/convert_rows.h"

#include <string.h>

#include "base/mem.h"

enum { STRIPE = 32 }; /* rows turned at a time: a cache line of 16-bit elements */

typedef struct {
    const lm_rows *r;
    float *scratch; /* per worker */
    size_t each;    /* floats of it */
} job;

size_t lm_row_bytes(lm_row_type t, int64_t cols)
{
    return t.block ? (size_t)(cols / t.block->block) * t.block->bytes
                   : (size_t)cols * lm_dtype_size(t.dtype);
}

static void to_f32(lm_row_type t, const void *src, float *dst, int64_t n)
{
    if (t.block)
        t.block->decode(src, n, dst);
    else
        lm_convert(t.dtype, src, LM_DTYPE_F32, dst, n);
}

static void from_f32(lm_row_type t, const float *src, void *dst, int64_t n)
{
    if (t.block)
        t.block->encode(src, n, dst);
    else
        lm_convert(LM_DTYPE_F32, src, t.dtype, dst, n);
}

static bool same(const lm_rows *r)
{
    return r->from.block == r->to.block && (r->from.block || r->from.dtype == r->to.dtype);
}

static void move_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_rows *r = j->r;
    float *row = j->scratch + (size_t)worker * j->each;
    size_t in = lm_row_bytes(r->from, r->cols), out = lm_row_bytes(r->to, r->cols);

    for (int64_t i = begin; i < end; i++) {
        const char *src = (const char *)r->src + (size_t)(r->map ? r->map(r->slot, i) : i) * in;
        char *dst = (char *)r->dst + (size_t)i * out;
        if (same(r)) {
            memcpy(dst, src, in);
            continue;
        }
        to_f32(r->from, src, row, r->cols);
        from_f32(r->to, row, dst, r->cols);
    }
}

/* ---- Turning ---- */

static void turn_bits(const void *from, size_t pitch, int64_t n, void *to, int64_t width,
                      size_t size)
{
    for (int64_t i = 0; i < n; i++) {
        const char *src = (const char *)from + (size_t)i * pitch;
        for (int64_t k = 0; k < width; k++) {
            char *dst = (char *)to + ((size_t)k * (size_t)n + (size_t)i) * size;
            if (size == 2)
                memcpy(dst, src + 2 * k, 2);
            else
                memcpy(dst, src + 4 * k, 4);
        }
    }
}

/* Rows [begin, end) of dst are columns of src, which has plain elements. */
static void gather_stripe(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_rows *r = j->r;
    size_t size = lm_dtype_size(r->from.dtype), out = lm_row_bytes(r->to, r->rows);
    float *wide = j->scratch + (size_t)worker * j->each, *row = wide + STRIPE * r->rows;
    char *dst = (char *)r->dst + (size_t)begin * out;

    turn_bits((const char *)r->src + (size_t)begin * size, (size_t)r->cols * size, r->rows,
              same(r) ? (void *)dst : wide, end - begin, size);
    for (int64_t i = 0; i < end - begin && !same(r); i++) {
        to_f32(r->from, (const char *)wide + (size_t)(i * r->rows) * size, row, r->rows);
        from_f32(r->to, row, dst + (size_t)i * out, r->rows);
    }
}

/* Rows [begin, end) of src, which has blocks, become columns of dst. */
static void scatter_stripe(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_rows *r = j->r;
    size_t in = lm_row_bytes(r->from, r->cols), size = lm_dtype_size(r->to.dtype);
    float *row = j->scratch + (size_t)worker * j->each;
    char *wide = (char *)(row + r->cols);
    int64_t n = end - begin;

    for (int64_t i = 0; i < n; i++) {
        to_f32(r->from, (const char *)r->src + (size_t)(begin + i) * in, row, r->cols);
        from_f32(r->to, row, wide + (size_t)(i * r->cols) * size, r->cols);
    }
    for (int64_t k = 0; k < r->cols; k++) {
        char *dst = (char *)r->dst + (size_t)(k * r->rows + begin) * size;
        for (int64_t i = 0; i < n; i++)
            memcpy(dst + (size_t)i * size, wide + (size_t)(i * r->cols + k) * size, size);
    }
}

bool lm_rows_of_slot(const lm_slot *s, bool to_gguf, lm_row_type from, lm_row_type to, lm_rows *r)
{
    bool rope = s->layout == LM_LAYOUT_ROPE, turn = s->layout == LM_LAYOUT_CONV1D;

    *r = (lm_rows){ .from = from, .to = to, .slot = s, .turn = turn };
    r->rows = s->ndim == 2 ? s->dim[turn && !to_gguf] : rope ? s->dim[0] : 1;
    r->cols = s->ndim == 2 ? s->dim[!(turn && !to_gguf)] : rope ? 1 : s->dim[0];
    if (rope)
        r->map = to_gguf ? lm_slot_hf_row : lm_slot_gguf_row;
    return rope || turn || !same(r);
}

lm_code lm_rows_convert(const lm_rows *r, lm_par *par, lm_err *e)
{
    job j = { .r = r };
    int64_t longest = r->turn && !r->from.block ? r->rows : r->cols;
    size_t floats = (size_t)longest * (r->turn ? STRIPE + 1 : 1);
    int64_t grain = 1 + 65536 / (r->cols + 1);
    lm_code rc;

    j.each = (floats + 15) / 16 * 16;
    rc = lm_alloc_n(&j.scratch, j.each * (size_t)lm_par_threads(par), sizeof *j.scratch,
                    "rows being converted", e);
    if (rc)
        return rc;
    if (!r->turn)
        lm_par_for(par, r->rows, grain, move_rows, &j);
    else if (!r->from.block)
        lm_par_for(par, r->cols, STRIPE, gather_stripe, &j);
    else
        lm_par_for(par, r->rows, STRIPE, scatter_stripe, &j);
    lm_free(j.scratch);
    return LM_OK;
}
