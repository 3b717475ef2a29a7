/* SPDX-License-Identifier: Apache-2.0 */
/* program.h -- a training step as a program: its graphs after all passes, their plans, and the
 * sections of their lists in the order of execution.
 *
 *   first, other   forward and backward of a micro-batch, whose losses are added up (`train`)
 *   forward        with `halves`: the forward of a micro-batch; first and other are then its backward
 *   start .. check the parts of the update (update.h), on the same arena
 *   (eval)         the forward of an evaluation, which evaluate.h runs
 *
 * All parts of a training use it: dumps print its lists, the memory report walks over its values
 * and plans (memory.h), the trainer binds and runs its sections.  Backends with recordings record a
 * section whose nodes are the same in every step, and replay it. */
#ifndef LM_TRAIN_PROGRAM_H
#define LM_TRAIN_PROGRAM_H

#include "base/progress.h"
#include "graph/trace.h"
#include "train/groups.h"

typedef struct {
    int64_t batch, seq, source; /* as of lm_build */
    lm_precision precision;
    bool documents, dropout;
    bool halves;        /* lm_build.halves: section `forward` */
    lm_entropy entropy; /* lm_build.entropy of the training's graph; of both if COLLISION */
    bool value;         /* lm_build.value of both graphs */
    lm_groups groups;
    double clip_norm, clip_value; /* 0: none */
    /* Which parameters train, and how the others are stored.  Read are: trainable, ctx, adapt,
     * teacher, recompute, routing, choice, ahead (of the training), mesh, lay, stages, apart, codes, codes_space,
     * frozen_format, frozen_embed.  The
     * graph of an evaluation is built from the same fields. */
    lm_build build;
    int zero; /* the level of lm_trainer_opts: 1: ranks of `mesh` along dp share the update; 3: graphs gather parameters */
    int64_t gather_ahead;           /* then lm_gather_opts.distance */
    const lm_mesh *mesh;            /* with `zero`; borrowed */
    lm_states_in states_in;         /* of the optimiser */
    const char *states_dir;         /* LM_STATES_FILE; borrowed */
    const lm_update_beside *beside; /* of an adapter; borrowed; NULL: none */
} lm_program_opts;

/* The update's in the order of lm_update_part. */
typedef enum {
    LM_SECTION_FORWARD, /* empty without halves */
    LM_SECTION_FIRST,   /* the first micro-batch: gradients and losses are replaced */
    LM_SECTION_OTHER,   /* any other: they are added to */
    LM_SECTION_UPDATE,
    LM_SECTION_START = LM_SECTION_UPDATE + LM_UPDATE_START,
    LM_SECTION_PENALTY = LM_SECTION_UPDATE + LM_UPDATE_PENALTY,
    LM_SECTION_NORM = LM_SECTION_UPDATE + LM_UPDATE_NORM,
    LM_SECTION_BEFORE = LM_SECTION_UPDATE + LM_UPDATE_BEFORE,
    LM_SECTION_STEP = LM_SECTION_UPDATE + LM_UPDATE_STEP,
    LM_SECTION_AFTER = LM_SECTION_UPDATE + LM_UPDATE_AFTER,
    LM_SECTION_SHOW = LM_SECTION_UPDATE + LM_UPDATE_SHOW,
    LM_SECTION_CHECK = LM_SECTION_UPDATE + LM_UPDATE_CHECK,
    LM_SECTIONS,
} lm_section_id;

typedef struct {
    const char *name; /* for profilers */
    const lm_graph *graph;
    lm_exec *exec;
    size_t first, last; /* nodes */
    bool numbered;      /* the numbers of its run differ from those of the previous section */
    bool recordable;
    bool ran; /* it ran once, so that kernels are loaded and chosen */
    lm_recording *recorded;
} lm_section;

/* STATE F32 [E], of `dropped` [1], of `train`, sums of lm_model.routed over the micro-batches of a step; LM_NONE for layers
 * without experts. */
typedef struct {
    lm_vid load, mean, dropped;
} lm_routed_sum;

typedef struct {
    lm_backend *backend;
    const lm_config *config;
    lm_program_opts o;
    lm_model *train, *eval; /* eval: NULL without validation */
    lm_vid loss_sum;        /* STATE F64 [1] of `train`: of all micro-batches of a step so far */
    lm_vid aux_sum;         /* the same of lm_model.aux; LM_NONE without it */
    lm_vid ahead_sum[LM_MOST_AHEAD]; /* of lm_model.ahead_loss */
    lm_routed_sum *routed;           /* of each layer; NULL: the model has no experts */
    lm_update *update;
    bool borrows;                               /* `update` belongs to another program */
    lm_plan train_plan, update_plan, eval_plan; /* the latter two share the first one's arena */

    /* Between lm_program_ready and lm_program_rest. */
    lm_exec *exec, *updating; /* of `train` and `update` */
    lm_section section[LM_SECTIONS];
    lm_sink *sink;
    int64_t updates; /* steps that changed the parameters; set by the trainer */
    bool timed;      /* nodes are timed in every run */
    bool unrecorded; /* the backend refused a recording */
    lm_exec_time *times;
    lm_trace *trace; /* NULL: none; set by the trainer for one step */
} lm_program;

/* Build and plan; nothing is allocated for runs.  c and b are borrowed.  like: a program of the
 * same config and groups, whose update is reused if it is the same, and which must then live
 * longer; may be NULL.  Fails: LM_EUSAGE. */
lm_code lm_program_new(const lm_program_opts *o, const lm_config *c, bool validation, lm_backend *b,
                       const lm_program *like, lm_program **out, lm_err *e);
void lm_program_free(lm_program *p);
/* Append its lists as text (lm_graph_dump). */
lm_code lm_program_dump(const lm_program *p, lm_buf *out, lm_err *e);

/* Allocate memory for activations, and executors whose other values the caller binds.  timed: time
 * nodes even if that slows the steps down.  sink: receives the reason of a refused recording. */
lm_code lm_program_ready(lm_program *p, bool timed, lm_sink *sink, lm_err *e);
/* Release these; does nothing if it is not ready.  Work of the device must be complete. */
void lm_program_rest(lm_program *p);
/* True if nodes are timed now. */
bool lm_program_timed(const lm_program *p);
/* Write the times of later runs to `trace`; NULL: stop. */
lm_code lm_program_trace(lm_program *p, lm_trace *trace, lm_err *e);

/* Enqueue a section on the main stream: node by node, or from the second time on by replaying its
 * recording, if the backend has recordings and nodes are not timed.  Bits are the same. */
lm_code lm_program_run(lm_program *p, lm_section_id s, const lm_step *step, lm_err *e);
/* Nodes [first, last) of its list alone, node by node. */
lm_code lm_program_run_nodes(lm_program *p, lm_section_id s, size_t first, size_t last,
                             const lm_step *step, lm_err *e);
/* The same for a section of a stage of a pipeline that this rank has (lm_model.stages): without recordings. */
lm_code lm_program_run_stage(lm_program *p, int stage, lm_stage_kind kind, const lm_step *step,
                             lm_err *e);
/* Seconds by phase and operator of all sections, in falling order; as lm_exec_times. */
size_t lm_program_times(lm_program *p, const lm_exec_time **out);

#endif
