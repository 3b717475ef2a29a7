/* SPDX-License-Identifier: Apache-2.0 */
/* shm_impl.h -- a segment of shared memory, and waiting on its counters.  Private to lib/comm.
 *
 *   head     what the group is, and its failure
 *   ranks    shm_rank [ranks]
 *   pairs    shm_pair [ranks, ranks]: from, to
 *   buffers  [ranks, SHM_SLOTS] of a card and `piece` bytes
 *   rings    [ranks, ranks, SHM_RING] of a card and `ring` bytes
 *
 * Pages that are not written take no memory. */
#ifndef LM_COMM_SHM_IMPL_H
#define LM_COMM_SHM_IMPL_H

#include <stdatomic.h>
#include <stdint.h>

#include "comm/comm_impl.h"
#include "comm/shm.h"

enum {
    /* Buffers of a rank.  Step s is written after step s-2 has been read, for which every rank had written it, after it had read
     * step s-4: the buffer of that one is free, and no rank has to say so. */
    SHM_SLOTS = 4,
    SHM_RING = 2, /* buffers of a pair */
};

typedef enum {
    SHM_NO_CALL,
    SHM_BARRIER,
    SHM_ALL_REDUCE,
    SHM_REDUCE_SCATTER,
    SHM_ALL_GATHER,
    SHM_ALL_TO_ALL,
    SHM_BROADCAST,
    SHM_SPLIT,
    SHM_SEND,
    SHM_RECV,
} shm_call;

/* A counter that others wait for; it wraps around. */
typedef struct {
    _Alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t sleepers; /* a killed one stays counted, which costs wakes that wake no rank */
} shm_word;

/* What the buffer after it holds. */
typedef struct {
    _Alignas(64) uint32_t call, of; /* of: type and operation */
    uint64_t n;    /* elements or bytes that all ranks give as equal, or bytes of a message */
    uint64_t most; /* of all_to_all: bytes of the longest part */
} shm_card;

typedef struct {
    shm_word put;            /* steps whose buffer this rank has filled */
    _Atomic int known, call; /* known: what follows is written */
    int64_t pid;
    uint64_t start;
    int name; /* rank in the world */
} shm_rank;

typedef struct {
    shm_word put, took; /* pieces of messages */
} shm_pair;

typedef struct {
    uint64_t token;
    size_t bytes, piece, ring, ranks_at, pairs_at, buffers_at, rings_at;
    int ranks;
    double timeout;
    char host[64];
    _Atomic int failed; /* SHM_WELL ... */
    _Atomic int reported;
    lm_err why;
} shm_head;

enum { SHM_WELL, SHM_FAILING, SHM_FAILED };

struct lm_shm {
    shm_head *head;
    int fd;
    atomic_int users;
    void (*at_end)(void *ctx, bool failed);
    void *ctx;
};

/* A rank's view of a group. */
typedef struct {
    lm_comm comm;
    lm_shm *own;
    lm_shm *world; /* the segment that holds the failure and the names of ranks */
    uint32_t step; /* of the next exchange */
} shm_member;

static inline shm_rank *shm_rank_at(const lm_shm *s, int r)
{
    return (shm_rank *)((char *)s->head + s->head->ranks_at) + r;
}

static inline shm_pair *shm_pair_at(const lm_shm *s, int from, int to)
{
    return (shm_pair *)((char *)s->head + s->head->pairs_at) + from * s->head->ranks + to;
}

/* The buffer of rank r for a step; its bytes follow the card. */
static inline shm_card *shm_slot(const lm_shm *s, int r, uint32_t step)
{
    size_t i = (size_t)r * SHM_SLOTS + step % SHM_SLOTS;
    return (shm_card *)((char *)s->head + s->head->buffers_at +
                        i * (sizeof(shm_card) + s->head->piece));
}

static inline shm_card *shm_ring(const lm_shm *s, int from, int to, uint32_t k)
{
    size_t i = ((size_t)from * (size_t)s->head->ranks + (size_t)to) * SHM_RING + k % SHM_RING;
    return (shm_card *)((char *)s->head + s->head->rings_at +
                        i * (sizeof(shm_card) + s->head->ring));
}

const char *shm_call_name(int call);

/* Become `rank` of s, in a world: s itself if NULL. */
lm_code shm_join(lm_shm *s, lm_shm *world, int rank, int name, lm_comm **out, lm_err *e);

/* The world has failed: its reason into *e, if that holds none; LM_OK if it has not. */
lm_code shm_state(shm_member *m, lm_err *e);
/* Make it fail, by an error that has happened on this rank, and return the reason in *e. */
lm_code shm_fail(shm_member *m, const lm_err *why, lm_err *e);

/* lm_comm_look. */
lm_code shm_look(lm_comm *c, lm_err *e);

/* What was expected of `peer` is not there: fail if its process has ended. */
lm_code shm_check_peer(shm_member *m, int peer, shm_call call, lm_err *e);

/* Wait until the counter of rank `peer` is `target` or more. */
lm_code shm_wait(shm_member *m, shm_word *w, uint32_t target, int peer, shm_call call, lm_err *e);
/* Count, and wake those that wait. */
void shm_set(shm_word *w, uint32_t value);

/* Copies into memory of the caller that will not be read soon: past the cache, if the whole result has `whole` bytes. */
void shm_copy_out(void *to, const void *from, size_t bytes, size_t whole);

extern const lm_transport shm_transport;

#endif
