/* SPDX-License-Identifier: Apache-2.0 */
/* recipe_streams.c -- a stream can be read only once, so it may be used for one input only. */
#include <string.h>

#include "base/stream.h"
#include "merge/recipe_impl.h"

enum { USES = 4 }; /* the paths of one input: model, adapter, and side data */

static const char *use_of(const lm_merge_input *in, int k)
{
    const char *const path[USES] = { in->path, in->lora, in->fisher, in->gram };

    return path[k];
}

/* Compare use b of input k with all earlier ones; a model with several adapters is opened once. */
static lm_code check_use(const lm_merge_recipe *r, int k, int b, lm_err *e)
{
    const char *path = use_of(&r->input[k], b);

    for (int i = 0; path && i <= k; i++)
        for (int a = 0; a < (i < k ? USES : b); a++) {
            const char *other = use_of(&r->input[i], a);

            if (other && lm_stream_same(other, path) && (a || b || strcmp(other, path) != 0))
                return lm_stream_twice(other, path, e);
        }
    return LM_OK;
}

lm_code lm_recipe_streams(const lm_merge_recipe *r, lm_err *e)
{
    lm_code rc = LM_OK;

    for (int i = 0; i < r->n_inputs && !rc; i++)
        for (int k = 0; k < USES && !rc; k++)
            rc = check_use(r, i, k, e);
    for (int s = 0; s < r->n_slices && !rc; s++)
        for (int k = 0; k < r->slice[s].n && !rc; k++)
            for (int i = 0; i < k && !rc; i++) {
                int input = r->slice[s].source[k].input;
                const char *path = r->input[input].path;

                if (r->slice[s].source[i].input == input && lm_stream_is(path))
                    rc = lm_stream_twice(path, path, e);
            }
    return rc;
}
