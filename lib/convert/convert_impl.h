/* SPDX-License-Identifier: Apache-2.0 */
/* convert_impl.h -- shared by importers and exporters; private to lib/convert. */
#ifndef LM_CONVERT_CONVERT_IMPL_H
#define LM_CONVERT_CONVERT_IMPL_H

#include "base/file.h"
#include "convert/convert.h"
#include "convert/convert_rows.h"
#include "convert/names.h"

#define LM_SIDE_MAX ((size_t)1 << 30) /* most bytes of a small file */

/* Importers: each fills *m or fails. */
lm_code lm_import_hf(lm_import *m, const char *path, const lm_import_opts *o, lm_err *e);
/* From a mapped file; takes ownership of `map`, whatever the result. */
lm_code lm_import_gguf(lm_import *m, lm_map *map, const lm_import_opts *o, lm_err *e);
lm_code lm_import_llmc(lm_import *m, lm_map *map, lm_err *e);
lm_code lm_import_llama2c(lm_import *m, lm_map *map, lm_err *e);
/* True if these are the first bytes of such a file of `size` bytes. */
bool lm_is_llmc(const uint8_t *data, size_t size);
bool lm_is_llama2c(const uint8_t *data, size_t size);
/* True if the `n` bytes begin with plausible sizes of a llama2.c model. */
bool lm_has_llama2c_header(const uint8_t *data, size_t n);

/* Takes ownership of `data`. */
lm_code lm_import_put(lm_import *m, const char *name, lm_buf *data, lm_err *e);
/* Add the tokenizer files of `from` (a folder or a file), or none for "none". */
lm_code lm_import_tokenizer(lm_import *m, const char *from, lm_err *e);
/* If there is no tokenizer.json: build one from vocab.json and merges.txt in the folder `dir`. */
lm_code lm_import_join(lm_import *m, const char *dir, lm_err *e);

/* llama2.c's tokenizer.bin as tokenizer.json.  Fails: LM_EIO, LM_EFORMAT. */
lm_code lm_import_tokenizer_bin(lm_import *m, const char *path, lm_err *e);

/* Exporters. */
lm_code lm_export_hf(lm_import *m, const char *path, const lm_export_opts *o, lm_err *e);
lm_code lm_export_gguf(lm_import *m, const char *path, const lm_export_opts *o, lm_err *e);
lm_code lm_export_llmc(lm_import *m, const char *path, const lm_export_opts *o, lm_err *e);
lm_code lm_export_llama2c(lm_import *m, const char *path, const lm_export_opts *o, lm_err *e);

/* The history of m and this step. */
lm_code lm_export_history(const lm_import *m, const lm_export_opts *o, lm_buf *out, lm_err *e);
/* Open `path` for `bytes` bytes, for which there must be space.  Then lm_export_write is an
 * lm_write_fn with ctx = lm_out. */
lm_code lm_export_open(const char *path, bool force, uint64_t bytes, lm_out **out, lm_err *e);
lm_code lm_export_write(void *out, const void *data, size_t bytes, lm_err *e);

#endif
