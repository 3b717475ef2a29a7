/* SPDX-License-Identifier: Apache-2.0 */
/* chart_axis.c -- round ticks for an axis, their labels, and the smoothing of a line. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "format/chart.h"

/* Usual steps of time, in seconds; beyond the last: multiples of days. */
static const double time_steps[] = { 1,   2,   5,    10,   15,   30,    60,    120,   300,
                                     600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400 };
enum { TIME_STEPS = sizeof time_steps / sizeof *time_steps };

/* The smallest of 1, 2, 5 times a power of ten that is not below `raw` > 0. */
static double round_step(double raw)
{
    double p = pow(10, floor(log10(raw)));
    double f = raw / p;

    return p * (f <= 1.0000001 ? 1 : f <= 2.0000001 ? 2 : f <= 5.0000001 ? 5 : 10);
}

static double choose_step(lm_axis_kind kind, double span, int most)
{
    double raw = span / (most > 1 ? most - 1 : 1);

    if (kind == LM_AXIS_TIME && raw > 0.5) {
        for (int i = 0; i < TIME_STEPS; i++)
            if (time_steps[i] >= raw)
                return time_steps[i];
        return 86400 * round_step(raw / 86400);
    }
    if (kind == LM_AXIS_COUNT && raw < 1)
        return 1; /* no half steps */
    return round_step(raw);
}

/* 1500 -> "1.5k"; exact to four digits. */
static void label_count(char *s, size_t size, double v)
{
    static const char *const suffix[] = { "", "k", "M", "B", "T" };
    int i = 0;

    while (i < 4 && fabs(v) >= 1000) {
        v /= 1000;
        i++;
    }
    snprintf(s, size, "%.4g%s", v, suffix[i]);
}

/* 90 -> "1m30", 7200 -> "2h": the largest unit, and the rest in the next one. */
static void label_time(char *s, size_t size, double v)
{
    static const struct {
        double unit, next;
        const char *name;
    } u[] = { { 86400, 3600, "d" }, { 3600, 60, "h" }, { 60, 1, "m" } };

    for (int i = 0; i < 3; i++) {
        if (v < u[i].unit)
            continue;
        double whole = floor(v / u[i].unit + 1e-9);
        double rest = round((v - whole * u[i].unit) / u[i].next);

        if (rest > 0)
            snprintf(s, size, "%.0f%s%02.0f", whole, u[i].name, rest);
        else
            snprintf(s, size, "%.0f%s", whole, u[i].name);
        return;
    }
    snprintf(s, size, "%.3g%s", v, v > 0 ? "s" : "");
}

/* "3e-04" -> "3e-4": no leading zeros in an exponent. */
static void trim_exponent(char *s)
{
    char *p = strchr(s, 'e'), *from;

    if (!p)
        return;
    p++;
    if (*p == '+')
        memmove(p, p + 1, strlen(p));
    else if (*p == '-')
        p++;
    for (from = p; *from == '0' && from[1]; from++)
        ;
    memmove(p, from, strlen(from) + 1);
}

/* As many digits as the distance between ticks requires. */
static void label_number(char *s, size_t size, double v, double step)
{
    double top = floor(log10(fmax(fabs(v), step)) + 1e-9), unit = floor(log10(step) + 1e-9);

    if (v == 0)
        snprintf(s, size, "0");
    else if (fabs(v) >= 1e5 && unit >= 2)
        label_count(s, size, v);
    else if (unit < -4 || top >= 7)
        snprintf(s, size, "%.*e", (int)fmin(fmax(top - unit, 0), 6), v);
    else
        snprintf(s, size, "%.*f", unit < 0 ? (int)-unit : 0, v);
    trim_exponent(s);
}

static void add_tick(lm_chart_axis *a, double v, double step)
{
    if (a->n >= LM_AXIS_TICKS)
        return;
    a->tick[a->n] = v;
    if (a->kind == LM_AXIS_COUNT)
        label_count(a->label[a->n], sizeof *a->label, v);
    else if (a->kind == LM_AXIS_TIME)
        label_time(a->label[a->n], sizeof *a->label, v);
    else
        label_number(a->label[a->n], sizeof *a->label, v, step);
    a->n++;
}

/* Ends of a widened axis: whole ticks, or a margin of a twentieth where whole ticks would leave
 * much space empty. */
