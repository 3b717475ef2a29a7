/* SPDX-License-Identifier: Apache-2.0 */
/* imatrix.h -- importance matrices in the form of llama.cpp's llama-imatrix: for each weight
 * matrix, by its name in GGUF, the mean square of every column of its input over some calibration
 * text.  The larger the input of a weight, the more an error in it costs.
 *
 * Two formats are read, the first is also written:
 *   GGUF    tensors NAME.in_sum2 (sums of squares, F32) and NAME.counts (rows that were added, F32);
 *           keys imatrix.datasets, imatrix.chunk_count, imatrix.chunk_size
 *   legacy  (.dat, little-endian) i32 entries; of each i32 length, name, i32 calls, i32 values, F32 values
 *           (means times calls); then, if there is more, i32 chunks, i32 length, data set */
#ifndef LM_FORMAT_IMATRIX_H
#define LM_FORMAT_IMATRIX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

typedef struct lm_imatrix lm_imatrix;

/* True if the file at `path` begins like an importance matrix of either format; false if it cannot
 * be read. */
bool lm_imatrix_is(const char *path);
/* Fails: LM_EIO, LM_EFORMAT naming the entry: truncated, duplicate, a value that is negative or not
 * finite. */
lm_code lm_imatrix_open(const char *path, lm_imatrix **out, lm_err *e);
/* The same for bytes in memory; `where` names them in messages. */
lm_code lm_imatrix_parse(const void *data, size_t size, const char *where, lm_imatrix **out,
                         lm_err *e);
/* An empty one; `dataset` names the text from which it is made, `chunk` tokens at a time. */
lm_code lm_imatrix_new(const char *dataset, int64_t chunk, lm_imatrix **out, lm_err *e);
void lm_imatrix_free(lm_imatrix *m);

/* Add an entry: n sums of squares over `count` rows, copied.  Fails: LM_EFORMAT as above. */
lm_code lm_imatrix_add(lm_imatrix *m, const char *name, const double *sums, size_t n, int64_t count,
                       lm_err *e);
void lm_imatrix_set_chunks(lm_imatrix *m, int64_t chunks);

size_t lm_imatrix_count(const lm_imatrix *m);
/* The n mean squares of an entry; NULL: no such entry. */
const float *lm_imatrix_find(const lm_imatrix *m, const char *name, size_t *n);
int64_t lm_imatrix_chunks(const lm_imatrix *m);      /* 0: unknown */
const char *lm_imatrix_dataset(const lm_imatrix *m); /* NULL: unknown */

/* As GGUF, entries in the order of their names.  The file appears whole or not at all; "-" is standard
 * output.  Fails: LM_EIO. */
lm_code lm_imatrix_write(const lm_imatrix *m, const char *path, bool force, lm_err *e);

#endif
