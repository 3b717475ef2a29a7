/* SPDX-License-Identifier: Apache-2.0 */
/* mesh.c -- see mesh.h. */
#include "common/mesh.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/threads.h"
#include "common/frame.h"
#include "common/ranks.h"
#include "graph/layout.h"
#include "parallel/pipeline.h"

enum { MOST_RANKS = 1000000 };

typedef struct {
    lm_tool *tool;
    lm_mesh_args *m;
    bool threads; /* the tool makes ranks of them */
    bool splits;  /* its ranks share more than the batch */
    bool resumed;
    int64_t others; /* ranks that share the micro-batches of one along dp */
    int ways;       /* of micro-batches through the stages, with leaves of their own */
    lm_mesh mesh;
} asker;

/* The option that made the ranks; `otherwise` if none did. */
static const char *said(const asker *x, const char *otherwise)
{
    return lm_given(x->tool, "ranks") ? "--ranks" : otherwise;
}

/* "dp=2,tp=2" with so many along dp. */
static void show_mesh(const lm_mesh *mesh, int64_t dp, char out[64])
{
    static const lm_axis others[] = { LM_AXIS_PP, LM_AXIS_TP, LM_AXIS_EP, LM_AXIS_CP };
    int n = snprintf(out, 64, "dp=%" PRId64, dp);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (lm_mesh_along(mesh, others[i]) > 1 && n < 64)
            n += snprintf(out + n, 64 - (size_t)n, ",%s=%d", lm_axis_names[others[i]],
                          lm_mesh_along(mesh, others[i]));
}

/* How to make n of them along dp. */
static void how_many(const asker *x, int64_t n, char out[96])
{
    char mesh[64] = "";
    if (x->m->mesh)
        show_mesh(&x->mesh, n, mesh);
    if (x->tool->comm)
        snprintf(out, 96, "start %" PRId64 " process%s%s%s", n * x->others,
                 n * x->others == 1 ? "" : "es", *mesh ? " with --mesh " : "", mesh);
    else if (*mesh && !lm_given(x->tool, "ranks"))
        snprintf(out, 96, "give --mesh %s", mesh);
    else
        snprintf(out, 96, "give --ranks %" PRId64 "%s%s", n * x->others,
                 *mesh ? " and --mesh " : "", mesh);
}

/* Processes are ranks: their launcher says how many there are. */
static lm_code take_processes(const asker *x, lm_err *e)
{
    if (!x->tool->comm)
        return LM_OK;
    if (lm_given(x->tool, "ranks") && !x->m->elastic)
        return lm_fail(e, LM_EUSAGE, "--ranks", "leave it out, or start one process",
                       "makes threads of one process, and %d processes are ranks already",
                       x->tool->ranks);
    x->m->ranks = x->tool->ranks;
    return LM_OK;
}

static lm_code check_product(const asker *x, int64_t product, const char *todo, lm_err *e)
{
    if (product == x->m->ranks)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, "--mesh", todo,
                   lm_given(x->tool, "ranks") ? "it has %" PRId64 " ranks, and --ranks %" PRId64
                                              : "it has %" PRId64 " ranks, and there are %" PRId64,
                   product, x->m->ranks);
}

static lm_code check_axes(const asker *x, const lm_mesh *mesh, lm_err *e)
{
    for (int i = 0; i < LM_AXES; i++)
        if (i != LM_AXIS_DP && !x->splits && mesh->size[i] > 1)
            return lm_fail(e, LM_EUSAGE, "--mesh", NULL, "ranks share the batch (dp) only, not %s",
                           lm_axis_names[i]);
    return LM_OK;
}

/* Ranks share the batch (dp) and, where the tool splits models, what the other axes do.  Without --ranks and processes the mesh
 * says how many threads there are; an axis dp that is not named is what the others leave. */
