/* SPDX-License-Identifier: Apache-2.0 */
/* choose_impl.h -- how entries of a configuration match modules, as PEFT compares them.
 * Private to lib/tune. */
#ifndef LM_TUNE_CHOOSE_IMPL_H
#define LM_TUNE_CHOOSE_IMPL_H

#include "tune/modules.h"

/* Whether name is `part`, or ends with it behind a dot. */
bool lm_tune_ends_as(const char *name, const char *part);
/* Whether a method can change such a module. */
bool lm_tune_suits(const lm_tune_method *t, const lm_tune_base *m);
/* The number that layers_to_transform means in a module's name: of the numbers in it the first, or
 * that behind a name of layers_pattern; *out stays if there is none.  Fails: LM_EFORMAT for a
 * pattern that is not a regular expression. */
lm_code lm_tune_layer_of(const json_t *config, const char *name, const char *where, int64_t *out,
                         lm_err *e);

#endif
