/* SPDX-License-Identifier: Apache-2.0 */
/* file_report.h -- what a cache file holds, from its header. */
#ifndef LM_KV_FILE_REPORT_H
#define LM_KV_FILE_REPORT_H

#include "base/buf.h"
#include "kv/file.h"

/* As text, one line for each layer, or as one JSON object on a line. */
lm_code lm_kv_file_report(const lm_kv_file *f, bool json, lm_buf *out, lm_err *e);

/* What lists call a part: "k", "v", "latent", "rotary". */
const char *lm_kv_part_name(const lm_kv_about *a, int64_t part);

#endif
