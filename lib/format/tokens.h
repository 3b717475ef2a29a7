/* SPDX-License-Identifier: Apache-2.0 */
/* tokens.h -- token datasets: Megatron, llm.c and nanoGPT shards behind one handle.
 *
 * Readers see one flat stream of ids [0, count) with document starts, whatever the format:
 * - Megatron: NAME.bin holds the ids and nothing else, NAME.idx where sequences and documents
 *   begin. Little-endian; the layout of .idx:
 *       bytes 0-8    "MMIDIDX\0\0"          9 + 8 + 1 + 8 + 8 = 34 bytes of header in all
 *       u64          version, 1
 *       u8           id type: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16 (6, 7 are floats: refused)
 *       u64          sequences S
 *       u64          documents D, plus 1
 *       i32 [S]      length of each sequence, in ids
 *       i64 [S]      byte offset of each sequence in .bin; must be the running sum of lengths
 *       i64 [D+1]    first sequence of each document; from 0 up to S
 *       i8  [S]      modes, optional, not read
 * - llm.c: 256 i32 of header (magic 20240520 version 1: u16 ids, GPT-2; magic 20240801 version 7:
 *   u32 ids, Llama-3; [2] = number of ids), then the ids.  A document begins with its
 *   end-of-text id: 50256, and 128000 for Llama-3.
 * - nanoGPT: u16 ids and nothing else, or, as in forks for larger vocabularies, u32: the ids are read as u32 when every
 *   second 16-bit word is below 16 and not all others are.  A document ends with its end-of-text id.
 * llm.c and nanoGPT shards may be numbered, NAME_000000.bin and on; they read as one stream.
 *
 * Sources: megatron/core/datasets/indexed_dataset.py; llm.c dev/data/data_common.py; nanoGPT
 * data/openwebtext/prepare.py. */
#ifndef LM_FORMAT_TOKENS_H
#define LM_FORMAT_TOKENS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/par.h"

typedef enum {
    LM_TOKENS_AUTO,
    LM_TOKENS_MEGATRON,
    LM_TOKENS_LLMC,
    LM_TOKENS_NANOGPT,
} lm_tokens_kind;
const char *lm_tokens_kind_name(lm_tokens_kind k); /* "megatron", "llmc", "nanogpt"; AUTO: "auto" */
lm_tokens_kind lm_tokens_kind_find(const char *name); /* AUTO if it is none of the others */

typedef struct lm_tokens lm_tokens;

/* Identifies the tokenizer of ids: the number of its ids, and the digest of their tokens
 * (lm_tokenizer_identity). */
typedef struct {
    int64_t ids; /* 0: unknown */
    uint64_t digest;
} lm_tokens_tokenizer;

/* Open a dataset.  `path` is 'data/train', 'data/train.bin', 'data/train.idx', or an llm.c or
 * nanoGPT shard.  With AUTO the kind is that in meta.json (see tokens_meta.h); without it, the kind
 * follows from an .idx beside the .bin, otherwise from the magic number.  Any other file can only
 * hold ids of nanoGPT, and is accepted if it is named .bin, has a whole number of ids, and is not
 * text.  Files are mapped; every header, length and offset is checked against the file sizes, in 64
 * bits.  `eot` is the id between documents for llm.c and nanoGPT if meta.json names none; -1: that
 * of the format, or none (all is then one document).  Ids are not checked here: see
 * lm_tokens_check.  Fails: LM_EIO if no file is found (naming those that were tried), LM_EFORMAT
 * for malformed, truncated or missing files, for files not marked as ids in any way, and when
 * meta.json has another number of ids.  A dataset without ids opens; callers decide. */
lm_code lm_tokens_open(const char *path, lm_tokens_kind kind, int64_t eot, lm_tokens **out,
                       lm_err *e);
void lm_tokens_close(lm_tokens *t);
/* True if a file of a dataset of this name exists: PREFIX.bin, .idx or _nnnnnn.bin. */
lm_code lm_tokens_there(const char *prefix, bool *there, lm_err *e);
/* The datasets of a folder by name: train and val, as shard-data writes them, or with a prefix, as
 * llm.c's scripts do: fineweb_train (fineweb_train_000001.bin, ...) and fineweb_val.  *train and
 * *val are paths without extension, which the caller frees; NULL if the folder has no such dataset.
 * Fails: LM_EUSAGE if there are datasets with several prefixes; LM_EIO. */
lm_code lm_tokens_in_folder(const char *dir, char **train, char **val, lm_err *e);

const char *lm_tokens_path(const lm_tokens *t); /* as given; borrowed */
lm_tokens_kind lm_tokens_format(const lm_tokens *t);
int64_t lm_tokens_vocab(const lm_tokens *t); /* from meta.json; 0: unknown */
lm_tokens_tokenizer lm_tokens_made_with(const lm_tokens *t);
/* True if both begin with the same file. */
bool lm_tokens_same(const lm_tokens *a, const lm_tokens *b);
int64_t lm_tokens_eot(const lm_tokens *t);   /* -1 if none */
int64_t lm_tokens_count(const lm_tokens *t); /* number of ids */

