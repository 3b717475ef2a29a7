/* SPDX-License-Identifier: Apache-2.0 */
/* hyper.h -- tables of hyper-parameters, and values for them as text: "beta1=0.9,nesterov=on".
 *
 * A method (an optimiser, a cache of keys and values) declares a table; its hyper-parameters are
 * then read, checked, listed and written by the functions here.  Messages begin with `where`, the
 * subject of the text ("optimizer"), and name `who`, the method. */
#ifndef LM_BASE_HYPER_H
#define LM_BASE_HYPER_H

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

typedef struct {
    const char *name; /* usual name: "beta1"; NULL: past the last */
    double value, least, most;
    const char *help; /* short description */
    /* names of the values 0, 1, 2...: "off on"; NULL: a number; LM_WHOLE: an integer */
    const char *words;
} lm_hyper;
#define LM_WHOLE ""

/* The index in the table; -1: no entry has that name. */
int lm_hyper_find(const lm_hyper *table, const char *name);

/* One "key=value" at *at; *at then points to the ',' or the character of `ends` (at most 7) behind
 * it, or to the end.  In keys '-' is read as '_'.  Fails: LM_EUSAGE for a key without value and for
 * a value that is too long; a key that is too long is returned cut, with an empty value. */
typedef struct {
    char key[64], value[64];
} lm_hyper_text;
lm_code lm_hyper_next(const char **at, const char *ends, const char *where, const char *who,
                      lm_hyper_text *out, lm_err *e);

/* A value of *h, a number in its range or one of its words.  Fails: LM_EUSAGE. */
lm_code lm_hyper_set(const lm_hyper *h, const char *where, const char *who, const char *text,
                     double *out, lm_err *e);

/* LM_EUSAGE for a key that is not in the table; `more`: keys besides the table's, "lr ema ", or "". */
lm_code lm_hyper_fail(const lm_hyper *table, const char *where, const char *who, const char *more,
                      const char *key, lm_err *e);

/* A value as lm_hyper_set reads it: its word, or the fewest digits that read back equal. */
void lm_hyper_show(const lm_hyper *h, double value, char out[64]);

/* A line of a list: name, help, words or range, and the default: "off on [off]", "0 to 1 [0.9]". */
lm_code lm_hyper_add_line(const lm_hyper *h, lm_buf *out, lm_err *e);
/* As an object of that name: value, least, most or words, help. */
void lm_hyper_add_json(const lm_hyper *h, lm_jw *w);

#endif
