/* SPDX-License-Identifier: Apache-2.0 */
/* stream.c -- the choice of a level by bandwidth and deadline. */
#include "kv/stream.h"

#include <math.h>

enum { RECENT = 4 };
static const double floor_rate = 1e7; /* bytes a second, until one is measured */

double lm_kv_stream_rate(const lm_kv_transfer *done, int64_t n)
{
    double bytes = 0, seconds = 0, last = NAN;
    for (int64_t i = n - 1, used = 0; i >= 0 && used < RECENT; i--) {
        if (!(done[i].bytes > 0 && done[i].seconds > 0))
            continue;
        bytes += done[i].bytes;
        seconds += done[i].seconds;
        if (!used++)
            last = bytes / seconds;
    }
    return fmin(last, bytes / seconds);
}

double lm_kv_stream_seconds(const lm_kv_offer *o, int64_t next, int how, double rate)
{
    double bytes = 0, rows = (double)o->rows_behind;
    for (int64_t c = next; c < o->chunks; c++) {
        if (how == LM_KV_COMPUTE)
            rows += (double)o->rows[c];
        else
            bytes += (double)o->bytes[c * o->levels + how];
    }
    return (bytes > 0 ? bytes / rate : 0) + rows * o->row_seconds;
}

static bool has_level(const lm_kv_offer *o, int64_t chunk, int level)
{
    return o->bytes[chunk * o->levels + level] > 0;
}

/* The i-th of the levels that are present; their number if there are not as many. */
static int level_at(const lm_kv_offer *o, int64_t chunk, int i, int *number)
{
    int found = LM_KV_COMPUTE;
    *number = 0;
    for (int l = 0; l < o->levels; l++)
        if (has_level(o, chunk, l) && (*number)++ == i)
            found = l;
    return found;
}

int lm_kv_stream_choose(const lm_kv_offer *o, int64_t next, double elapsed,
                        const lm_kv_transfer *done, int64_t n)
{
    double rate = lm_kv_stream_rate(done, n), left = o->deadline - elapsed, least = INFINITY;
    bool measured = !isnan(rate);
    int levels, best = level_at(o, next, 0, &levels), fastest = best;
    if (isinf(o->deadline) || !levels)
        return best;
    if (o->compute) {
        least = lm_kv_stream_seconds(o, next, LM_KV_COMPUTE, rate);
        fastest = LM_KV_COMPUTE;
        if (least <= left)
            return LM_KV_COMPUTE;
    }
    int middle = level_at(o, next, (levels - 1) / 2, &levels);
    for (int l = 0; l < o->levels; l++) {
        double seconds = lm_kv_stream_seconds(o, next, l, measured ? rate : floor_rate);
        if (!has_level(o, next, l))
            continue;
        if (seconds <= left || (!measured && l == middle))
            return l;
        if (seconds < least)
            least = seconds, fastest = l;
    }
    return fastest;
}
