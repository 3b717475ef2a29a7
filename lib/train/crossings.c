/* SPDX-License-Identifier: Apache-2.0 */
/* crossings.c -- see crossings.h. */
#include "train/crossings.h"

#include "base/mem.h"

static const lm_stage_border *border_at(const lm_model *m, int border, bool up)
{
    const lm_stage *at = &m->stages->stage[border];
    return up ? &at->up : &at->down;
}

static lm_vid value_at(const lm_stage_border *b, size_t k, bool sender)
{
    return sender ? b->value[k].from : b->value[k].to;
}

static size_t crossing_bytes(const lm_model *m, lm_vid v)
{
    return lm_value_bytes(&m->graph->value[v], &lm_mesh_alone);
}

/* In memory of the backend. */
static bool find_part(const exchanged *x, int border, bool up, bool sender, int slot, size_t k,
                      lm_pipe_part *out)
{
    const lm_stage_border *b = border_at(x->m, border, up);
    if (k >= b->n)
        return false;
    const lm_vid v = value_at(b, k, sender);
    const slots *s = &x->of[x->plan->slot[v] - 1];
    *out = (lm_pipe_part){ s->data + s->each * (size_t)slot + x->plan->offset[v],
                           crossing_bytes(x->m, v) };
    return true;
}

bool crossings_part(const exchanged *x, int border, bool up, bool sender, int slot, size_t k,
                    lm_pipe_part *out)
{
    if (!find_part(x, border, up, sender, slot, k, out) || !x->by)
        return k < border_at(x->m, border, up)->n;
    const lm_stage_border *b = border_at(x->m, border, up);
    const crossing *c = &x->by[border][up][sender];
    char *at = c->data + c->each * (size_t)slot;
    for (size_t i = 0; i < k; i++)
        at += crossing_bytes(x->m, value_at(b, i, sender));
    out->data = at;
    return true;
}

/* Between the host's memory and the device's: what a step receives, or what it sends; nothing on a host. */
static lm_code copy_parts(const exchanged *x, int border, bool up, bool sender, int slot, lm_err *e)
{
    lm_backend *b = x->b;
    lm_pipe_part near, far;
    for (size_t k = 0; x->by && find_part(x, border, up, sender, slot, k, &near) &&
                       crossings_part(x, border, up, sender, slot, k, &far);
         k++)
        if (b->copy(b, sender ? far.data : near.data, sender ? near.data : far.data, near.bytes,
                    b->main, e))
            return e->code;
    return LM_OK;
}

static bool goes_up(const lm_pipe_step *s)
{
    return s->kind == LM_PIPE_B || s->kind == LM_PIPE_I;
}

lm_code crossings_receive(const exchanged *x, const lm_pipe_step *s, int slot, lm_err *e)
{
    if (s->kind == LM_PIPE_F && s->stage > 0)
        return copy_parts(x, s->stage - 1, false, false, slot, e);
    return goes_up(s) && s->stage + 1 < x->stages ? copy_parts(x, s->stage, true, false, slot, e)
                                                  : LM_OK;
}

/* Then the step is complete: messages of the next ones may come into the same memory. */
lm_code crossings_hand_on(const exchanged *x, const lm_pipe_step *s, int slot, lm_err *e)
{
    lm_backend *b = x->b;
    if (s->kind == LM_PIPE_F && s->stage + 1 < x->stages)
        copy_parts(x, s->stage, false, true, slot, e);
    else if (goes_up(s) && s->stage > 0)
        copy_parts(x, s->stage - 1, true, true, slot, e);
    return e->code || !x->by ? e->code : b->sync(b, b->main, e);
}

/* Memory for one side of a border, whose values are in slots of a stage. */
static lm_code make_crossing(const exchanged *x, int border, bool up, bool sender, lm_err *e)
{
    const lm_stage_border *b = border_at(x->m, border, up);
    const int stage = border + (up == sender);
    crossing *c = &x->by[border][up][sender];
    void *data = NULL;
    c->n = x->of[stage].n;
    for (size_t k = 0; k < b->n && c->n; k++)
        c->each += crossing_bytes(x->m, value_at(b, k, sender));
    if (c->each && x->b->host_alloc(x->b, c->each * (size_t)c->n, "messages of stages", &data, e))
        return e->code;
    c->data = data;
    return LM_OK;
}

lm_code crossings_make(const exchanged *x, crossings **by, lm_err *e)
{
    if (x->b->host_memory)
        return LM_OK;
    if (lm_alloc_n(by, (size_t)x->stages, sizeof **by, "stages", e))
        return e->code;
    exchanged made = *x;
    made.by = *by;
    for (int k = 0; k < 4 * (x->stages - 1); k++)
        if (make_crossing(&made, k / 4, k / 2 % 2, k % 2, e))
            return e->code;
    return LM_OK;
}

void crossings_free(const exchanged *x)
{
    for (int k = 0; x->by && k < 4 * x->stages; k++) {
        crossing *c = &x->by[k / 4][k / 2 % 2][k % 2];
        if (c->data)
            x->b->host_free(x->b, c->data, c->each * (size_t)c->n);
    }
    lm_free(x->by);
}
