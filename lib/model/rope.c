/* SPDX-License-Identifier: Apache-2.0 */
/* rope.c -- tables of positions: rotary ones from inverse frequencies with the published scalings, in double, rounded
 * once, and biases by distance.
 *
 * Rules as in Hugging Face's modeling_rope_utils.py; YaRN is arXiv:2309.00071. */
#include <math.h>

#include "model/config.h"

double lm_rope_mscale(double factor, double k)
{
    return factor <= 1 ? 1 : 0.1 * k * log(factor) + 1;
}

double lm_rope_yarn_factor(const lm_rope_config *r)
{
    if (r->attention > 0)
        return r->attention;
    if (r->mscale > 0 && r->mscale_all_dim > 0)
        return lm_rope_mscale(r->factor, r->mscale) / lm_rope_mscale(r->factor, r->mscale_all_dim);
    return lm_rope_mscale(r->factor, 1);
}

/* The dimension whose frequency makes `rotations` turns over the original context. */
static double yarn_dim(const lm_rope_config *r, double d, double original, double rotations)
{
    return d * log(original / (rotations * 2 * M_PI)) / (2 * log(r->theta));
}

static double llama3_scale(const lm_rope_config *r, double f)
{
    double wave = 2 * M_PI / f, original = (double)r->original;
    if (wave < original / r->high_freq)
        return f;
    if (wave > original / r->low_freq)
        return f / r->factor;
    double s = (original / wave - r->low_freq) / (r->high_freq - r->low_freq);
    return (1 - s) * f / r->factor + s * f;
}

void lm_alibi_table(int64_t heads, int64_t positions, float *out)
{
    int64_t power = 1;
    while (2 * power <= heads)
        power *= 2;
    for (int64_t h = 0; h < heads; h++) {
        /* Slopes are rounded to F32, as in modeling_bloom.py. */
        double slope = h < power ? pow(2, -8.0 * (double)(h + 1) / (double)power)
                                 : pow(2, -4.0 * (double)(2 * (h - power) + 1) / (double)power);
        for (int64_t p = 0; p < positions; p++)
            out[h * positions + p] = (float)((double)(float)slope * (double)(p - (positions - 1)));
    }
}

void lm_rope_table(const lm_config *c, int table, int64_t positions, float *out)
{
    lm_rope_rows(c, table, positions, positions, out);
}

void lm_rope_rows(const lm_config *c, int table, int64_t positions, int64_t rows, float *out)
{
    const lm_rope_config *r = &c->rope[table];
    int64_t half = r->dim / 2;
    double d = (double)r->dim, theta = r->theta, attention = 1, lo = 0, hi = 0;
    double original = r->original ? (double)r->original : (double)c->max_positions;

    if (r->type == LM_ROPE_DYNAMIC && positions > c->max_positions)
        theta *= pow(r->factor * (double)positions / (double)c->max_positions - (r->factor - 1),
                     d / (d - 2));
    if (r->type == LM_ROPE_YARN) {
        attention = lm_rope_yarn_factor(r);
        lo = yarn_dim(r, d, original, r->beta_fast);
        hi = yarn_dim(r, d, original, r->beta_slow);
        if (r->truncate) {
            lo = floor(lo);
            hi = ceil(hi);
        }
        lo = fmax(lo, 0);
        hi = fmin(hi, d - 1);
        if (lo == hi)
            hi += 0.001;
    }
    for (int64_t j = 0; j < half; j++) {
        /* Frameworks store the inverse frequencies and the angles in F32: the same roundings are
         * made here, so that a long context gives the same angles. */
        double f = (float)(1.0 / (float)pow(theta, 2.0 * (double)j / d));
        if (r->type == LM_ROPE_LINEAR)
            f /= r->factor;
        if (r->type == LM_ROPE_LLAMA3)
            f = llama3_scale(r, f);
        if (r->type == LM_ROPE_YARN) {
            double ramp = fmin(fmax(((double)j - lo) / (hi - lo), 0), 1);
            f = f / r->factor * ramp + f * (1 - ramp);
        }
        float f32 = (float)f;
        for (int64_t p = 0; p < rows; p++) {
            float angle = (float)p * f32;
            out[p * r->dim + j] = (float)(cos((double)angle) * attention);
            out[p * r->dim + half + j] = (float)(sin((double)angle) * attention);
        }
    }
}
