/* SPDX-License-Identifier: Apache-2.0 */
/* schedule.c -- learning-rate schedules. */
#include "train/schedule.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

const char *const lm_sched_names[] = { "constant",    "linear", "cosine", "step",
                                       "exponential", "wsd",    NULL };

/* Position between the end of the warm-up and the end, in [0,1]. */
static double progress(const lm_schedule *s, int64_t t)
{
    int64_t span = s->total - s->warmup;
    double u = span > 0 ? (double)(t - s->warmup) / (double)span : 1;
    return u < 0 ? 0 : u > 1 ? 1 : u;
}

static double wsd(const lm_schedule *s, int64_t t)
{
    int64_t start = s->total - s->decay;
    if (t < start || s->decay <= 0)
        return 1;
    double u = (double)(t - start) / (double)s->decay;
    return s->min_ratio + (1 - s->min_ratio) * (1 - sqrt(u > 1 ? 1 : u));
}

lm_sched_kind lm_sched_find(const char *name)
{
    int k = 0;
    while (lm_sched_names[k] && strcmp(lm_sched_names[k], name))
        k++;
    return (lm_sched_kind)k;
}

unsigned lm_sched_reads(lm_sched_kind k)
{
    switch (k) {
    case LM_SCHED_COSINE:
        return LM_SCHED_READS_CYCLES;
    case LM_SCHED_STEP:
        return LM_SCHED_READS_STEP_SIZE | LM_SCHED_READS_GAMMA;
    case LM_SCHED_EXPONENTIAL:
        return LM_SCHED_READS_GAMMA;
    case LM_SCHED_WSD:
        return LM_SCHED_READS_DECAY;
    default:
        return 0;
    }
}

double lm_schedule_lr(const lm_schedule *s, int64_t t)
{
    double floor_ = s->min_ratio, u;
    t = t > s->from ? t - s->from : 0;
    if (t < s->warmup)
        return s->start + (s->lr - s->start) * (double)(t + 1) / (double)s->warmup;
    switch (s->kind) {
    case LM_SCHED_LINEAR:
        return s->lr * (1 - progress(s, t) * (1 - floor_));
    case LM_SCHED_COSINE:
        u = progress(s, t);
        if (s->cycles > 1 && u < 1)
            u = u * (double)s->cycles - floor(u * (double)s->cycles);
        return s->lr * (floor_ + (1 - floor_) * 0.5 * (1 + cos(M_PI * u)));
    case LM_SCHED_STEP:
        return s->lr * fmax(floor_, pow(s->gamma, (double)((t - s->warmup) / s->step_size)));
    case LM_SCHED_EXPONENTIAL:
        return s->lr * fmax(floor_, pow(s->gamma, (double)(t - s->warmup)));
    case LM_SCHED_WSD:
        return s->lr * wsd(s, t);
    default:
        return s->lr;
    }
}
