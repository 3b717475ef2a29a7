/* SPDX-License-Identifier: Apache-2.0 */
/* store_finite.c -- an adapter whose numbers are not finite is refused when it is read.
 *
 * Beside other adapters in one batch its rows alone have its low-rank part h; in the others h is 0, and 0 times a NaN or
 * an infinity of B is a NaN.  Rows cannot be kept apart later without a pass over the results of every layer; here each
 * number is read once. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "model/store_impl.h"

enum { PIECE = 1 << 16 };

/* Room for a piece of a tensor: as in the file, and in F32. */
typedef struct {
    uint8_t raw[PIECE * sizeof(double)];
    float x[PIECE];
} room;

static lm_code check_piece(const lm_st *st, const lm_st_tensor *t, const float *x, int64_t n,
                           lm_err *e)
{
    const uint32_t exponent = 0x7f800000;
    uint32_t bits, bad = 0;
    for (int64_t i = 0; i < n; i++) {
        memcpy(&bits, &x[i], sizeof bits);
        bad |= (bits & exponent) == exponent;
    }
    for (int64_t i = 0; bad && i < n; i++)
        if (!isfinite(x[i]))
            return lm_fail(e, LM_ENUMERIC, lm_st_path(st),
                           "use another checkpoint of the adapter, or train it again",
                           "tensor \"%.200s\" holds %s", t->name,
                           isnan(x[i]) ? "a NaN" : "an infinity");
    return LM_OK;
}

static lm_code check_tensor(const lm_st *st, const lm_st_tensor *t, room *r, lm_err *e)
{
    size_t size = lm_dtype_size(t->dtype);
    for (int64_t at = 0; at < t->count; at += PIECE) {
        int64_t n = t->count - at < PIECE ? t->count - at : PIECE;
        if (lm_st_read(st, t, (uint64_t)at * size, r->raw, (size_t)n * size, e))
            return e->code;
        lm_convert(t->dtype, r->raw, LM_DTYPE_F32, r->x, n);
        if (check_piece(st, t, r->x, n, e))
            return e->code;
    }
    return LM_OK;
}

lm_code store_check_finite(const lm_st *st, lm_err *e)
{
    room *r = NULL;
    lm_code rc = lm_alloc_n(&r, 1, sizeof *r, "a piece of an adapter", e);
    for (size_t k = 0; !rc && k < lm_st_count(st); k++) {
        const lm_st_tensor *t = lm_st_at(st, k);
        if (t->dtype != LM_DTYPE_NONE && lm_dtype_is_float(t->dtype))
            rc = check_tensor(st, t, r, e);
    }
    lm_free(r);
    return rc;
}
