/* SPDX-License-Identifier: Apache-2.0 */
/* advantage.c -- means and deviations of groups of rewards. */
#include "tune/align/advantage.h"

#include <math.h>

int64_t lm_moments(const double *x, int64_t n, double *mean, double *std)
{
    double sum = 0, square = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += isnan(x[i]) ? 0 : x[i];
        count += !isnan(x[i]);
    }
    *mean = count ? sum / (double)count : NAN;
    for (int64_t i = 0; i < n; i++)
        square += isnan(x[i]) ? 0 : (x[i] - *mean) * (x[i] - *mean);
    *std = count > 1 ? sqrt(square / (double)(count - 1)) : NAN;
    return count;
}

/* ---- statistics ---- */

bool lm_advantage_flat(const double *r, int64_t size)
{
    double first = NAN;
    for (int64_t i = 0; i < size; i++) {
        if (isnan(r[i]))
            continue;
        if (!isnan(first) && fabs(r[i] - first) > 1e-8 + 1e-5 * fabs(first))
            return false;
        first = isnan(first) ? r[i] : first;
    }
    return true;
}

static void count_groups(const double *r, int64_t groups, int64_t size, lm_advantage_stats *s)
{
    int64_t flat = 0;
    s->unscored = groups * size - lm_moments(r, groups * size, &s->mean, &s->std);
    for (int64_t g = 0; g < groups; g++)
        flat += lm_advantage_flat(r + g * size, size);
    s->zero_std = groups ? (double)flat / (double)groups : 0;
}

/* (x - mean) / (deviation + eps) of all that are numbers. */
static void normalise(double *x, int64_t n, double eps)
{
    double mean, std;
    lm_moments(x, n, &mean, &std);
    for (int64_t i = 0; i < n; i++)
        x[i] = (x[i] - mean) / (std + eps);
}

/* Completions without a reward, and those whose deviation does not exist, do not train. */
static void clear_nan(double *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = isnan(x[i]) ? 0 : x[i];
}

/* ---- completions ---- */

/* Of one group; all_mean and all_std are those of all rewards. */
static void judge_group(const lm_advantage_opts *o, const double *r, int64_t size, double all_mean,
                        double all_std, double *out)
{
    double mean, std, base;
    int64_t count = lm_moments(r, size, &mean, &std);
    for (int64_t i = 0; i < size; i++) {
        switch (o->kind) {
        case LM_ADVANTAGE_LEAVE_ONE_OUT:
            base = count > 1 ? (mean * (double)count - r[i]) / (double)(count - 1) : NAN;
            break;
        case LM_ADVANTAGE_GLOBAL:
            base = all_mean;
            break;
        default:
            base = mean;
        }
        out[i] = r[i] - base;
        if (o->kind == LM_ADVANTAGE_GROUP && o->scale != LM_ADVANTAGE_SCALE_NONE)
            out[i] /= (o->scale == LM_ADVANTAGE_SCALE_GROUP ? std : all_std) + o->eps;
    }
}

void lm_advantage(const lm_advantage_opts *o, const double *reward, int64_t groups, int64_t size,
                  double *out, lm_advantage_stats *stats)
{
    double mean, std;
    lm_moments(reward, groups * size, &mean, &std);
    if (stats)
        count_groups(reward, groups, size, stats);
    for (int64_t g = 0; g < groups; g++)
        judge_group(o, reward + g * size, size, mean, std, out + g * size);
    if (o->normalise || o->kind == LM_ADVANTAGE_BATCH)
        normalise(out, groups * size, o->eps);
    clear_nan(out, groups * size);
}

/* Add weight * (r - mean) / (deviation + eps) of reward k in one group. */
static void add_kind(const double *each, double weight, int kinds, int k, int64_t size, double eps,
                     double *out)
{
    double mean = 0, square = 0, std;
    int64_t count = 0;
    for (int64_t i = 0; i < size; i++) {
        double r = each[i * kinds + k];
        mean += isnan(r) ? 0 : r;
        count += !isnan(r);
    }
    mean /= (double)count;
    for (int64_t i = 0; i < size; i++) {
        double r = each[i * kinds + k];
        square += isnan(r) ? 0 : (r - mean) * (r - mean);
    }
    std = count > 1 ? sqrt(square / (double)(count - 1)) : NAN;
    for (int64_t i = 0; i < size; i++) {
        double a = weight * (each[i * kinds + k] - mean) / (std + eps);
        out[i] += isnan(a) ? 0 : a;
    }
}

/* NAN if no reward applies. */
static double sum_kinds(const double *each, const double *weight, int kinds)
{
    double sum = 0;
    bool any = false;
    for (int k = 0; k < kinds; k++) {
        sum += isnan(each[k]) ? 0 : weight[k] * each[k];
        any |= !isnan(each[k]);
    }
    return any ? sum : NAN;
}

void lm_advantage_each(const double *each, const double *weight, int kinds, int64_t groups,
                       int64_t size, double eps, double *out, lm_advantage_stats *stats)
{
    const int64_t n = groups * size;
    for (int64_t i = 0; i < n; i++)
        out[i] = sum_kinds(each + i * kinds, weight, kinds);
    if (stats)
        count_groups(out, groups, size, stats);
    for (int64_t i = 0; i < n; i++)
        out[i] = isnan(out[i]) ? NAN : 0;
    for (int64_t g = 0; g < groups; g++)
        for (int k = 0; k < kinds; k++)
            add_kind(each + g * size * kinds, weight[k], kinds, k, size, eps, out + g * size);
    normalise(out, n, eps);
    clear_nan(out, n);
}

/* ---- tokens ---- */

void lm_token_rewards(const double *logp, const double *ref, int64_t T, double beta, double score,
                      double *out)
{
    for (int64_t t = 0; t < T; t++)
        out[t] = -beta * (logp[t] - ref[t]);
    if (T > 0)
        out[T - 1] += score;
}

void lm_gae(const double *reward, const double *value, int64_t T, double gamma, double lambda,
            double *adv, double *returns)
{
    double next_value = 0, next = 0;
    for (int64_t t = T - 1; t >= 0; t--) {
        double delta = reward[t] + gamma * next_value - value[t];
        adv[t] = next = delta + gamma * lambda * next;
        returns[t] = adv[t] + value[t];
        next_value = value[t];
    }
}

void lm_whiten(double *x, const bool *mask, int64_t n, bool keep_mean)
{
    double mean = 0, square = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        mean += !mask || mask[i] ? x[i] : 0;
        count += !mask || mask[i];
    }
    if (count < 2)
        return;
    mean /= (double)count;
    for (int64_t i = 0; i < n; i++)
        square += !mask || mask[i] ? (x[i] - mean) * (x[i] - mean) : 0;
    double scale = 1 / sqrt(square / (double)(count - 1) + 1e-8);
    for (int64_t i = 0; i < n; i++)
        if (!mask || mask[i])
            x[i] = (x[i] - mean) * scale + (keep_mean ? mean : 0);
}