static lm_code read_mesh(asker *x, lm_mesh *mesh, lm_err *e)
{
    const bool known = x->m->ranks > 0;
    char todo[80] = "give --mesh ";
    *mesh = lm_mesh_alone;
    if (!x->m->mesh) {
        mesh->size[LM_AXIS_DP] = known ? (int)x->m->ranks : 1;
        return LM_OK;
    }
    if (lm_mesh_read(x->m->mesh, mesh, e)) {
        snprintf(e->where, sizeof e->where, "--mesh");
        return e->code;
    }
    if (check_axes(x, mesh, e))
        return e->code;
    const int64_t others = x->others = lm_mesh_ranks(mesh) / mesh->size[LM_AXIS_DP];
    if (known && !strstr(x->m->mesh, "dp=") && x->m->ranks % others == 0)
        mesh->size[LM_AXIS_DP] = (int)(x->m->ranks / others);
    const int64_t product = lm_mesh_ranks(mesh);
    const bool can = !known || x->m->ranks % others == 0;
    show_mesh(can ? mesh : &lm_mesh_alone,
              !known ? mesh->size[LM_AXIS_DP] : x->m->ranks / (can ? others : 1), todo + 12);
    if (!known && product > 1 && !x->threads)
        return lm_fail(e, LM_EUSAGE, "--mesh", "start the processes with mpirun -n",
                       "it has %" PRId64 " ranks, and this is one process", product);
    if (!known)
        x->m->ranks = product;
    if (!x->tool->comm && x->m->ranks > LM_THREAD_RANKS && !x->tool->dry_run)
        return lm_fail(e, LM_EUSAGE, "--mesh",
                       "start the processes with mpirun -n, or plan them with --dry-run",
                       "%" PRId64 " ranks are more than the %d that one process has", x->m->ranks,
                       LM_THREAD_RANKS);
    return check_product(x, product, todo, e);
}

/* What is of ranks along cp alone. */
static lm_code set_context(const asker *x, lm_mesh *mesh, lm_err *e)
{
    const char *name = x->m->context;
    if (!name)
        return LM_OK;
    if (lm_mesh_along(mesh, LM_AXIS_CP) == 1)
        return lm_fail(e, LM_EUSAGE, "--cp", "give --mesh cp=N",
                       "is of ranks that share positions");
    for (int i = 0; lm_context_names[i]; i++)
        if (!strcmp(lm_context_names[i], name))
            mesh->context = (lm_context)i;
    return LM_OK;
}

/* ---- fewer ranks than the mesh has ---- */

/* The mesh that the run is to have, if ranks are there. */
static lm_code read_wanted(const asker *x, lm_mesh *mesh, lm_err *e)
{
    lm_mesh_args *m = x->m;
    *mesh = lm_mesh_alone;
    if (m->mesh && lm_mesh_read(m->mesh, mesh, e)) {
        snprintf(e->where, sizeof e->where, "--mesh");
        return e->code;
    }
    const int64_t others = lm_mesh_ranks(mesh) / mesh->size[LM_AXIS_DP];
    if (!m->mesh || !strstr(m->mesh, "dp=")) {
        const int64_t dp = m->was > 0 ? m->was : m->ranks > others ? m->ranks / others : 1;
        mesh->size[LM_AXIS_DP] = (int)dp;
    }
    return check_axes(x, mesh, e);
}

/* Ranks are worth most, then axes that are as they were, then all but dp: ranks along these have less of the model each. */
static int64_t worth(const lm_mesh *mesh, const lm_mesh *wanted)
{
    int64_t same = 0;
    for (int i = 0; i < LM_AXES; i++)
        same += lm_mesh_along(mesh, (lm_axis)i) == lm_mesh_along(wanted, (lm_axis)i);
    return (lm_mesh_ranks(mesh) * 16 + same) * (MOST_RANKS + 1) +
           lm_mesh_ranks(mesh) / mesh->size[LM_AXIS_DP];
}

static bool can_have(const asker *x, const lm_mesh *mesh, const lm_mesh *wanted)
{
    const lm_mesh_args *m = x->m;
    const bool same = lm_mesh_along(mesh, LM_AXIS_PP) == lm_mesh_along(wanted, LM_AXIS_PP);
    return lm_ranks_fit(mesh->size[LM_AXIS_DP], m->accumulate, m->leaves) &&
           (!m->legal || m->legal(mesh, same ? m->schedule : NULL, same ? m->stages : NULL));
}

