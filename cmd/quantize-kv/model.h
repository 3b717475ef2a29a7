/* SPDX-License-Identifier: Apache-2.0 */
/* model.h -- the parts of quantize-kv that run a model: calibrations (calibrate.c) and reports
 * (evaluate.c), and the tokens that both read (tokens.c). */
#ifndef LM_CMD_QUANTIZE_KV_MODEL_H
#define LM_CMD_QUANTIZE_KV_MODEL_H

#include "common/tool.h"
#include "compress/kv_calibrate.h"
#include "graph/backend.h"
#include "model/loaded.h"
#include "text/tokenizer.h"

typedef struct {
    const char *method;  /* of a calibration */
    const char *methods; /* of a report */
    const char *states;  /* of all rows but the plain one; NULL: F32 */
    const char *lengths, *text, *tokenizer, *dtype, *candidates;
    int64_t windows, seq, depths, repeats, records, steps;
    bool table, check_tokenizer, documents;
} kv_model_options;

#define KV_MODEL_OPTIONS                                                              \
    {                                                                                 \
        .methods = "fp8 int8 int4 int4:rotate=off kivi:bits=2 k4v2", .dtype = "bf16", \
        .windows = 8, .depths = 5, .repeats = 10, .records = 8, .steps = 32,          \
        .check_tokenizer = true, .documents = true                                    \
    }

/* A model, its tokenizer (NULL: it has none), and windows of tokens. */
typedef struct {
    lm_tool *tool;
    const kv_model_options *o;
    const char *path, *data;
    lm_par *par;
    lm_loaded model;
    lm_tokenizer *tok;
    int64_t seq, windows;
    lm_ids ids;
} kv_work;

enum { KV_LEAST_WINDOW = 8 }; /* tokens */

/* Open the model and the first tokens of the data: `windows` windows, of o->seq tokens or as
 * long as its training's; fewer windows if there is less data.  With o->documents each window is
 * a part of one document. */
lm_code kv_work_open(kv_work *w, int64_t windows, lm_err *e);
/* At most `most` tokens of a dataset, text or JSONL. */
lm_code kv_read_tokens(const kv_work *w, const char *path, size_t most, lm_ids *out, lm_err *e);
void kv_work_close(kv_work *w);

/* The next method of a list, and NULL behind the last: methods are separated by spaces, and by
 * commas where no key follows.  The text is changed. */
char *kv_next_method(char **at);
/* Add what a method needs to the settings of a calibration: "kvquant:bits=3,outliers=0.01",
 * "auto", "fp8:scale=head", "all".  With `rest` the text is a specification of a cache,
 * "kvquant:bits=3,sinks=1", and *rest, which the caller frees, that with a file:
 * "kvquant:file=calibration,sinks=1". */
lm_code kv_calibration_parse(const char *text, lm_kv_calibrate_opts *o, char **rest, lm_err *e);
/* True for a specification that needs a calibration and names no file. */
bool kv_calibrated_here(const char *name);

/* --calibrate and --evaluate: complain, and return; lm_end has the status. */
void kv_calibrate(lm_tool *t, const kv_model_options *o);
void kv_evaluate(lm_tool *t, const kv_model_options *o);

#endif
