/* SPDX-License-Identifier: Apache-2.0 */
/* recipe_impl.h -- shared by the parts of the recipe reader.  Private to lib/merge. */
#ifndef LM_MERGE_RECIPE_IMPL_H
#define LM_MERGE_RECIPE_IMPL_H

#include "merge/recipe.h"

lm_code lm_recipe_begin(const char *method, lm_merge_recipe **out, lm_err *e);
/* A copy of `len` bytes with the lifetime of the recipe. */
lm_code lm_recipe_text(lm_merge_recipe *r, const char *s, size_t len, const char **out, lm_err *e);
/* The input of this name, added when it is new; "MODEL+LORA" is split. */
lm_code lm_recipe_input(lm_merge_recipe *r, const char *name, int *out, lm_err *e);
/* One more source at the end of a slice. */
lm_code lm_recipe_source(lm_merge_recipe *r, lm_merge_slice *s, int input, lm_merge_source **out,
                         lm_err *e);
/* Find a parameter of the method.  `where` is for the message. */
lm_code lm_recipe_takes(const lm_merge_recipe *r, const char *name, const char *where, int *p,
                        lm_err *e);
/* One number from its text: a name of a choice, a truth value, a number in range. */
lm_code lm_recipe_number(lm_merge_param p, const char *text, const char *where, double *out,
                         lm_err *e);
/* A value of one case; v [n] is copied. */
lm_code lm_recipe_value(lm_merge_recipe *r, const double *v, int n, lm_merge_value *out, lm_err *e);
/* Check that no stream is used for two inputs.  Fails: LM_EUSAGE naming it. */
lm_code lm_recipe_streams(const lm_merge_recipe *r, lm_err *e);

#endif
