/* SPDX-License-Identifier: Apache-2.0 */
/* shard_set.h -- inputs to a whole token dataset: FOLDER/train.* and, when documents are held out,
 * FOLDER/val.*, with FOLDER/meta.json, which describes their origin.
 *
 * Texts are tokenised; token datasets are copied.  Pools hold both splits until their sizes are
 * known; then they are mixed by weight, shuffled and written.  The files appear together at the
 * end: by one rename of the folder, if it is new or holds only an older dataset.  In a folder with
 * other files they are renamed one by one, when all are on disk: the older meta.json and dataset
 * are removed, then val, train (the .idx before the .bin) and last meta.json are renamed.  A kill
 * in between leaves no dataset, or a complete one without meta.json. */
#ifndef LM_TEXT_SHARD_SET_H
#define LM_TEXT_SHARD_SET_H

#include "format/provenance.h"
#include "text/shard_run.h"

typedef struct {
    const char *const *path; /* the inputs, */
    const double *weight;    /* their shares of train (NULL: by size), */
    int n;                   /* and how many they are */
    const char *tokenizer;   /* tokenizer.json or its folder; NULL: the inputs are token datasets */
    lm_input_opts in;        /* how texts are read */
    lm_tokens_kind from;  /* of inputs that are token datasets; AUTO: detected by lm_tokens_open */
    bool check_tokenizer; /* refuse datasets that were made with different tokenizers */
    bool eos; /* an id between documents: that of the token `eos_token` (may be NULL), */
    /* otherwise `eos_id` (-1: not given), otherwise the tokenizer's or the dataset's */
    const char *eos_token;
    int64_t eos_id;
    bool add_special; /* apply the tokenizer's post-processor */
    /* Records (records.h) instead of texts: examples with loss marks (example.h), a Megatron
     * dataset with NAME.mask. */
    bool records;
    const char *chat_template; /* lm_chat_open's `want`; NULL: the tokenizer's own, if it has one */
    lm_loss_on loss_on;
    const lm_text_record_map *map; /* may be NULL */
    /* ids are below it; 0: the tokenizer's size, for datasets that of meta.json or the largest id +
     * 1 */
    int64_t vocab;
    double val_fraction; /* fraction of the documents held out, [0, 1) */
    bool contiguous;     /* hold out the end of each document instead of whole ones */
    bool shuffle;        /* documents in a random order given by `seed` */
    uint64_t seed;
    int64_t tokens;       /* target number of ids in train (0: all), */
    double max_epochs;    /* with at most this many passes over an input */
    lm_tokens_kind kind;  /* format of the output */
    int64_t shard_tokens; /* as in lm_tokens_writer_opts */
    const char *output;   /* the folder; created when it is missing */
    bool force;
    lm_history_step step; /* tool, version and argv for meta.json; the inputs are filled in here */
    lm_sink *sink;
} lm_shard_opts;

typedef struct {
    lm_shard_stats read;
    int64_t vocab, eos; /* eos -1: none */
    lm_tokens_tokenizer tokenizer;
    bool masked; /* with loss marks */
    int64_t docs[LM_SPLITS], tokens[LM_SPLITS];
} lm_shard_set;

/* Make the dataset.  The content of meta.json is appended to `meta` in one line.  When lm_stopping,
 * it returns early with success and writes nothing.  Fails: LM_EUSAGE for a tokenizer without
 * end-of-text token, a vocabulary that does not fit, an output that exists (unless force) or is an
 * input, all documents held out; LM_EFORMAT if the inputs hold no document; and as lm_shard_text,
 * lm_tokens_open, lm_tokens_create. */
lm_code lm_shard_set_make(const lm_shard_opts *o, lm_par *par, lm_shard_set *set, lm_buf *meta,
                          lm_err *e);

#endif
