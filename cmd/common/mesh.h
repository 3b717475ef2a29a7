/* SPDX-License-Identifier: Apache-2.0 */
/* mesh.h -- the options of tools whose training several ranks share: processes that a launcher has started, or threads.
 *
 * The micro-batches of a step and the leaves of its sums define a run, the number of ranks does not: those are kept for
 * resumed runs, this one is chosen anew. */
#ifndef LM_CMD_MESH_H
#define LM_CMD_MESH_H

#include "common/tool.h"
#include "train/trainer.h"

/* -1: not given. */
typedef struct {
    int64_t ranks, leaves, accumulate;
    const char *mesh;
    const char *schedule, *stages; /* along pp */
    const char *context;           /* along cp: one of lm_context_names */
    bool devices;                  /* set by the tool: each rank may have a device */
    bool splits; /* set by the tool: its ranks may share more than the batch (dp) */
    bool rows;   /* and along tp the rows between the layers, too, if no other axis splits these */
    bool apart;  /* gradients of a tied embedding and head are two sums: with pp always */
    bool turned; /* set by lm_mesh_ask: a run that had one sum of these gets two */
    bool varies; /* set by the tool: a step has micro-batches as it needs, which ranks share */
    double expert_room;   /* lm_build.expert_room; 0: not given */
    int64_t zero;         /* what ranks along dp share (lm_trainer_opts.zero) */
    int64_t gather_ahead; /* lm_trainer_opts.gather_ahead; -1: not given */
    bool elastic; /* with fewer ranks than the mesh has, take the nearest mesh that they can have */
    int64_t
        was; /* set by the tool: ranks along dp of a mesh that does not say it; -1: as many as fit */
    /* set by the tool: whether its model can have the mesh, with this schedule and these stages (NULL: the usual ones) */
    bool (*legal)(const lm_mesh *mesh, const char *schedule, const char *stages);
    char wanted[64]; /* the mesh that the run had, or is to have again, as options are saved */
} lm_mesh_args;

#define LM_MESH_DEFAULT                                                                          \
    {                                                                                            \
        .ranks = -1, .leaves = -1, .accumulate = -1, .gather_ahead = -1, .rows = true, .was = -1 \
    }

/* Rows of an option table; `m` is an lm_mesh_args.  A tool with threads has --ranks between them. */
#define LM_MESH_MICROS(m, help)                                                              \
    LM_COUNT(0, "gradient-accumulation-steps", &(m).accumulate, "N", 1, LM_MESH_MOST_MICROS, \
             help),                                                                          \
        LM_ALSO("grad-accum-steps")
#define LM_MESH_AXES(m, help)                                           \
    LM_STR(0, "mesh", &(m).mesh, "AXES", help),                         \
        LM_COUNT(0, "leaves", &(m).leaves, "N", 1, LM_MESH_MOST_MICROS, \
                 "of the sums of a step [as many as ranks]")
#define LM_MESH_STAGES(m)                                                                       \
    LM_STR(0, "schedule", &(m).schedule, "NAME|FILE",                                           \
           "order of work along pp: gpipe, 1f1b, zb-h1, ... [1f1b]"),                           \
        LM_STR(0, "stages", &(m).stages, "LIST", "layers of each stage [as even as possible]"), \
        LM_FLAG(0, "tied-apart", &(m).apart,                                                    \
                "tied embedding and head add up gradients apart [with pp]")
#define LM_MESH_ZERO(m)                                                            \
    LM_COUNT(0, "zero", &(m).zero, "LEVEL", 0, 3,                                  \
             "along dp ranks share 1: states, 2: gradients, 3: weights, too [0]"), \
        LM_COUNT(0, "zero-prefetch", &(m).gather_ahead, "N", 0, 1000000,           \
                 "with --zero 3 gather weights N layers ahead [1]")

enum { LM_MESH_MOST_MICROS = 65535 };

/* Set the ranks of *o, the micro-batches of a step and the leaves of its sums, and these options to what the run is to keep.
 * resumed: the run has begun.  Fails: LM_EUSAGE for what does not fit, with the nearest that does. */
lm_code lm_mesh_ask(lm_tool *t, lm_mesh_args *m, bool resumed, lm_trainer_opts *o, lm_err *e);

#endif
