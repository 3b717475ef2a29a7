/* SPDX-License-Identifier: Apache-2.0 */
/* distance.h -- biases of attention by distance from a learned table (kernels/attention.h).
 *
 * T5 (arXiv:1910.10683, section 2.1) has a number for each head and bucket of distances: near distances have a bucket
 * each, farther ones share buckets whose width grows by the logarithm, all from max_distance on the last one.
 *
 * distance_bias         in  table [N,H] F32, bucket [Z] I32 (below N)
 *                       out bias [H,Z] F32 = table[bucket[z], h]
 * distance_bias_dtable  in  dbias [H,Z] F32, bucket [Z] I32
 *                       out dtable [N,H] F32 (acc): sums over the columns of a bucket, in their order
 * Tolerance: distance_bias the same bits, distance_bias_dtable relative L2 1e-6. */
#ifndef LM_KERNELS_DISTANCE_H
#define LM_KERNELS_DISTANCE_H

#include <math.h>

#include "kernels/kernel.h"

typedef struct {
    lm_acc acc;
} lm_distance_bias_attr;

/* Buckets of a table: both_ways: half of them for keys behind the query. */
typedef struct {
    int64_t buckets, max_distance;
    bool both_ways;
} lm_distance_buckets;

/* The bucket of a key at `distance` = key - query, as transformers computes it, in F32: distances of max_distance and
 * above have the last one. */
static inline int32_t lm_distance_bucket(const lm_distance_buckets *b, int64_t distance)
{
    int64_t n = b->both_ways ? b->buckets / 2 : b->buckets, first = 0, far = -distance;
    if (b->both_ways) {
        first = distance > 0 ? n : 0;
        far = distance < 0 ? -distance : distance;
    }
    far = far > 0 ? far : 0;
    int64_t exact = n / 2;
    if (far < exact)
        return (int32_t)(first + far);
    float ratio =
        logf((float)far / (float)exact) / (float)log((double)b->max_distance / (double)exact);
    int64_t at = exact + (int64_t)(ratio * (float)(n - exact));
    return (int32_t)(first + (at < n - 1 ? at : n - 1));
}

#endif
