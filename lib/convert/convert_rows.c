/* SPDX-License-Identifier: Apache-2.0 */
/* convert_rows.c -- converts matrices row by row. */
#include "convert/convert_rows.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"

enum { STRIPE = 32 }; /* rows transposed at a time: a cache line of 16-bit elements */

#define NO_ELEMENT INT64_MAX

typedef struct {
    const lm_rows *r;
    float *scratch;  /* per worker */
    size_t each;     /* floats of it */
    size_t in, out;  /* bytes of a row of src and of dst */
    int64_t *broken; /* per worker: the first element of src that did not fit, or NO_ELEMENT */
} job;

static void to_f32(const lm_format *f, const void *src, float *dst, int64_t n)
{
    f->decode(f, &src, 1, n, dst, n);
}

static void from_f32(const lm_rows *r, const float *src, void *dst, int64_t n)
{
    const lm_encode_mode mode = { .importance = r->importance };

    r->to->encode(r->to, src, 1, n, n, &dst, &mode);
}

static bool adds(const lm_rows *r)
{
    return r->plus > 0 || r->plus < 0 || r->exponent;
}

static bool same(const lm_rows *r)
{
    return r->from == r->to && !adds(r);
}

/* ---- Numbers that do not fit ---- */

static uint32_t magnitude(float f)
{
    uint32_t u;

    memcpy(&u, &f, 4);
    return u & 0x7fffffff; /* in the order of the numbers, infinity and NaN last */
}

/* The smallest magnitude that may not fit; scales of blocks are F16. */
static uint32_t suspect(const lm_rows *r)
{
    if (lm_format_interleaved(r->to))
        return magnitude(65504.0f);
    return r->to->element == LM_DTYPE_F16    ? magnitude(65520.0f) /* rounds to infinity */
           : r->to->element == LM_DTYPE_BF16 ? magnitude(0x1.ffp127f)
                                             : magnitude(INFINITY);
}

/* True if element i of a row is lost: it became infinite or, in blocks, is not finite or so large
 * that its scale was limited.  x is the row as F32, `back` (blocks) the decoded row. */
static bool is_lost(const lm_rows *r, const void *src, const float *x, const void *dst,
                    const float *back, int64_t i)
{
    if (lm_format_interleaved(r->to))
        return !isfinite(x[i]) ||
               (fabsf(x[i]) > 65504.0f && fabsf(back[i] - x[i]) > 0.5f * fabsf(x[i]));
    return isinf(lm_get(r->to->element, dst, i)) &&
           isfinite(lm_format_interleaved(r->from) || r->col ? (double)x[i]
                                                             : lm_get(r->from->element, src, i));
}

/* The first lost number among the `n` of a row, or NO_ELEMENT.  `back` has room for n floats. */
static int64_t check_row(const lm_rows *r, const void *src, const float *x, const void *dst,
                         float *back, int64_t n)
{
    uint32_t worst = 0;

    for (int64_t i = 0; i < n; i++) {
        uint32_t u = magnitude(x[i]);
        worst = u > worst ? u : worst;
    }
    if (worst < suspect(r))
        return NO_ELEMENT;
    if (lm_format_interleaved(r->to))
        to_f32(r->to, dst, back, n);
    for (int64_t i = 0; i < n; i++)
        if (is_lost(r, src, x, dst, back, i))
            return i;
    return NO_ELEMENT;
}

/* The columns of a row in the order of dst. */
static void sort_cols(const lm_rows *r, const void *src, void *dst, size_t size)
{
    for (int64_t k = 0; k < r->cols; k += r->run)
        memcpy((char *)dst + (size_t)k * size,
               (const char *)src + (size_t)r->col(r->tensor, k) * size, (size_t)r->run * size);
}

/* One row of src to one of dst, x and back are scratch of n floats each; returns the result of
 * check_row. */
static int64_t recast(const lm_rows *r, const void *src, void *dst, float *x, float *back,
                      int64_t n)
{
    to_f32(r->from, src, r->col ? back : x, n);
    if (r->col)
        sort_cols(r, back, x, sizeof *x);
    for (int64_t i = 0; adds(r) && i < n; i++)
        x[i] = r->exponent > 0   ? (float)-exp((double)x[i])
               : r->exponent < 0 ? (float)log(-(double)x[i])
                                 : x[i] + r->plus;
    from_f32(r, x, dst, n);
    return check_row(r, src, x, dst, back, n);
}

static void note(const job *j, int worker, int64_t element)
{
    if (element < j->broken[worker])
        j->broken[worker] = element;
}

static lm_code report(const job *j, int threads, lm_err *e)
{
    const lm_rows *r = j->r;
    bool plain = !lm_format_interleaved(r->from);
    int64_t first = NO_ELEMENT;
    char value[40] = "";

    for (int w = 0; w < threads; w++)
        first = j->broken[w] < first ? j->broken[w] : first;
    if (first == NO_ELEMENT)
        return LM_OK;
    bool finite = !plain || isfinite(lm_get(r->from->element, r->src, first));
    if (plain)
        snprintf(value, sizeof value, " is %.9g,", lm_get(r->from->element, r->src, first));
    return lm_fail(e, LM_ENUMERIC, r->name,
                   finite ? "choose a type of wider range, such as bf16"
                          : "find the weights that are not finite",
                   "element %" PRId64 "%s which %s cannot hold", first, value,
                   lm_format_show(r->to));
}

/* ---- Rows in order, or mapped ---- */

