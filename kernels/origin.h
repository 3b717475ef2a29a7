/* SPDX-License-Identifier: Apache-2.0 */
/* origin.h -- where in a whole value the elements of a rank's part are, for operators whose draws are those of the whole.
 *
 * Split along an axis, a value is a row of pieces of `period` elements, and the part has of each piece one range, or two for
 * parts from both ends (numeric/portions.h).  Parts along a further axis are parts of that part: each is a level, and the last
 * level is the innermost. */
#ifndef LM_KERNELS_ORIGIN_H
#define LM_KERNELS_ORIGIN_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/device.h"

enum { LM_ORIGIN_LEVELS = 3 };

/* Of each piece, count0 elements from from0 on, then count1 from from1 on.  period 0: no level. */
typedef struct {
    int64_t period, from0, count0, from1, count1;
} lm_origin_level;

typedef struct {
    int64_t count; /* elements of the whole; 0: the part is the whole */
    lm_origin_level level[LM_ORIGIN_LEVELS];
} lm_origin;

/* Elements of the whole, if the part has so many. */
LM_DEVICE_TOO static inline int64_t lm_origin_count(const lm_origin *o, int64_t part)
{
    return o->count ? o->count : part;
}

/* The index in the whole of element i of the part; of `run` elements from i on the indices follow each other (at least 1; those
 * of the whole's last run may lie behind the part's end). */
LM_DEVICE_TOO static inline int64_t lm_origin_index(const lm_origin *o, int64_t i, int64_t *run)
{
    *run = INT64_MAX;
    for (int k = LM_ORIGIN_LEVELS - 1; k >= 0; k--) {
        const lm_origin_level *l = &o->level[k];
        if (!l->period)
            continue;
        const int64_t each = l->count0 + l->count1, at = i % each;
        const bool second = at >= l->count0;
        const int64_t left = (second ? each : l->count0) - at;
        i = i / each * l->period + (second ? l->from1 - l->count0 : l->from0) + at;
        *run = left < *run ? left : *run;
    }
    return i;
}

#endif
