/* SPDX-License-Identifier: Apache-2.0 */
/* foreign.h -- names inputs that cannot be read as a model, with the remedy. */
#ifndef LM_FORMAT_FOREIGN_H
#define LM_FORMAT_FOREIGN_H

#include "format/bundle.h"

/* The first file of b (for a stream: of those read so far) with weights in such a format, and the
 * remedy; NULL: none. */
const char *lm_foreign_in(const lm_bundle *b, const char **todo);
/* The same for a file by its name: its kind, and the remedy; NULL: unknown name. */
const char *lm_foreign_name(const char *path, const char **todo);

/* The kind of a file that is not a model, by its bytes, and the tool for it; NULL: unknown. */
const char *lm_foreign_bytes(const void *data, size_t n, const char **todo);
/* True if `path` is a token dataset, named with .bin or without an ending.  Keeps errno. */
bool lm_foreign_dataset(const char *path);
/* The content of a folder that is not a model, by the names of its files (for a stream: those read
 * so far). */
const char *lm_foreign_files(const lm_bundle *b, const char **todo);

#endif
