/* SPDX-License-Identifier: Apache-2.0 */
/* json.h -- JSON in and out.  Reading is jansson's tree behind checked getters that name the key;
 * writing is a small streaming writer with a fixed key order.
 *
 * JSON has no numbers that are not finite: the writer writes null. */
#ifndef LM_BASE_JSON_H
#define LM_BASE_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/err.h"

/* Parse a whole text; duplicate keys, depth over 512 and trailing bytes are LM_EFORMAT with line
 * and column.  Free with json_decref. */
lm_code lm_json_parse(const char *text, size_t len, const char *where, json_t **out, lm_err *e);
lm_code lm_json_load(const char *path, size_t limit, json_t **out, lm_err *e);

/* Check a text that was parsed: LM_EFORMAT names a number (outside strings) that a double cannot
 * hold, such as 1e-400, which the parser reads as 0. */
lm_code lm_json_check_numbers(const char *text, const char *where, lm_err *e);

/* Getters: `obj` must be an object (LM_EFORMAT otherwise).  The *_or forms accept absence and null;
 * a present value of the wrong type or outside [min,max] is always LM_EFORMAT, naming key, value
 * and range. */
lm_code lm_json_i64(const json_t *obj, const char *key, int64_t min, int64_t max, int64_t *out,
                    const char *where, lm_err *e);
lm_code lm_json_i64_or(const json_t *obj, const char *key, int64_t dflt, int64_t min, int64_t max,
                       int64_t *out, const char *where, lm_err *e);
lm_code lm_json_f64_or(const json_t *obj, const char *key, double dflt, double *out,
                       const char *where, lm_err *e);
lm_code lm_json_bool_or(const json_t *obj, const char *key, bool dflt, bool *out, const char *where,
                        lm_err *e);
/* Borrowed from obj; NULL default allowed; a string that holds U+0000 is refused. */
lm_code lm_json_str_or(const json_t *obj, const char *key, const char *dflt, const char **out,
                       const char *where, lm_err *e);

/* Writer onto an lm_buf.  Open/close nest; the writer adds commas and escapes; key NULL inside an
 * array or at the top.  Bytes that are not UTF-8 become U+FFFD.  Errors are sticky in w->err and
 * returned by lm_jw_end. */
typedef struct {
    lm_buf *buf;
    int depth, indent; /* indent 0: one line; else spaces per level */
    bool comma;
    lm_err *err;
    lm_code rc;
} lm_jw;
void lm_jw_begin(lm_jw *w, lm_buf *buf, int indent, lm_err *e);
void lm_jw_obj(lm_jw *w, const char *key);
void lm_jw_arr(lm_jw *w, const char *key);
void lm_jw_close_obj(lm_jw *w);
void lm_jw_close_arr(lm_jw *w);
void lm_jw_str(lm_jw *w, const char *key, const char *s); /* NULL writes null */
void lm_jw_strn(lm_jw *w, const char *key, const char *s, size_t len);
void lm_jw_int(lm_jw *w, const char *key, int64_t v);
/* As few digits as read back equal: 6 to 9 as a float, 15 to 17 as a double. */
void lm_jw_f32(lm_jw *w, const char *key, double v);
void lm_jw_f64(lm_jw *w, const char *key, double v);
void lm_jw_bool(lm_jw *w, const char *key, bool v);
/* Compact copy of a tree; its reals are written by lm_json_real. */
void lm_jw_json(lm_jw *w, const char *key, const json_t *v);
void lm_jw_raw(lm_jw *w, const char *json, size_t len); /* copies valid JSON text */
lm_code lm_jw_end(lm_jw *w);
/* A finite real as Python's repr writes it: the fewest digits that read back equal, with ".0" or an
 * exponent, so that it stays a real (3.7, 1000000.0, 1e-06). */
void lm_json_real(double v, char out[40]);

#endif
