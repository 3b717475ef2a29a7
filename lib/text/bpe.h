/* SPDX-License-Identifier: Apache-2.0 */
/* bpe.h -- the encoding of one word: the vocabulary, and byte-pair encoding with its merge table
 * and merge loop.  The other models of a word are in subword.h, behind the same calls.
 *
 * The symbols of a word (its characters, or its bytes in byte-level mode) are merged pair by pair:
 * lowest rank first, leftmost among equal ranks, until no pair is in the table (arXiv:1508.07909).
 * Short words take a scan over all pairs, long ones a heap: O(n log n). */
#ifndef LM_TEXT_BPE_H
#define LM_TEXT_BPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "text/tokenizer.h"

/* Byte b's character in byte-level vocabularies: printable Latin-1 characters map to themselves,
 * the 68 other bytes to U+0100 and up (GPT-2, encoder.py). */
uint32_t lm_byte_char(uint8_t b);
int lm_byte_of_char(uint32_t c); /* -1: not such a character */
/* The UTF-8 of lm_byte_char(b), 1 or 2 bytes; returns their number. */
size_t lm_byte_utf8(uint8_t b, char out[4]);

typedef struct {
    uint64_t pair; /* left << 32 | right; LM_BPE_EMPTY in a free cell */
    uint32_t rank, id;
} lm_bpe_merge;
#define LM_BPE_EMPTY UINT64_MAX
#define LM_BPE_NONE  UINT32_MAX

typedef struct lm_subword lm_subword;

/* Filled by the loader (tokenizer_json.c), constant afterwards.  Zero-initialise. */
typedef struct {
    char *text; /* all tokens one after the other */
    size_t text_len, text_cap;
    struct {
        uint32_t off, len;
    } * tokens;   /* by id; off = LM_BPE_NONE: no token has this id */
    size_t n_ids; /* highest id + 1 */
    size_t n_tokens;
    uint32_t *cells; /* open addressing over tokens: id, or LM_BPE_NONE */
    size_t cell_mask;
    lm_bpe_merge *merges;
    size_t merge_mask, n_merges;
    uint32_t byte_id[256];     /* token of each byte's character; valid if byte_level */
    uint32_t fallback_id[256]; /* <0xXX>, or LM_BPE_NONE */
    uint32_t unk_id;           /* LM_BPE_NONE: characters without a token are dropped */
    const char *unk_name;      /* named but missing from the vocabulary: an error when needed */
    bool byte_level;           /* every byte's character is a token: words are taken as bytes */
    bool byte_fallback, fuse_unk, ignore_merges;
    const lm_subword *subword; /* words are cut by this model; NULL: by merges.  Borrowed */
} lm_bpe;

void lm_bpe_fini(lm_bpe *b);
/* Reserve n tokens and n_ids ids; then call lm_bpe_add_token for each, then lm_bpe_end_vocab. */
lm_code lm_bpe_begin_vocab(lm_bpe *b, size_t n, size_t n_ids, lm_err *e);
/* Fails: LM_EFORMAT if the id or the text is taken, or id >= n_ids. */
lm_code lm_bpe_add_token(lm_bpe *b, const char *s, size_t len, uint32_t id, const char *where,
                         lm_err *e);
void lm_bpe_end_vocab(lm_bpe *b);
/* Then reserve n merges and add each in order of rank.  Fails: LM_EFORMAT if one of the three texts
 * is not a token. */
lm_code lm_bpe_begin_merges(lm_bpe *b, size_t n, lm_err *e);
lm_code lm_bpe_add_merge(lm_bpe *b, const char *l, size_t llen, const char *r, size_t rlen,
                         uint32_t rank, const char *where, lm_err *e);

uint32_t lm_bpe_find(const lm_bpe *b, const char *s, size_t len); /* id or LM_BPE_NONE */

/* Working memory of one thread, with a cache from words to ids. */
typedef struct lm_bpe_scratch lm_bpe_scratch;
lm_code lm_bpe_scratch_new(lm_bpe_scratch **out, lm_err *e);
void lm_bpe_scratch_free(lm_bpe_scratch *s);

/* Append the ids of one word.  `bytes`: w is plain bytes, each standing for its byte-level
 * character (needs b->byte_level); otherwise w is UTF-8 and its characters are looked up.  A
 * scratch is for one lm_bpe and one value of `bytes`.  `readable`: bytes that may be read from w
 * on, at least len. */
lm_code lm_bpe_encode(const lm_bpe *b, lm_bpe_scratch *s, const char *w, size_t len,
                      size_t readable, bool bytes, lm_ids *out, lm_err *e);

#endif
