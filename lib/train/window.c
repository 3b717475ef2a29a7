/* SPDX-License-Identifier: Apache-2.0 */
/* window.c -- stores and reads the sequence length of a training. */
#include "train/window.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "format/provenance.h"

enum { USUAL = 1024 };

lm_code lm_window_note(lm_st_plan *plan, int64_t seq, lm_err *e)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRId64, seq);
    return seq ? lm_st_plan_meta(plan, LM_SEQ_KEY, text, e) : LM_OK;
}

lm_code lm_window_default(const lm_model_source *m, int64_t max_positions, int64_t *seq,
                          bool *trained, lm_err *e)
{
    const char *text = lm_model_source_meta(m, LM_SEQ_KEY);
    *seq = USUAL;
    if (trained)
        *trained = text != NULL;
    if (text &&
        (strspn(text, "0123456789") != strlen(text) || !lm_parse_count(text, seq) || *seq < 1))
        return lm_fail(e, LM_EFORMAT, lm_model_source_path(m), "name the window",
                       "%s is '%.40s', not a length", LM_SEQ_KEY, text);
    if (*seq > max_positions)
        *seq = max_positions;
    return LM_OK;
}
