/* SPDX-License-Identifier: Apache-2.0 */
/* record.c -- recordings of work on a backend, and their refusal. */
#include "graph/backend.h"

lm_code lm_record(lm_backend *b, lm_code (*run)(void *ctx, lm_err *e), void *ctx,
                  lm_recording **out, lm_err *e)
{
    lm_err second = { 0 };
    *out = NULL;
    if (b->record_begin(b, b->main, e))
        return e->code;
    run(ctx, e);
    if (b->record_end(b, b->main, out, &second) && !e->code)
        *e = second;
    if (e->code && *out) {
        b->recording_free(b, *out);
        *out = NULL;
    }
    return e->code;
}
