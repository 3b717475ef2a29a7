/* SPDX-License-Identifier: Apache-2.0 */
/* stream.h -- how a reader receives a cache that is stored at several levels (cachegen.h), so that
 * the first token comes by a deadline.
 *
 * Chunks are taken in order, and before each one the reader asks here how to take it: at a level,
 * or by computing its rows from the prompt's tokens, which is exact.  As in CacheGen
 * (arXiv:2310.07240, section 5.3) a choice is feasible if all chunks that are left, taken alike,
 * arrive in the time that is left at the bandwidth measured last; the first feasible one in the
 * order of quality is chosen.  The choice is made again for every chunk, so a change of bandwidth
 * is answered within one chunk. */
#ifndef LM_KV_STREAM_H
#define LM_KV_STREAM_H

#include <stdbool.h>
#include <stdint.h>

#include "kv/cachegen.h"

enum { LM_KV_COMPUTE = -1 }; /* instead of a level */

/* What can be taken.  Levels are numbered from 0, the best. */
typedef struct {
    int64_t chunks;
    int levels;
    const uint64_t *bytes; /* [chunks][levels]; 0: the level is absent, in all chunks or in none */
    const int64_t *rows;   /* [chunks]: tokens */
    bool compute;          /* rows can be computed: the prompt's tokens and the model are here */
    double row_seconds;    /* of computing a row */
    int64_t rows_behind;   /* rows of the prompt that follow the cache: computed in any case */
    double deadline;       /* seconds from the start to the first token; INFINITY: none */
} lm_kv_offer;

/* A transfer that is complete: the time from asking for its first byte until its last was
 * decoded. */
typedef struct {
    double bytes, seconds;
} lm_kv_transfer;

/* Bytes per second to expect after n transfers: the lower of the rates of the last one and of the
 * last four together; NAN before the first.  Transfers without bytes or time do not count. */
double lm_kv_stream_rate(const lm_kv_transfer *done, int64_t n);

/* How to take chunk `next` at `elapsed` seconds: a level that is present, or LM_KV_COMPUTE if rows
 * can be computed.  There must be one way.
 *
 * Without a deadline: the best level.  With one: computing if it is feasible, else the best
 * feasible level, else whatever is expected to be ready first.  While the rate is unknown (before
 * the first transfer): computing if feasible, else the best level that needs at most 10 MB/s, but
 * no worse one than the middle one of the levels, the better one of two. */
int lm_kv_stream_choose(const lm_kv_offer *o, int64_t next, double elapsed,
                        const lm_kv_transfer *done, int64_t n);

/* Seconds from now to the first token if all chunks from `next` on are taken in this way at `rate`
 * bytes per second. */
double lm_kv_stream_seconds(const lm_kv_offer *o, int64_t next, int how, double rate);

#endif
