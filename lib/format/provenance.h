/* SPDX-License-Identifier: Apache-2.0 */
/* provenance.h -- the history of a file: the chain of tools that produced it, stored in each
 * product.
 *
 * A JSON array, oldest step first, kept as a string under "lmutils.history" in safetensors'
 * __metadata__ and in state.json:
 * [{"tool":"init-model","version":"0.1.0","argv":["init-model","llama-5m"],
 *                "inputs":[{"name":"tokenizer.json","xxh3":"<16 hex digits>"}]}, ...]
 * Holds the arguments that determine the product, so not its own name; never a clock or a host.  With `hide_paths` (set by
 * tools when SOURCE_DATE_EPOCH is set) arguments and names keep only the part behind their last '/'. */
#ifndef LM_FORMAT_PROVENANCE_H
#define LM_FORMAT_PROVENANCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "format/safetensors.h"

#define LM_HISTORY_KEY "lmutils.history"
/* Another key: tokens in a window of the last training, in decimal digits. */
#define LM_SEQ_KEY "lmutils.seq_len"

typedef struct {
    const char *name; /* path of the input as given */
    uint64_t digest;  /* lm_digest_path, 0: not computed */
    /* The digest's name when it is not that of a path: "xxh3_sample", "xxh3_tensors"
     * (merge/plan.h); NULL: "xxh3" */
    const char *kind;
} lm_history_input;

typedef struct {
    const char *tool, *version;
    char *const *argv; /* argv[0] is replaced by `tool` */
    int argc;
    const lm_history_input *inputs;
    size_t n_inputs;
    bool hide_paths;
    bool none; /* write no history, neither this step nor the earlier ones */
} lm_history_step;

/* `before` (the chain of the main input, NULL for none; one that cannot be parsed is dropped) with
 * `step` appended, as compact JSON appended to `out`; with step->none `out` is unchanged. */
lm_code lm_history_add(const char *before, const lm_history_step *step, lm_buf *out, lm_err *e);

/* Write the chain of this step alone as member `name` of the object open in `w`; nothing with
 * step->none. */
lm_code lm_history_write(lm_jw *w, const char *name, const lm_history_step *step, lm_err *e);

/* Add the chain of lm_history_add to the __metadata__ of a plan; nothing with step->none. */
lm_code lm_history_plan(const char *before, const lm_history_step *step, lm_st_plan *plan,
                        lm_err *e);

/* XXH3-64 of a file's content; of a folder: over its regular files (links to files followed, names
 * sorted bytewise, not recursive) as name, NUL, digest. */
lm_code lm_digest_path(const char *path, uint64_t *out, lm_err *e);

#endif
