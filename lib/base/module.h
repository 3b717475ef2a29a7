/* SPDX-License-Identifier: Apache-2.0 */
/* module.h -- loadable modules: libraries of this project that a program opens when it is asked for what they do. */
#ifndef LM_BASE_MODULE_H
#define LM_BASE_MODULE_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* What the symbol of a module begins with.  Program and module fit each other if all three are equal. */
typedef struct {
    const char *version; /* LM_VERSION of its build */
    size_t size;         /* of the structure of functions that it fills */
    uint32_t contracts;  /* a checksum of the headers that both were compiled with */
} lm_module_head;

typedef struct {
    const char *file;   /* "libcore-cuda.so" */
    const char *symbol; /* that it defines for the program: a structure that begins with a head */
    const char *todo;   /* how such a file comes to be */
    const char *const *folders; /* searched in this order, NULL-terminated */
    lm_module_head want;        /* .version is not read */
} lm_module_search;

/* Load the first that is found and set *out to its symbol; it stays loaded until the process ends.  `where` is that of the
 * messages.  Fails: LM_EIO when no folder has it (names them), when the file is truncated or cannot be loaded, when it is not a
 * module, or was built from other sources than this program. */
lm_code lm_module_open(const lm_module_search *s, const char *where, const void **out, lm_err *e);

#endif
