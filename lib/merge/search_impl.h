/* SPDX-License-Identifier: Apache-2.0 */
/* search_impl.h -- shared by the searches; for lib/merge/search*.c only.  Private to lib/merge. */
#ifndef LM_MERGE_SEARCH_IMPL_H
#define LM_MERGE_SEARCH_IMPL_H

#include "merge/search.h"

/* A search algorithm with its own state; ask and tell as in search.h, but the objective is never
 * NAN. */
typedef struct {
    lm_code (*begin)(lm_search *s, lm_err *e);
    bool (*ask)(lm_search *s, double *w, const char **kind);
    void (*tell)(lm_search *s, double objective);
    void (*end)(void *state);
} lm_search_ops;

struct lm_search {
    lm_search_opts o; /* with defaults; grid and start point to the two fields below */
    double grid[256], start[LM_SEARCH_MAX_DIM];
    int64_t asked; /* points so far */
    const lm_search_ops *ops;
    void *state;
};

extern const lm_search_ops lm_search_grid_ops, lm_search_simplex_ops, lm_search_coordinate_ops,
    lm_search_cmaes_ops;

#endif