/* The best mesh up to `most` ranks whose axes divide the wanted ones. */
static bool find_nearest(const asker *x, const lm_mesh *wanted, int64_t most, lm_mesh *best)
{
    lm_mesh mesh = lm_mesh_alone;
    bool found = false;
    mesh.context = wanted->context;
    for (;;) {
        if (lm_mesh_ranks(&mesh) <= most &&
            (!found || worth(&mesh, wanted) > worth(best, wanted)) && can_have(x, &mesh, wanted)) {
            *best = mesh;
            found = true;
        }
        int i = 0;
        for (; i < LM_AXES; i++) { /* the next one, as a number whose digits are divisors */
            while (mesh.size[i]++ < wanted->size[i] && wanted->size[i] % mesh.size[i])
                ;
            if (mesh.size[i] <= wanted->size[i])
                break;
            mesh.size[i] = 1;
        }
        if (i == LM_AXES)
            return found;
    }
}

static void say_nearest(const asker *x, const lm_mesh *mesh, int64_t there)
{
    char now[64], rest[80] = "";
    const int64_t idle = there - lm_mesh_ranks(mesh);
    show_mesh(mesh, mesh->size[LM_AXIS_DP], now);
    if (idle > 0)
        snprintf(rest, sizeof rest, "; %" PRId64 " of %" PRId64 " rest%s", idle, there,
                 idle == 1 ? "s" : "");
    lm_say(x->tool, LM_LOG_NOTICE,
           "--elastic: %" PRId64 " rank%s for the mesh %s: goes on with %s%s", there,
           there == 1 ? "" : "s", x->m->wanted, now, rest);
}

/* --elastic: the mesh of the options or of the run, or the nearest one for the ranks that are there. */
static lm_code read_elastic(asker *x, lm_mesh *mesh, lm_err *e)
{
    lm_mesh_args *m = x->m;
    lm_mesh wanted;
    if (read_wanted(x, &wanted, e) || set_context(x, &wanted, e))
        return e->code;
    const int64_t all = lm_mesh_ranks(&wanted), there = m->ranks > 0 ? m->ranks : all;
    const int64_t ways = lm_pipeline_ranks_of_stage(m->schedule) * wanted.size[LM_AXIS_DP];
    show_mesh(&wanted, wanted.size[LM_AXIS_DP], m->wanted);
    if (m->leaves < 0)
        m->leaves = x->resumed ? 1 : ways;
    if (m->accumulate < 0)
        m->accumulate = ways * lm_mesh_along(&wanted, LM_AXIS_PP);
    *mesh = wanted;
    x->others = all / wanted.size[LM_AXIS_DP];
    if (there < all) {
        if (!find_nearest(x, &wanted, there, mesh))
            return lm_fail(e, LM_EUSAGE, "--elastic", "give --mesh",
                           "no mesh of up to %" PRId64 " ranks fits the model and %" PRId64
                           " leaves of %" PRId64 " micro-batches",
                           there, m->leaves, m->accumulate);
        say_nearest(x, mesh, there);
        if (lm_mesh_along(mesh, LM_AXIS_PP) != lm_mesh_along(&wanted, LM_AXIS_PP))
            m->schedule = m->stages = NULL;
        if (lm_mesh_along(mesh, LM_AXIS_CP) == 1)
            m->context = NULL;
        if (lm_mesh_along(mesh, LM_AXIS_EP) == 1)
            m->expert_room = 0;
    } else if (there > all) {
        m->ranks = there;
        return check_product(x, all, "start as many", e);
    }
    m->mesh = m->wanted;
    m->ranks = lm_mesh_ranks(mesh);
    return LM_OK;
}

/* ---- what does not fit ---- */

/* The largest number of ranks up to the wanted one that fits; one always does. */
static int64_t nearest_ranks(const lm_mesh_args *m)
{
    int64_t n = m->ranks;
    while (n > 1 && !lm_ranks_fit(n, m->accumulate, m->leaves))
        n--;
    return n;
}

static int64_t nearest_multiple(int64_t of, int64_t n)
{
    const int64_t down = n / of * of;
    return down && (n - down <= down + of - n || down + of > LM_MESH_MOST_MICROS) ? down
                                                                                  : down + of;
}

static int64_t largest_divisor(int64_t of, int64_t most)
{
    most = most < of ? most : of;
    while (of % most)
        most--;
    return most;
}

