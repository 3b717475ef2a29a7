/* SPDX-License-Identifier: Apache-2.0 */
/* adamw.c -- AdamW (arXiv:1711.05101, algorithm 2), with the full rate multiplying the decay as frameworks do:
 *   p *= 1 - lr wd;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
 *   p -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) */
#include <math.h>

#include "kernels/optim.h"
#include "op/ops.h"
#include "train/optim/optims.h"

enum { BETA1, BETA2, EPS, DECAY };

static const lm_hyper hyper[] = {
    [BETA1] = { "beta1", 0.9, 0, 0.9999999, "first moment", NULL },
    [BETA2] = { "beta2", 0.95, 0, 0.9999999, "second moment", NULL },
    [EPS] = { "eps", 1e-8, 0, 1, "added to the root", NULL },
    [DECAY] = { "weight_decay", 0.1, 0, 10, "on matrices only", NULL },
    { 0 },
};

static void numbers(const double *h, double lr, int64_t t, double *out)
{
    out[0] = lr;
    out[1] = 1 - pow(h[BETA1], (double)(t + 1));
    out[2] = 1 - pow(h[BETA2], (double)(t + 1));
}

static lm_code update(lm_update *u, const lm_update_tensor *t, lm_err *e)
{
    lm_vid in[4] = { t->grad, lm_update_sumsq(u), lm_update_watch(u), lm_update_numbers(u) };
    lm_vid out[4] = { t->param, LM_NONE, LM_NONE, t->low >= 0 ? t->low : LM_SKIP };
    lm_adamw_attr a = { .beta1 = lm_update_hyper(u, "beta1"),
                        .beta2 = lm_update_hyper(u, "beta2"),
                        .eps = lm_update_hyper(u, "eps"),
                        .weight_decay = t->decay ? lm_update_hyper(u, "weight_decay") : 0,
                        .clip_norm = lm_update_clip_norm(u),
                        .clip_value = lm_update_clip_value(u) };
    if (lm_update_state(u, t, "exp_avg", t->shape, &out[1], e) ||
        lm_update_state(u, t, "exp_avg_sq", t->shape, &out[2], e))
        return e->code;
    return lm_graph_append(lm_update_graph(u), &lm_op_adamw, &a, in, out, e);
}

const lm_optim lm_optim_adamw = {
    .name = "adamw",
    .about = "Adam with decoupled weight decay",
    .hyper = hyper,
    .n_numbers = 3,
    .numbers = numbers,
    .update = update,
};
