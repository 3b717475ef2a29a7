/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer.h -- text to token ids and back, from a Hugging Face tokenizer.json.
 *
 * The pipeline is that of the `tokenizers` library: split on added tokens -> normaliser ->
 * pre-tokeniser -> model -> post-processor; back through the decoder.  Read are
 *   - tokenizer.json with a BPE model, byte-level (GPT-2, Llama-3) or byte-fallback (Llama-2),
 *     with a WordPiece model (BERT) or a Unigram model (T5);
 *   - vocab.json + merges.txt, GPT-2's older pair of files: byte-level, with GPT-2's pattern, or
 *     with Qwen2's when tokenizer_config.json names its class;
 *   - vocab.txt, BERT's older file: WordPiece;
 *   - tokenizer.model or spiece.model, SentencePiece's file (sentencepiece.h).
 *
 * Ids are the same as those of `tokenizers` (0.23), as far as its Unicode tables have the same
 * version as those here (utf8proc, PCRE2).  Any part of the file that is not supported is
 * LM_EFORMAT with its name: a tokenizer is followed exactly or refused.  Only "truncation" and
 * "padding", which concern batches, are ignored.
 *
 * A loaded lm_tokenizer is constant and may be shared by any number of threads; the memory that
 * encoding changes (word cache, buffers) is in an lm_tok_scratch, one per thread. */
#ifndef LM_TEXT_TOKENIZER_H
#define LM_TEXT_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"

typedef struct lm_tokenizer lm_tokenizer;
typedef struct lm_tok_scratch lm_tok_scratch;

/* A growing array of ids; zero-initialise, release with lm_ids_fini. */
typedef struct {
    uint32_t *v;
    size_t n, cap;
} lm_ids;
void lm_ids_fini(lm_ids *ids);

/* Load from `path`: a tokenizer.json, a SentencePiece file (*.model), BERT's vocab.txt, or a folder
 * that holds one of these or vocab.json + merges.txt.  A tokenizer_config.json beside it names the
 * special tokens.
 *
 * Fails: LM_EIO when none of these can be read; LM_EFORMAT for a file that breaks its format
 * (merges of unknown tokens, two tokens with one id, ids far beyond the number of tokens) or uses a
 * part that is not supported; e->where names the file and the place in it. */
lm_code lm_tokenizer_load(const char *path, lm_tokenizer **out, lm_err *e);
/* The same from the text of a tokenizer.json; `config` (may be NULL) is that of a
 * tokenizer_config.json. */
lm_code lm_tokenizer_from_json(const char *json, size_t len, const char *config, size_t config_len,
                               const char *where, lm_tokenizer **out, lm_err *e);
/* From the bytes of one of the files: a SentencePiece model when `where` ends in ".model", BERT's
 * list of tokens when it ends in "vocab.txt", otherwise a tokenizer.json.  A SentencePiece model
 * whose *config is empty fills it. */
lm_code lm_tokenizer_from_text(const char *text, size_t len, lm_buf *config, const char *where,
                               lm_tokenizer **out, lm_err *e);
void lm_tokenizer_free(lm_tokenizer *t); /* NULL is fine */

lm_code lm_tok_scratch_new(const lm_tokenizer *t, lm_tok_scratch **out, lm_err *e);
void lm_tok_scratch_free(lm_tok_scratch *s);

/* Append the ids of text[0..len) to *out.  add_special: also the ids that the post-processor adds
 * (<s>, ...); added tokens in the text are found either way.  The text must be valid UTF-8
 * (LM_EFORMAT with the byte offset otherwise).  Threads: safe with one scratch a thread. */
lm_code lm_tokenizer_encode(const lm_tokenizer *t, lm_tok_scratch *s, const char *text, size_t len,
                            bool add_special, lm_ids *out, lm_err *e);

