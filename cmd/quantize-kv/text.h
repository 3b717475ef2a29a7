/* SPDX-License-Identifier: Apache-2.0 */
/* text.h -- texts that quantize-kv writes. */
#ifndef LM_CMD_QUANTIZE_KV_TEXT_H
#define LM_CMD_QUANTIZE_KV_TEXT_H

#include <stdbool.h>

#include "base/buf.h"

/* Write a text to a file, or to standard output ("-"). */
lm_code kv_write_text(const char *path, bool force, const lm_buf *text, lm_err *e);

#endif
