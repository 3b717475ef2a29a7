/* SPDX-License-Identifier: Apache-2.0 */
/* state.c -- the memory of a training run. */
#include "train/state.h"

#include <math.h>
#include <string.h>

#include "train/flat.h"

size_t lm_train_work_bytes(const lm_model *m, lm_backend *b)
{
    size_t norm = lm_sumsq_work(b, m->block);
    size_t loss = lm_total_work(b, m->build.batch * m->build.seq);
    return norm > loss ? norm : loss;
}

lm_store_opts lm_train_store(const lm_optim_flat *optim, const lm_optim_hyper *h)
{
    return (lm_store_opts){
        .master = true, .grads = true, .state = optim->state, .n_states = optim->states(h)
    };
}

lm_code lm_train_state_new(const lm_model *m, lm_backend *b, const lm_optim_flat *optim,
                           const lm_optim_hyper *h, lm_par *par, lm_train_state *s, lm_err *e)
{
    lm_store_opts o = lm_train_store(optim, h);
    o.par = par;
    *s = (lm_train_state){ .model = m, .optim = optim, .backend = b };
    s->best_loss = s->best_val = INFINITY;
    s->evaluated = s->best_step = -1;
    s->work_bytes = lm_train_work_bytes(m, b);
    lm_code rc = lm_store_new(m, b, &o, &s->store, e);
    if (!rc && s->work_bytes)
        rc = b->alloc(b, s->work_bytes, "scratch", &s->work, e);
    if (rc)
        lm_train_state_fini(s);
    return rc;
}

void lm_train_state_fini(lm_train_state *s)
{
    lm_store_free(s->store);
    if (s->work)
        s->backend->free(s->backend, s->work, s->work_bytes);
    memset(s, 0, sizeof *s);
}
