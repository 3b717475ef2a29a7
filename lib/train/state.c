/* SPDX-License-Identifier: Apache-2.0 */
/* state.c -- the memory of a training run. */
#include "train/state.h"

#include <math.h>
#include <string.h>

/* The store options of a program's model. */
static lm_store_opts store_opts(const lm_program *p)
{
    const lm_vid *value;
    lm_store_opts o = { .master = true, .grads = true, .shown = lm_update_shows(p->update) };
    o.n_states = lm_update_states(p->update, &o.state, &value);
    o.twice = p->o.beside && p->o.beside->twice;
    o.own = lm_update_own(p->update);
    o.drops = p->o.zero >= 2;
    o.gathered = p->o.zero >= 3;
    o.states_in = p->o.states_in;
    o.states_dir = p->o.states_dir;
    return o;
}

lm_code lm_train_state_new(const lm_program *p, lm_par *par, lm_train_state *s, lm_err *e)
{
    lm_store_opts o = store_opts(p);
    o.par = par;
    *s =
        (lm_train_state){ .model = p->train, .optimizer = p->o.groups.text, .backend = p->backend };
    s->best_loss = s->best_val = INFINITY;
    s->evaluated = s->best_step = -1;
    return lm_store_new(p->train, p->backend, &o, &s->store, e);
}

void lm_train_state_fini(lm_train_state *s)
{
    lm_store_free(s->store);
    lm_buf_fini(&s->objective);
    json_decref(s->resumed);
    memset(s, 0, sizeof *s);
}
