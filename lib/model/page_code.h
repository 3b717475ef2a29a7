/* SPDX-License-Identifier: Apache-2.0 */
/* page_code.h -- pages of a model's caches in fewer bytes, for the tiers below the device (tiers.h): keys and values that
 * are plain on the device are coded by the forms of a plan, those that are coded already stay as they are.  Pages that
 * are read again differ by the error of the codes.  Private to lib/model. */
#ifndef LM_MODEL_PAGE_CODE_H
#define LM_MODEL_PAGE_CODE_H

#include <sys/uio.h>

#include "kv/spec.h"
#include "model/model.h"

/* A type of paged.h's, too. */
typedef struct lm_page_code lm_page_code;

/* For pages of `page` tokens of m, whose caches are pages.  The plan is borrowed, its forms are in the host's memory.  `cpu`
 * selects the kernels (kernels/kv_code.h).  Fails: LM_EUSAGE for a policy, for methods that code other than single tokens
 * (those with plain tokens, groups along tokens, outliers, keys before the rotation), and if no side is coded that is
 * plain on the device. */
lm_code lm_page_code_new(const lm_model *m, int64_t page, const lm_kv_plan *plan, lm_cpu_level cpu,
                         lm_page_code **out, lm_err *e);
void lm_page_code_free(lm_page_code *c); /* NULL is fine */
/* Of a page; a multiple of 64. */
size_t lm_page_code_bytes(const lm_page_code *c);
/* Between a page in pieces, one for each paged cache of the model (lm_paged_pieces), that the host can read, and its
 * codes.  One thread at a time. */
void lm_page_encode(lm_page_code *c, const struct iovec *piece, char *to);
void lm_page_decode(lm_page_code *c, const char *from, const struct iovec *piece);

#endif
