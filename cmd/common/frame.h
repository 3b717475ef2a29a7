/* SPDX-License-Identifier: Apache-2.0 */
/* frame.h -- inside of cmd/common: the merged option table of the running tool. */
#ifndef LM_CMD_FRAME_H
#define LM_CMD_FRAME_H

#include "common/tool.h"

enum { LM_MOST_OPTS = 160 };

/* The tool's own rows, then the common ones.  An option without dst is an action (help, verbose);
 * one without help text is hidden. */
typedef struct {
    lm_opt opt[LM_MOST_OPTS];
    bool given[LM_MOST_OPTS];
    int n;
    int64_t threads;
    const char *config, *completion;
    bool help, version, print_config, progress, progress_given, history;
} lm_frame;

extern lm_frame lm_the_frame;

void lm_frame_build(lm_tool *t);
/* Environment, --config, command line, in this order of strength.  Fails with LM_EUSAGE. */
lm_code lm_options_parse(lm_tool *t, lm_err *e);
int lm_option_find(const char *name); /* index by long name, -1 if there is none */
/* Store a value given as text: range and choices are checked. */
lm_code lm_option_set(int i, const char *text, lm_err *e);
bool lm_option_takes_value(const lm_opt *o);

lm_code lm_options_read(const char *path, lm_err *e);
lm_code lm_options_print(lm_err *e);

void lm_help_print(const lm_tool *t);
void lm_version_print(const lm_tool *t);
lm_code lm_completion_print(const lm_tool *t, const char *shell, lm_err *e);

void lm_sink_init(lm_tool *t);
void lm_sink_clear(void); /* take the progress line away */
void lm_signals_init(const lm_tool *t);
void lm_signal_raise(void); /* die of the pending signal, if any */

#endif
