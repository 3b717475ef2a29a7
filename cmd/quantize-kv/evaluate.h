/* SPDX-License-Identifier: Apache-2.0 */
/* evaluate.h -- the report of quantize-kv --evaluate, and how it is written (evaluate_text.c). */
#ifndef LM_CMD_QUANTIZE_KV_EVALUATE_H
#define LM_CMD_QUANTIZE_KV_EVALUATE_H

#include "compress/kv_report.h"
#include "quantize-kv/model.h"

enum { KV_MOST_METHODS = 64, KV_MOST_LENGTHS = 32 };

typedef struct {
    kv_work work;
    lm_backend *b, *host;
    lm_loaded host_model;
    lm_kv_row row[1 + KV_MOST_METHODS]; /* the reference first */
    int rows;
    char *list;                            /* the text of names */
    char *spec[1 + KV_MOST_METHODS];       /* own texts; NULL: the name is it */
    lm_kv_data *made[1 + KV_MOST_METHODS]; /* calibrations made here */
    lm_kv_report report;
    double *outliers;     /* of keys, by layer */
    lm_cache_plan states; /* of --states */
    lm_ids filler;
    int64_t length[KV_MOST_LENGTHS];
    int64_t lengths, depths, repeats;
    lm_kv_passkeys passkeys;
} kv_report;

/* Append the table; an object of JSON; the maps of retrieval as SVG, PNG or text, by the ending
 * of `path`. */
lm_code kv_report_table(const kv_report *k, lm_buf *out, lm_err *e);
lm_code kv_report_json(const kv_report *k, lm_buf *out, lm_err *e);
lm_code kv_report_picture(const kv_report *k, const char *path, lm_buf *out, lm_err *e);

#endif
