/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_value.h -- the values of a rendering: Python's, as far as templates see them.
 * Private to lib/text.
 *
 * Values live in the arena of their rendering, constants in that of the template; nothing is
 * released before.  Only namespaces, loops and iterators change after they are made. */
#ifndef LM_TEXT_JINJA_VALUE_H
#define LM_TEXT_JINJA_VALUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/err.h"

typedef struct lm_jrun lm_jrun;
typedef struct lm_jval lm_jval;

/* UTF-8; chars: its code points, -1: not counted yet.  safe: what `safe` and `escape` give,
 * jinja2's Markup: text that `+` joins to it is escaped for HTML. */
typedef struct {
    const char *s;
    size_t len;
    int64_t chars;
    bool safe;
} lm_jstr;

typedef enum {
    LM_JV_MISSING, /* an argument that was not given; never seen by a template */
    LM_JV_UNDEFINED,
    LM_JV_NONE,
    LM_JV_BOOL,
    LM_JV_INT,
    LM_JV_FLOAT,
    LM_JV_STR,
    /* sequences */
    LM_JV_LIST,
    LM_JV_TUPLE,
    LM_JV_RANGE,
    LM_JV_VIEW, /* keys(), values() or items() of a dict: iterable, with a length, without indices */
    LM_JV_ITER, /* what filters such as map give: can be iterated once, has no length */
    LM_JV_DICT,
    LM_JV_NAMESPACE,
    LM_JV_LOOP,
    LM_JV_MACRO,
    LM_JV_FUNC,
} lm_jkind;

/* Arguments of a call. */
typedef struct {
    lm_jval *pos;
    size_t n;
    lm_jval *kw;
    const lm_jstr **name; /* [n_kw] */
    size_t n_kw;
} lm_jcall;

/* A function of the language, or a method with its object in `self`. */
typedef lm_code lm_jfn(lm_jrun *r, const lm_jval *self, const lm_jcall *c, lm_jval *out);

typedef struct {
    const char *name;
    lm_jfn *fn;
    lm_jval *self; /* NULL: none */
} lm_jfunc;

typedef struct {
    const char *hint;    /* the whole message, or NULL */
    const char *type;    /* of the object that lacks `name`; NULL: a variable */
    const lm_jstr *name; /* NULL: a number, `index` */
    int64_t index;
} lm_jundefined;

typedef struct {
    lm_jval *v;
    size_t n, cap;
    size_t at;              /* ITER: the next one */
    const char *what;       /* VIEW: dict_keys, dict_values, dict_items */
    int64_t from, to, step; /* RANGE */
} lm_jseq;

typedef struct lm_jpair lm_jpair;
typedef struct {
    lm_jpair *v;
    size_t n, cap;
} lm_jdict;

struct lm_jloop;
struct lm_jmacro;

struct lm_jval {
    lm_jkind kind;
    union {
        bool b;
        int64_t i;
        double f;
        const lm_jstr *s;
        lm_jseq *seq;
        lm_jdict *dict; /* DICT, NAMESPACE */
        const lm_jundefined *undefined;
        struct lm_jloop *loop;
        struct lm_jmacro *macro;
        const lm_jfunc *func;
    } u;
};

struct lm_jpair {
    lm_jval key, value;
};

/* ---- Making ---- */

