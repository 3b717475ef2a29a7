/* SPDX-License-Identifier: Apache-2.0 */
/* attention_sink.h -- how a sink (kernels/attention.h) ends the softmax of a row: one more logit, without a key and a
 * value.  It is added to the finished sums, so that loops over keys do not know of it. */
#ifndef LM_KERNELS_CPU_ATTENTION_SINK_H
#define LM_KERNELS_CPU_ATTENTION_SINK_H

#include <math.h>

/* A NaN: the row is lost, but its sum stays above 0, as that of a row which sees something. */
static inline float attn_lose(float s, float *m, float *l)
{
    *m = s;
    *l = 1;
    return s;
}

/* The maximum *m and the sum *l of exp(score - *m) of a row become those with the sink s.  Returns the factor that the
 * sums of values need beside 1 / *l; 0 of a row that sees nothing, NaN of one whose sink is NaN. */
static inline float attn_add_sink(float s, float *m, float *l)
{
    float top = fmaxf(*m, s);
    if (isnan(s))
        return attn_lose(s, m, l);
    if (top == -INFINITY)
        return 0;
    float fade = *l > 0 ? expf(*m - top) : 0.0f;
    *l = *l * fade + expf(s - top);
    *m = top;
    return fade;
}

/* The same with m in log2 units: sums are of exp2(score * log2(e) - *m). */
static inline float attn_add_sink2(float s, float *m, float *l)
{
    float s2 = s * 1.44269504088896341f, top = fmaxf(*m, s2);
    if (isnan(s))
        return attn_lose(s, m, l);
    if (top == -INFINITY)
        return 0;
    float fade = *l > 0 ? exp2f(*m - top) : 0.0f;
    *l = *l * fade + exp2f(s2 - top);
    *m = top;
    return fade;
}

#endif
