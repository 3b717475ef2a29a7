/* SPDX-License-Identifier: Apache-2.0 */
/* program.h -- a training step as a program: its graphs after all passes, their plans, and the sections
 * of their lists that are run in turn.
 *
 *   first, other   forward and backward of a micro-batch, whose losses are added up (`train`)
 *   start .. check the parts of the update (update.h), on the same arena
 *   (eval)         the forward of an evaluation, which evaluate.h runs
 *
 * Everything about a training is read off it: dumps print its lists, the memory report walks over its
 * values and plans (memory.h), the trainer binds and runs its sections.  A section whose nodes are the
 * same in every step is recorded by backends that can, and replayed. */
#ifndef LM_TRAIN_PROGRAM_H
#define LM_TRAIN_PROGRAM_H

#include "base/progress.h"
#include "graph/trace.h"
#include "train/groups.h"

typedef struct {
    int64_t batch, seq;
    lm_precision precision;
    bool documents, dropout;
    lm_groups groups;
    double clip_norm, clip_value; /* 0: none */
} lm_program_opts;

/* The update's in the order of lm_update_part. */
typedef enum {
    LM_SECTION_FIRST, /* the first micro-batch: gradients and losses are replaced */
    LM_SECTION_OTHER, /* any other: they are added to */
    LM_SECTION_UPDATE,
    LM_SECTION_START = LM_SECTION_UPDATE + LM_UPDATE_START,
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
    bool numbered;      /* the numbers of its run differ from those of the section before it */
    bool recordable;
    bool ran; /* once, so that kernels are loaded and chosen */
    lm_recording *recorded;
} lm_section;

typedef struct {
    lm_backend *backend;
    const lm_config *config;
    lm_program_opts o;
    lm_model *train, *eval; /* eval: NULL without validation */
    lm_vid loss_sum;        /* STATE F64 [1] of `train`: of all micro-batches of a step so far */
    lm_update *update;
    bool borrows;                               /* `update` is another program's */
    lm_plan train_plan, update_plan, eval_plan; /* the latter two share the first one's arena */

    /* Between lm_program_ready and lm_program_rest. */
    lm_exec *exec, *updating; /* of `train` and `update` */
    lm_section section[LM_SECTIONS];
    lm_sink *sink;
    bool timed;    /* times of nodes are taken in every run */
    bool as_it_is; /* the backend refused a recording */
    lm_exec_time *times;
    lm_trace *trace; /* NULL: none; set by the trainer for one step */
} lm_program;

/* Build and plan; nothing is allocated for runs.  c and b are borrowed.  like: a program of the same config and
 * groups whose update is taken where it is the same, and which then must live longer; may be NULL.  Fails: LM_EUSAGE. */
lm_code lm_program_new(const lm_program_opts *o, const lm_config *c, bool validation, lm_backend *b,
                       const lm_program *like, lm_program **out, lm_err *e);
void lm_program_free(lm_program *p);
/* Its lists as text (lm_graph_dump), appended. */
lm_code lm_program_dump(const lm_program *p, lm_buf *out, lm_err *e);

/* Memory for activations, and executors whose other values the caller binds.  timed: take the times of nodes also
 * where that slows the steps down.  sink: told of a refused recording. */
lm_code lm_program_ready(lm_program *p, bool timed, lm_sink *sink, lm_err *e);
/* The reverse; nothing when it is not ready.  Work of the device must be done. */
void lm_program_rest(lm_program *p);
/* Are the times of nodes taken now? */
bool lm_program_timed(const lm_program *p);
/* Take times and write them to `trace` in the runs to come; NULL: no longer. */
lm_code lm_program_trace(lm_program *p, lm_trace *trace, lm_err *e);

/* Put a section on the main stream: node by node, or from the second time on as a replay of what that put there,
 * where the backend has such a thing and no times are taken.  Bits are the same. */
lm_code lm_program_run(lm_program *p, lm_section_id s, const lm_step *step, lm_err *e);
/* Seconds by phase and operator of all sections, in falling order; as lm_exec_times. */
size_t lm_program_times(lm_program *p, const lm_exec_time **out);

#endif
