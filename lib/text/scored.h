/* SPDX-License-Identifier: Apache-2.0 */
/* scored.h -- vocabularies with scores of tokens instead of a list of merges, as a tokenizer.json:
 * of BPE, and of Unigram, which has such scores there too.
 *
 * SentencePiece writes such vocabularies, also used by GGUF's "llama" and llama2.c's tokenizer.bin:
 * the pair whose joined token has the highest score is merged first.  Every way to cut a token into
 * two others becomes a merge; the token's score gives its rank.  Two cuts of one token have one
 * score there and two ranks here, as in the tokenizer.json files of `transformers`. */
#ifndef LM_TEXT_SCORED_H
#define LM_TEXT_SCORED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"

/* Kinds of tokens, numbered as in SentencePiece and GGUF (tokenizer.ggml.token_type). */
enum {
    LM_SCORED_NORMAL = 1,
    LM_SCORED_UNKNOWN,
    LM_SCORED_CONTROL,
    LM_SCORED_USER,
    LM_SCORED_UNUSED,
    LM_SCORED_BYTE
};

typedef struct {
    const char *text; /* borrowed; not NUL-terminated */
    size_t len;
    int type;
    float score; /* not NaN */
} lm_scored_token;

typedef struct {
    lm_scored_token *v; /* by id */
    size_t n;
    int64_t bos, eos, unk, pad; /* -1: none */
    bool add_bos, add_eos;      /* only where bos, eos >= 0 */
    const char *where;          /* the file, for messages */
    /* Added tokens that are not in v: objects with "content" and flags by id, as in
     * "added_tokens_decoder" of a tokenizer_config.json; ids below n are skipped.  The list was
     * checked; NULL: none. */
    const json_t *extra;
} lm_scored_vocab;

/* Tokens `left` and `right` become token `id`, which is their text together. */
typedef struct {
    uint32_t id, left, right;
    uint32_t n_left; /* bytes of the left token */
    float score;
} lm_scored_merge;

/* All merges, the highest score first, ties in the order of the parts' ids.  The caller frees *out
 * (lm_free).  Fails: LM_ELIMIT. */
lm_code lm_scored_merges(const lm_scored_token *tokens, size_t n, lm_scored_merge **out,
                         size_t *n_out, lm_err *e);

/* ---- Parts of a tokenizer.json ---- */

/* "key": {"type": type, and left open. */
void lm_scored_type(lm_jw *w, const char *key, const char *type);
/* Control, user-defined and unknown tokens; user-defined ones are not special.  after_normal:
 * user-defined tokens are searched in the normalised text, in which U+2581 replaces a space. */
void lm_scored_added(lm_jw *w, const lm_scored_vocab *v, bool after_normal);
/* "post_processor" that adds bos and eos as set in v; `plain` writes its value when nothing is
 * added (NULL: null). */
lm_code lm_scored_post(lm_jw *w, const lm_scored_vocab *v, void (*plain)(lm_jw *w), lm_err *e);
/* "model" up to "vocab"; left open. */
void lm_scored_model(lm_jw *w, const lm_scored_vocab *v, bool fallback, bool with_unk,
                     bool ignore_merges);
/* "vocab": all tokens, those of type UNUSED only if `unused`.  Added tokens too: the `tokenizers`
 * library takes their ids from the vocabulary. */
lm_code lm_scored_names(lm_jw *w, const lm_scored_vocab *v, bool unused, lm_err *e);
void lm_scored_merge_pair(lm_jw *w, const char *left, size_t n_left, const char *right,
                          size_t n_right);

/* How a text is prepared for a vocabulary of words with spaces inside. */
typedef struct {
    bool prefix; /* a space is added before the text */
    /* there are user-defined tokens: no space is added behind them, nor before a text that begins
     * with a space */
    bool first_only;
    bool strip;           /* spaces at both ends are removed, runs of spaces become one */
    bool escape;          /* spaces are U+2581 in the vocabulary */
    bool fallback;        /* characters without a token are bytes, <0x00> to <0xFF> */
    bool unused;          /* tokens of type UNUSED are in the vocabulary */
    bool unigram;         /* the scores are log-probabilities of a Unigram model */
    bool split;           /* Unigram: no token has a space behind its first character */
    const char *charsmap; /* base 64 of SentencePiece's compiled map of characters, NULL: none */
} lm_scored_steps;

/* A whole tokenizer.json, appended to *out.  Fails: LM_EFORMAT for a token that is not UTF-8 or
 * holds a NUL. */
lm_code lm_scored_write(const lm_scored_vocab *v, const lm_scored_steps *s, lm_buf *out, lm_err *e);

#endif
