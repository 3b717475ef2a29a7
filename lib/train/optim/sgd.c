/* SPDX-License-Identifier: Apache-2.0 */
/* sgd.c -- gradient descent, with momentum as frameworks have it: the rate stays outside the buffer, decay is
 * coupled.
 *   d = g + wd p;  buf = first ? d : momentum buf + (1 - dampening) d
 *   p -= lr (nesterov ? d + momentum buf : buf) */
#include "kernels/optim.h"
#include "op/ops.h"
#include "train/optim/optims.h"

enum { MOMENTUM, DAMPENING, NESTEROV, DECAY };
enum { HEAVY_MOMENTUM, HEAVY_DECAY };

static const lm_hyper hyper[] = {
    [MOMENTUM] = { "momentum", 0.9, 0, 0.9999999, "0: none, and no state", NULL },
    [DAMPENING] = { "dampening", 0, 0, 1, "of what enters the buffer", NULL },
    [NESTEROV] = { "nesterov", 0, 0, 1, "look ahead by the buffer", "off on" },
    [DECAY] = { "weight_decay", 0.1, 0, 10, "on matrices only", NULL },
    { 0 },
};

/* The same with momentum in its name. */
static const lm_hyper heavy[] = {
    [HEAVY_MOMENTUM] = { "momentum", 0.9, 1e-9, 0.9999999, "of the buffer", NULL },
    [HEAVY_DECAY] = { "weight_decay", 0, 0, 10, "on matrices only", NULL },
    { 0 },
};

static lm_code check(const double *h, lm_err *e)
{
    if (h[NESTEROV] != 0 && (h[MOMENTUM] <= 0 || h[DAMPENING] > 0))
        return lm_fail(e, LM_EUSAGE, "nesterov", NULL, "needs momentum and no dampening");
    return LM_OK;
}

static double shrinks(const double *h)
{
    return h[DECAY] * (1 - h[DAMPENING] * (h[MOMENTUM] > 0)) / (1 - h[MOMENTUM]);
}

static double shrinks_heavy(const double *h)
{
    return h[HEAVY_DECAY] / (1 - h[HEAVY_MOMENTUM]);
}

static void numbers(const double *h, double lr, int64_t t, double *out)
{
    (void)h;
    out[0] = lr;
    out[1] = t == 0;
}

static lm_code append(lm_update *u, const lm_update_tensor *t, double dampening, bool nesterov,
                      lm_err *e)
{
    lm_vid in[4] = { t->grad, lm_update_sumsq(u), lm_update_watch(u), lm_update_numbers(u) };
    lm_vid out[3] = { t->param, LM_SKIP, t->low >= 0 ? t->low : LM_SKIP };
    lm_sgd_attr a = { .momentum = lm_update_hyper(u, "momentum"),
                      .dampening = dampening,
                      .nesterov = nesterov,
                      .weight_decay = t->decay ? lm_update_hyper(u, "weight_decay") : 0,
                      .clip_norm = lm_update_clip_norm(u),
                      .clip_value = lm_update_clip_value(u) };
    if (a.momentum > 0 && lm_update_state(u, t, "momentum_buffer", t->shape, &out[1], e))
        return e->code;
    return lm_graph_append(lm_update_graph(u), &lm_op_sgd, &a, in, out, e);
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    return append(u, t, lm_update_hyper(u, "dampening"), lm_update_hyper(u, "nesterov") != 0, e);
}

static lm_code update_momentum(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    return append(u, t, 0, false, e);
}

static lm_code update_nesterov(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    return append(u, t, 0, true, e);
}

const lm_optim lm_optim_sgd = {
    .name = "sgd",
    .rate = 0.1,
    .about = "gradient descent, with momentum",
    .hyper = hyper,
    .check = check,
    .shrinks = shrinks,
    .n_numbers = 2,
    .numbers = numbers,
    .update = update,
};

const lm_optim lm_optim_momentum = {
    .name = "momentum",
    .rate = 0.1,
    .about = "gradient descent with a heavy ball",
    .hyper = heavy,
    .shrinks = shrinks_heavy,
    .n_numbers = 2,
    .numbers = numbers,
    .update = update_momentum,
};

const lm_optim lm_optim_nesterov = {
    .name = "nesterov",
    .rate = 0.1,
    .about = "momentum that looks ahead",
    .hyper = heavy,
    .shrinks = shrinks_heavy,
    .n_numbers = 2,
    .numbers = numbers,
    .update = update_nesterov,
};