/* Read ids [at, at + n) into dst.  Negative ids and those over 32 bits read as UINT32_MAX.  Any
 * thread.  Fails: LM_EUSAGE if the range leaves the dataset; LM_EFORMAT when an id is not below
 * `vocab`, with its position and value (LM_ANY_ID: all are accepted). */
#define LM_ANY_ID INT64_MAX
lm_code lm_tokens_read(const lm_tokens *t, int64_t at, int64_t n, int64_t vocab, uint32_t *dst,
                       lm_err *e);

/* Loss marks: NAME.mask beside NAME.bin has one byte for each id, 1 if the id is trained to be
 * predicted, otherwise 0, as shard-data --chat writes.  Where ids and marks travel together, the mark
 * is the highest bit of the id.  lm_tokens_open checks the size of the file. */
#define LM_TOKENS_TRAINS 0x80000000u
#define LM_TOKENS_ID     0x7fffffffu
bool lm_tokens_masked(const lm_tokens *t);
/* The marks of ids [at, at + n), 1 or 0; all 1 for a dataset without marks.  Fails: LM_EUSAGE if the
 * range leaves the dataset; LM_EFORMAT for other bytes. */
lm_code lm_tokens_read_mask(const lm_tokens *t, int64_t at, int64_t n, uint8_t *dst, lm_err *e);

/* Find the documents: at no cost for Megatron; by one parallel pass over the ids, made once, for
 * llm.c and nanoGPT.  Must be called before the three functions below.  p may be NULL. */
lm_code lm_tokens_index(lm_tokens *t, lm_par *p, lm_err *e);
int64_t lm_tokens_docs(const lm_tokens *t);
/* First id of document d in [0, docs]; docs gives count.  Documents may be empty. */
int64_t lm_tokens_doc_start(const lm_tokens *t, int64_t d);
/* The document that holds id `at` in [0, count). */
int64_t lm_tokens_doc_of(const lm_tokens *t, int64_t at);

/* Largest id, by one parallel pass over the ids, made once; 0 when there are none. */
uint32_t lm_tokens_max(lm_tokens *t, lm_par *p);
/* Check that all ids are below `vocab`, for writers of derived data: readers check the ids that
 * they read.  Fails as lm_tokens_read for the first that is not. */
lm_code lm_tokens_check(lm_tokens *t, int64_t vocab, lm_par *p, lm_err *e);

/* ---- writing ---- */

typedef struct lm_tokens_writer lm_tokens_writer;
typedef struct {
    lm_tokens_kind kind; /* AUTO = Megatron */
    int64_t vocab;       /* ids are below it: chooses u16 or i32/u32; checked for every id */
    /* llm.c, nanoGPT: at most this many ids per shard, NAME_000000.bin and on; 0 = one file
     * NAME.bin */
    int64_t shard_tokens;
    bool force; /* replace existing files */
    /* write loss marks too: ids have LM_TOKENS_TRAINS set or not.  One file only (no shard_tokens) */
    bool mask;
} lm_tokens_writer_opts;

/* Start writing the dataset `prefix` ('data/train').  Nothing appears under its name before commit.
 * The id type: Megatron u16 if vocab < 65500 else i32; llm.c the GPT-2 layout if vocab <= 65536,
 * else the Llama-3 layout; nanoGPT u16, and LM_EUSAGE if vocab > 65536. Fails: LM_EUSAGE if a
 * target exists and !force; LM_EIO. */
lm_code lm_tokens_create(const char *prefix, const lm_tokens_writer_opts *o, lm_tokens_writer **out,
                         lm_err *e);
/* Append a sequence (n may be 0; in pieces of at most 2^31-1 ids).  LM_EFORMAT for an id that is
 * not below vocab; LM_ELIMIT when a single llm.c file would pass 2^31-1 ids. */
lm_code lm_tokens_put(lm_tokens_writer *w, const uint32_t *ids, int64_t n, lm_err *e);
/* The sequences since the last call make a document (none: an empty one). */
lm_code lm_tokens_end_doc(lm_tokens_writer *w, lm_err *e);
int64_t lm_tokens_written(const lm_tokens_writer *w);
int64_t lm_tokens_written_docs(const lm_tokens_writer *w);
/* End an open document and sync all files; nothing is published yet, and nothing may be added. */
lm_code lm_tokens_finish(lm_tokens_writer *w, lm_err *e);
/* The same and publish: with force the files of an older dataset are removed first, then the new
 * ones renamed, so that a kill in between leaves no dataset rather than a mixture.  Frees w,
 * whatever the result. */
lm_code lm_tokens_commit(lm_tokens_writer *w, lm_err *e);
/* True if `name` is a file of the dataset `base`: base.bin, base.idx, base_nnnnnn.bin. */
bool lm_tokens_own(const char *base, const char *name);
/* Remove the files of a dataset of this name, in any format; LM_EUSAGE if there are any and !force.
 * lm_tokens_create and lm_tokens_commit do so themselves; this is for a dataset that must not
 * exist. */
lm_code lm_tokens_clear(const char *prefix, bool force, lm_err *e);
void lm_tokens_drop(lm_tokens_writer *w); /* NULL is fine; leaves nothing behind */

#endif
