/* SPDX-License-Identifier: Apache-2.0 */
/* distance_ref.c -- the definitions of kernels/distance.h. */
#include "kernels/distance.h"

#include "kernels/cpu/ref.h"
#include "kernels/cpu/tables.h"

static void distance_bias(const lm_call *c)
{
    const int32_t *bucket = c->in[1].data;
    int64_t H = c->out[0].dim[0], Z = c->out[0].dim[1];
    for (int64_t h = 0; h < H; h++)
        for (int64_t z = 0; z < Z; z++)
            set(&c->out[0], h * Z + z, get(&c->in[0], bucket[z] * H + h));
}

static void distance_bias_dtable(const lm_call *c)
{
    const lm_distance_bias_attr *a = c->attr;
    const int32_t *bucket = c->in[1].data;
    int64_t N = c->out[0].dim[0], H = c->out[0].dim[1], Z = c->in[0].dim[1];
    for (int64_t n = 0; n < N; n++)
        for (int64_t h = 0; h < H; h++) {
            double sum = 0;
            for (int64_t z = 0; z < Z; z++)
                sum += bucket[z] == n ? get(&c->in[0], h * Z + z) : 0;
            accumulate(c, a->acc, &c->out[0], n * H + h, sum);
        }
}

const lm_kernel lm_distance_ref_kernels[] = {
    { "distance_bias", LM_DTYPE_NONE, LM_CPU_REF, distance_bias, NULL },
    { "distance_bias_dtable", LM_DTYPE_NONE, LM_CPU_REF, distance_bias_dtable, NULL },
    { 0 },
};