static lm_code check_leaves(const asker *x, lm_err *e)
{
    const lm_mesh_args *m = x->m;
    char todo[240], ranks[96];
    if (m->accumulate % m->leaves) {
        snprintf(todo, sizeof todo, "give --leaves %" PRId64,
                 largest_divisor(m->accumulate, m->leaves));
        return lm_fail(e, LM_EUSAGE, "--leaves", todo,
                       "%" PRId64 " leaves do not divide the %" PRId64 " micro-batches of a step",
                       m->leaves, m->accumulate);
    }
    if (lm_ranks_fit(m->ranks, m->accumulate, m->leaves))
        return LM_OK;
    how_many(x, nearest_ranks(m), ranks);
    snprintf(todo, sizeof todo, "%s%s", ranks,
             x->resumed ? ", or give --leaves for sums in another order" : "");
    return m->leaves % m->ranks
               ? lm_fail(e, LM_EUSAGE, said(x, "ranks"), todo,
                         "%" PRId64 " ranks do not divide the %" PRId64
                         " lea%s of the sums of a step",
                         m->ranks, m->leaves, m->leaves == 1 ? "f" : "ves")
               : lm_fail(e, LM_EUSAGE, said(x, "ranks"), todo,
                         "each of %" PRId64 " ranks would add up %" PRId64
                         " leaves, no power of two: the order of the sums would change",
                         m->ranks, m->leaves / m->ranks);
}

static lm_code check_micros(const asker *x, lm_err *e)
{
    const lm_mesh_args *m = x->m;
    char todo[240], ranks[96];
    if (m->accumulate % m->ranks == 0)
        return LM_OK;
    how_many(x, largest_divisor(m->accumulate, m->ranks), ranks);
    snprintf(todo, sizeof todo, "give %" PRId64 ", or %s",
             nearest_multiple(m->ranks, m->accumulate), ranks);
    return lm_fail(e, LM_EUSAGE, "--gradient-accumulation-steps", todo,
                   "%" PRId64 " ranks do not divide the %" PRId64 " micro-batches of a step",
                   m->ranks, m->accumulate);
}

static lm_code check_device(const asker *x, const lm_mesh *mesh, lm_err *e)
{
    const char *device = x->tool->device;
    const char *axis = lm_trainer_host_axis(mesh);
    if (lm_mesh_ranks(mesh) <= 1 || !strcmp(device, "cpu"))
        return LM_OK;
    if (!x->m->devices)
        return lm_fail(e, LM_EUSAGE, x->tool->comm ? "--device" : said(x, "--mesh"),
                       x->tool->comm ? "give --device cpu, or start one process"
                                     : "leave it out, or give --device cpu",
                       "several ranks compute on processors, not on %s", device);
    if (axis)
        return lm_fail(e, LM_EUSAGE, said(x, "--mesh"),
                       "share by dp, tp, pp and cp (ulysses), or give --device cpu",
                       "ranks share by %s on processors, not on %s", axis, device);
    return x->m->zero ? lm_fail(e, LM_EUSAGE, "--zero", "give 0, or --device cpu",
                                "ranks share states on processors, not on %s", device)
                      : LM_OK;
}

/* Each way through the stages of each rank along dp has leaves of its own, and twice as many micro-batches as ranks. */
static lm_code check_ways(const asker *x, lm_err *e)
{
    const lm_mesh_args *m = x->m;
    const int64_t parts = m->ranks * x->ways;
    char todo[120];
    if (x->ways == 1 || lm_ranks_fit(parts, m->accumulate, m->leaves))
        return LM_OK;
    snprintf(todo, sizeof todo, "give --leaves %" PRId64 "%s", parts,
             m->accumulate % parts ? " and a multiple of them as --gradient-accumulation-steps"
                                   : "");
    return lm_fail(e, LM_EUSAGE, "--schedule", todo,
                   "%s has two ways for micro-batches, each with leaves of its own: %" PRId64
                   " lea%s of %" PRId64 " micro-batches cannot be theirs",
                   m->schedule, m->leaves, m->leaves == 1 ? "f" : "ves", m->accumulate);
}

/* For the history: the number of ranks is not in it, what follows from it is. */
static lm_code tell_ranks(const asker *x, int pp, lm_err *e)
{
    static const char *const names[] = { "gradient-accumulation-steps", "leaves", NULL },
                             *const staged[] = { "gradient-accumulation-steps", "leaves",
                                                 "tied-apart", NULL };
    if (pp > 1)
        return lm_tell_too(x->tool, staged, e);
    return x->m->ranks > 1 && !x->resumed ? lm_tell_too(x->tool, names + x->m->varies, e) : LM_OK;
}

