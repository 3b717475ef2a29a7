/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_impl.h -- the parts of a loaded tokenizer; for lib/text/tokenizer*.c only. */
#ifndef LM_TEXT_TOKENIZER_IMPL_H
#define LM_TEXT_TOKENIZER_IMPL_H

#include "base/json.h"
#include "text/bpe.h"
#include "text/normal.h"
#include "text/pretok.h"
#include "text/subword.h"
#include "text/tokenizer.h"
#include "text/tokenizer_added.h"
#include "text/tokenizer_lists.h"

typedef struct lm_decoder lm_decoder;

enum { LM_MAX_AFFIX = 64, LM_MAX_PAIR = 3 * LM_MAX_AFFIX };

/* An item of the template of two texts: a token, or one of the texts. */
enum { LM_PAIR_A = -1, LM_PAIR_B = -2 };
typedef struct {
    int64_t id; /* LM_PAIR_A, LM_PAIR_B: the text */
    uint32_t type;
} lm_pair_item;

struct lm_tokenizer {
    lm_bpe bpe;         /* the vocabulary of every kind of model */
    lm_subword subword; /* WordPiece and Unigram; bpe.subword names it then */
    lm_normal *normal;  /* NULL: none */
    lm_pretok *pretok;
    bool plain_bytes;  /* the pre-tokeniser returns words as bytes */
    lm_scan_kind scan; /* the only step of the pre-tokeniser is this scanner */
    lm_added added;
    uint32_t *added_of; /* by id: index into added.v, or LM_BPE_NONE; vocab_size entries */
    int64_t vocab_size;
    lm_decoder *decoder;                                 /* NULL: tokens joined by spaces */
    uint32_t prefix[LM_MAX_AFFIX], suffix[LM_MAX_AFFIX]; /* of the post-processor */
    int n_prefix, n_suffix;
    lm_pair_item pair[LM_MAX_PAIR];
    int n_pair, n_templates; /* pairs are supported with one template, or none */
    int64_t bos, eos, pad, unk, mask;
    char *unk_name;
    lm_buf json, config;
};

/* tokenizer_model.c.  Refuse keys that are not in the list: a part that is not supported must not
 * be ignored. */
lm_code lm_tokenizer_check_keys(const json_t *obj, const char *const *known, const char *where,
                                lm_err *e);
/* The kind of a "model", its keys checked.  `cut`: its vocabulary was cut out of the text. */
lm_code lm_word_model_check(const json_t *m, bool cut, lm_subword_kind *kind, const char *where,
                            lm_err *e);
/* Load it; t->vocab_size is known. */
lm_code lm_word_model_load(lm_tokenizer *t, lm_subword_kind kind, const json_t *m,
                           const lm_lists *l, const char *where, lm_err *e);

/* tokenizer_decode.c.  null gives *out = NULL. */
lm_code lm_decoder_new(const json_t *j, const char *where, lm_decoder **out, lm_err *e);
void lm_decoder_free(lm_decoder *d);

/* tokenizer_post.c: the ids that the post-processor adds before and behind the text. */
lm_code lm_post_parse(lm_tokenizer *t, const json_t *j, const char *where, lm_err *e);

/* tokenizer_files.c: `where`, the name of a tokenizer's file, with the part behind the last '/' or
 * ' ' replaced by tokenizer_config.json. */
void lm_tokenizer_config_where(const char *where, char *out, size_t size);
/* tokenizer_files.c: a tokenizer.json text from GPT-2's pair of files, with the added tokens of a
 * tokenizer_config.json, whose text may be empty. */
lm_code lm_tokenizer_join(const lm_buf *vocab, const char *merges_path, const lm_buf *merges,
                          const lm_buf *config, lm_buf *json, lm_err *e);
/* tokenizer_bert.c: a tokenizer.json text from BERT's vocab.txt, with the settings of a
 * tokenizer_config.json, whose text may be empty. */
lm_code lm_tokenizer_bert(const lm_buf *vocab, const char *path, const lm_buf *config, lm_buf *json,
                          lm_err *e);
lm_code lm_tokenizer_join_files(const char *vocab_path, const char *merges_path,
                                const lm_buf *config, lm_buf *json, lm_err *e);

#endif
