/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_run.h -- one rendering: its state, and the tables of filters, tests and methods.
 * Private to lib/text. */
#ifndef LM_TEXT_JINJA_RUN_H
#define LM_TEXT_JINJA_RUN_H

#include "text/jinja_node.h"

/* Variables of a block.  Those of an inner one hide those outside; `set` writes the innermost
 * one. */
typedef struct lm_jscope lm_jscope;
struct lm_jscope {
    lm_jscope *up;
    struct lm_jslot {
        int id;
        lm_jval value;
    } * v;
    size_t n, cap;
};

struct lm_jrun {
    const lm_jinja *t;
    lm_arena *mem;
    lm_jval *root; /* [n_names] the outermost variables; MISSING: not set */
    lm_jscope *scope;
    const lm_jnode *at; /* for messages */
    lm_buf *out;        /* where output goes: the text itself, or the buffer of a macro or block */
    lm_buf *text;
    size_t text_from; /* its length at the beginning */
    lm_text_spans *marked;
    int64_t steps, memory; /* left */
    int64_t output, now;
    int64_t macros; /* defined so far: a scope without one can be used again */
    int depth;
    enum { LM_JRUN_GO, LM_JRUN_BREAK, LM_JRUN_CONTINUE } flow;
    lm_err *err;
};

struct lm_jloop {
    lm_jrun *run;
    const lm_jnode *node; /* its target and condition */
    lm_jscope *outside;
    lm_jseq all; /* elements */
    size_t next; /* the next of `all` to test */
    int64_t index0;
    bool peeked; /* `ahead` holds the element after the current one */
    bool ended;  /* the current one is the last */
    lm_jval before, current, ahead;
    lm_jval changed; /* the last arguments of changed() */
    int64_t length;  /* -1: not counted */
};

struct lm_jmacro {
    const lm_jmacro_node *node;
    lm_jscope *scope; /* where it was defined */
};

enum { LM_JRUN_MAX_DEPTH = 600 };

lm_code lm_jrun_fail(lm_jrun *r, const char *what, ...) LM_PRINTF(2, 3);
/* Count work; fails at the limit. */
lm_code lm_jrun_work(lm_jrun *r, size_t units);
/* Count the work of finding characters of a text by their number, and of counting them; ASCII needs
 * none. */
lm_code lm_jrun_walk(lm_jrun *r, const lm_jstr *s);
/* Zeroed memory of the rendering. */
lm_code lm_jrun_alloc(lm_jrun *r, void *out_ptr, size_t n, size_t size);
/* Enter and leave a level of recursion. */
lm_code lm_jrun_enter(lm_jrun *r);
static inline void lm_jrun_leave(lm_jrun *r)
{
    r->depth--;
}
/* Append to a buffer of this rendering, within the limit of output. */
lm_code lm_jrun_add(lm_jrun *r, lm_buf *out, const char *s, size_t len);

/* ---- Evaluation ---- */

lm_code lm_jrun_eval(lm_jrun *r, const lm_jnode *n, lm_jval *out);
/* The failure of using an undefined value. */
lm_code lm_jrun_fail_undefined(lm_jrun *r, const lm_jval *v);
lm_code lm_jrun_name(lm_jrun *r, const lm_jnode *n, lm_jval *out);
lm_code lm_jrun_slice(lm_jrun *r, const lm_jnode *n, lm_jval *out);
lm_code lm_jrun_binary(lm_jrun *r, lm_jop op, const lm_jval *a, const lm_jval *b, lm_jval *out);
lm_code lm_jrun_attribute(lm_jrun *r, const lm_jval *of, const lm_jstr *name, lm_jval *out);
lm_code lm_jrun_item(lm_jrun *r, const lm_jval *of, const lm_jval *key, lm_jval *out);
lm_code lm_jrun_call(lm_jrun *r, const lm_jval *f, const lm_jcall *c, lm_jval *out);
lm_code lm_jrun_filter(lm_jrun *r, const lm_jnode *n, const lm_jval *v, lm_jval *out);
lm_code lm_jrun_body(lm_jrun *r, const lm_jnode *body);
lm_code lm_jrun_assign(lm_jrun *r, const lm_jnode *target, const lm_jval *v);
lm_code lm_jrun_set(lm_jrun *r, int id, lm_jval v);
lm_code lm_jrun_push(lm_jrun *r, lm_jscope *up, lm_jscope **out);
/* Run body in a scope under `up` and give its output as text. */
lm_code lm_jrun_capture(lm_jrun *r, lm_jscope *in, const lm_jnode *body, lm_jval *out);
/* The next element of a loop, behind its condition; *more = false: none. */
lm_code lm_jloop_pull(struct lm_jloop *l, lm_jval *out, bool *more);
lm_code lm_jloop_attribute(lm_jrun *r, struct lm_jloop *l, const lm_jstr *name, bool *found,
                           lm_jval *out);
/* Call a macro; caller may be NULL. */
lm_code lm_jmacro_call(lm_jrun *r, const struct lm_jmacro *m, const lm_jcall *c, lm_jval *out);
/* The language's functions; false: none of that name. */
lm_code lm_jrun_global(lm_jrun *r, const lm_jstr *name, bool *found, lm_jval *out);

/* ---- Arguments ---- */

