/* SPDX-License-Identifier: Apache-2.0 */
/* nccl.c -- groups of emulated devices: a call is complete when the calls that match it have come to the front of their streams. */
#include "nccl.h"

#include <stdlib.h>
#include <string.h>

#include "numeric/dtype.h"
#include "queue.h"

enum { RANKS_MAX = DEVICES_MAX };

typedef enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, SEND, RECV } kind;

/* One call, in the data of a piece of work. */
typedef struct call call;
struct call {
    call *next; /* posted by this rank, not done */
    ncclComm_t comm;
    kind kind;
    const void *in;
    void *out;
    size_t count; /* as the call has it */
    ncclDataType_t type;
    ncclRedOp_t op;
    int peer;
    bool done;
};

struct ncclComm {
    struct world *world;
    int rank, device;
    cudaStream_t stream; /* of its calls; NULL: none yet */
    call *posted;
    bool aborted, hangs;
    ncclResult_t error;
};

/* They stay until the process ends: work of their streams may refer to them. */
typedef struct world world;
struct world {
    world *next;
    ncclUniqueId id;
    int ranks, joined;
    struct ncclComm of[RANKS_MAX];
};
static world *worlds;

static uint64_t ids, calls, fail_at;

/* The calls of a group on one stream. */
typedef struct {
    int n;
    bool posted;
    call call[];
} batch;

/* Between ncclGroupStart and ncclGroupEnd. */
typedef struct pending pending;
struct pending {
    pending *next;
    call call;
    cudaStream_t stream;
};
static _Thread_local struct {
    int depth;
    pending *first, **end;
    ncclResult_t result;
} group;

void lm_emu_nccl_fail(uint64_t n)
{
    emu_enter();
    fail_at = n ? calls + n : 0;
    emu_leave(cudaSuccess);
}

static lm_dtype type_of(ncclDataType_t t)
{
    switch (t) {
    case ncclInt32:
        return LM_DTYPE_I32;
    case ncclInt64:
        return LM_DTYPE_I64;
    case ncclFloat16:
        return LM_DTYPE_F16;
    case ncclBfloat16:
        return LM_DTYPE_BF16;
    case ncclFloat32:
        return LM_DTYPE_F32;
    case ncclFloat64:
        return LM_DTYPE_F64;
    default:
        return LM_DTYPE_NONE;
    }
}

static size_t size_of(ncclDataType_t t)
{
    return t == ncclInt8 || t == ncclUint8 ? 1 : lm_dtype_size(type_of(t));
}

/* ---- what calls do ---- */

static double number(lm_dtype d, const void *x, size_t i)
{
    double v;
    lm_convert(d, (const char *)x + i * lm_dtype_size(d), LM_DTYPE_F64, &v, 1);
    return v;
}

/* Elements first..first+n-1 over the ranks, the last one first; each sum is rounded to F32, or kept in F64. */
static void combine(const world *w, size_t first, size_t n, void *out)
{
    const call *any = w->of[0].posted;
    const lm_dtype d = type_of(any->type);
    for (size_t i = first; i < first + n; i++) {
        double sum = number(d, w->of[w->ranks - 1].posted->in, i);
        for (int r = w->ranks - 2; r >= 0; r--) {
            const double x = number(d, w->of[r].posted->in, i);
            sum = any->op == ncclSum   ? sum + x
                  : any->op == ncclMax ? (x > sum ? x : sum)
                                       : (x < sum ? x : sum);
            sum = d == LM_DTYPE_F64 || d == LM_DTYPE_I64 ? sum : (float)sum;
        }
        lm_convert(LM_DTYPE_F64, &sum, d, (char *)out + (i - first) * lm_dtype_size(d), 1);
    }
}

static void take_off(struct ncclComm *c, call *x)
{
    call **at = &c->posted;
    while (*at && *at != x)
        at = &(*at)->next;
    if (*at)
        *at = x->next;
}

/* All ranks' first calls are collective, and alike. */
static void run_collective(world *w)
{
    const call *any = w->of[0].posted;
    const size_t size = size_of(any->type), n = any->count;
    const size_t whole = any->kind == ALL_REDUCE ? n : n * (size_t)w->ranks;
    char *result = emu_allocate(whole * size + 1);
    for (int r = 1; r < w->ranks; r++) {
        const call *x = w->of[r].posted;
        if (x->kind != any->kind || x->count != n || x->type != any->type || x->op != any->op)
            emu_break(cudaErrorLaunchFailure,
                      "NCCL: ranks 0 and %d call differently: kinds %d and %d, counts %zu and %zu",
                      r, any->kind, x->kind, n, x->count);
    }
    if (any->kind != ALL_GATHER && !emu_broken())
        combine(w, 0, whole, result);
    for (int r = 0; r < w->ranks && any->kind == ALL_GATHER && !emu_broken(); r++)
        memcpy(result + (size_t)r * n * size, w->of[r].posted->in, n * size);
    const kind what = any->kind;
    for (int r = 0; r < w->ranks; r++) {
        call *x = w->of[r].posted;
        if (!emu_broken())
            memcpy(x->out, result + (what == REDUCE_SCATTER ? (size_t)r * n * size : 0),
                   (what == REDUCE_SCATTER ? n : whole) * size);
        x->done = true;
        w->of[r].posted = x->next;
    }
    free(result);
}