/* The same for two texts, with the tokens around and between them, and each id's type appended to
 * *types: 0 for the first text and 1 for the second in BERT, as the post-processor says.  Fails:
 * also LM_EFORMAT when the post-processor has no template of two texts, or several. */
lm_code lm_tokenizer_encode_pair(const lm_tokenizer *t, lm_tok_scratch *s, const char *a,
                                 size_t a_len, const char *b, size_t b_len, bool add_special,
                                 lm_ids *out, lm_ids *types, lm_err *e);

/* Append the text of ids[0..n) to *out.  Always valid UTF-8: bytes that are not UTF-8 become
 * U+FFFD. skip_special drops special added tokens.  An id without a token is LM_EFORMAT. */
lm_code lm_tokenizer_decode(const lm_tokenizer *t, const uint32_t *ids, size_t n, bool skip_special,
                            lm_buf *out, lm_err *e);

/* Decoding as ids arrive: after each id the text that is final is appended to *out (possibly
 * nothing, when a character is split over tokens).  Ids without a token have no text: models whose
 * vocabulary is padded give some.  Zero-initialise; end with lm_tok_stream_end,
 * which appends the rest and resets the stream for the next text; release with
 * lm_tok_stream_fini. */
typedef struct {
    lm_ids ids;
    size_t shown; /* ids[0..shown) are written */
    lm_buf before, after;
} lm_tok_stream;
lm_code lm_tok_stream_push(lm_tok_stream *s, const lm_tokenizer *t, uint32_t id, bool skip_special,
                           lm_buf *out, lm_err *e);
lm_code lm_tok_stream_end(lm_tok_stream *s, const lm_tokenizer *t, bool skip_special, lm_buf *out,
                          lm_err *e);
void lm_tok_stream_fini(lm_tok_stream *s);

/* Highest id + 1, added tokens included: the least number of rows of a model's embedding. */
int64_t lm_tokenizer_vocab_size(const lm_tokenizer *t);
/* The token's text as in the file (byte-level: mapped characters such as U+0120 for a space), not
 * NUL-terminated beyond *len; NULL for an id without a token.  Borrowed. */
const char *lm_tokenizer_token(const lm_tokenizer *t, uint32_t id, size_t *len);
/* The id of a token of that text, -1 if none. */
int64_t lm_tokenizer_id(const lm_tokenizer *t, const char *token, size_t len);
bool lm_tokenizer_is_special(const lm_tokenizer *t, uint32_t id);
/* Bytes of text that the token represents (special tokens and unknown ids: 0); for bits per
 * byte. */
size_t lm_tokenizer_id_bytes(const lm_tokenizer *t, uint32_t id);

/* Special ids, -1 if there is none: from tokenizer_config.json, otherwise by well-known names.  eos
 * is the token that ends a document (<|endoftext|>, </s>, <|end_of_text|>, ...). */
int64_t lm_tokenizer_bos(const lm_tokenizer *t);
int64_t lm_tokenizer_eos(const lm_tokenizer *t);
int64_t lm_tokenizer_pad(const lm_tokenizer *t);
int64_t lm_tokenizer_unk(const lm_tokenizer *t);
int64_t lm_tokenizer_mask(const lm_tokenizer *t);

/* "BPE", "WordPiece" or "Unigram". */
const char *lm_tokenizer_model(const lm_tokenizer *t);
/* LM_EUSAGE "its tokenizer has a WordPiece model, and <what> BPE alone" for other models than
 * BPE. */
lm_code lm_tokenizer_need_bpe(const lm_tokenizer *t, const char *where, const char *what,
                              lm_err *e);

/* The bytes of the tokenizer.json (made from the older files when these were read), and of
 * tokenizer_config.json (NULL if there was none), so that a model folder can carry copies.
 * Borrowed. */
const char *lm_tokenizer_json(const lm_tokenizer *t, size_t *len);
const char *lm_tokenizer_config_json(const lm_tokenizer *t, size_t *len);

#endif
