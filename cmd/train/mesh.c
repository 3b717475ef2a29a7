/* SPDX-License-Identifier: Apache-2.0 */
/* mesh.c -- the ranks of a run, from the options of train.
 *
 * The micro-batches of a step and the leaves of its sums define a run, the number of ranks does not: those are kept for
 * resumed runs, this one is chosen anew. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/threads.h"
#include "graph/layout.h"
#include "train/options.h"

enum { MOST_MICROS = 65535 }; /* of --gradient-accumulation-steps */

/* Processes are ranks: their launcher says how many there are. */
static lm_code take_processes(lm_err *e)
{
    if (!tool.comm)
        return LM_OK;
    if (lm_given(&tool, "ranks"))
        return lm_fail(e, LM_EUSAGE, "--ranks", "leave it out, or start one process",
                       "makes threads of one process, and %d processes are ranks already",
                       tool.ranks);
    opt.ranks = tool.ranks;
    return LM_OK;
}

/* Only the batch can be shared now.  Without --ranks the mesh says how many there are. */
static lm_code read_mesh(lm_err *e)
{
    const bool given = lm_given(&tool, "ranks") || tool.comm;
    lm_mesh mesh;
    char todo[64];
    if (!opt.mesh)
        return LM_OK;
    if (lm_mesh_read(opt.mesh, &mesh, e)) {
        snprintf(e->where, sizeof e->where, "--mesh");
        return e->code;
    }
    snprintf(todo, sizeof todo, "give --mesh dp=%" PRId64,
             given ? opt.ranks : mesh.size[LM_AXIS_DP]);
    for (int i = 0; i < LM_AXES; i++)
        if (i != LM_AXIS_DP && mesh.size[i] > 1)
            return lm_fail(e, LM_EUSAGE, "--mesh", todo, "ranks share the batch (dp) only, not %s",
                           lm_axis_names[i]);
    if (!given)
        opt.ranks = lm_mesh_ranks(&mesh);
    if (!tool.comm && opt.ranks > LM_THREAD_RANKS)
        return lm_fail(e, LM_EUSAGE, "--mesh", NULL,
                       "%" PRId64 " ranks, and at most %d share a step", opt.ranks,
                       LM_THREAD_RANKS);
    return lm_mesh_ranks(&mesh) == opt.ranks
               ? LM_OK
               : lm_fail(e, LM_EUSAGE, "--mesh", todo,
                         tool.comm ? "it has %" PRId64 " ranks, and there are %" PRId64
                                   : "it has %" PRId64 " ranks, and --ranks %" PRId64,
                         lm_mesh_ranks(&mesh), opt.ranks);
}

/* The largest number of ranks up to the wanted one that fits; one always does. */
static int64_t nearest_ranks(void)
{
    int64_t n = opt.ranks;
    while (n > 1 && !lm_ranks_fit(n, opt.accumulate, opt.leaves))
        n--;
    return n;
}

static int64_t nearest_multiple(int64_t of, int64_t n)
{
    const int64_t down = n / of * of;
    return down && (n - down <= down + of - n || down + of > MOST_MICROS) ? down : down + of;
}

static int64_t largest_divisor(int64_t of, int64_t most)
{
    most = most < of ? most : of;
    while (of % most)
        most--;
    return most;
}

static lm_code check_leaves(bool resumed, lm_err *e)
{
    char todo[160];
    if (opt.accumulate % opt.leaves) {
        snprintf(todo, sizeof todo, "give --leaves %" PRId64,
                 largest_divisor(opt.accumulate, opt.leaves));
        return lm_fail(e, LM_EUSAGE, "--leaves", todo,
                       "%" PRId64 " leaves do not divide the %" PRId64 " micro-batches of a step",
                       opt.leaves, opt.accumulate);
    }
    if (lm_ranks_fit(opt.ranks, opt.accumulate, opt.leaves))
        return LM_OK;
    snprintf(todo, sizeof todo, "give --ranks %" PRId64 "%s", nearest_ranks(),
             resumed ? ", or --leaves for sums in another order" : "");
    return opt.leaves % opt.ranks
               ? lm_fail(e, LM_EUSAGE, "--ranks", todo,
                         "%" PRId64 " ranks do not divide the %" PRId64
                         " leaves of the sums of a step",
                         opt.ranks, opt.leaves)
               : lm_fail(e, LM_EUSAGE, "--ranks", todo,
                         "each of %" PRId64 " ranks would add up %" PRId64
                         " leaves, no power of two: the order of the sums would change",
                         opt.ranks, opt.leaves / opt.ranks);
}

static lm_code check_micros(lm_err *e)
{
    char todo[160];
    if (opt.accumulate % opt.ranks == 0)
        return LM_OK;
    snprintf(todo, sizeof todo, "give %" PRId64 ", or --ranks %" PRId64,
             nearest_multiple(opt.ranks, opt.accumulate),
             largest_divisor(opt.accumulate, opt.ranks));
    return lm_fail(e, LM_EUSAGE, "--gradient-accumulation-steps", todo,
                   "%" PRId64 " ranks do not divide the %" PRId64 " micro-batches of a step",
                   opt.ranks, opt.accumulate);
}

/* For the history: the number of ranks is not in it, what follows from it is. */
static lm_code tell_ranks(lm_err *e)
{
    static const char *const names[] = { "gradient-accumulation-steps", "leaves", NULL };
    return opt.ranks > 1 && !opt.loop.resume ? lm_tell_too(&tool, names, e) : LM_OK;
}

/* A run from before there were leaves has one. */
lm_code train_ask_ranks(lm_trainer_opts *o, lm_err *e)
{
    const bool resumed = opt.loop.resume, chosen = opt.leaves > 0 || resumed;
    if (take_processes(e) || read_mesh(e))
        return e->code;
    if (opt.ranks > 1 && strcmp(tool.device, "cpu") != 0)
        return lm_fail(e, LM_EUSAGE,
                       tool.comm                  ? "--device"
                       : lm_given(&tool, "ranks") ? "--ranks"
                                                  : "--mesh",
                       tool.comm ? "give --device cpu, or start one process"
                                 : "leave it out, or give --device cpu",
                       "several ranks compute on processors, not on %s", tool.device);
    if (opt.accumulate < 0)
        opt.accumulate = opt.ranks;
    if (opt.leaves < 0)
        opt.leaves = resumed ? 1 : opt.ranks;
    if ((chosen ? check_leaves(resumed, e) : check_micros(e)) || tell_ranks(e))
        return e->code;
    o->accumulate = opt.accumulate;
    o->ranks = (int)opt.ranks;
    o->ranks_here = tool.ranks_here;
    o->leaves = opt.leaves;
    return LM_OK;
}
