/* SPDX-License-Identifier: Apache-2.0 */
/* err.h -- errors of the library, as values that a tool prints.
 *
 * A fallible function takes `lm_err *e` last and returns 0, or a negative lm_code after filling *e.
 * Code below cmd/ neither prints nor exits.  The first failure wins; callers may only put context
 * in front of it.  The tool prints the result once, as "tool: where: what is wrong: what to do". */
#ifndef LM_BASE_ERR_H
#define LM_BASE_ERR_H

#include <stdarg.h>

typedef enum {
    LM_OK = 0,
    LM_EUSAGE = -1,   /* the request cannot be obeyed      -> exit 2 */
    LM_EIO = -2,      /* the operating system failed      -> exit 1 */
    LM_EFORMAT = -3,  /* bytes do not match their format   -> exit 1 */
    LM_ELIMIT = -4,   /* memory, disk or device too small  -> exit 1 */
    LM_ENUMERIC = -5, /* NaN, Inf or divergence            -> exit 4 */
    LM_EBUG = -6,     /* a broken promise inside libcore   -> abort() */
} lm_code;

/* A value, never allocated: it lives on the stack of the caller, so that a failure to allocate can
 * be reported too.  Zero-initialise it. */
typedef struct {
    lm_code code;
    int sys;         /* errno at the time of failure, 0 if none */
    char where[256]; /* file, tensor or option at fault         */
    char what[256];  /* what is wrong, with the numbers seen    */
    char todo[256];  /* the next step; may be empty             */
} lm_err;

#define LM_PRINTF(f, a) __attribute__((format(printf, f, a)))
#define LM_MUST_USE     __attribute__((warn_unused_result))

/* Fill *e unless it already holds a failure (then *e stays and `code` is still returned).  `todo`
 * may be NULL.  Keeps errno for LM_EIO.  Returns `code`: write `return lm_fail(...)`. */
lm_code lm_fail(lm_err *e, lm_code code, const char *where, const char *todo, const char *what, ...)
    LM_PRINTF(5, 6);

/* Put "<context>: " in front of e->where; does nothing if *e is empty. */
void lm_err_in(lm_err *e, const char *context, ...) LM_PRINTF(2, 3);

/* What was read is intact, but cannot be obeyed: LM_EFORMAT in *e becomes LM_EUSAGE.  Returns the code. */
lm_code lm_err_disobeyed(lm_err *e);

#endif