/* What is of ranks along pp alone. */
static lm_code check_stages(const asker *x, const lm_mesh *mesh, lm_err *e)
{
    const char *given = x->m->schedule ? "--schedule" : x->m->stages ? "--stages" : NULL;
    const bool staged = lm_mesh_along(mesh, LM_AXIS_PP) > 1;
    if (staged && !x->m->apart && lm_given(x->tool, "tied-apart"))
        return lm_fail(e, LM_EUSAGE, "--tied-apart", "leave --no-tied-apart out",
                       "first and last stage add up their gradients by themselves");
    x->m->turned = staged && x->resumed && !x->m->apart;
    x->m->apart |= staged;
    return given && !staged
               ? lm_fail(e, LM_EUSAGE, given, "give --mesh pp=N", "is of ranks that share layers")
               : LM_OK;
}

lm_code lm_mesh_ask(lm_tool *t, lm_mesh_args *m, bool resumed, lm_trainer_opts *o, lm_err *e)
{
    asker x = { t, m, lm_option_find("ranks") >= 0, m->splits, resumed, 1, 1, lm_mesh_alone };
    const bool chosen = m->leaves > 0 || resumed;
    lm_mesh mesh;
    if (take_processes(&x, e) || (m->elastic ? read_elastic : read_mesh)(&x, &mesh, e) ||
        set_context(&x, &mesh, e) || check_stages(&x, &mesh, e))
        return e->code;
    x.mesh = mesh;
    if (m->ranks < 0)
        m->ranks = 1;
    if (check_device(&x, &mesh, e))
        return e->code;
    m->ranks = mesh.size[LM_AXIS_DP]; /* those that share a step's micro-batches */
    x.ways = lm_pipeline_ranks_of_stage(m->schedule);
    if (m->accumulate < 0)
        m->accumulate = m->ranks * lm_mesh_along(&mesh, LM_AXIS_PP) * x.ways;
    if (m->leaves < 0) /* a run from before there were leaves has one */
        m->leaves = resumed ? 1 : m->ranks * x.ways;
    if (m->varies)
        m->accumulate = m->leaves;
    if ((chosen ? check_leaves(&x, e) : check_micros(&x, e)) || check_ways(&x, e) ||
        tell_ranks(&x, lm_mesh_along(&mesh, LM_AXIS_PP), e))
        return e->code;
    o->accumulate = m->accumulate;
    o->mesh = mesh;
    o->rows = lm_mesh_along(&mesh, LM_AXIS_TP) > 1 && m->rows;
    if (lm_mesh_inner(&mesh) != lm_mesh_along(&mesh, LM_AXIS_TP)) { /* other axes split the rows */
        if (o->rows && lm_given(t, "sequence-parallel"))
            return lm_fail(e, LM_EUSAGE, "--sequence-parallel", "leave it out",
                           "splits the rows along tp, and the mesh does along another axis");
        o->rows = false;
    }
    if (m->expert_room > 0 && lm_mesh_along(&mesh, LM_AXIS_EP) == 1)
        return lm_fail(e, LM_EUSAGE, "--expert-room", "leave it out, or give --mesh ep=N",
                       "serves ranks that share experts");
    if (m->expert_room > 0 && lm_mesh_along(&mesh, LM_AXIS_PP) > 1)
        return lm_fail(e, LM_EUSAGE, "--expert-room", "leave it out",
                       "has no effect along pp, where stages have memory for all rows");
    o->build.expert_room = m->expert_room;
    if (m->zero < 3 &&
        lm_given(t, "zero-prefetch")) /* a resumed run may have it from its former level */
        return lm_fail(e, LM_EUSAGE, "--zero-prefetch", "leave it out, or give --zero 3",
                       "serves ranks that share weights");
    o->zero = (int)m->zero;
    o->gather_ahead = m->gather_ahead >= 0 ? m->gather_ahead : 1;
    o->leaves = m->leaves;
    o->pipe_schedule = m->schedule;
    o->pipe_stages = m->stages;
    o->build.apart = m->apart;
    if (m->elastic && t->comm && lm_ranks_keep(t, (int)lm_mesh_ranks(&mesh), e))
        return e->code;
    o->ranks_here = t->ranks_here;
    return LM_OK;
}
