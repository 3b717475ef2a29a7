/* SPDX-License-Identifier: Apache-2.0 */
/* sharing.c -- see sharing.h. */
#include "common/sharing.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/stop.h"
#include "graph/links.h"
#include "parallel/fit.h"
#include "parallel/layouts.h"

/* The arguments of all ranks, which must be the same. */
static lm_code check_alike(const lm_tool *t, lm_err *e)
{
    lm_buf text = { 0 };
    lm_code rc = LM_OK;
    for (int i = 1; !rc && i < t->full_argc; i++)
        rc = lm_buf_addf(&text, e, "%s%s", i > 1 ? " " : "", t->full_argv[i]);
    rc = rc ? rc : lm_comm_agree(t->comm, "options", text.data ? text.data : "", e);
    lm_buf_fini(&text);
    return rc;
}

lm_code lm_sharing_ask(lm_tool *t, const char *mesh, const char *adapter, lm_sharing *out,
                       lm_err *e)
{
    const int ranks = t->comm ? t->ranks : 1;
    out->mesh = lm_mesh_alone;
    if (mesh && lm_mesh_read(mesh, &out->mesh, e)) {
        snprintf(e->where, sizeof e->where, "--mesh");
        return e->code;
    }
    if (lm_mesh_ranks(&out->mesh) != lm_mesh_along(&out->mesh, LM_AXIS_TP))
        return lm_fail(e, LM_EUSAGE, "--mesh", "give --mesh tp=N",
                       "processes share the weights (tp) only");
    if (lm_mesh_ranks(&out->mesh) != ranks)
        return ranks == 1
                   ? lm_fail(e, LM_EUSAGE, "--mesh", "start the processes with mpirun -n",
                             "it has %lld ranks, and this is one process",
                             (long long)lm_mesh_ranks(&out->mesh))
                   : lm_fail(e, LM_EUSAGE, "--mesh", "give the number of the processes as tp=N",
                             "%d processes, of which each would do the whole work", ranks);
    if (ranks > 1 && adapter)
        return lm_fail(e, LM_EUSAGE, "--adapter", "merge it into the model first",
                       "processes share the weights of whole models only");
    if (ranks > 1 && strcmp(t->device, "cpu") != 0)
        return lm_fail(e, LM_EUSAGE, "--device", "give --device cpu",
                       "several ranks compute on processors, not on %s", t->device);
    if (ranks > 1 && check_alike(t, e))
        return e->code;
    lm_mesh_place(&out->mesh, t->rank);
    if (ranks > 1)
        out->links = lm_comm_links(t->comm);
    return LM_OK;
}

/* Ranks that one cannot reach stop, too: what is wrong is seen by their next exchange. */
static bool any_stops(void *ctx, bool mine)
{
    int32_t flag = mine;
    lm_err ignored = { 0 };
    return lm_comm_all_reduce(ctx, &flag, &flag, 1, LM_DTYPE_I32, LM_COMM_MAX, &ignored) || flag;
}

lm_code lm_sharing_use(lm_tool *t, lm_sharing *s, lm_backend *b, lm_loaded *model, lm_err *e)
{
    lm_build build = { 0 };
    if (lm_mesh_ranks(&s->mesh) == 1)
        return LM_OK;
    if (lm_fit_mesh(&model->config, &s->mesh, 1, 1, e))
        return e->code;
    lm_layouts_share(&build, &s->mesh, false);
    model->mesh = build.mesh;
    model->lay = build.lay;
    s->link[LM_AXIS_TP] = &s->links;
    b->links = s->link;
    lm_stop_together(any_stops, t->comm);
    return LM_OK;
}
