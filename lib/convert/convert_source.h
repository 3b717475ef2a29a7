/* SPDX-License-Identifier: Apache-2.0 */
/* convert_source.h -- a GGUF file as a model source, through lm_import, with the codes of its
 * tensors. */
#ifndef LM_CONVERT_CONVERT_SOURCE_H
#define LM_CONVERT_CONVERT_SOURCE_H

#include "convert/convert.h"

/* True if `path` is a regular file that begins like a GGUF file, or is named .gguf: opening a damaged
 * file of that name reports the fault.  "-": standard input, a file or a pipe, begins so. */
bool lm_is_gguf(const char *path);
/* Open it; blocks that are read as numbers are decoded to F32.  A pipe is copied to an unnamed file in
 * the folder for temporaries.  tokenizer false: without its tokenizer.  Fails as lm_import_open. */
lm_code lm_gguf_source_open(const char *path, bool tokenizer, const lm_bundle_opts *how,
                            lm_model_source **out, lm_err *e);

#endif
