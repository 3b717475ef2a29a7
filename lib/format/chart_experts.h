/* SPDX-License-Identifier: Apache-2.0 */
/* chart_experts.h -- from the metrics of a run to a map of its experts over its steps. */
#ifndef LM_FORMAT_CHART_EXPERTS_H
#define LM_FORMAT_CHART_EXPERTS_H

#include "base/mem.h"
#include "format/chart.h"
#include "format/metrics.h"

/* The loads in "experts" records, each over the mean load of its record: 1 is balance.  A panel for each layer, a
 * row for each expert, a column for a step, or for neighbouring steps together when there are more than 64.  Arrays live in
 * `a`; title is borrowed.  Layers of another number of experts than the first are left out.  Fails: LM_EFORMAT without such
 * records, or for more experts than LM_CHART_MAP_MOST. */
lm_code lm_experts_chart_make(const lm_metrics_file *f, const char *title, lm_arena *a,
                              lm_chart_map *out, lm_err *e);

#endif
