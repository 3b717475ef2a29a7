/* SPDX-License-Identifier: Apache-2.0 */
/* fit.c -- which meshes a model can have. */
#include "parallel/fit.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* What ranks along an axis have to share. */
typedef struct {
    const lm_config *c;
    int64_t batch, seq;
    int64_t tp; /* ranks along it, which share heads with those along cp */
    lm_context context;
} work;

/* The first thing that n ranks along tp do not divide, and in *size its number; NULL: they can share all layers. */
static const char *tensor_obstacle(const work *w, int64_t n, int64_t *size)
{
    const lm_config *c = w->c;
    for (int64_t l = 0; l < lm_config_depth(c); l++) {
        const lm_layer *y = &c->layer[l];
        if (y->attention != LM_ATTENTION_DELTA) {
            *size = y->heads;
            if (y->heads % n)
                return "heads";
            *size = y->kv_heads;
            if (y->kv_heads % n && n % y->kv_heads)
                return "heads of keys";
        }
        *size = y->moe.experts ? y->moe.shared : y->ffn;
        if (*size % n)
            return y->moe.experts ? "columns of the shared expert" : "columns of an MLP";
    }
    *size = c->vocab;
    return c->vocab < n ? "words" : NULL;
}

/* The same along ep: ranks have whole windows, and whole experts of each layer that has some. */
static const char *expert_obstacle(const work *w, int64_t n, int64_t *size)
{
    for (int64_t l = 0; l < lm_config_depth(w->c); l++) {
        *size = w->c->layer[l].moe.experts;
        if (*size && *size < n)
            return "experts";
    }
    *size = w->batch;
    return w->batch % n ? "windows of a micro-batch" : NULL;
}

/* True if ranks along cp have all positions of some heads in this layer. */
static bool shares_heads(const work *w, const lm_layer *y)
{
    return y->attention != LM_ATTENTION_DELTA &&
           (w->context == LM_CONTEXT_HEADS || y->attention == LM_ATTENTION_LINEAR ||
            y->blocks.size > 0);
}

/* The same along cp: of each window ranks have as many positions, and in attention heads. */
static const char *context_obstacle(const work *w, int64_t n, int64_t *size)
{
    for (int64_t l = 0; l < lm_config_depth(w->c); l++) {
        const lm_layer *y = &w->c->layer[l];
        if (!shares_heads(w, y))
            continue;
        *size = y->heads / w->tp;
        if (*size % n)
            return w->tp > 1 ? "heads of a rank along tp" : "heads";
        *size = y->kv_heads > w->tp ? y->kv_heads / w->tp : 1;
        if (*size % n && n % *size)
            return w->tp > 1 ? "heads of keys of a rank along tp" : "heads of keys";
    }
    *size = w->seq;
    if (w->context == LM_CONTEXT_ENDS)
        return w->seq % (2 * n) ? "positions of a window in two halves" : NULL;
    return w->seq % n ? "positions of a window" : NULL;
}

typedef const char *obstacle_of(const work *w, int64_t n, int64_t *size);

/* "choose tp=2, or tp=8": the nearest sizes on either side that serve. */
static void nearest(const work *w, obstacle_of *obstacle, const char *axis, int64_t n, int64_t size,
                    char *out, size_t room)
{
    int64_t less = n, more = n, unused;
    while (--less > 1 && obstacle(w, less, &unused))
        ;
    while (++more <= size && obstacle(w, more, &unused))
        ;
    if (more <= size)
        snprintf(out, room, "choose %s=%" PRId64 " or %s=%" PRId64, axis, less, axis, more);
    else
        snprintf(out, room, "choose %s=%" PRId64, axis, less);
}

/* True if as many ranks along cp can share the positions of blocks around a ring. */
static bool has_ring(const work *w, int64_t n)
{
    work ring = *w;
    int64_t unused;
    ring.context = LM_CONTEXT_RING;
    return w->context == LM_CONTEXT_HEADS && !context_obstacle(&ring, n, &unused);
}

static lm_code fit_axis(const work *w, lm_axis axis, int64_t n, obstacle_of *obstacle, lm_err *e)
{
    const char *name = lm_axis_names[axis];
    char todo[120];
    int64_t size;
    const char *what = n > 1 ? obstacle(w, n, &size) : NULL;
    if (!what)
        return LM_OK;
    nearest(w, obstacle, name, n, size, todo, 80);
    if (axis == LM_AXIS_CP && has_ring(w, n))
        snprintf(todo + strlen(todo), sizeof todo - strlen(todo), ", or blocks around a ring");
    return lm_fail(e, LM_EUSAGE, "mesh", todo, "%s=%" PRId64 " does not divide %" PRId64 " %s",
                   name, n, size, what);
}

static bool has_experts(const lm_config *c)
{
    bool any = false;
    for (int64_t l = 0; l < lm_config_depth(c); l++)
        any |= c->layer[l].moe.experts > 0;
    return any;
}

lm_code lm_fit_mesh(const lm_config *c, const lm_mesh *mesh, int64_t batch, int64_t seq, lm_err *e)
{
    const int64_t tp = lm_mesh_along(mesh, LM_AXIS_TP), ep = lm_mesh_along(mesh, LM_AXIS_EP);
    const work w = { c, batch, seq, tp, mesh->context };
    char todo[40];
    if (ep > 1 && !has_experts(c)) {
        snprintf(todo, sizeof todo, "choose dp=%" PRId64, ep);
        return lm_fail(e, LM_EUSAGE, "mesh", todo,
                       "ep=%" PRId64 " shares experts, of which this "
                       "model has 0",
                       ep);
    }
    return fit_axis(&w, LM_AXIS_TP, tp, tensor_obstacle, e) ||
                   fit_axis(&w, LM_AXIS_EP, ep, expert_obstacle, e) ||
                   fit_axis(&w, LM_AXIS_CP, lm_mesh_along(mesh, LM_AXIS_CP), context_obstacle, e)
               ? e->code
               : LM_OK;
}
