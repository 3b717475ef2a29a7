/* SPDX-License-Identifier: Apache-2.0 */
/* lossy.c -- pieces of a tensor, each converted to F32, encoded, decoded and compared by one
 * thread. */
#include "compress/lossy.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"

enum { PIECE = 16384 }; /* elements; a multiple of every block size */

/* The contribution of one piece to the totals. */
typedef struct {
    double d2, x2, max_abs, bound;
    int64_t broken; /* first element beyond the bound; -1: none */
} piece_sums;

typedef struct {
    const lm_format *f;
    lm_dtype dtype; /* number of elements beyond the bound */
    const uint8_t *in;
    uint8_t *out, *plane[LM_MAX_PLANES];
    int64_t count;
    float *scratch; /* 2 * PIECE for each worker */
    piece_sums *sums;
} job;

bool lm_lossy_takes(const lm_format *f)
{
    bool takes = f->encode && !lm_format_interleaved(f) && f->err_rms == 0;

    for (int p = 0; p < f->n_planes; p++) {
        const lm_plane *l = &f->plane[p];
        takes &= l->rows == 1 && PIECE % l->cols == 0 && PIECE / l->cols * l->bits % 8 == 0;
    }
    return takes && f->plane[0].bits <= 32;
}

bool lm_lossy_can(const lm_format *f, lm_dtype from)
{
    bool taken = from == LM_DTYPE_F32 || from == LM_DTYPE_F16 || from == LM_DTYPE_BF16;
    return taken && lm_lossy_takes(f) && 8 * lm_dtype_size(from) > (size_t)f->plane[0].bits;
}

/* The address of element i, the first of a piece, in each plane. */
static void planes_at(const job *j, int64_t i, uint8_t *at[LM_MAX_PLANES])
{
    for (int p = 0; p < j->f->n_planes; p++)
        at[p] = j->plane[p] + lm_plane_bytes(&j->f->plane[p], 1, i);
}

static void decode_at(const job *j, uint8_t *const at[LM_MAX_PLANES], float *y, int64_t n)
{
    const void *plane[LM_MAX_PLANES];
    for (int p = 0; p < j->f->n_planes; p++)
        plane[p] = at[p];
    j->f->decode(j->f, plane, 1, n, y, n);
}

/* Equal bits, infinities and NaNs included. */
static bool agrees(float x, float y)
{
    return x == y || (isnan(x) && isnan(y));
}

/* Compare a block of n numbers, the first of which is element `at` of the tensor. */
static void account_block(const lm_format *f, const float *x, const float *y, int64_t n, int64_t at,
                          piece_sums *s)
{
    double most = 0;
    bool scaled = f->n_planes > 1;
    /* One NaN or infinity makes the scale useless, and with it every number of its block. */
    for (int64_t i = 0; scaled && i < n && s->broken < 0; i++)
        s->broken = isfinite(x[i]) ? -1 : at + i;
    for (int64_t i = 0; f->err_block > 0 && i < n; i++)
        most = fabs(x[i]) > most ? fabs(x[i]) : most;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)x[i] - y[i]), rel = f->err_rel * fabs(x[i]);
        double bound = (rel > f->err_abs ? rel : f->err_abs) + f->err_block * most;
        bool kept = agrees(x[i], y[i]) && !scaled;
        if (!(d <= bound && isfinite(y[i])) && !kept) {
            if (s->broken < 0)
                s->broken = at + i;
            continue;
        }
        if (!isfinite(x[i]))
            continue;
        s->d2 += d * d;
        s->x2 += (double)x[i] * x[i];
        s->max_abs = d > s->max_abs ? d : s->max_abs;
        s->bound = bound > s->bound ? bound : s->bound;
    }
}

static void encode_piece(job *j, int64_t p, float *x, float *y)
{
    const lm_format *f = j->f;
    int64_t from = p * PIECE, n = j->count - from < PIECE ? j->count - from : PIECE;
    piece_sums *s = &j->sums[p];
    uint8_t *at[LM_MAX_PLANES];
    void *plane[LM_MAX_PLANES];
    planes_at(j, from, at);
    for (int k = 0; k < f->n_planes; k++)
        plane[k] = at[k];
    lm_convert(j->dtype, j->in + (size_t)from * lm_dtype_size(j->dtype), LM_DTYPE_F32, x, n);
    f->encode(f, x, 1, n, n, plane, NULL);
    decode_at(j, at, y, n);
    s->broken = -1;
    int64_t step = lm_format_group(f) > 1 ? lm_format_group(f) : n;
    for (int64_t i = 0; i < n; i += step)
        account_block(f, x + i, y + i, n - i < step ? n - i : step, from + i, s);
}

