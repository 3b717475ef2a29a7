/* SPDX-License-Identifier: Apache-2.0 */
/* cgroup.h -- limits that the control groups of this process set (version 2, and 1 where mounted).
 * Private to lib/base. */
#ifndef LM_BASE_CGROUP_H
#define LM_BASE_CGROUP_H

#include <stddef.h>

/* Cores granted by the tightest cpu quota on the way to the root; 0 if there is none. */
double lm_cgroup_cpus(void);
/* Bytes left under the tightest memory limit (page cache counts as free); SIZE_MAX if none. */
size_t lm_cgroup_memory_left(void);

#endif