static void widen_ends(lm_chart_axis *a, double min, double max)
{
    double span = max - min;

    if (min - a->lo > 0.15 * span)
        a->lo = min >= 0 ? fmax(min - span / 20, 0) : min - span / 20;
    if (a->hi - max > 0.15 * span)
        a->hi = max + span / 20;
}

/* Ticks at the multiples of one step.  Few whole ticks may leave much of the axis empty: then the
 * ends are moved inwards, and a smaller step is tried until two ticks remain. */
static void fit_linear(lm_chart_axis *a, double min, double max, int most, bool tight)
{
    for (int trial = 0; trial < 3; trial++) {
        double step = choose_step(a->kind, max - min, most << trial);
        double first = floor(min / step + 1e-9), last = ceil(max / step - 1e-9);

        if (!(last > first))
            last = first + 1;
        a->n = 0;
        a->lo = tight ? min : first * step;
        a->hi = tight ? max : last * step;
        if (!tight && trial < 2)
            widen_ends(a, min, max);
        for (double k = first; k <= last && a->n < LM_AXIS_TICKS; k++) {
            double v = k * step;
            if (v >= a->lo - 1e-9 * step && v <= a->hi + 1e-9 * step)
                add_tick(a, v, step);
        }
        if (a->n >= 2)
            return;
    }
}

/* Ticks at 1, or 1 2 5, of each decade, or of every few decades. */
static void fit_log(lm_chart_axis *a, double min, double max, int most, bool tight)
{
    static const double mult[3] = { 1, 2, 5 };
    double lo = floor(log10(min) + 1e-9), hi = ceil(log10(max) - 1e-9);
    double every = fmax(1, ceil((hi - lo) / fmax(1, most - 1)));
    bool fine = every == 1 && 3 * (log10(max) - log10(min)) + 1 <= most;

    a->lo = min;
    a->hi = max;
    if (!tight && fine) { /* widened to the next 1, 2 or 5 */
        double below = pow(10, lo), above = pow(10, hi);
        for (int i = 0; i < 3; i++) {
            if (mult[i] * pow(10, lo) <= min * (1 + 1e-9))
                below = mult[i] * pow(10, lo);
            if (mult[2 - i] * pow(10, hi - 1) >= max * (1 - 1e-9))
                above = mult[2 - i] * pow(10, hi - 1);
        }
        a->lo = fmin(below, min);
        a->hi = fmax(above, max);
    } else if (!tight) {
        a->lo = pow(10, lo);
        a->hi = pow(10, hi);
    }
    for (double d = lo; d <= hi; d += every) {
        for (int i = 0; i < (fine ? 3 : 1); i++) {
            double v = mult[i] * pow(10, d);
            if (v >= a->lo * (1 - 1e-9) && v <= a->hi * (1 + 1e-9))
                add_tick(a, v, v);
        }
    }
}

void lm_axis_fit(lm_chart_axis *a, double min, double max, int most, bool tight)
{
    a->n = 0;
    if (most > LM_AXIS_TICKS)
        most = LM_AXIS_TICKS;
    if (most < 2)
        most = 2;
    if (a->log && !(min > 0)) {
        min = 1;
        max = 10;
    }
    if (!(max - min > 1e-12 * fmax(fabs(min), fabs(max)))) {
        double by = a->kind == LM_AXIS_COUNT ? 1 : min == 0 ? 1 : 0.1 * fabs(min);
        max = a->log ? min * 2 : max + by;
        min = a->log ? min / 2 : min - (min >= by || min < 0 ? by : min);
    }
    if (!a->log) {
        fit_linear(a, min, max, most, tight);
        return;
    }
    fit_log(a, min, max, most, tight);
    if (a->n < 2) { /* too narrow for decades: round numbers at logarithmic positions */
        a->n = 0;
        fit_linear(a, min, max, most, true);
    }
}

double lm_axis_at(const lm_chart_axis *a, double v)
{
    if (!a->log)
        return (v - a->lo) / (a->hi - a->lo);
    if (!(v > 0))
        return NAN;
    return log(v / a->lo) / log(a->hi / a->lo);
}

void lm_chart_smooth(double *out, const double *y, size_t n, double beta)
{
    double m = 0, weight = 0; /* weight = 1 - beta^k */

    for (size_t i = 0; i < n; i++) {
        if (!isfinite(y[i])) {
            out[i] = y[i];
            continue;
        }
        m = beta * m + (1 - beta) * y[i];
        weight = beta * weight + (1 - beta);
        out[i] = m / weight;
    }
}
