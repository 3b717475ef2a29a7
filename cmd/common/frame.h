/* SPDX-License-Identifier: Apache-2.0 */
/* frame.h -- internal to cmd/common: the merged option table of the running tool. */
#ifndef LM_CMD_FRAME_H
#define LM_CMD_FRAME_H

#include "common/tool.h"

enum { LM_MOST_OPTS = 176, LM_MOST_ALIASES = 160 };

/* Another name of option `target`, with `value` when it is a flag for one value; target -1: a name
 * that is refused with the advice `instead`. */
typedef struct {
    const char *name;
    int target;
    const char *value, *instead;
} lm_alias;

/* The tool's own rows, then the common ones.  An option without dst is an action (help, verbose);
 * one without help text is hidden. */
typedef struct {
    const char *name; /* of the tool */
    lm_opt opt[LM_MOST_OPTS];
    bool given[LM_MOST_OPTS];
    int n;
    lm_alias alias[LM_MOST_ALIASES];
    int n_alias;
    int64_t threads;
    const char *config, *completion;
    const char *const *plans; /* of the tool */
    bool help, version, print_config, progress, progress_given, history;
} lm_frame;

extern lm_frame lm_the_frame;

void lm_frame_build(lm_tool *t);
/* Read environment, --config and command line; later ones override earlier ones.  Fails with
 * LM_EUSAGE. */
lm_code lm_options_parse(lm_tool *t, lm_err *e);
int lm_option_find(const char *name); /* index by long name, -1 if unknown */
/* Store a value given as text: range and choices are checked. */
lm_code lm_option_set(int i, const char *text, lm_err *e);
bool lm_option_takes_value(const lm_opt *o);

void lm_option_fold(const char *name, char *out, size_t size); /* '_' to '-' */
/* The names of a row LM_ALSO or LM_INSTEAD, which follows its option. */
void lm_alias_add(const lm_opt *row);
const lm_alias *lm_alias_find(const char *name); /* folded; NULL if unknown */
/* The choice for `text`: equal, in another case, or by its name in other programs; or NULL. */
const char *lm_choice_find(const char *const *choices, const char *text);

/* Read options from a file.  `built_in`: the options saved before any was set. */
lm_code lm_options_read(lm_tool *t, const char *path, const json_t *built_in, lm_err *e);
/* The same from the member "plan" of a file, which holds options of lm_tool.plans. */
lm_code lm_options_read_plan(lm_tool *t, const char *path, lm_err *e);
lm_code lm_options_print(const lm_tool *t, lm_err *e);

/* The place of a library error in the words of the running tool: its option instead of the quantity
 * that the library names.  Either the argument or `out`. */
const char *lm_place_shown(const char *where, char *out, size_t size);

void lm_help_print(const lm_tool *t);
void lm_version_print(const lm_tool *t);
lm_code lm_completion_print(const lm_tool *t, const char *shell, lm_err *e);

void lm_sink_init(lm_tool *t);
void lm_sink_clear(void); /* erase the progress line */
void lm_signals_init(const lm_tool *t);
void lm_signal_raise(void); /* die of the pending signal, if any */
/* Called before a line is printed.  An input that shrinks causes a signal in one thread and failing
 * calls in others: only the first report is printed.  Does not return once the handler ends the
 * process. */
void lm_signal_wait(const char *what);

#endif
