/* SPDX-License-Identifier: Apache-2.0 */
/* attention_sink.h -- what ends a row of attention (kernels/attention.h), so that loops over keys do not know of it: a
 * sink, which is one more logit without a key and a value, and the division, or none with `undivided`. */
#ifndef LM_KERNELS_CPU_ATTENTION_SINK_H
#define LM_KERNELS_CPU_ATTENTION_SINK_H

#include <math.h>
#include <stdbool.h>

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

/* The factor of the sums of values of a row with maximum m and sum l, and what its lse is; fade: of its sink, or 1. */
static inline float attn_row_factor(bool undivided, float fade, float m, float l)
{
    float by = undivided ? expf(m) : fade / l;
    return l > 0 ? by : 0.0f;
}

static inline float attn_row_lse(bool undivided, float m, float l)
{
    float lse = undivided ? 0.0f : m + logf(l);
    return l > 0 ? lse : -INFINITY;
}

/* The same with m in log2 units. */
static inline float attn_row_factor2(bool undivided, float fade, float m, float l)
{
    float by = undivided ? exp2f(m) : fade / l;
    return l > 0 ? by : 0.0f;
}

static inline float attn_row_lse2(bool undivided, float m, float l)
{
    float lse = undivided ? 0.0f : (m + log2f(l)) * 0.69314718056f;
    return l > 0 ? lse : -INFINITY;
}

#endif
