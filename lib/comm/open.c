/* SPDX-License-Identifier: Apache-2.0 */
/* open.c -- see open.h. */
#include "comm/open.h"

#include <errno.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/process.h"
#include "comm/comm_impl.h"
#include "comm/messages.h"
#include "comm/shm.h"

/* ---- the module ---- */

static lm_code open_wire(const lm_comm_opts *o, lm_wire **out, lm_err *e)
{
    const lm_module_search s = { .file = "libcore-mpi.so",
                                 .symbol = LM_WIRE_SYMBOL,
                                 .todo = "'make' builds it where Open MPI is (libopenmpi-dev)",
                                 .folders = o->modules,
                                 .want = { .size = sizeof(lm_wire), .contracts = LM_CONTRACTS } };
    const void *found = NULL;
    const lm_launch *l = &o->launch;
    char started[80];

    lm_launch_says(l, started, sizeof started);
    if (lm_module_open(&s, started, &found, e) || ((const lm_wire_module *)found)->open(out, e))
        return e->code;
    int sees = (*out)->size;
    if (!l->ranks || l->ranks == sees)
        return LM_OK;
    const char *name = (*out)->name;
    (*out)->close(*out, false);
    errno = 0;
    return lm_fail(e, LM_EIO, started,
                   "use the launcher of that library: mpirun, or srun with PMIx", "%s sees %d",
                   name, sees);
}

/* ---- shared memory ---- */

/* Ranks that see the same kernel and the same numbers of processes. */
typedef struct {
    uint64_t boot, processes;
} machine;

static machine this_machine(void)
{
    struct stat st;

    return (machine){ lm_boot_hash(), stat("/proc/self/ns/pid", &st) ? 0 : (uint64_t)st.st_ino };
}

static lm_code one_machine(lm_comm *c, bool *same, lm_err *e)
{
    const int n = lm_comm_size(c);
    machine mine = this_machine(), *all = NULL;

    *same = n <= LM_SHM_RANKS;
    if (lm_comm_gather_each(c, &mine, sizeof mine, (void *)&all, e))
        return e->code;
    for (int r = 0; r < n; r++)
        *same = *same && !memcmp(&all[r], &all[0], sizeof mine);
    lm_free(all);
    return LM_OK;
}

static void close_wire(void *wire, bool failed)
{
    ((lm_wire *)wire)->close(wire, failed);
}

/* Rank 0 makes the segment.  *out stays NULL when a rank cannot map it: a container may not let it. */
static lm_code share_memory(const lm_comm_opts *o, lm_comm *c, lm_wire *w, lm_comm **out, lm_err *e)
{
    lm_shm *s = NULL;
    lm_shm_name name = { 0 };
    lm_err why = { 0 };
    int32_t mapped;

    if (w->rank == 0 && !lm_shm_new(w->size, o->timeout, 0, &s, &why))
        name = lm_shm_name_of(s);
    if (!lm_comm_broadcast(c, &name, sizeof name, 0, e) && w->rank > 0 && name.pid)
        lm_shm_find(&name, &s, &why);
    if (s)
        lm_shm_enter(s, w->rank);
    mapped = s && !o->unmapped;
    if (!e->code && !lm_comm_all_reduce(c, &mapped, &mapped, 1, LM_DTYPE_I32, LM_COMM_MIN, e) &&
        mapped && !lm_shm_join(s, w->rank, out, e))
        lm_shm_at_end(s, close_wire, w);
    lm_shm_drop(s);
    return e->code;
}

static lm_code open_group(const lm_comm_opts *o, lm_wire *w, lm_comm **out, lm_err *e)
{
    lm_comm *first = NULL;
    bool messages = o->transport && !strcmp(o->transport, "mpi"), same = false;

    if (messages)
        return lm_messages_open(w, o->timeout, 0, false, out, e);
    if (lm_messages_open(w, o->timeout, 0, true, &first, e))
        return e->code;
    if (!one_machine(first, &same, e) && same)
        share_memory(o, first, w, out, e);
    lm_comm_free(first);
    return e->code || *out ? e->code : lm_messages_open(w, o->timeout, 0, false, out, e);
}

/* ---- ranks that a tool starts itself ---- */

/* One type: the segment. */
static lm_shm *segment_of(const lm_comm_memory *m)
{
    return (lm_shm *)(uintptr_t)m;
}

lm_code lm_comm_memory_new(int ranks, lm_comm_memory **out, lm_err *e)
{
    lm_shm *s = NULL;
    lm_code rc = lm_shm_new(ranks, 0, 0, &s, e);

    *out = (lm_comm_memory *)s;
    return rc;
}

void lm_comm_memory_text(const lm_comm_memory *m, char out[LM_MEMORY_TEXT])
{
    const lm_shm_name n = lm_shm_name_of(segment_of(m));

    snprintf(out, LM_MEMORY_TEXT, "%" PRId64 ":%" PRId64 ":%" PRIx64, n.pid, n.fd, n.token);
}

void lm_comm_memory_enter(lm_comm_memory *m, int rank)
{
    lm_shm_enter(segment_of(m), rank);
}

void lm_comm_memory_free(lm_comm_memory *m)
{
    lm_shm_drop(segment_of(m));
}

static lm_code open_memory(const lm_launch *l, lm_comm **out, lm_err *e)
{
    lm_shm_name n = { 0 };
    lm_shm *s = NULL;

    if (sscanf(l->memory, "%" SCNd64 ":%" SCNd64 ":%" SCNx64, &n.pid, &n.fd, &n.token) != 3)
        return lm_fail(e, LM_EUSAGE, LM_MEMORY_VARIABLE, "unset it", "\"%.40s\" names no memory",
                       l->memory);
    if (lm_shm_find(&n, &s, e))
        return e->code;
    lm_shm_join(s, l->rank, out, e);
    lm_shm_drop(s);
    return e->code;
}

/* ---- opening ---- */

/* Long enough for rank 0 to print first: a launcher ends all when one has ended. */
static void let_first_print(const lm_launch *l)
{
    if (l->rank > 0)
        usleep(500000);
}

lm_code lm_comm_open(const lm_comm_opts *o, lm_comm **out, lm_err *e)
{
    const lm_launch *l = &o->launch;
    lm_wire *w;

    *out = NULL;
    if (l->ranks == 1)
        return lm_comm_self(out, e);
    if (l->memory)
        return open_memory(l, out, e);
    if (o->transport && !strcmp(o->transport, "self"))
        lm_fail(e, LM_EUSAGE, l->launcher, NULL, "has started several ranks");
    else if (!open_wire(o, &w, e) && open_group(o, w, out, e))
        w->close(w, true);
    if (e->code)
        let_first_print(l);
    return e->code;
}
