/* SPDX-License-Identifier: Apache-2.0 */
/* balance.h -- experts dealt to ranks by their loads, hot ones several times.
 *
 * EPLB (DeepSeek; the method of its eplb.py): ranks have `slots` / `ranks` slots each, every expert has one slot at least, and
 * the others go one by one to the expert whose load for each of its copies is the largest.  Where the groups of experts divide
 * by the nodes, whole groups are packed on nodes first, so that tokens whose routers choose few groups go to few nodes, and
 * copies stay on the node of their expert.  Packing: items in falling order of weight, each to the lightest pack that has room;
 * of equals the first. */
#ifndef LM_PARALLEL_BALANCE_H
#define LM_PARALLEL_BALANCE_H

#include <stdint.h>

#include "base/err.h"

typedef struct {
    int64_t experts, slots, groups, nodes, ranks;
} lm_balance_ask;

/* load [experts], of any unit, not negative.  expert_of [slots]: slot s is on rank s / (slots / ranks), ranks of a node follow
 * each other; copies [experts]: slots of each.  Fails: LM_EUSAGE where slots do not divide by ranks, ranks by nodes or experts
 * by groups, or there are fewer slots than experts; for memory. */
lm_code lm_balance_experts(const double *load, const lm_balance_ask *a, int32_t *expert_of,
                           int32_t *copies, lm_err *e);
/* The largest load of a rank over the mean; 1 without any load.  A copy has an equal part of its expert's load. */
double lm_balance_peak(const double *load, const lm_balance_ask *a, const int32_t *expert_of,
                       const int32_t *copies);

#endif
