/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h -- what a training run will hold in memory and what a step will cost, from the config
 * alone.
 *
 * The host's memory and a device's are counted apart; on the CPU all rows are the host's. */
#ifndef LM_TRAIN_MEMORY_H
#define LM_TRAIN_MEMORY_H

#include "train/program.h"

typedef struct {
    const char *name;
    double bytes;
    bool device; /* in the device's memory, not the host's */
} lm_memory_row;

enum { LM_MEMORY_ROWS = 24 };

typedef struct {
    lm_memory_row row[LM_MEMORY_ROWS];
    int n_rows;
    double total, device;      /* bytes of the host's memory, and of the device's */
    double arena, lower_bound; /* of the activations: as planned, and the least possible */
    double checkpoint;         /* bytes of weights and states in files */
    int64_t params, matmul_params;
    double flops_per_token; /* 6 N + 12 L H D T                                        */
    double graph_flops[LM_PHASE_COUNT]; /* of one micro-batch by the operators' own cost rules  */
    int64_t tokens_per_step;
} lm_memory_plan;

/* Of a program that takes steps of `accumulate` micro-batches: the memory alone, and the rest of *out. */
void lm_memory_of(const lm_program *p, int64_t accumulate, lm_memory_plan *out);
void lm_memory_costs(const lm_program *p, int64_t accumulate, lm_memory_plan *out);
/* One thing more that the run will hold; nothing for 0 bytes. */
void lm_memory_add(lm_memory_plan *p, const char *name, double bytes, bool device);
/* Of a device's free bytes, those that plans may take: kernels bring code and stacks of their own
 * when they first run. */
double lm_memory_usable(double device_free);

#endif
