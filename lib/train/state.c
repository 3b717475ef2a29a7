/* SPDX-License-Identifier: Apache-2.0 */
/* state.c -- the blocks of a training run. */
#include "train/state.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "train/flat.h"

static lm_code block(lm_train_state *s, const char *what, size_t bytes, void *out, lm_err *e)
{
    return s->backend->alloc(s->backend, bytes, what, out, e);
}

size_t lm_train_work_bytes(const lm_model *m, lm_backend *b)
{
    size_t norm = lm_sumsq_work(b, m->block);
    size_t loss = lm_total_work(b, m->build.batch * m->build.seq);
    return norm > loss ? norm : loss;
}

lm_code lm_train_state_new(const lm_model *m, lm_backend *b, const lm_optim *optim,
                           const lm_optim_hyper *h, lm_train_state *s, lm_err *e)
{
    memset(s, 0, sizeof *s);
    s->model = m;
    s->optim = optim;
    s->backend = b;
    s->best_loss = s->best_val = INFINITY;
    s->evaluated = s->best_step = -1;
    s->block_bytes = (size_t)m->block * sizeof(float);
    s->work_bytes = lm_train_work_bytes(m, b);
    s->n_states = optim ? optim->states(h) : 0;
    lm_code rc = block(s, "weights", s->block_bytes, &s->param, e);
    if (!rc && m->build.precision.low == LM_DTYPE_BF16)
        rc = block(s, "BF16 weights", s->block_bytes / 2, &s->low, e);
    if (!rc && optim)
        rc = block(s, "gradients", s->block_bytes, &s->grad, e);
    for (int i = 0; !rc && i < s->n_states; i++)
        rc = block(s, "optimiser states", s->block_bytes, &s->state[i], e);
    if (!rc && optim && s->work_bytes)
        rc = block(s, "scratch", s->work_bytes, &s->work, e);
    if (rc)
        lm_train_state_fini(s);
    return rc;
}

static void drop(lm_train_state *s, void *p, size_t bytes)
{
    if (p)
        s->backend->free(s->backend, p, bytes);
}

void lm_train_state_fini(lm_train_state *s)
{
    if (!s->backend)
        return;
    drop(s, s->param, s->block_bytes);
    drop(s, s->low, s->block_bytes / 2);
    drop(s, s->grad, s->block_bytes);
    drop(s, s->work, s->work_bytes);
    for (int i = 0; i < LM_OPTIM_MAX_STATES; i++)
        drop(s, s->state[i], s->block_bytes);
    memset(s, 0, sizeof *s);
}
