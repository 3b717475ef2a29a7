/* SPDX-License-Identifier: Apache-2.0 */
/* fit.c -- which meshes a model can have. */
#include "parallel/fit.h"

#include <inttypes.h>
#include <stdio.h>

/* The first thing that n ranks do not divide, and in *size its number; NULL: they can share all layers. */
static const char *obstacle(const lm_config *c, int64_t n, int64_t *size)
{
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

bool lm_fits_tensor(const lm_config *c, int64_t ranks)
{
    int64_t size;
    return ranks > 0 && !obstacle(c, ranks, &size);
}

/* "choose tp=2, or tp=8": the nearest sizes on either side that serve. */
static void nearest(const lm_config *c, int64_t n, int64_t size, char *out, size_t room)
{
    int64_t less = n, more = n;
    while (--less > 1 && !lm_fits_tensor(c, less))
        ;
    while (++more <= size && !lm_fits_tensor(c, more))
        ;
    if (more <= size)
        snprintf(out, room, "choose tp=%" PRId64 " or tp=%" PRId64, less, more);
    else
        snprintf(out, room, "choose tp=%" PRId64, less);
}

lm_code lm_fit_mesh(const lm_config *c, const lm_mesh *mesh, lm_err *e)
{
    const int64_t n = lm_mesh_along(mesh, LM_AXIS_TP);
    char todo[80];
    int64_t size;
    const char *what = n > 1 ? obstacle(c, n, &size) : NULL;
    if (!what)
        return LM_OK;
    nearest(c, n, size, todo, sizeof todo);
    return lm_fail(e, LM_EUSAGE, "mesh", todo, "tp=%" PRId64 " does not divide %" PRId64 " %s", n,
                   size, what);
}
