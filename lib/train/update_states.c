/* SPDX-License-Identifier: Apache-2.0 */
/* update_states.c -- states of an update: blocks of them, and where a tensor's part stands. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "train/update_impl.h"

/* Values have these shapes until all tensors have their offsets in a block. */
static const int64_t boundless = INT64_C(1) << 60;

/* A block for each name and type: rules of two groups may keep states of one name in different types. */
static lm_code find_state(lm_update *u, const char *name, lm_dtype format, size_t *out, lm_err *e)
{
    size_t k = 0;
    while (k < u->n_states && (u->state[k].format != format || strcmp(u->state[k].name, name)))
        k++;
    *out = k;
    if (k < u->n_states)
        return LM_OK;
    if (lm_grow(&u->state, &u->cap_states, k + 1, sizeof *u->state, "states", e) ||
        lm_grow(&u->state_value, &u->cap_values, k + 1, sizeof *u->state_value, "states", e) ||
        lm_grow(&u->cap_parts, &u->cap_caps, k + 1, sizeof *u->cap_parts, "states", e) ||
        lm_graph_value(u->g, LM_ROLE_OPT, lm_shape1(format, boundless), name, &u->state_value[k],
                       e))
        return e->code;
    u->state[k] = (lm_store_state){ .name = u->g->value[u->state_value[k]].name, .format = format };
    u->cap_parts[k] = 0;
    u->n_states++;
    return LM_OK;
}

/* The last part of a block that this rank holds; *end: elements up to its end.  NULL, and *end = 0, if it holds no part. */
static const struct lm_state_part *last_here(const lm_store_state *s, int64_t *end)
{
    int n = s->n_parts;
    while (n > 0 && s->part[n - 1].none)
        n--;
    *end = n ? s->part[n - 1].at + lm_tensor_count(&s->part[n - 1].shape) : 0;
    return n ? &s->part[n - 1] : NULL;
}

static int64_t align_up(int64_t n)
{
    return (n + LM_BLOCK_ALIGN - 1) / LM_BLOCK_ALIGN * LM_BLOCK_ALIGN;
}

/* States are in the order of their parameters, so that runs over parameters are runs over
 * states. */
static int64_t place_for(const lm_store_state *s, const lm_update_tensor *all,
                         const lm_update_tensor *t, int64_t count)
{
    int64_t end;
    const struct lm_state_part *last = last_here(s, &end);
    const lm_update_tensor *before = t;
    while (before > all && update_is_elsewhere(before - 1))
        before--;
    if (last && before > all && before[-1].index == last->tensor && count == update_count(t) &&
        lm_tensor_count(&last->shape) == update_count(before - 1)) {
        const int64_t gap = t->offset - before[-1].offset - update_count(before - 1);
        if (gap < LM_BLOCK_ALIGN)
            return end + gap;
    }
    return align_up(end);
}

/* prefix.name, truncated if it is too long. */
void update_join_name(char out[512], const char *prefix, const char *name)
{
    size_t n = strlen(prefix), m = strlen(name);
    n = n < 200 ? n : 200;
    m = m < 300 ? m : 300;
    memcpy(out, prefix, n);
    out[n] = '.';
    memcpy(out + n + 1, name, m);
    out[n + 1 + m] = 0;
}

lm_code lm_update_state(lm_update *u, const lm_update_tensor *t, const char *name, lm_tensor shape,
                        lm_vid *out, lm_err *e)
{
    char full[512];
    size_t k;
    if (find_state(u, name, shape.dtype, &k, e))
        return e->code;
    lm_store_state *s = &u->state[k];
    if (t < u->t || t >= u->t + u->n_tensors)
        return lm_fail(e, LM_EBUG, name, NULL,
                       "a state of a value that is not a tensor of the model");
    if (s->n_parts && s->part[s->n_parts - 1].tensor == t->index)
        return lm_fail(e, LM_EBUG, name, NULL, "is declared twice for %s", t->name);
    if (lm_grow(&s->part, &u->cap_parts[k], (size_t)s->n_parts + 1, sizeof *s->part, "states", e))
        return e->code;
    int64_t at = u->elsewhere ? 0 : place_for(s, u->t, t, lm_tensor_count(&shape));
    s->part[s->n_parts++] =
        (struct lm_state_part){ .tensor = t->index,
                                .at = at,
                                .shape = shape,
                                .turned = t->transposed && lm_same_shape(&shape, &t->shape),
                                .none = u->elsewhere,
                                .owned = u->owned };
    if (u->elsewhere)
        return lm_graph_value(u->g, LM_ROLE_CONST, shape, NULL, out, e);
    update_join_name(full, name, t->name);
    return lm_graph_view(u->g, u->state_value[k], at, shape, full, out, e);
}

void update_drop_states(lm_update *u, const lm_update_tensor *t)
{
    for (size_t k = 0; k < u->n_states; k++)
        if (u->state[k].n_parts && u->state[k].part[u->state[k].n_parts - 1].tensor == t->index)
            u->state[k].n_parts--;
}

static int by_tensor(const void *a, const void *b)
{
    const struct lm_state_part *x = a, *y = b;
    return x->tensor < y->tensor ? -1 : x->tensor > y->tensor;
}

/* Set the sizes of blocks, and the order of tensors in files to that of the model. */
void update_close_states(lm_update *u)
{
    for (size_t k = 0; k < u->n_states; k++) {
        lm_store_state *s = &u->state[k];
        last_here(s, &s->count);
        s->count = align_up(s->count > 0 ? s->count : 1);
        u->g->value[u->state_value[k]].t.dim[0] = s->count;
        qsort(s->part, (size_t)s->n_parts, sizeof *s->part, by_tensor);
    }
}
