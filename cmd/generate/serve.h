/* SPDX-License-Identifier: Apache-2.0 */
/* serve.h -- generate --serve-batch: options of continuous batching over pages, and its report. */
#ifndef LM_CMD_GENERATE_SERVE_H
#define LM_CMD_GENERATE_SERVE_H

#include "generate/work.h"
#include "kv/list.h"

/* Rows of the option table. */
#define GENERATE_SERVE_OPTIONS(a)                                                                  \
    LM_GROUP("Batches that never wait (without --serve-batch: batches of -b)"),                    \
        LM_COUNT(0, "serve-batch", &(a).batch, "N", 1, 4096,                                       \
                 "texts at a time, each begins when there is room"),                               \
        LM_ALSO("max-num-seqs"),                                                                   \
        LM_BYTES(0, "kv-memory", &(a).memory, "SIZE", 1, 1e15, "for their caches [what fits]"),    \
        LM_BYTES(0, "kv-host", &(a).host, "SIZE", 1, 1e15, "host memory for those that wait [0]"), \
        LM_STR(0, "kv-disk", &(a).disk, "DIR:SIZE", "disk for those that wait [none]"),            \
        LM_STR_OF(0, "kv-down", &(a).down, "SPEC", lm_kv_names,                                    \
                  "code what goes to host or disk: int8 ... [as it is]")

/* Refuse options that do not fit together, before anything is read. */
void generate_check_serve(void);
/* Choose sizes and build; w->context may become shorter. */
lm_code generate_open_served(generate_work *w, lm_dtype type, lm_err *e);
/* --metrics is opened before the work; and its last record. */
lm_code generate_open_metrics(generate_work *w, lm_err *e);
lm_code generate_close_metrics(generate_work *w, lm_code rc, lm_err *e);
lm_code generate_serve(generate_work *w, const lm_complete_opts *o, const lm_complete_hooks *h,
                       lm_err *e);
/* With --json the last line of the output. */
lm_code generate_serve_record(generate_work *w, lm_err *e);
void generate_serve_summary(const generate_work *w);

#endif
