/* SPDX-License-Identifier: Apache-2.0 */
/* file_llama.h -- the state of a sequence as llama.cpp writes it (llama_state_seq_save_file, slots
 * of llama-server).
 *
 * All numbers little-endian:
 *   1. u32 "ggsq" 0x67677371, u32 version 1 to 4, u32 n, then n i32: the tokens
 *   2. u32 streams; of each: u32 cells; a stream without cells has no more
 *   3. of each cell: i32 position, u32 1, i32 number of the sequence.  (Models with several positions a token, and
 *      hashes of tokens, have more here; they are none of ours.)
 *   4. u32 transposed, u32 layers; keys of each layer: i32 type, u64 bytes of a row, rows of all heads by cell
 *   5. values of each layer: as keys; transposed: i32 type, u32 bytes of a number, u32 numbers of a row, then
 *      for each of these the numbers of all cells
 * Types: F32, F16, BF16.  Block types are refused, because newer versions rotate what they store in
 * them, and the file does not say so.
 *
 * Such a file names neither model nor weights and has no checksums: what is read from it may be
 * that of any model of these shapes. */
#ifndef LM_KV_FILE_LLAMA_H
#define LM_KV_FILE_LLAMA_H

#include "kv/image.h"

typedef struct lm_kv_llama lm_kv_llama;

/* Open a file, and check all that comes before the numbers.  Fails: LM_EIO, LM_EFORMAT. */
lm_code lm_kv_llama_open(const char *path, lm_kv_llama **out, lm_err *e);
void lm_kv_llama_close(lm_kv_llama *f);
/* True if the file at `path` begins like one. */
bool lm_kv_llama_is(const char *path);

/* Tokens with keys and values; whether one more token follows them. */
int64_t lm_kv_llama_tokens(const lm_kv_llama *f);
bool lm_kv_llama_has_next(const lm_kv_llama *f);

/* Read it as the cache of a model, whose description is *a (tokens are not read), plain, in the
 * type a->act.  `pairs`: the rotary embedding rotates adjacent numbers there (weights of Llama and
 * Mistral are permuted so).  Fails: LM_EFORMAT for other shapes, ids from `vocab` on, block types,
 * and numbers that are not finite; LM_ELIMIT. */
lm_code lm_kv_llama_read(const lm_kv_llama *f, const lm_kv_about *a, bool pairs, int64_t vocab,
                         lm_kv_image **out, lm_err *e);

#endif