/* The first posted message of this kind between c and `peer`. */
static call *find_message(struct ncclComm *c, kind what, int peer)
{
    call *x = c->posted;
    while (x && !(x->kind == what && x->peer == peer))
        x = x->next;
    return x;
}

static bool pass_message(world *w, call *recv)
{
    struct ncclComm *to = recv->comm, *from = &w->of[recv->peer];
    call *sent = find_message(from, SEND, to->rank);
    if (!sent || recv != find_message(to, RECV, recv->peer))
        return false;
    if (sent->count * size_of(sent->type) != recv->count * size_of(recv->type))
        emu_break(cudaErrorLaunchFailure, "NCCL: rank %d sends %zu elements, rank %d takes %zu",
                  from->rank, sent->count, to->rank, recv->count);
    else
        memmove(recv->out, sent->in, sent->count * size_of(sent->type));
    sent->done = recv->done = true;
    take_off(from, sent);
    take_off(to, recv);
    return true;
}

static bool is_collective(const call *x)
{
    return x && x->kind < SEND;
}

/* What can be completed of a group. */
static void match(world *w)
{
    for (bool again = true; again && !emu_broken();) {
        bool all = true;
        again = false;
        for (int r = 0; r < w->ranks; r++) {
            all = all && is_collective(w->of[r].posted) && !w->of[r].hangs;
            for (call *x = w->of[r].posted, *next; x; x = next) {
                next = x->next;
                if (x->kind == RECV && pass_message(w, x)) {
                    again = true;
                    break; /* the list has changed */
                }
            }
        }
        if (all) {
            run_collective(w);
            again = true;
        }
    }
    emu_signal();
}

/* ---- as work of a stream ---- */

static void post(batch *b)
{
    b->posted = true;
    for (int i = 0; i < b->n; i++) {
        call *x = &b->call[i], **at = &x->comm->posted;
        while (*at)
            at = &(*at)->next;
        *at = x;
        x->comm->hangs |= ++calls == fail_at;
        if (x->comm->hangs)
            x->comm->error = ncclRemoteError;
    }
}

static bool is_complete(void *data)
{
    batch *b = data;
    struct ncclComm *c = b->call[0].comm;
    if (c->aborted)
        return true;
    if (!b->posted)
        post(b);
    match(c->world);
    for (int i = 0; i < b->n; i++)
        if (!b->call[i].done)
            return false;
    return true;
}

static void run_batch(void *data)
{
    (void)data;
}

static void drop_batch(void *data)
{
    batch *b = data;
    for (int i = 0; i < b->n && b->posted; i++)
        take_off(b->call[i].comm, &b->call[i]);
}

/* The stream is one of the group's device, and the only one that it uses. */
static ncclResult_t check_stream(struct ncclComm *c, cudaStream_t s)
{
    const struct CUstream_st *of = emu_stream(s);
    if (of && of->device == c->device && (!c->stream || c->stream == s) && !c->aborted) {
        c->stream = s;
        return ncclSuccess;
    }
    emu_say("NCCL: rank %d of device %d uses a stream of device %d, or a second one", c->rank,
            c->device, of ? of->device : -1);
    return ncclInvalidUsage;
}

/* `first` and those behind it of the same group and stream, which leave the list. */
static ncclResult_t put_calls(pending *first, pending **rest)
{
    struct ncclComm *c = first->call.comm;
    const cudaStream_t s = first->stream;
    int n = 0;
    for (const pending *p = first; p; p = p->next)
        n += p->call.comm == c && p->stream == s;
    const size_t bytes = sizeof(batch) + (size_t)n * sizeof(call);
    batch *b = emu_allocate(bytes);
    pending **keep = rest;
    for (pending *p = first, *next; p; p = next) {
        next = p->next;
        if (p->call.comm == c && p->stream == s) {
            b->call[b->n++] = p->call;
            free(p);
        } else {
            *keep = p;
            keep = &p->next;
        }
    }
    *keep = NULL;
    ncclResult_t result = check_stream(c, s);
    if (!result && emu_put_gate(s, is_complete, run_batch, drop_batch, b, bytes))
        result = ncclUnhandledCudaError;
    free(b);
    return result;
}

