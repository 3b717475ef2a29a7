/* SPDX-License-Identifier: Apache-2.0 */
/* mesh_plan.h -- what each rank of a mesh has and gives in a step, from the lists that the ranks would run.
 *
 * Ranks along dp have one list, and each other rank has its own: stages along pp, parts along tp, cp and ep.  Each of these is
 * built as a rank builds it, planned, and let go of; nothing is allocated for its run, so that the ranks of a cluster fit into
 * a small machine. */
#ifndef LM_TRAIN_MESH_PLAN_H
#define LM_TRAIN_MESH_PLAN_H

#include "train/trainer.h"

/* Ranks that are alike.  With --zero those along dp have as much as each other. */
typedef struct {
    int at[LM_AXES]; /* their coordinates; -1: any along this axis */
    int64_t ranks;   /* so many */
    lm_memory_plan
        plan; /* the memory of one of them, the bytes that it gives, and the FLOPs of its list */
} lm_rank_plan;

typedef struct {
    lm_rank_plan *rank; /* [n] by stage, then by part; those of a stage that are alike are one */
    int n;
    int64_t lists; /* built */
    /* of stages: the mean share of a step that ranks wait, for each other or for one that has more to do, if sections take as
     * long as their FLOPs; negative: there are no stages */
    double bubble;
} lm_mesh_plan;

/* For a mesh with several ranks; without, *out is empty.  p: the program of one of them.  threads: that build (0: as many as
 * there are cores).  The caller owns *out: lm_mesh_plan_fini.
 * Fails: as lm_trainer_program; LM_EBUG if the lists of ranks do not fit each other: if ranks along an axis would exchange other
 * values, or a stage would send what the next one does not expect. */
lm_code lm_mesh_plan_make(const lm_trainer_opts *o, const lm_program *p, bool lmz, int threads,
                          lm_mesh_plan *out, lm_err *e);
void lm_mesh_plan_fini(lm_mesh_plan *p);

/* Its memory of the rank that has the most; of none 0. */
double lm_mesh_plan_largest(const lm_mesh_plan *p);

#endif
