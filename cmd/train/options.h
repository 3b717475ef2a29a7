/* SPDX-License-Identifier: Apache-2.0 */
/* options.h -- the command line of train: its options, and what is asked for by them. */
#ifndef LM_CMD_TRAIN_OPTIONS_H
#define LM_CMD_TRAIN_OPTIONS_H

#include "common/loop.h"
#include "common/mesh.h"

typedef struct {
    lm_loop_args loop;
    lm_mesh_args mesh;
    int64_t steps, batch, seq;
    const char *dtype, *objective;
    double dropout, bias_rate, ahead_weight;
    bool documents, check_tokenizer;
    const char *format, *plan;
    bool dump_graph, measure, check_links;
} train_options;

extern lm_tool tool;
extern train_options opt;            /* the present values */
extern const train_options built_in; /* the defaults */

/* Everything that main owns. */
typedef struct {
    lm_session t;
    lm_loop_run run;
    lm_targets targets;
} train_session;

/* True if nothing is trained or written. */
bool train_plan_only(void);
/* Set what is asked of the library from options and operands, with --resume also from the options of the
 * run.  Misuse of operands ends the program.  Fails: LM_EUSAGE, and what reading a run fails with. */
lm_code train_ask(train_session *s, lm_err *e);

#endif
