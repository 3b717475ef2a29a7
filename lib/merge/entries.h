/* SPDX-License-Identifier: Apache-2.0 */
/* entries.h -- the rows of the table of methods, one array for each family, ended by an entry
 * without a name.  Private to lib/merge. */
#ifndef LM_MERGE_ENTRIES_H
#define LM_MERGE_ENTRIES_H

#include <math.h>

#include "merge/method.h"

#define LM_MERGE_BIT(p) (UINT64_C(1) << (p))
extern const lm_merge_method lm_merge_linear_methods[], lm_merge_sphere_methods[],
    lm_merge_task_methods[], lm_merge_other_methods[], lm_merge_arcee_methods[],
    lm_merge_gram_methods[], lm_merge_ram_methods[];

#endif
