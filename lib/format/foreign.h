/* SPDX-License-Identifier: Apache-2.0 */
/* foreign.h -- weights in formats that are not read as a model, named with the way out. */
#ifndef LM_FORMAT_FOREIGN_H
#define LM_FORMAT_FOREIGN_H

#include "format/bundle.h"

/* The first file of b (of a stream: of those met so far) that holds weights of such a format, and what
 * to do about it; NULL: there is none. */
const char *lm_foreign_in(const lm_bundle *b, const char **todo);
/* The same for a file by its name: what it is, and what to do; NULL: the name says nothing. */
const char *lm_foreign_name(const char *path, const char **todo);

/* What a file that is no model holds, by its bytes, and the tool for it; NULL: that is not known. */
const char *lm_foreign_bytes(const void *data, size_t n, const char **todo);
/* Is `path` a token dataset, named with .bin or without an ending?  Keeps errno. */
bool lm_foreign_dataset(const char *path);
/* What a folder that is no model holds, by the names of its files (of a stream: those met so far). */
const char *lm_foreign_files(const lm_bundle *b, const char **todo);

#endif
