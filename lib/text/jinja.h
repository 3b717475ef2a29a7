/* SPDX-License-Identifier: Apache-2.0 */
/* jinja.h -- the Jinja language as chat templates use it.
 *
 * A template renders here as in the environment of `transformers` (5.x): jinja2's immutable sandbox
 * with trim_blocks, lstrip_blocks, loop controls, {% generation %} blocks, a tojson that escapes
 * nothing but what JSON must, raise_exception and strftime_now.  Values follow Python: text is
 * counted in code points, dictionaries keep their order, undefined values print as nothing and fail
 * when used.
 *
 * Read are: expressions of every kind (filters, tests, slices, methods of str, list and dict,
 * inline if, chained comparisons), for (else, filter, unpacking, loop, break, continue), if, set
 * (also blocks and namespaces), with, macro, call, filter blocks, raw, comments, generation.  Not
 * there, and refused with their name: include, import, extends, block, autoescape, recursive loops,
 * integers beyond 64 bits, and the filters that draw random numbers or write HTML (urlize, xmlattr,
 * striptags, pprint, ...).
 *
 * A template is hostile text.  It sees its variables and nothing else; work, output, memory and
 * depth are limited, so that an endless loop is one error. */
#ifndef LM_TEXT_JINJA_H
#define LM_TEXT_JINJA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

typedef struct lm_jinja lm_jinja;

/* Compile text[0..len), UTF-8; `where` names it in messages.  The result is constant and may be
 * shared by threads.  Fails: LM_EFORMAT with line and column for what is no template or uses what
 * is not there. */
lm_code lm_jinja_compile(const char *text, size_t len, const char *where, lm_jinja **out,
                         lm_err *e);
void lm_jinja_free(lm_jinja *t); /* NULL is fine */
/* True if the template has a {% generation %} block. */
bool lm_jinja_marks(const lm_jinja *t);
/* True if the template reads a variable of this name. */
bool lm_jinja_reads(const lm_jinja *t, const char *name);

/* Bytes [from, to) of a text. */
typedef struct {
    size_t from, to;
} lm_text_span;
/* Zero-initialise; release with lm_text_spans_fini. */
typedef struct {
    lm_text_span *v;
    size_t n, cap;
} lm_text_spans;
lm_code lm_text_spans_add(lm_text_spans *s, size_t from, size_t to, lm_err *e);
void lm_text_spans_fini(lm_text_spans *s);

/* Limits of one rendering; a field of 0 has the default. */
typedef struct {
    int64_t steps;  /* evaluated nodes, and work in proportion to longer operations [50 million] */
    int64_t output; /* bytes of text [64 MiB] */
    int64_t memory; /* bytes of values [512 MiB] */
    int64_t now;    /* seconds since 1970 that strftime_now sees, in local time [the clock] */
} lm_jinja_limits;

/* Append the template's text for the variables of `vars` (an object; NULL: none) to *out.  `marked`
 * (may be NULL): the bytes of *out that generation blocks made are appended; as in `transformers`,
 * the place of a block inside a macro is where the output had got to when the macro was called.
 * `l` may be NULL.
 *
 * Fails: LM_EFORMAT with line and column when the template calls raise_exception, uses an undefined
 * value or a wrong type; LM_ELIMIT at a limit.  *out may then hold a part.  Threads: safe. */
lm_code lm_jinja_render(const lm_jinja *t, const json_t *vars, const lm_jinja_limits *l,
                        lm_buf *out, lm_text_spans *marked, lm_err *e);

#endif
