/* SPDX-License-Identifier: Apache-2.0 */
/* optim.c -- the optimisers: AdamW, SGD and SGD with momentum. */
#include "train/optim.h"

#include <math.h>
#include <string.h>

#include "kernels/optim.h"
#include "train/flat.h"

static int two_states(const lm_optim_hyper *h)
{
    (void)h;
    return 2;
}

static void adamw_now(const lm_optim_hyper *h, double lr, int64_t t, double out[LM_OPTIM_NOW])
{
    out[0] = lr;
    out[1] = 1 - pow(h->beta1, (double)(t + 1));
    out[2] = 1 - pow(h->beta2, (double)(t + 1));
}

/* AdamW, arXiv:1711.05101 algorithm 2, with the full rate multiplying the decay as frameworks do.
 */
static lm_code adamw_run(lm_backend *b, const lm_optim_hyper *h, const lm_optim_run *r, lm_err *e)
{
    double now[LM_OPTIM_NOW];
    adamw_now(h, r->lr, r->t, now);
    lm_adamw_attr a = { .lr = now[0],
                        .beta1 = h->beta1,
                        .beta2 = h->beta2,
                        .eps = h->eps,
                        .weight_decay = r->decay ? h->weight_decay : 0,
                        .bc1 = now[1],
                        .bc2 = now[2],
                        .clip_norm = r->clip_norm,
                        .clip_value = r->clip_value };
    lm_tensor in[4] = { lm_flat(LM_DTYPE_F32, r->n, r->grad), lm_flat(LM_DTYPE_F64, 1, r->sumsq),
                        lm_flat(LM_DTYPE_F64, 1, r->watch), lm_flat(LM_DTYPE_F64, 3, r->now) };
    lm_tensor out[4] = { lm_flat(LM_DTYPE_F32, r->n, r->param),
                         lm_flat(LM_DTYPE_F32, r->n, r->state[0]),
                         lm_flat(LM_DTYPE_F32, r->n, r->state[1]),
                         lm_flat(LM_DTYPE_BF16, r->n, r->low) };
    return lm_flat_call(b, "adamw", &a, in, 4, out, 4, e);
}

static int momentum_state(const lm_optim_hyper *h)
{
    return h->momentum > 0;
}

static void sgd_now(const lm_optim_hyper *h, double lr, int64_t t, double out[LM_OPTIM_NOW])
{
    (void)h;
    out[0] = lr;
    out[1] = t == 0;
    out[2] = 0;
}

/* SGD with framework momentum: the rate stays outside the buffer, decay is coupled. */
static lm_code sgd_run(lm_backend *b, const lm_optim_hyper *h, const lm_optim_run *r, lm_err *e)
{
    lm_sgd_attr a = { .lr = r->lr,
                      .momentum = h->momentum,
                      .dampening = h->dampening,
                      .weight_decay = r->decay ? h->weight_decay : 0,
                      .clip_norm = r->clip_norm,
                      .clip_value = r->clip_value,
                      .nesterov = h->nesterov,
                      .first = r->t == 0 };
    lm_tensor in[4] = { lm_flat(LM_DTYPE_F32, r->n, r->grad), lm_flat(LM_DTYPE_F64, 1, r->sumsq),
                        lm_flat(LM_DTYPE_F64, 1, r->watch), lm_flat(LM_DTYPE_F64, 2, r->now) };
    lm_tensor out[3] = { lm_flat(LM_DTYPE_F32, r->n, r->param),
                         lm_flat(LM_DTYPE_F32, r->n, r->state[0]),
                         lm_flat(LM_DTYPE_BF16, r->n, r->low) };
    return lm_flat_call(b, "sgd", &a, in, 4, out, 3, e);
}

static const lm_optim_flat optims[] = {
    { "adamw", 2, { "exp_avg", "exp_avg_sq" }, two_states, adamw_now, adamw_run },
    { "sgd", 1, { "momentum_buffer" }, momentum_state, sgd_now, sgd_run },
};
enum { N_OPTIMS = sizeof optims / sizeof *optims };
const char *const lm_optim_names[] = { "adamw", "sgd", NULL };

const lm_optim_flat *lm_optim_flat_find(const char *name)
{
    for (int i = 0; i < N_OPTIMS; i++)
        if (!strcmp(optims[i].name, name))
            return &optims[i];
    return NULL;
}
