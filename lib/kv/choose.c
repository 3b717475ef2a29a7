/* SPDX-License-Identifier: Apache-2.0 */
/* choose.c -- forms of many caches within a budget of bytes. */
#include "kv/choose.h"

#include <math.h>
#include <stddef.h>

static int cheapest(const lm_kv_choice *offer, int m)
{
    int best = 0;
    for (int i = 1; i < m; i++)
        if (offer[i].bytes < offer[best].bytes ||
            (offer[i].bytes == offer[best].bytes && offer[i].error < offer[best].error))
            best = i;
    return best;
}

/* Error saved per byte by going from one offer to another; 0: nothing is saved, or the bytes do not fit. */
static double gain_of(const lm_kv_choice *from, const lm_kv_choice *to, double room)
{
    double bytes = to->bytes - from->bytes, error = from->error - to->error;
    if (!(error > 0) || !(bytes <= room))
        return 0;
    return bytes > 0 ? error / bytes : (double)INFINITY;
}

lm_code lm_kv_choose(const lm_kv_choice *offer, int64_t n, int m, double limit, int *out, lm_err *e)
{
    double used = 0;
    for (int64_t i = 0; i < n; i++) {
        out[i] = cheapest(offer + i * m, m);
        used += offer[i * m + out[i]].bytes;
    }
    if (!isfinite(used))
        return lm_fail(e, LM_EUSAGE, "kv cache", NULL, "a layer has no possible form");
    if (!(used <= limit))
        return lm_fail(e, LM_EUSAGE, "kv cache", "allow more bits",
                       "the cheapest forms have %.7g bytes a token, not %.7g", used, limit);
    for (;;) {
        double best = 0;
        int64_t at = -1;
        int to = 0;
        for (int64_t i = 0; i < n; i++)
            for (int k = 0; k < m; k++) {
                double gain = gain_of(&offer[i * m + out[i]], &offer[i * m + k], limit - used);
                if (gain > best) {
                    best = gain;
                    at = i;
                    to = k;
                }
            }
        if (at < 0)
            return LM_OK;
        used += offer[at * m + to].bytes - offer[at * m + out[at]].bytes;
        out[at] = to;
    }
}