ncclResult_t ncclGroupStart(void)
{
    if (group.depth++ == 0)
        group.end = &group.first;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    ncclResult_t result = group.result;
    if (--group.depth > 0)
        return ncclSuccess;
    emu_enter();
    while (group.first) {
        const ncclResult_t one = put_calls(group.first, &group.first);
        result = result ? result : one;
    }
    emu_leave(cudaSuccess);
    group.result = ncclSuccess;
    return result;
}

static bool is_own(const call *x, const void *p, size_t bytes)
{
    return !bytes || (emu_memory_device(p) == x->comm->device && emu_memory_fits(p, bytes));
}

static ncclResult_t check_call(const call *x)
{
    const struct ncclComm *c = x->comm;
    const size_t n = x->count * size_of(x->type), whole = n * (size_t)c->world->ranks;
    const bool alone = x->kind >= SEND;
    if (alone && (x->peer < 0 || x->peer >= c->world->ranks))
        return ncclInvalidArgument;
    if ((x->kind != RECV && !is_own(x, x->in, x->kind == REDUCE_SCATTER ? whole : n)) ||
        (x->kind != SEND && !is_own(x, x->out, x->kind == ALL_GATHER ? whole : n))) {
        emu_say("NCCL: rank %d: %p or %p is not so much memory of device %d", c->rank, x->in,
                x->out, c->device);
        return ncclInvalidArgument;
    }
    return ncclSuccess;
}

static ncclResult_t begin(call x, cudaStream_t s)
{
    pending *p = emu_allocate(sizeof *p);
    *p = (pending){ .call = x, .stream = s };
    ncclGroupStart();
    emu_enter();
    const ncclResult_t bad = check_call(&x);
    emu_leave(cudaSuccess);
    group.result = group.result ? group.result : bad;
    if (bad) {
        free(p);
    } else {
        *group.end = p;
        group.end = &p->next;
    }
    return ncclGroupEnd();
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t s)
{
    return begin((call){ .comm = comm,
                         .kind = ALL_REDUCE,
                         .in = in,
                         .out = out,
                         .count = count,
                         .type = type,
                         .op = op },
                 s);
}

ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t s)
{
    return begin((call){ .comm = comm,
                         .kind = REDUCE_SCATTER,
                         .in = in,
                         .out = out,
                         .count = count,
                         .type = type,
                         .op = op },
                 s);
}

ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t s)
{
    return begin(
        (call){
            .comm = comm, .kind = ALL_GATHER, .in = in, .out = out, .count = count, .type = type },
        s);
}

ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t s)
{
    return begin(
        (call){
            .comm = comm, .kind = SEND, .in = data, .count = count, .type = type, .peer = peer },
        s);
}

ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t s)
{
    return begin(
        (call){
            .comm = comm, .kind = RECV, .out = data, .count = count, .type = type, .peer = peer },
        s);
}

/* ---- groups ---- */

ncclResult_t ncclGetVersion(int *version)
{
    *version = 22809;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    emu_enter();
    memset(id, 0, sizeof *id);
    ids++;
    memcpy(id, &ids, sizeof ids);
    emu_leave(cudaSuccess);
    return ncclSuccess;
}

static world *find_world(const ncclUniqueId *id, int ranks)
{
    world *w = worlds;
    while (w && memcmp(&w->id, id, sizeof *id))
        w = w->next;
    if (!w) {
        w = emu_allocate(sizeof *w);
        w->id = *id;
        w->ranks = ranks;
        w->next = worlds;
        worlds = w;
    }
    return w;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank)
{
    emu_enter();
    ncclResult_t result = ncclInvalidArgument;
    world *w = rank >= 0 && rank < ranks && ranks <= RANKS_MAX ? find_world(&id, ranks) : NULL;
    if (w && w->ranks == ranks && !w->of[rank].world) {
        w->of[rank] = (struct ncclComm){ .world = w, .rank = rank, .device = emu_device() };
        for (int r = 0; r < ranks; r++) /* as NCCL: one device serves one rank */
            if (r != rank && w->of[r].world && w->of[r].device == emu_device())
                result = ncclInvalidUsage;
        if (result == ncclInvalidArgument) {
            w->joined++;
            result = ncclSuccess;
            emu_signal();
        }
        while (!result && w->joined < ranks && !emu_broken())
            emu_wait();
        *comm = &w->of[rank];
    }
    emu_leave(cudaSuccess);
    return result;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    return ncclCommAbort(comm);
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    emu_enter();
    comm->aborted = true;
    emu_signal();
    emu_leave(cudaSuccess);
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    emu_enter();
    *error = comm->error;
    emu_leave(cudaSuccess);
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const text[] = {
        "no error",         "unhandled cuda error", "unhandled system error", "internal error",
        "invalid argument", "invalid usage",        "remote process exited",  "in progress"
    };
    return (size_t)result < sizeof text / sizeof *text ? text[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return "";
}
