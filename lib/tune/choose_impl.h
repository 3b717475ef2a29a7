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

/* True if the configuration has numbers of layers. */
bool lm_tune_has_layers(const json_t *config);
/* LM_EUSAGE: no module of the base is meant by `targets`; with the modules that the method can change, and those whose
 * names are near to a part of a name or of an expression (choose_check.c). */
lm_code lm_tune_fail_to_match(const lm_tune_bases *b, const lm_tune_method *t,
                              const json_t *targets, const json_t *config, const char *where,
                              lm_err *e);

#endif
