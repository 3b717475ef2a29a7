/* SPDX-License-Identifier: Apache-2.0 */
/* scored.h -- BPE vocabularies that keep scores of tokens in place of a list of merges, as a
 * tokenizer.json.
 *
 * SentencePiece writes such vocabularies, and GGUF's "llama" and llama2.c's tokenizer.bin took them
 * over: the pair whose joint token has the highest score is joined first.  Every way to cut a token
 * into two others becomes a merge, of the rank that the token's score says.  Two cuts of one token
 * have one score there and two ranks here, as in the tokenizer.json files of `transformers`. */
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
    /* Added tokens that are not among v: objects with "content" and flags under their ids, as
     * "added_tokens_decoder" of a tokenizer_config.json has them; ids below n are passed over.
     * Checked; NULL: none. */
    const json_t *extra;
} lm_scored_vocab;

/* Tokens `left` and `right` become token `id`, which is their text together. */
typedef struct {
    uint32_t id, left, right;
    uint32_t n_left; /* bytes of the left one */
    float score;
} lm_scored_merge;

/* All merges, the highest score first, ties in the order of the parts' ids.  *out is yours
 * (lm_free).  Fails: LM_ELIMIT. */
lm_code lm_scored_merges(const lm_scored_token *tokens, size_t n, lm_scored_merge **out,
                         size_t *n_out, lm_err *e);

/* ---- Parts of a tokenizer.json ---- */

/* "key": {"type": type, and left open. */
void lm_scored_type(lm_jw *w, const char *key, const char *type);
/* Control, user-defined and unknown tokens; user-defined ones are not special.  after_normal: those
 * are looked for in the text that the normaliser made, where U+2581 stands for a space. */
void lm_scored_added(lm_jw *w, const lm_scored_vocab *v, bool after_normal);
/* "post_processor" that adds bos and eos as v says; `plain` writes what stands there when nothing
 * is added (NULL: null). */
lm_code lm_scored_post(lm_jw *w, const lm_scored_vocab *v, void (*plain)(lm_jw *w), lm_err *e);
/* "model" up to where "vocab" follows; left open. */
void lm_scored_model(lm_jw *w, const lm_scored_vocab *v, bool fallback, bool with_unk,
                     bool ignore_merges);
/* "vocab": all tokens, those of type UNUSED only if `unused`.  Added tokens too: the `tokenizers`
 * library gives them the ids that the vocabulary says. */
lm_code lm_scored_names(lm_jw *w, const lm_scored_vocab *v, bool unused, lm_err *e);
void lm_scored_merge_pair(lm_jw *w, const char *left, size_t n_left, const char *right,
                          size_t n_right);

/* How the text is prepared for a vocabulary of words with spaces inside. */
typedef struct {
    bool prefix; /* a space stands before the text */
    bool
        first_only; /* there are user-defined tokens: but not after an added token; a text that begins with a space gets none */
    bool strip;     /* spaces at both ends go, runs of them become one */
    bool escape;    /* spaces are U+2581 in the vocabulary */
    bool fallback;  /* characters without a token are bytes, <0x00> to <0xFF> */
    bool unused;    /* tokens of type UNUSED are in the vocabulary */
    const char *charsmap; /* base 64 of SentencePiece's compiled map of characters, NULL: none */
} lm_scored_steps;

/* A whole tokenizer.json, appended to *out.  Fails: LM_EFORMAT for a token that is not UTF-8 or
 * holds a NUL. */
lm_code lm_scored_write(const lm_scored_vocab *v, const lm_scored_steps *s, lm_buf *out, lm_err *e);

#endif