static void encode_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    job *j = ctx;
    float *x = j->scratch + (size_t)worker * 2 * PIECE;
    for (int64_t p = begin; p < end; p++)
        encode_piece(j, p, x, x + PIECE);
}

static void decode_range(void *ctx, int64_t begin, int64_t end, int worker)
{
    job *j = ctx;
    float *y = j->scratch + (size_t)worker * 2 * PIECE;
    uint8_t *at[LM_MAX_PLANES];
    for (int64_t p = begin; p < end; p++) {
        int64_t from = p * PIECE, n = j->count - from < PIECE ? j->count - from : PIECE;
        planes_at(j, from, at);
        decode_at(j, at, y, n);
        lm_convert(LM_DTYPE_F32, y, j->dtype, j->out + (size_t)from * lm_dtype_size(j->dtype), n);
    }
}

static int64_t pieces_of(int64_t count)
{
    return count / PIECE + (count % PIECE != 0);
}

/* The sums of all pieces, in their order. */
static lm_code account(const job *j, const char *name, lm_lossy_error *err, lm_err *e)
{
    double d2 = 0, x2 = 0;
    *err = (lm_lossy_error){ 0 };
    for (int64_t p = 0; p < pieces_of(j->count); p++) {
        const piece_sums *s = &j->sums[p];
        if (s->broken >= 0) {
            double x = lm_get(j->dtype, j->in, s->broken);
            return lm_fail(e, LM_ENUMERIC, name,
                           isfinite(x) ? "choose a format of wider range, or do not convert it"
                                       : "find the weights that are not finite",
                           "element %" PRId64 " is %.9g, which %s cannot hold within its bound",
                           s->broken, x, j->f->name);
        }
        d2 += s->d2;
        x2 += s->x2;
        err->max_abs = s->max_abs > err->max_abs ? s->max_abs : err->max_abs;
        err->bound = s->bound > err->bound ? s->bound : err->bound;
    }
    err->rel_l2 = x2 > 0 ? sqrt(d2 / x2) : 0;
    return LM_OK;
}

static lm_code take_scratch(job *j, lm_par *par, lm_err *e)
{
    return lm_alloc_n(&j->scratch, (size_t)lm_par_threads(par) * 2 * PIECE, sizeof *j->scratch,
                      "a piece of a tensor", e);
}

lm_code lm_lossy_encode(const lm_format *f, const char *name, lm_dtype from, const void *x,
                        int64_t count, void *const *plane, lm_par *par, lm_lossy_error *err,
                        lm_err *e)
{
    job j = { .f = f, .dtype = from, .in = x, .count = count };
    for (int p = 0; p < f->n_planes; p++)
        j.plane[p] = plane[p];
    lm_code rc = take_scratch(&j, par, e);
    if (!rc)
        rc = lm_alloc_n(&j.sums, (size_t)pieces_of(count), sizeof *j.sums, "sums of errors", e);
    if (!rc) {
        lm_par_for(par, pieces_of(count), 1, encode_range, &j);
        rc = account(&j, name, err, e);
    }
    lm_free(j.scratch);
    lm_free(j.sums);
    return rc;
}

lm_code lm_lossy_decode(const lm_format *f, const void *const *plane, int64_t count, lm_dtype to,
                        void *y, lm_par *par, lm_err *e)
{
    job j = { .f = f, .dtype = to, .out = y, .count = count };
    for (int p = 0; p < f->n_planes; p++)
        j.plane[p] = (uint8_t *)(uintptr_t)plane[p];
    lm_code rc = take_scratch(&j, par, e);
    if (!rc)
        lm_par_for(par, pieces_of(count), 1, decode_range, &j);
    lm_free(j.scratch);
    return rc;
}
