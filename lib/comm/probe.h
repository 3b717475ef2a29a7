/* SPDX-License-Identifier: Apache-2.0 */
/* probe.h -- what the links between ranks can do: every pair is tried, slow ones are found. */
#ifndef LM_COMM_PROBE_H
#define LM_COMM_PROBE_H

#include <stdint.h>

#include "comm/comm.h"

/* A pair of ranks, tried while other pairs were tried, too. */
typedef struct {
    int a, b;         /* ranks, a < b; a < 0: none */
    double latency;   /* seconds of a message of 8 bytes, one way: half of the fastest round trip */
    double bandwidth; /* bytes a second of messages of `bytes` bytes, one way: the fastest one */
    bool slow;        /* lm_links_judge */
} lm_link;

/* The rounds in which all pairs of n ranks are tried, each rank with one other at a time (a round-robin tournament). */
int lm_links_rounds(int n);
/* The partner of rank p of n in a round; -1: it rests. */
int lm_links_partner(int n, int round, int p);

/* Try pairs in `rounds` rounds, the first of all (lm_links_rounds).  *out, the same on each rank: rounds times n / 2, in the
 * order of the rounds, of which some may be none; the caller frees it (lm_free).  Collective.  Fails: LM_EIO naming the rank
 * that cannot be reached. */
lm_code lm_links_probe(lm_comm *c, int rounds, size_t bytes, lm_link **out, size_t *n, lm_err *e);

/* Mark the links that are slow beside others of their kind, inside machines or between them: a third of the median bandwidth or
 * ten times the median latency (and a millisecond), of three or more.  machine: a number for each rank.  Returns how many. */
size_t lm_links_judge(lm_link *all, size_t n, const uint64_t *machine, lm_err *e);

#endif
