/* SPDX-License-Identifier: Apache-2.0 */
/* portion.c -- see portion.h. */
#include "tune/align/portion.h"

#include <string.h>

#include "base/mem.h"
#include "base/stop.h"

static int rank_of(const lm_comm *c)
{
    return c ? lm_comm_rank(c) : 0;
}

static int ranks_of(const lm_comm *c)
{
    return c ? lm_comm_size(c) : 1;
}

lm_portion lm_portion_of(int64_t n, int rank, int ranks)
{
    return (lm_portion){ rank * n / ranks, (rank + 1) * n / ranks };
}

lm_portion lm_portion_own(const lm_comm *c, int64_t n)
{
    return lm_portion_of(n, rank_of(c), ranks_of(c));
}

lm_code lm_portion_stops(lm_comm *c, bool ends, bool *stops, lm_err *e)
{
    int32_t flag = ends || lm_stopping();
    lm_code rc = c ? lm_comm_all_reduce(c, &flag, &flag, 1, LM_DTYPE_I32, LM_COMM_MAX, e) : LM_OK;
    *stops = flag;
    return rc;
}

lm_code lm_portion_join(lm_comm *c, void *x, int64_t n, size_t each, lm_err *e)
{
    const int ranks = ranks_of(c);
    size_t *bytes = NULL;
    if (!c || lm_alloc_n(&bytes, (size_t)ranks, sizeof *bytes, "parts of ranks", e))
        return e->code;
    for (int r = 0; r < ranks; r++) {
        const lm_portion s = lm_portion_of(n, r, ranks);
        bytes[r] = (size_t)(s.end - s.first) * each;
    }
    lm_comm_all_gather(c, (char *)x + (size_t)lm_portion_own(c, n).first * each, x, bytes, e);
    lm_free(bytes);
    return e->code;
}

lm_code lm_portion_parts(lm_comm *c, const void *own, size_t n, char **all, size_t *bytes,
                         lm_err *e)
{
    size_t *size = NULL;
    *all = NULL;
    *bytes = 0;
    if (lm_comm_gather_each(c, &n, sizeof n, (void *)&size, e))
        return e->code;
    for (int r = 0; r < ranks_of(c); r++)
        *bytes += size[r];
    if (!lm_alloc_n(all, *bytes + 1, 1, "parts of ranks", e))
        lm_comm_all_gather(c, own, *all, size, e);
    lm_free(size);
    return e->code;
}
