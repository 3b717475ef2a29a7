/* SPDX-License-Identifier: Apache-2.0 */
/* clock.h -- monotonic seconds, for rates and phases. */
#ifndef LM_BASE_CLOCK_H
#define LM_BASE_CLOCK_H

double lm_now(void); /* CLOCK_MONOTONIC, seconds */

#endif
