/* SPDX-License-Identifier: Apache-2.0 */
/* jinja_node.h -- a compiled template: its tree.  Private to lib/text.
 *
 * text -> tokens (jinja_lex.c) -> tree (jinja_parse.c: expressions; jinja_tags.c: statements), as
 * jinja2's parser defines the language. */
#ifndef LM_TEXT_JINJA_NODE_H
#define LM_TEXT_JINJA_NODE_H

#include "base/mem.h"
#include "text/jinja.h"
#include "text/jinja_value.h"

typedef enum {
    /* expressions */
    LM_JN_CONST,   /* value */
    LM_JN_NAME,    /* id */
    LM_JN_TUPLE,   /* item */
    LM_JN_LIST,    /* item */
    LM_JN_DICT,    /* item: key, value, key, value ... */
    LM_JN_ATTR,    /* a.text */
    LM_JN_ITEM,    /* a[b] */
    LM_JN_SLICE,   /* a[item0:item1:item2], NULL: left out */
    LM_JN_CALL,    /* a(args) */
    LM_JN_FILTER,  /* a|text(args) */
    LM_JN_TEST,    /* a is text(args) */
    LM_JN_NOT,     /* a */
    LM_JN_NEG,     /* a */
    LM_JN_POS,     /* a */
    LM_JN_BINARY,  /* a op b: the token */
    LM_JN_CONCAT,  /* item ~ item ~ ... */
    LM_JN_AND,     /* a, b */
    LM_JN_OR,      /* a, b */
    LM_JN_COMPARE, /* a ops[0] item[0] ops[1] item[1] ... */
    LM_JN_COND,    /* a if b else c (NULL) */
    LM_JN_NSREF,   /* id.text, a target only */
    /* statements */
    LM_JN_TEXT,         /* text */
    LM_JN_PRINT,        /* a */
    LM_JN_BODY,         /* item */
    LM_JN_FOR,          /* for a in b if c: body, otherwise other */
    LM_JN_IF,           /* a: body, otherwise other */
    LM_JN_SET,          /* a = b */
    LM_JN_SET_BLOCK,    /* a = body, through the filters of b (their innermost operand is NULL) */
    LM_JN_WITH,         /* item: target, value ...; body */
    LM_JN_MACRO,        /* macro */
    LM_JN_CALL_BLOCK,   /* macro is the caller of the call a */
    LM_JN_FILTER_BLOCK, /* body through the filters of b */
    LM_JN_GENERATION,   /* body */
    LM_JN_BREAK,
    LM_JN_CONTINUE,
} lm_jnode_kind;

typedef enum {
    LM_JOP_EQ,
    LM_JOP_NE,
    LM_JOP_LT,
    LM_JOP_LE,
    LM_JOP_GT,
    LM_JOP_GE,
    LM_JOP_IN,
    LM_JOP_NOT_IN,
    LM_JOP_ADD,
    LM_JOP_SUB,
    LM_JOP_MUL,
    LM_JOP_DIV,
    LM_JOP_FLOOR,
    LM_JOP_MOD,
    LM_JOP_POW,
} lm_jop;

typedef struct lm_jnode lm_jnode;

/* The signature and body of a macro or of a call block. */
typedef struct {
    const lm_jstr *name;
    int *arg;              /* [n] ids of variables */
    const lm_jstr **names; /* [n] */
    lm_jnode **dflt;       /* [n], NULL: none */
    size_t n;
    lm_jnode *body;
    bool caller, varargs, kwargs; /* the body reads these names */
} lm_jmacro_node;

struct lm_jnode {
    lm_jnode_kind kind;
    int line, col; /* from 1 */
    int id;        /* of a variable */
    lm_jop op;
    lm_jop *ops;
    const lm_jstr *text;
    lm_jval value;
    lm_jnode *a, *b, *c;
    lm_jnode **item; /* [n]; positional arguments of a call */
    size_t n;
    const lm_jstr **kw_name; /* [n_kw] keyword arguments */
    lm_jnode **kw;
    size_t n_kw;
    lm_jnode *star, *star_star; /* *args, **kwargs */
    lm_jnode *body, *other;
    lm_jmacro_node *macro;
    const void *entry; /* FILTER, TEST: its row, NULL: unknown name */
};

