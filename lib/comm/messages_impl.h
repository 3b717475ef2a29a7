/* SPDX-License-Identifier: Apache-2.0 */
/* messages_impl.h -- requests in flight between ranks, and the failure of all.  Private to lib/comm. */
#ifndef LM_COMM_MESSAGES_IMPL_H
#define LM_COMM_MESSAGES_IMPL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "comm/comm_impl.h"
#include "comm/wire.h"

enum {
    MSG_HOST = 48,
    MSG_CONTROL_TAG = 0, /* of notices */
    MSG_FIRST_TAG = 2,   /* two for each group: of collective calls, of messages */
};

typedef enum {
    MSG_BARRIER,
    MSG_ALL_REDUCE,
    MSG_REDUCE_SCATTER,
    MSG_ALL_GATHER,
    MSG_ALL_TO_ALL,
    MSG_BROADCAST,
    MSG_SPLIT,
    MSG_SEND,
    MSG_RECV
} msg_call;

/* What goes to all ranks when one has failed. */
typedef struct {
    int blamed;
    lm_err why;
} msg_notice;

/* All ranks, whatever groups they are in: one for each rank. */
typedef struct {
    lm_wire *wire;
    double timeout;
    size_t scratch;
    bool keep;
    atomic_int users;
    atomic_int next_tag;
    atomic_bool failed;
    pthread_mutex_t lock; /* of what follows */
    msg_notice fail;
    char (*host)[MSG_HOST]; /* [ranks] */
} msg_world;

/* What a rank tells every other one at the beginning of a call. */
typedef struct {
    uint32_t call, of; /* of: type and operation */
    uint64_t n;
} msg_card;

/* Requests in flight. */
typedef struct {
    int peer;           /* of the group */
    size_t want;        /* bytes to receive; SIZE_MAX: sent */
    const msg_card *is; /* a card was received here; NULL: data */
} msg_flight;

typedef struct {
    uintptr_t *request;
    msg_flight *about;
    size_t n, cap, cap_about;
    /* Ranks that may be waiting for each other before this one is served.  It is more patient then: the rank that waits for the
     * missing one itself shall name it first. */
    int behind;
} msg_batch;

typedef struct {
    lm_comm comm;
    msg_world *world;
    int *name; /* [size] ranks in the world */
    int tag;
    msg_batch batch[2];
    msg_card mine, *card; /* [size] */
    size_t *bytes[2];     /* [size] each, for calls made of others */
    void *scratch;
    size_t scratch_bytes;
} msg_member;

static inline msg_member *msg_member_of(lm_comm *c)
{
    return (msg_member *)c;
}

/* The world has failed: its reason into *e, if that holds none; LM_OK if it has not. */
lm_code msg_state(msg_world *w, lm_err *e);
/* This rank has failed: all learn it. */
void msg_abort(lm_comm *c, const lm_err *why);
lm_code msg_look(lm_comm *c, lm_err *e);
/* The same, and the reason in *e. */
lm_code msg_fail_here(msg_member *m, const lm_err *why, lm_err *e);

/* Begin one message; those of a call `SEND` are done when the other has begun to receive them.  is_card: what arrives must be
 * equal to m->mine. */
lm_code msg_send(msg_member *m, msg_batch *b, msg_call call, int to, int tag, const void *data,
                 size_t bytes, lm_err *e);
lm_code msg_recv(msg_member *m, msg_batch *b, msg_call call, int from, int tag, void *data,
                 size_t bytes, bool is_card, lm_err *e);
/* Begin to send (out) or to receive what may be longer than the wire carries at once; nothing for no bytes. */
lm_code msg_part(msg_member *m, msg_batch *b, msg_call call, int peer, bool out, char *data,
                 size_t bytes, lm_err *e);
/* Set m->mine, and exchange it with all others. */
lm_code msg_cards(msg_member *m, msg_batch *b, msg_card mine, lm_err *e);
/* Wait for all requests of a batch. */
lm_code msg_finish(msg_member *m, msg_batch *b, msg_call call, lm_err *e);

#endif
