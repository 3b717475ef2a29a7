/* SPDX-License-Identifier: Apache-2.0 */
/* convert_impl.h -- what importers and exporters share; private to lib/convert. */
#ifndef LM_CONVERT_CONVERT_IMPL_H
#define LM_CONVERT_CONVERT_IMPL_H

#include "base/file.h"
#include "convert/convert.h"
#include "convert/convert_rows.h"
#include "convert/names.h"

#define LM_SIDE_MAX ((size_t)1 << 30) /* bytes of a small file */

/* Importers: each fills *m or fails. */
lm_code lm_import_hf(lm_import *m, const char *path, const lm_import_opts *o, lm_err *e);
/* From bytes that `map` maps; its ownership passes, whatever the result. */
lm_code lm_import_gguf(lm_import *m, lm_map *map, const lm_import_opts *o, lm_err *e);
lm_code lm_import_llmc(lm_import *m, lm_map *map, lm_err *e);
lm_code lm_import_llama2c(lm_import *m, lm_map *map, lm_err *e);
/* Is this the beginning (of `size` bytes in all) of one? */
bool lm_is_llmc(const uint8_t *data, size_t size);
bool lm_is_llama2c(const uint8_t *data, size_t size);
/* Do the `n` bytes there begin with sizes that a model of llama2.c may have? */
bool lm_has_llama2c_header(const uint8_t *data, size_t n);

/* Takes the bytes of `data` over. */
lm_code lm_import_put(lm_import *m, const char *name, lm_buf *data, lm_err *e);
/* Add the tokenizer files of `from` (a folder or a file), or none for "none". */
lm_code lm_import_tokenizer(lm_import *m, const char *from, lm_err *e);
/* When there is no tokenizer.json: one made out of vocab.json and merges.txt in the folder `dir`. */
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
/* Open `path` for `bytes` bytes to come, for which there must be room.  Then lm_export_write is an
 * lm_write_fn with ctx = lm_out. */
lm_code lm_export_open(const char *path, bool force, uint64_t bytes, lm_out **out, lm_err *e);
lm_code lm_export_write(void *out, const void *data, size_t bytes, lm_err *e);

#endif
