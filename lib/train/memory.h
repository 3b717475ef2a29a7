/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h -- the memory of a training run and the cost of a step, from the config alone.
 *
 * The memory of host and device is counted separately; on the CPU all rows belong to the host. */
#ifndef LM_TRAIN_MEMORY_H
#define LM_TRAIN_MEMORY_H

#include "train/pipe.h"
#include "train/program.h"

typedef struct {
    char name[40]; /* "activations and scratch", "frozen (nf4_dq)" */
    double bytes;
    bool device; /* in the device's memory, not the host's */
} lm_memory_row;

enum { LM_MEMORY_ROWS = 32 + LM_STORE_FORMATS };

typedef struct {
    lm_memory_row row[LM_MEMORY_ROWS];
    int n_rows;
    double total, device;      /* bytes of the host's memory, and of the device's */
    double arena, lower_bound; /* bytes of the activations: planned, and the lower bound */
    /* of `total`: bytes that nothing touches before the first step; 0 with a device */
    double later;
    double checkpoint; /* bytes of weights and states in files */
    int64_t params, matmul_params;
    int64_t trained;        /* elements that train, an adapter's included */
    double flops_per_token; /* 6 N + 12 L H D T; beside frozen weights those of the graph */
    double graph_flops[LM_PHASE_COUNT]; /* FLOPs of one micro-batch by the operators' cost rules  */
    int64_t tokens_per_step;
    int ranks; /* whose memory this is */
    /* bytes that a rank gives to the others along each axis in a step: gradients along dp, rows and sums along the others;
     * 0: there are no others */
    double given[LM_AXES];
} lm_memory_plan;

/* The steps of a run (lm_trainer_opts); 0: 1 rank, and as many leaves as ranks that share. */
typedef struct {
    int64_t accumulate;
    int ranks, here; /* here: of them, on this machine; 0: all */
    int sharing;     /* of them, that share the micro-batches */
    int64_t leaves;
    int64_t places;            /* to which checkpoints are written besides the run's folder */
    const lm_train_pipe *pipe; /* of ranks along pp; NULL: one has all layers */
    lm_program *const
        *others; /* then, of the ranks along pp that have other stages: they are counted, too */
    int n_others;
} lm_memory_ask;

/* "comm_bytes_dp" ..., by axis: in metrics and plans. */
extern const char *const lm_comm_bytes_names[LM_AXES];

/* For a program with such steps: only the memory, of all ranks here together, as if each had the mean of the stages; and the
 * rest of *out. */
void lm_memory_of(const lm_program *p, const lm_memory_ask *ask, lm_memory_plan *out);
void lm_memory_costs(const lm_program *p, int64_t accumulate, lm_memory_plan *out);
/* Bytes of weights and states in the files of a checkpoint. */
double lm_memory_checkpoint(const lm_program *p);
/* Add a row to the memory of the run; nothing for 0 bytes. */
void lm_memory_add(lm_memory_plan *p, const char *name, double bytes, bool device);
/* The part of a device's free bytes that plans may use: kernels allocate code and stacks at their
 * first run. */
double lm_memory_usable(double device_free);

#endif
