/* SPDX-License-Identifier: Apache-2.0 */
/* metrics.h -- the metrics of a run while it works: JSONL, one object per line; lm-metrics(5).
 *
 *   {"event":"run","tool":"train","version":"0.1.0","argv":["train",...],"seed":1, ...}    first
 *   {"event":"step","step":1,"tokens":4096,"seconds":0.41,"loss":8.31,"lr":1e-4,"grad_norm":2.1,
 *    "tokens_per_second":10012,"mfu":0.31, ...}
 *   {"event":"eval","step":100,"tokens":...,"seconds":...,"loss":4.9,"perplexity":...,"bits_per_byte":...}
 *   {"event":"experts","step":100,...,"layer":3,"max_over_mean":1.4,...,"load":[96,120,...]}
 *   {"event":"checkpoint","step":100,"path":"run/checkpoint-100"}
 *   {"event":"end","status":"done","step":300,"seconds":...}                              last
 *
 * Each line is one write(2), so that a reader of a growing file sees complete lines, except perhaps
 * the last.  JSON has no NaN and no infinity: such a number becomes null, and the record then ends
 * with "nonfinite":"nan" ("inf", "-inf"; the kind of the first one). */
#ifndef LM_FORMAT_METRICS_H
#define LM_FORMAT_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/progress.h"

/* ---- writing ----------------------------------------------------------------------------------
 */

typedef struct lm_metrics lm_metrics;

/* Treatment of an existing file. */
typedef enum {
    LM_METRICS_NEW,     /* refuse: LM_EUSAGE               */
    LM_METRICS_REPLACE, /* append; lm_metrics_settle removes the old records */
    LM_METRICS_APPEND, /* append (resumed run); an incomplete last line is ended with a newline first
                        */
} lm_metrics_mode;

/* Open `dest`: a file name, "-" (standard output) or "fd:N" (a descriptor that is already open; it
 * is not closed at the end).  `sink` takes the one warning of a broken pipe; may be NULL.  A caller
 * with long work must ignore SIGPIPE (lm_tool.lasting).  Fails: LM_EUSAGE (exists; N is not an open
 * descriptor), LM_EIO. */
lm_code lm_metrics_open(const char *dest, lm_metrics_mode mode, lm_sink *sink, lm_metrics **out,
                        lm_err *e);

/* One record: begin, fields in their order, end.  All functions do nothing for m == NULL, so a loop
 * needs no "if (metrics)".  Strings must be UTF-8 (other bytes become U+FFFD).  Nothing is
 * allocated after the longest record. */
void lm_metrics_begin(lm_metrics *m, const char *event);
void lm_metrics_int(lm_metrics *m, const char *key, int64_t v);
void lm_metrics_f32(lm_metrics *m, const char *key, double v);      /* %.9g  */
void lm_metrics_f64(lm_metrics *m, const char *key, double v);      /* %.17g */
void lm_metrics_str(lm_metrics *m, const char *key, const char *s); /* NULL writes null */
void lm_metrics_list(lm_metrics *m, const char *key, const double *v, size_t n); /* %.9g */
/* Write the line.  A closed reader (EPIPE) is not a failure: it causes one warning, and later
 * records are dropped.  Fails: LM_EIO (disk full), LM_ELIMIT. */
lm_code lm_metrics_end(lm_metrics *m, lm_err *e);

/* Begin the "run" record with tool, version, argv and seed; add more fields, then lm_metrics_end.
 */
void lm_metrics_begin_run(lm_metrics *m, const char *tool, const char *version, int argc,
                          char *const *argv, int64_t seed);

/* After LM_METRICS_REPLACE, once the new run has results: remove the old records.  The file is
 * replaced by rename, so that it always holds either all or only the new records; until then it has
 * both, the new ones behind a "run" record of their own.  A failure is a warning, and both remain.
 * Does nothing at a second call, and for m == NULL. */
void lm_metrics_settle(lm_metrics *m);

/* Close; the caller writes the "end" record first ("done", "stopped", "converged", "nan",
 * "failed"). */
lm_code lm_metrics_close(lm_metrics *m, lm_err *e);

/* ---- reading ----------------------------------------------------------------------------------
 */

/* Records with a number "layer" are of the event and that layer: "experts.3" for layer 3.
 *
 * The numbers that one key had in the records of one event, in file order.  step, tokens and
 * seconds are those of the same record, NAN where it has none; value is NAN or +-INFINITY if the
 * record marks it so.  When step goes back (a run resumed from a checkpoint before its last
 * record), the points at and after that step are replaced: the later records are valid. */
typedef struct {
    char *event, *key;
    double *step, *tokens, *seconds, *value;
    size_t n, cap;
} lm_series;

/* The lists that one key had in the records of one event, likewise. */
typedef struct {
    char *event, *key;
    double *step, *value; /* [n], [n,width] */
    size_t n, cap, width; /* of the last record: one of another width replaces those before */
} lm_list_series;

typedef struct lm_metrics_file lm_metrics_file;

/* Open a metrics file for reading; "-" is standard input.  Reads nothing yet. */
lm_code lm_metrics_file_open(const char *path, lm_metrics_file **out, lm_err *e);

/* Read what has been added since the last call, up to the end of the file as it is now; *grew (may
 * be NULL): true if records were added.  `last`: the file is final, so a last line without a
 * newline is parsed if it is complete, and dropped otherwise.  Lines that are not JSON objects are
 * skipped and counted.  A file that was emptied or replaced under its name is read from its start.
 * On a pipe: blocks until the end when `last`, otherwise reads the available bytes. */
lm_code lm_metrics_file_poll(lm_metrics_file *f, bool last, bool *grew, lm_err *e);

/* Borrowed until the next poll or close.  NULL when there is none. */
const lm_series *lm_metrics_file_series(const lm_metrics_file *f, const char *event,
                                        const char *key);
const lm_list_series *lm_metrics_file_rows(const lm_metrics_file *f,
                                           size_t i);                     /* NULL past the last */
const lm_series *lm_metrics_file_nth(const lm_metrics_file *f, size_t i); /* NULL past the last */
const char *lm_metrics_file_path(const lm_metrics_file *f);
const char *
lm_metrics_file_status(const lm_metrics_file *f);          /* of the end record; NULL before it */
bool lm_metrics_file_eof(const lm_metrics_file *f);        /* a pipe whose writer has ended */
int64_t lm_metrics_file_skipped(const lm_metrics_file *f); /* lines that are not JSON objects */
/* line number of the first, 0 if none */
int64_t lm_metrics_file_first_skipped(const lm_metrics_file *f);
void lm_metrics_file_close(lm_metrics_file *f);

#endif