static inline lm_jval lm_jv_bool(bool b)
{
    return (lm_jval){ LM_JV_BOOL, { .b = b } };
}
static inline lm_jval lm_jv_int(int64_t i)
{
    return (lm_jval){ LM_JV_INT, { .i = i } };
}
static inline lm_jval lm_jv_float(double f)
{
    return (lm_jval){ LM_JV_FLOAT, { .f = f } };
}
static inline lm_jval lm_jv_none(void)
{
    return (lm_jval){ LM_JV_NONE, { .i = 0 } };
}
/* A copy of text; `s` may be NULL for len = 0. */
lm_code lm_jv_text(lm_jrun *r, const char *s, size_t len, lm_jval *out);
/* The same without a copy: the text lives as long as the rendering. */
lm_code lm_jv_lend(lm_jrun *r, const char *s, size_t len, lm_jval *out);
/* The same for a part of `of`, safe if that is. */
lm_code lm_jv_part(lm_jrun *r, const lm_jstr *of, const char *s, size_t len, lm_jval *out);
/* A sequence with room for n values, empty. */
lm_code lm_jv_seq(lm_jrun *r, lm_jkind kind, size_t n, lm_jval *out);
lm_code lm_jv_push(lm_jrun *r, lm_jseq *s, lm_jval v);
lm_code lm_jv_pair(lm_jrun *r, lm_jval a, lm_jval b, lm_jval *out); /* a tuple */
lm_code lm_jv_dict(lm_jrun *r, lm_jkind kind, size_t n, lm_jval *out);
/* A function; `self` is copied. */
lm_code lm_jv_func(lm_jrun *r, const char *name, lm_jfn *fn, const lm_jval *self, lm_jval *out);
lm_code lm_jv_undefined(lm_jrun *r, const lm_jundefined *u, lm_jval *out);
lm_code lm_jv_undefined_hint(lm_jrun *r, const char *hint, lm_jval *out);

/* ---- Asking ---- */

bool lm_jv_truth(const lm_jval *v);
static inline bool lm_jv_is_seq(const lm_jval *v)
{
    return v->kind >= LM_JV_LIST && v->kind <= LM_JV_ITER;
}
static inline bool lm_jv_is_number(const lm_jval *v)
{
    return v->kind >= LM_JV_BOOL && v->kind <= LM_JV_FLOAT;
}
const char *lm_jv_type(const lm_jval *v); /* Python's name of the type: "str", "NoneType" */
/* v is an integer or a truth value. */
bool lm_jv_integer(const lm_jval *v, int64_t *out);
double lm_jv_real(const lm_jval *v); /* of a number */
/* Code points of a text. */
int64_t lm_jv_chars(const lm_jstr *s);
bool lm_jv_is(const lm_jval *v, const char *text); /* a str equal to text */
/* The message of an undefined value, in buf. */
const char *lm_jv_undefined_message(const lm_jval *v, char *buf, size_t size);

/* Equal as in Python (1 == 1.0 == True). */
lm_code lm_jv_equal(lm_jrun *r, const lm_jval *a, const lm_jval *b, bool *out);
/* *out < 0, 0, > 0; fails for types without an order.  `op` is named in the message. */
lm_code lm_jv_order(lm_jrun *r, const lm_jval *a, const lm_jval *b, const char *op, int *out);
/* a in b */
lm_code lm_jv_within(lm_jrun *r, const lm_jval *a, const lm_jval *b, bool *out);
lm_code lm_jv_length(lm_jrun *r, const lm_jval *v, int64_t *out); /* len(v) */
/* The elements of anything that can be iterated: characters, keys, values.  An ITER is used up. */
lm_code lm_jv_elements(lm_jrun *r, const lm_jval *v, lm_jseq *out);

/* The pair with this key; NULL: none.  A key that cannot be hashed fails. */
lm_code lm_jv_dict_get(lm_jrun *r, const lm_jdict *d, const lm_jval *key, lm_jval **out);
lm_code lm_jv_dict_set(lm_jrun *r, lm_jdict *d, lm_jval key, lm_jval value);
const lm_jval *lm_jv_dict_at(const lm_jdict *d, const char *key, size_t len); /* NULL: none */

/* ---- Text ---- */

/* str(v), repr(v), appended. */
lm_code lm_jv_str(lm_jrun *r, const lm_jval *v, lm_buf *out);
lm_code lm_jv_repr(lm_jrun *r, const lm_jval *v, lm_buf *out);
/* str(v) as a value; a str is itself. */
lm_code lm_jv_to_str(lm_jrun *r, const lm_jval *v, const lm_jstr **out);

/* json.dumps with its arguments; indent -1: one line. */
typedef struct {
    bool ascii, sort;
    int64_t indent;
    const lm_jstr *unit;          /* one level of indentation; NULL: `indent` spaces */
    const lm_jstr *comma, *colon; /* NULL: ", " (with indent ",") and ": " */
} lm_jv_json_style;
lm_code lm_jv_json(lm_jrun *r, const lm_jval *v, const lm_jv_json_style *style, lm_buf *out);

#endif