enum { LM_JARGS_MAX = 6 };
/* Bind a call to parameters "a,b=,c=" (with "=": may be missing); `what` is named in messages. */
lm_code lm_jcall_bind(lm_jrun *r, const lm_jcall *c, const char *what, const char *params,
                      lm_jval out[LM_JARGS_MAX]);
/* Values of bound arguments, with defaults for missing ones. */
lm_code lm_jarg_int(lm_jrun *r, const lm_jval *v, int64_t dflt, int64_t *out);
lm_code lm_jarg_str(lm_jrun *r, const lm_jval *v, const char *what, const lm_jstr **out);
bool lm_jarg_truth(const lm_jval *v, bool dflt);
/* Bind the arguments of a function or method into `arg`; declares `rc`. */
#define LM_JBIND(name, params)                           \
    lm_jval arg[LM_JARGS_MAX];                           \
    lm_code rc = lm_jcall_bind(r, c, name, params, arg); \
    if (rc)                                              \
    return rc

/* ---- Tables ---- */

/* v|name(args): `arg` are bound by `params`, unless these are "*". */
typedef struct {
    const char *name, *params;
    lm_code (*fn)(lm_jrun *r, const lm_jval *v, const lm_jval *arg, const lm_jcall *c,
                  lm_jval *out);
} lm_jfilter;
/* The head of a filter's function. */
#define LM_JFILTER(name)                                                                     \
    static lm_code name(lm_jrun *r, const lm_jval *v, const lm_jval *arg, const lm_jcall *c, \
                        lm_jval *out)
const lm_jfilter *lm_jfilter_named(const char *name, size_t len);
lm_code lm_jfilter_apply(lm_jrun *r, const lm_jfilter *f, const lm_jval *v, const lm_jcall *c,
                         lm_jval *out);
extern const lm_jfilter lm_jfilters_text[], lm_jfilters_number[], lm_jfilters_seq[],
    lm_jfilters_sort[], lm_jfilters_pick[];

/* The value behind a path such as "a.b.0"; *dflt (may be NULL) replaces undefined steps. */
lm_code lm_jpath_follow(lm_jrun *r, const lm_jval *v, const lm_jval *path, const lm_jval *dflt,
                        lm_jval *out);
/* What elements are compared by: the value behind the path, small letters unless `exact`. */
lm_code lm_jpath_key(lm_jrun *r, const lm_jval *v, const lm_jval *path, bool exact,
                     const lm_jval *dflt, lm_jval *out);

typedef struct {
    const char *name, *params;
    lm_code (*fn)(lm_jrun *r, const lm_jval *v, const lm_jval *arg, bool *out);
} lm_jtest;
const lm_jtest *lm_jtest_named(const char *name, size_t len);
lm_code lm_jtest_apply(lm_jrun *r, const lm_jtest *t, const lm_jval *v, const lm_jcall *c,
                       bool *out);

/* Methods by name, up to one without; fn NULL: it would change its object. */
typedef struct {
    const char *name;
    lm_jfn *fn;
} lm_jmethod;
extern const lm_jmethod lm_jmethods_text[], lm_jmethods_split[];
/* Methods; *found = false: the type has none of that name.  *unsafe: it would change the object. */
lm_code lm_jmethod_of(lm_jrun *r, const lm_jval *of, const lm_jstr *name, bool *found, bool *unsafe,
                      lm_jval *out);

/* "..." % args and "...".format(...) */
lm_code lm_jformat_percent(lm_jrun *r, const lm_jstr *format, const lm_jval *args, lm_jval *out);
lm_code lm_jformat_braces(lm_jrun *r, const lm_jstr *format, const lm_jcall *c, lm_jval *out);

/* ---- Text in code points ---- */

size_t lm_jstr_offset(const lm_jstr *s, int64_t chars); /* bytes of the first `chars` characters */
bool lm_jstr_blank(uint32_t cp);                        /* str.isspace of one character */
enum { LM_JSTRIP_LEFT = 1, LM_JSTRIP_RIGHT = 2 };
/* strip(chars), chars NULL: white space. */
void lm_jstr_strip(const char **s, size_t *len, const lm_jstr *chars, unsigned sides);
lm_code lm_jstr_case(lm_jrun *r, const lm_jstr *s, bool upper, lm_jval *out);
lm_code lm_jstr_capitalize(lm_jrun *r, const lm_jstr *s, lm_jval *out);
lm_code lm_jstr_lines(lm_jrun *r, const lm_jstr *s, bool keep, lm_jval *out); /* splitlines */
lm_code lm_jstr_replace(lm_jrun *r, const lm_jstr *s, const lm_jstr *old, const lm_jstr *new,
                        int64_t most, lm_jval *out);
/* & < > " ' as HTML writes them, safe; a safe text is itself. */
lm_code lm_jstr_escape(lm_jrun *r, const lm_jstr *s, lm_jval *out);
/* The same text, safe. */
lm_code lm_jstr_trust(lm_jrun *r, const lm_jstr *s, lm_jval *out);
/* What a search from the right may cost; the last place of `what`, NULL: not found. */
lm_code lm_jstr_work_of_last(lm_jrun *r, const lm_jstr *s, const lm_jstr *what);
const char *lm_jstr_last(const lm_jstr *s, const lm_jstr *what);
bool lm_jstr_cased(const lm_jstr *s, bool upper); /* isupper, islower */

/* JSON to values. */
lm_code lm_jv_of_json(lm_jrun *r, const json_t *j, lm_jval *out);

#endif