struct lm_jinja {
    lm_arena *mem;
    char *where;
    lm_jnode *root;
    const lm_jstr **name; /* [n_names] variables by id */
    size_t n_names, cap_names;
    bool marks;
};

enum { LM_JINJA_MAX_BYTES = 4 << 20, LM_JINJA_MAX_DEPTH = 200 };

/* ---- Tokens ---- */

typedef enum {
    LM_JT_EOF,
    LM_JT_DATA,  /* text between tags */
    LM_JT_PRINT, /* {{ */
    LM_JT_PRINT_END,
    LM_JT_BLOCK, /* {% */
    LM_JT_BLOCK_END,
    LM_JT_NAME,
    LM_JT_STRING,
    LM_JT_INT,
    LM_JT_FLOAT,
    LM_JT_OP, /* text: the operator */
} lm_jtoken_kind;

typedef struct {
    lm_jtoken_kind kind;
    int line, col;
    const lm_jstr *text; /* decoded */
    int64_t i;
    double f;
} lm_jtoken;

/* Cut normalised text (\n only) into tokens, in the template's arena; the last one is EOF. */
lm_code lm_jinja_lex(lm_jinja *t, const char *text, size_t len, lm_jtoken **out, size_t *n,
                     lm_err *e);
/* Fill t->root. */
lm_code lm_jinja_parse(lm_jinja *t, const lm_jtoken *token, size_t n, lm_err *e);

/* An error at a place of the template. */
lm_code lm_jinja_wrong(const lm_jinja *t, int line, int col, lm_err *e, const char *what, ...)
    LM_PRINTF(5, 6);
/* A text in the template's arena, its characters counted. */
lm_code lm_jinja_str(lm_jinja *t, const char *s, size_t len, const lm_jstr **out, lm_err *e);

/* ---- Between the two halves of the parser ---- */

typedef struct {
    lm_jinja *t;
    const lm_jtoken *at; /* the current one */
    int depth;
    int loops;                    /* loops around the current place, in this function */
    bool caller, varargs, kwargs; /* read so far, in this function */
    lm_err *err;
} lm_jparser;

lm_code lm_jparse_wrong(lm_jparser *p, const char *what, ...) LM_PRINTF(2, 3);
lm_code lm_jparse_unexpected(lm_jparser *p, const char *wanted);
lm_code lm_jparse_new(lm_jparser *p, lm_jnode_kind kind, lm_jnode **out);
bool lm_jparse_is(const lm_jparser *p, lm_jtoken_kind kind, const char *text);
bool lm_jparse_skip(lm_jparser *p, lm_jtoken_kind kind, const char *text);
lm_code lm_jparse_expect(lm_jparser *p, lm_jtoken_kind kind, const char *text);
lm_code lm_jparse_name_id(lm_jparser *p, const lm_jstr *name, int *out);
lm_code lm_jparse_append(lm_jparser *p, lm_jnode ***list, size_t *n, size_t *cap, lm_jnode *one);

lm_code lm_jparse_expression(lm_jparser *p, bool with_if, lm_jnode **out);
/* An expression or, with commas, a tuple; `until`: a name that ends it. */
lm_code lm_jparse_tuple(lm_jparser *p, bool with_if, const char *until, bool in_parentheses,
                        lm_jnode **out);
lm_code lm_jparse_target(lm_jparser *p, bool with_namespace, const char *until, lm_jnode **out);
/* A sign, an operand, and what follows it. */
lm_code lm_jparse_unary(lm_jparser *p, bool with_filters, lm_jnode **out);
/* Filters behind `operand`; `started`: the first has no bar before it. */
lm_code lm_jparse_filters(lm_jparser *p, lm_jnode *operand, bool started, lm_jnode **out);

#endif