static void move_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_rows *r = j->r;
    float *row = j->scratch + (size_t)worker * j->each;

    for (int64_t i = begin; i < end; i++) {
        int64_t at = r->map ? r->map(r->tensor, i) : i;
        const char *src = (const char *)r->src + (size_t)at * j->in;
        char *dst = (char *)r->dst + (size_t)i * j->out;
        if (same(r) && r->col) {
            sort_cols(r, src, dst, lm_dtype_size(r->from->element));
            continue;
        }
        if (same(r)) {
            memcpy(dst, src, j->in);
            continue;
        }
        int64_t lost = recast(r, src, dst, row, row + r->cols, r->cols);
        if (lost != NO_ELEMENT)
            note(j, worker, at * r->cols + (r->col ? r->col(r->tensor, lost) : lost));
    }
}

/* ---- Transposing ---- */

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

/* Write rows [begin, end) of dst from columns of src, which has plain elements. */
static void gather_stripe(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_rows *r = j->r;
    size_t size = lm_dtype_size(r->from->element);
    float *wide = j->scratch + (size_t)worker * j->each, *row = wide + STRIPE * r->rows;
    int64_t lost;
    char *dst = (char *)r->dst + (size_t)begin * j->out;

    turn_bits((const char *)r->src + (size_t)begin * size, (size_t)r->cols * size, r->rows,
              same(r) ? (void *)dst : wide, end - begin, size);
    for (int64_t i = 0; i < end - begin && !same(r); i++) {
        lost = recast(r, (const char *)wide + (size_t)(i * r->rows) * size,
                      dst + (size_t)i * j->out, row, row + r->rows, r->rows);
        if (lost != NO_ELEMENT)
            note(j, worker, lost * r->cols + begin + i);
    }
}

/* Write columns of dst from rows [begin, end) of src, which has blocks. */
static void scatter_stripe(void *ctx, int64_t begin, int64_t end, int worker)
{
    const job *j = ctx;
    const lm_rows *r = j->r;
    size_t size = lm_dtype_size(r->to->element);
    float *row = j->scratch + (size_t)worker * j->each;
    char *wide = (char *)(row + r->cols);
    int64_t n = end - begin;

    for (int64_t i = 0; i < n; i++) {
        int64_t lost = recast(r, (const char *)r->src + (size_t)(begin + i) * j->in,
                              wide + (size_t)(i * r->cols) * size, row, NULL, r->cols);
        if (lost != NO_ELEMENT)
            note(j, worker, (begin + i) * r->cols + lost);
    }
    for (int64_t k = 0; k < r->cols; k++) {
        char *dst = (char *)r->dst + (size_t)(k * r->rows + begin) * size;
        for (int64_t i = 0; i < n; i++)
            memcpy(dst + (size_t)i * size, wide + (size_t)(i * r->cols + k) * size, size);
    }
}

bool lm_rows_of_tensor(const lm_model_tensor *s, bool to_gguf, const lm_format *from,
                       const lm_format *to, lm_rows *r)
{
    bool moves = lm_model_tensor_moves(s), turn = s->order == LM_ORDER_CONV1D;

    *r = (lm_rows){
        .name = to_gguf ? s->hf : s->gguf, .from = from, .to = to, .tensor = s, .turn = turn
    };
    r->rows = s->ndim == 3   ? s->dim[0]
              : s->ndim == 2 ? s->dim[turn && !to_gguf]
              : moves        ? s->dim[0]
                             : 1;
    r->cols = s->ndim == 3   ? s->dim[2]
              : s->ndim == 2 ? s->dim[!(turn && !to_gguf)]
              : moves        ? 1
                             : s->dim[0];
    if (moves)
        r->map = to_gguf ? lm_model_tensor_hf_row : lm_model_tensor_gguf_row;
    if (s->order == LM_ORDER_TILED_COLS) {
        r->col = to_gguf ? lm_model_tensor_hf_col : lm_model_tensor_gguf_col;
        r->run = s->dim[1] / s->heads;
    }
    if (s->plus_one)
        r->plus = to_gguf ? 1.0f : -1.0f;
    if (s->exponent)
        r->exponent = to_gguf ? 1 : -1;
    return moves || turn || r->col || !same(r);
}

lm_code lm_rows_convert(const lm_rows *r, lm_par *par, lm_err *e)
{
    job j = { .r = r };
    bool gather = r->turn && !lm_format_interleaved(r->from);
    int64_t longest = gather ? r->rows : r->cols;
    size_t floats = (size_t)longest * (r->turn ? STRIPE + 2 : 2);
    int64_t grain = 1 + 65536 / (r->cols + 1);
    int threads = lm_par_threads(par);
    lm_tensor_size in, out;
    lm_code rc;

    if (lm_tensor_bytes(r->from, 1, &r->cols, &in, e) ||
        lm_tensor_bytes(r->to, 1, r->turn ? &r->rows : &r->cols, &out, e))
        return e->code;
    j.in = in.all;
    j.out = out.all;
    j.each = (floats + 15) / 16 * 16;
    rc = lm_alloc_n(&j.scratch, j.each * (size_t)threads, sizeof *j.scratch, "rows being converted",
                    e);
    if (!rc)
        rc = lm_alloc_n(&j.broken, (size_t)threads, sizeof *j.broken, "rows being converted", e);
    for (int w = 0; !rc && w < threads; w++)
        j.broken[w] = NO_ELEMENT;
    if (!rc && !r->turn)
        lm_par_for(par, r->rows, grain, move_rows, &j);
    else if (!rc && gather)
        lm_par_for(par, r->cols, STRIPE, gather_stripe, &j);
    else if (!rc)
        lm_par_for(par, r->rows, STRIPE, scatter_stripe, &j);
    if (!rc)
        rc = report(&j, threads, e);
    lm_free(j.scratch);
    lm_free(j.broken);
    return rc;
}
