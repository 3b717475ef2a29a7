/* SPDX-License-Identifier: Apache-2.0 */
/* gather.h -- parameters of which each rank along an axis has a part, gathered for the layers that read them (ZeRO-3,
 * arXiv:1910.02054).
 *
 * The pass runs behind all others, on the list that is planned and run.  Readers are seen in groups: runs of the list whose
 * readers of such parameters are of one layer; so a layer is one group in the forward and one in its backward, and the last one
 * of the forward, whose backward follows, a single one.  Each group reads whole copies, activations that live from the start of
 * the group `distance` groups before it, where their gather_begin stands, to their last reader; gather_end stands in front of
 * the first.  So at most 1 + distance layers are whole at a time, memory is planned as that of all activations, and the next
 * groups travel while one is computed. */
#ifndef LM_GRAPH_GATHER_H
#define LM_GRAPH_GATHER_H

#include "graph/graph.h"

typedef struct {
    lm_axis axis;
    int ranks, rank;  /* along it */
    int64_t distance; /* groups; 0: a group's own start */
    /* By value: elements of each rank, [ranks], which lie one behind another in it; NULL: it is not gathered.  Copied. */
    const int64_t *const *part;
    /* Nodes at which runs of the list begin and end, as of sections of stages, in any order: no gather begins in front of one.
     * They are set to where these nodes are then.  NULL: the list is run as a whole. */
    size_t **border;
    size_t n_borders;
} lm_gather_opts;

/* Fails: for memory. */
lm_code lm_pass_gather(lm_graph *g, const lm_gather_opts *o, lm_err *e);

#endif
