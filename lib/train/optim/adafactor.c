/* SPDX-License-Identifier: Apache-2.0 */
/* adafactor.c -- Adafactor (arXiv:1804.04235), in the order of Hugging Face: the second moment of a matrix as the
 * product of its means over rows and over columns.
 *   b = 1 - t^decay_rate;  U = g^2 + eps1
 *   matrices: R = b R + (1 - b) mean over columns of U, C over rows; d = g / sqrt(R/mean(R)) / sqrt(C)
 *   vectors: v = b v + (1 - b) U; d = g / sqrt(v)
 *   d /= max(1, rms(d)/clip_threshold);  alpha = rate max(eps2, rms(p)) with scale_parameter, else rate
 *   d *= alpha;  with beta1: m = beta1 m + (1 - beta1) d, d = m;  p -= wd alpha p;  p -= d
 * rate: that of the run; with relative_step min(1e-2 or with warmup_init 1e-6 t, 1/sqrt(t)), times the run's schedule
 * from 1 on. */
#include <math.h>
#include <stdio.h>

#include "train/optim/rule.h"

enum { RATE_DECAY, EPS_1, EPS_2, THRESHOLD, BETA, RELATIVE, WARMUP };

static const lm_hyper hyper[] = {
    [RATE_DECAY] = { "decay_rate", -0.8, -10, -1e-3, "exponent of the second moment", NULL },
    [EPS_1] = { "eps1", 1e-30, 0, 1, "added to squares", NULL },
    [EPS_2] = { "eps2", 1e-3, 0, 1, "least size of a parameter", NULL },
    [THRESHOLD] = { "clip_threshold", 1, 1e-3, 1e9, "of the root mean square of a step", NULL },
    [BETA] = { "beta1", 0, 0, 0.9999999, "first moment; 0: none, and no state", NULL },
    [RELATIVE] = { "relative_step", 0, 0, 1, "rates by the step, without lr", "off on" },
    [WARMUP] = { "warmup_init", 0, 0, 1, "relative steps begin small", "off on" },
    { "scale_parameter", 1, 0, 1, "rates by the size of the parameter", "off on" },
    DECAY(0),
    { 0 },
};

static const char *const numbers_are[] = { "rate", "b" };

static void numbers(const double *h, double lr, int64_t t, double *out)
{
    double step = (double)(t + 1), most = h[WARMUP] > 0 ? 1e-6 * step : 1e-2;
    out[0] = h[RELATIVE] > 0 ? lr * fmin(most, 1 / sqrt(step)) : lr;
    out[1] = 1 - pow(step, h[RATE_DECAY]);
}

static bool own_rate(const double *h)
{
    return h[RELATIVE] > 0;
}

static lm_code check(const double *h, lm_err *e)
{
    if (h[WARMUP] > 0 && !(h[RELATIVE] > 0))
        return lm_fail(e, LM_EUSAGE, "warmup_init", NULL, "needs relative_step");
    return LM_OK;
}

/* The gradient over the root of its second moment. */
static lm_code direction(lm_update *u, const lm_update_tensor *t, lm_vid *out, lm_err *e)
{
    lm_vid v, rows, columns, square = LM_NONE, of_rows, of_columns, mean;
    *out = LM_NONE;
    if (t->shape.ndim == 1)
        return lm_rule_state(u, t, "exp_avg_sq", &v, e) ||
                       lm_rule(u, t, "v = b*v + (1 - b)*(g*g + eps1); d = g / sqrt(v)",
                               NAMES(LM_IS("v", v), LM_MAKES("d", out)), e)
                   ? e->code
                   : LM_OK;
    if (lm_rule_rows(u, t, "exp_avg_sq_row", &rows, e) ||
        lm_rule_columns(u, t, "exp_avg_sq_col", &columns, e) ||
        lm_rule(u, t, "square = g*g + eps1", NAMES(LM_MAKES("square", &square)), e) ||
        lm_rule_reduce(u, LM_REDUCE_SUM, LM_OVER_ROW, true, square, &of_rows, e) ||
        lm_rule_reduce(u, LM_REDUCE_SUM, LM_OVER_COLUMN, true, square, &of_columns, e) ||
        lm_rule(u, t, "r = b*r + (1 - b)*x", NAMES(LM_IS("r", rows), LM_IS("x", of_rows)), e) ||
        lm_rule(u, t, "c = b*c + (1 - b)*x", NAMES(LM_IS("c", columns), LM_IS("x", of_columns)),
                e) ||
        lm_rule_reduce(u, LM_REDUCE_SUM, LM_OVER_ALL, true, rows, &mean, e))
        return e->code;
    return lm_rule(
        u, t, "d = g / sqrt(r/mean) / sqrt(c)",
        NAMES(LM_IS("r", rows), LM_IS("c", columns), LM_IS("mean", mean), LM_MAKES("d", out)), e);
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    bool moment = lm_update_hyper(u, "beta1") > 0;
    lm_vid d, m = LM_NONE, size, own;
    char text[400];
    if (direction(u, t, &d, e) ||
        lm_rule_reduce(u, LM_REDUCE_SQUARES, LM_OVER_ALL, true, d, &size, e) ||
        lm_rule_reduce(u, LM_REDUCE_SQUARES, LM_OVER_ALL, true, t->param, &own, e) ||
        (moment && lm_rule_state(u, t, "exp_avg", &m, e)))
        return e->code;
    snprintf(text, sizeof text,
             "alpha = rate * where(scale_parameter, max(eps2, sqrt(own)), 1);"
             "way = alpha*d / max(1, sqrt(size)/clip_threshold); %s"
             "p = p - weight_decay*alpha*p - way",
             moment ? "m = beta1*m + (1 - beta1)*way; way = m;" : "");
    return lm_rule(u, t, text,
                   NAMES(LM_IS("d", d), LM_IS("m", m), LM_IS("size", size), LM_IS("own", own)), e);
}

const lm_optim lm_optim_adafactor = {
    .name = "adafactor",
    .rate = 1e-2,
    .about = "second moments as rows times columns",
    .hyper = hyper,
    .own_rate = own_rate,
    .check = check,
    .n_numbers = 2,
    .numbers = numbers,
    .number = numbers_are,
    .update = update,
};
