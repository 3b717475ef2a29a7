/* SPDX-License-Identifier: Apache-2.0 */
/* coded_source.h -- a model whose weights compress-ckpt --weights has put into a format with scales, as a
 * model source with the tensors themselves. */
#ifndef LM_COMPRESS_CODED_SOURCE_H
#define LM_COMPRESS_CODED_SOURCE_H

#include "format/folder.h"

/* *src is replaced by a source of the described tensors, which owns the former one; it stays where nothing is
 * described.  Fails: LM_EFORMAT for a description that the tensors do not keep; *src is the caller's then. */
lm_code lm_coded_source_over(lm_model_source **src, lm_err *e);

#endif
