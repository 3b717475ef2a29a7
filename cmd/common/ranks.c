/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.c -- see ranks.h. */
#include "common/ranks.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/mem.h"
#include "base/process.h"
#include "base/stop.h"
#include "comm/open.h"
#include "common/modules.h"

void lm_ranks_look(lm_tool *t)
{
    const lm_launch l = lm_launched(getenv);

    t->rank = l.rank;
    t->ranks = l.ranks;
}

/* As one of several ranks such a tool would do the whole work, and write the same output as all others. */
static lm_code refuse(const lm_launch *l, lm_err *e)
{
    char started[80];

    lm_launch_says(l, started, sizeof started);
    return lm_fail(e, LM_EUSAGE, started, "start one", "each would do the whole work");
}

/* Where a rank runs. */
typedef struct {
    uint64_t machine, cores;
} place;

static place here(void)
{
    cpu_set_t set;
    place p = { .machine = lm_boot_hash() };

    if (!sched_getaffinity(0, sizeof set, &set))
        p.cores = lm_hash64(&set, sizeof set, 0);
    return p;
}

/* The ranks of this machine, and those that may use the same cores, this one included. */
static lm_code count_near(lm_tool *t, lm_err *e)
{
    const place mine = here();
    place *all = NULL;

    t->ranks_here = t->ranks_sharing = t->rank_here = 0;
    if (lm_comm_gather_each(t->comm, &mine, sizeof mine, (void *)&all, e))
        return e->code;
    for (int r = 0; r < t->ranks; r++) {
        t->ranks_here += all[r].machine == mine.machine;
        t->rank_here += all[r].machine == mine.machine && r < t->rank;
        t->ranks_sharing += !memcmp(&all[r], &mine, sizeof mine);
    }
    lm_free(all);
    return LM_OK;
}

lm_code lm_ranks_open(lm_tool *t, lm_err *e)
{
    lm_comm_opts o = { .launch = lm_launched(getenv) };
    lm_modules modules;

    if (o.launch.ranks == 1)
        return LM_OK;
    if (!(t->use & LM_USE_RANKS))
        return refuse(&o.launch, e);
    lm_code rc = lm_modules_find(&modules, e);
    o.modules = (const char *const *)modules.dir;
    if (!rc)
        rc = lm_comm_open(&o, &t->comm, e);
    lm_modules_fini(&modules);
    if (rc)
        return rc;
    t->rank = lm_comm_rank(t->comm);
    t->ranks = lm_comm_size(t->comm);
    return lm_comm_agree(t->comm, "version", LM_VERSION, e) ||
                   lm_comm_agree(t->comm, "kernels", lm_cpu_level_name(t->cpu), e) ||
                   count_near(t, e)
               ? e->code
               : LM_OK;
}

lm_code lm_ranks_same_work(const lm_tool *t, const char *work, lm_err *e)
{
    return t->comm ? lm_comm_agree(t->comm, "work", work, e) : LM_OK;
}

lm_code lm_ranks_keep(lm_tool *t, int n, lm_err *e)
{
    lm_comm *kept = NULL;

    if (n >= t->ranks)
        return LM_OK;
    if (lm_comm_split(t->comm, t->rank < n ? 0 : -1, t->rank, &kept, e))
        return e->code;
    t->all_ranks = t->comm;
    t->comm = kept;
    t->rests = !kept;
    if (t->rests)
        return LM_OK;
    t->ranks = n;
    return count_near(t, e);
}

/* Also those that rest. */
static lm_comm *everybody(lm_tool *t)
{
    return t->all_ranks ? t->all_ranks : t->comm;
}

bool lm_ranks_fail(lm_tool *t, lm_err *e)
{
    lm_err first = { 0 };
    lm_comm *all = everybody(t);

    lm_comm_abort(all, e);
    if (lm_comm_barrier(all, &first) &&
        (first.code != LM_EUSAGE || strcmp(first.what, e->what) != 0))
        *e = first;
    return lm_comm_reports(all);
}

bool lm_ranks_close(lm_tool *t)
{
    lm_err ignored = { 0 };
    lm_comm *all = everybody(t);
    const bool failed = all && t->status == 0 && lm_comm_barrier(all, &ignored);

    lm_stop_together(NULL, NULL);
    if (t->all_ranks)
        lm_comm_free(t->comm);
    lm_comm_free(all);
    t->comm = t->all_ranks = NULL;
    return failed;
}
