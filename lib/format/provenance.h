/* SPDX-License-Identifier: Apache-2.0 */
/* provenance.h -- how a file came to be: the chain of tools that each product carries.
 *
 * A JSON array, oldest step first, kept as a string under "lmutils.history" in safetensors'
 * __metadata__ and in state.json:
 * [{"tool":"init-model","version":"0.1.0","argv":["init-model","llama-5m"],
 *                "inputs":[{"name":"tokenizer.json","xxh3":"<16 hex digits>"}]}, ...]
 * Of the arguments those that decide the product, so that its own name is not among them.  No clock
 * and no host ever; with `hide_paths` (the tool sets it when SOURCE_DATE_EPOCH is set)
 * arguments and names keep only what follows their last '/'. */
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
/* Beside it: tokens in a window of the last training, in decimal digits. */
#define LM_SEQ_KEY "lmutils.seq_len"

typedef struct {
    const char *name; /* path of the input as given */
    uint64_t digest;  /* lm_digest_path, 0: not taken */
    /* The digest's name when it is not of a path: "xxh3_sample", "xxh3_tensors" (merge/plan.h); NULL:
     * "xxh3" */
    const char *kind;
} lm_history_input;

typedef struct {
    const char *tool, *version;
    char *const *argv; /* argv[0] is written as `tool` */
    int argc;
    const lm_history_input *inputs;
    size_t n_inputs;
    bool hide_paths;
    bool none; /* no history is wanted: neither this step nor those before it are written */
} lm_history_step;

/* `before` (the chain of the main input, NULL for none; one that cannot be parsed is dropped) with
 * `step` appended, as compact JSON appended to `out`; with step->none `out` is left as it is. */
lm_code lm_history_add(const char *before, const lm_history_step *step, lm_buf *out, lm_err *e);

/* The chain of this one step as a member `name` of the object that `w` is in; with step->none no such
 * member. */
lm_code lm_history_write(lm_jw *w, const char *name, const lm_history_step *step, lm_err *e);

/* The chain as lm_history_add gives it under its key in the __metadata__ of a plan; with step->none no
 * such key. */
lm_code lm_history_plan(const char *before, const lm_history_step *step, lm_st_plan *plan,
                        lm_err *e);

/* XXH3-64 of a file's content; of a folder: over its regular files (links to files followed, names
 * sorted bytewise, not recursive) as name, NUL, digest. */
lm_code lm_digest_path(const char *path, uint64_t *out, lm_err *e);

#endif
