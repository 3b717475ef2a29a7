/* SPDX-License-Identifier: Apache-2.0 */
/* serve.h -- completes prompts by continuous batching: each step has the next token of every sequence that generates,
 * and parts of prompts beside them; a sequence that ends makes room at once (kv/sched.h, paged.h).
 *
 * An answer depends on the seed, the numbers of prompt and sample, and the prompt alone, to the bit of its
 * log-probabilities: not on the memory, the number of sequences or what else is completed.  It may differ in the last
 * bits from that of lm_complete_run, whose steps have fewer rows. */
#ifndef LM_MODEL_SERVE_H
#define LM_MODEL_SERVE_H

#include "format/metrics.h"
#include "kv/sched.h"
#include "model/complete.h"
#include "model/paged.h"
#include "model/tiers.h"

typedef struct {
    lm_tiers_opts tiers; /* pages below the device's */
    /* Pages are computed again where that takes less time than moving them, by the times measured so far; false:
     * they are moved if there is room. */
    bool measure;
    void (*warn)(void *ctx, const lm_err *why); /* the disk has failed: at most once; may be NULL */
    void *ctx;
    /* a "step" record (serve_metrics.h) for each second of steps, and the last one; may be NULL */
    lm_metrics *metrics;
} lm_serve_opts;

/* What is asked for. */
typedef struct {
    int64_t sequences, context; /* at the same time; tokens of one, at most */
    bool shorter;               /* the context may be shortened to what the memory holds */
    int64_t prompts;   /* tokens of prompts that are ever read in one step; 0: any number */
    size_t memory;     /* bytes of pages of the device; 0: for all sequences, or what is free */
    size_t host, disk; /* bytes; 0: no such tier */
    const struct lm_kv_plan *kv;          /* how caches are stored; NULL: plain */
    const struct lm_kv_plan *state_codes; /* and states of layers; NULL: F32 */
    /* how pages are coded in host and disk; NULL: they go as they are */
    const struct lm_kv_plan *down;
    const lm_model *like;       /* lm_paged_opts.like */
    const char *name[LM_TIERS]; /* of the three sizes in messages */
} lm_serve_sizes;

/* What there is room for; tiers.dir is left to the caller. */
typedef struct {
    lm_paged_opts pages;
    lm_tiers_opts tiers;
    lm_paged_sizes size;
} lm_serve_room;

/* Choose sizes for a model whose weights need not be loaded yet.  Of caches with tails (lm_paged_sizes), as many texts at a
 * time as there is room for with their tails, at least one: pages.sequences may be less than asked for.  Fails: LM_EUSAGE
 * for memory that holds no text of the context, or no page. */
lm_code lm_serve_choose(const lm_loaded *w, lm_dtype dtype, lm_backend *b,
                        const lm_serve_sizes *ask, lm_serve_room *r, lm_err *e);

typedef struct {
    lm_sched_stats sched;
    lm_tiers_stats tiers;
    double seconds;                /* of all steps; */
    double pages_seconds;          /* of these for the scheduler, without stalls */
    size_t page_bytes, peak_bytes; /* peak: of the pages in use in all tiers */
} lm_serve_stats;

/* Run until there are no more prompts, or lm_stopping(); no page of g is in use.  The samples of a prompt are
 * continued from one computation of it.  Stats are added to *st, those of the pages are set in *kv (may be NULL).
 * Fails: LM_ELIMIT for a prompt that with its answer takes more than all pages of the device. */
lm_code lm_serve_run(lm_paged *g, const lm_serve_opts *o, const lm_tokenizer *tok,
                     const lm_complete_opts *how, const lm_complete_hooks *h, lm_complete_stats *st,
                     lm_serve_stats *kv, lm_err *e);

#endif
