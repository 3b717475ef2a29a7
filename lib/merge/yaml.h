/* SPDX-License-Identifier: Apache-2.0 */
/* yaml.h -- a small YAML document as a tree, for untrusted configuration files.
 *
 * YAML 1.1 as parsed by libyaml, without tags, one document only.  A merge key ("<<") inserts the
 * pairs of a mapping, or of several in a list; keys beside it take precedence, then the mappings in
 * their order.  The text is hostile: bytes, events, depth and the nodes after expansion of aliases
 * and merge keys are limited, so that an exponential expansion is an error; a node cannot contain
 * itself. */
#ifndef LM_MERGE_YAML_H
#define LM_MERGE_YAML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"

enum {
    LM_YAML_MAX_BYTES = 4 << 20,
    LM_YAML_MAX_DEPTH = 32,
    LM_YAML_MAX_NODES = 100000, /* aliases are replaced by their nodes */
};

typedef enum { LM_YAML_SCALAR, LM_YAML_LIST, LM_YAML_MAP } lm_yaml_kind;

typedef struct lm_yaml lm_yaml;
struct lm_yaml {
    lm_yaml_kind kind;
    int line;             /* from 1 */
    const char *text;     /* SCALAR: NUL-terminated, without NUL bytes inside */
    bool plain;           /* SCALAR: not quoted: may be null, a number or a truth value */
    size_t n;             /* items of a list, pairs of a map */
    const lm_yaml **item; /* [n]; of a map: the values */
    const char **key;     /* MAP: [n], different from each other */
    const int *key_line;  /* MAP: [n] */
};

/* Parse `text`; the tree is allocated in `a`.  An empty document is a null scalar.  Fails:
 * LM_EUSAGE naming `where` and the line. */
lm_code lm_yaml_parse(const char *text, size_t len, const char *where, lm_arena *a,
                      const lm_yaml **out, lm_err *e);

/* Value of a key; NULL if absent. */
const lm_yaml *lm_yaml_get(const lm_yaml *map, const char *key);
/* The same; NULL also if it is null. */
const lm_yaml *lm_yaml_given(const lm_yaml *map, const char *key);
bool lm_yaml_is_null(const lm_yaml *y);          /* NULL, ~, null, empty */
bool lm_yaml_truth(const lm_yaml *y, bool *out); /* true false yes no on off, not quoted */
/* A finite decimal number; also quoted, or with an exponent and no dot. */
bool lm_yaml_number(const lm_yaml *y, double *out);
bool lm_yaml_integer(const lm_yaml *y, int64_t *out);

/* LM_EUSAGE naming `where`, the line of `y` and the key: `need` is needed. */
lm_code lm_yaml_wrong(const lm_yaml *y, const char *where, const char *key, const char *need,
                      lm_err *e);
/* Check that `y`, called `what`, is a mapping whose keys are all in `known`, which ends with NULL, or begin with "x-",
 * which is for anchors.  Fails: LM_EUSAGE naming the key, with the nearest or all that are known. */
lm_code lm_yaml_check_keys(const lm_yaml *y, const char *where, const char *what,
                           const char *const *known, lm_err *e);

#endif
