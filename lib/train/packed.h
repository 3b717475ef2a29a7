/* SPDX-License-Identifier: Apache-2.0 */
/* packed.h -- records as the data of a training: read, tokenised, packed into windows. */
#ifndef LM_TRAIN_PACKED_H
#define LM_TRAIN_PACKED_H

#include "format/folder.h"
#include "train/feed.h"

typedef struct {
    lm_packed data; /* for lm_feed_new_packed and lm_trainer_io; borrows from the next two */
    lm_text_examples *examples;
    lm_packing pack;
    bool pairs; /* examples are pairs (text/example.h), one a window */
} lm_packed_set;

/* Read records into windows of `seq` ids; join: several examples share one (pack.h).  o->maker.most is set to
 * `seq` if it is 0 or more.  Pairs (o->maker.pair) have a window each, whatever join says.  Fails as lm_text_examples_read
 * and lm_pack_make; LM_EUSAGE for pairs of a model without end token. */
lm_code lm_packed_read(const lm_text_examples_opts *o, int64_t seq, bool join, lm_par *par,
                       lm_packed_set *out, lm_err *e);
void lm_packed_fini(lm_packed_set *p);

/* One line about them for people: "1,000 records (ShareGPT): 998 examples in 121 windows of 1024 tokens, ...".
 * Appended to `out`. */
lm_code lm_packed_line(const lm_packed_set *p, int64_t seq, lm_buf *out, lm_err *e);

/* How the examples of a model are made: its tokenizer, its end-of-text id, and its chat template, or the one
 * that `want` names (lm_chat_open).  A model without template has none (out->chat NULL) unless `want` is given.
 * All else in *out is left alone.  The caller frees out->tok and out->chat (lm_packed_maker_fini).  Fails: LM_EUSAGE for a
 * model without tokenizer; as lm_tokenizer_of and lm_chat_open. */
lm_code lm_packed_maker(lm_model_source *m, const char *want, int64_t eos,
                        lm_text_example_maker *out, lm_err *e);
/* The same with that tokenizer, borrowed: out->tok is it. */
lm_code lm_packed_maker_with(const lm_tokenizer *tok, lm_model_source *m, const char *want,
                             int64_t eos, lm_text_example_maker *out, lm_err *e);
void lm_packed_maker_fini(lm_text_example_maker *m);

#endif
