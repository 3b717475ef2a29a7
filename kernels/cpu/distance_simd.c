/* SPDX-License-Identifier: Apache-2.0 */
/* distance_simd.c -- biases from a table of buckets, and its gradient. */
#include "kernels/distance.h"

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

/* Heads [begin, end) of all distances. */
static void spread(void *ctx, int64_t begin, int64_t end, int worker)
{
    (void)worker;
    const lm_call *c = ctx;
    const float *table = c->in[0].data;
    const int32_t *bucket = c->in[1].data;
    float *to = c->out[0].data;
    int64_t H = c->out[0].dim[0], Z = c->out[0].dim[1];
    for (int64_t h = begin; h < end; h++)
        for (int64_t z = 0; z < Z; z++)
            to[h * Z + z] = table[bucket[z] * H + h];
}

static void distance_bias(const lm_call *c)
{
    lm_par_for(c->par, c->out[0].dim[0], grain_rows(c->out[0].dim[1]), spread,
               (void *)(uintptr_t)c);
}

/* dtable of heads [begin, end): columns are added to their bucket one by one, so in their order. */
static void gather(void *ctx, int64_t begin, int64_t end, int worker)
{
    (void)worker;
    const lm_call *c = ctx;
    const lm_distance_bias_attr *a = c->attr;
    const float *from = c->in[0].data;
    const int32_t *bucket = c->in[1].data;
    float *to = c->out[0].data;
    int64_t N = c->out[0].dim[0], H = c->out[0].dim[1], Z = c->in[0].dim[1];
    bool add = !overwrites(c, a->acc);
    for (int64_t n = 0; n < N; n++)
        for (int64_t h = begin; h < end; h++) {
            double sum = add ? (double)to[n * H + h] : 0;
            for (int64_t z = 0; z < Z; z++)
                sum += bucket[z] == n ? (double)from[h * Z + z] : 0;
            to[n * H + h] = (float)sum;
        }
}

static void distance_bias_dtable(const lm_call *c)
{
    lm_par_for(c->par, c->out[0].dim[1], grain_rows(c->in[0].dim[1]), gather, (void *)(uintptr_t)c);
}

const lm_kernel LM_TABLE_NAME(distance, LM_SIMD)[] = {
    { "distance_bias", LM_DTYPE_F32, LM_SIMD_LEVEL, distance_bias, NULL },
    { "distance_bias_dtable", LM_DTYPE_F32, LM_SIMD_LEVEL, distance_bias_dtable, NULL },
    { 0 },
};
