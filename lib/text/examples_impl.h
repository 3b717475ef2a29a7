/* SPDX-License-Identifier: Apache-2.0 */
/* examples_impl.h -- shared by examples.c, which stores examples, and examples_read.c, which makes
 * them.  Private to lib/text. */
#ifndef LM_TEXT_EXAMPLES_IMPL_H
#define LM_TEXT_EXAMPLES_IMPL_H

#include <stdio.h>

#include "base/hash.h"
#include "text/examples.h"

struct lm_text_examples {
    lm_text_examples_stats st;
    uint32_t *v; /* all ids; mapped when there is a file */
    size_t cap;  /* of v in memory */
    FILE *file;
    size_t mapped; /* bytes */
    int64_t *end;  /* of each example in v */
    size_t cap_end;
    lm_hash128 hash;
    const char *tmp;
};

/* Empty, with a temporary file in the folder `dir` (NULL: in memory). */
lm_code examples_new(const char *dir, lm_text_examples **out, lm_err *e);
/* Append one example: ids with their marks. */
lm_code examples_append(lm_text_examples *x, const uint32_t *ids, size_t n, lm_err *e);
/* After the last one: the ids can be read. */
lm_code examples_finish(lm_text_examples *x, lm_err *e);

#endif
