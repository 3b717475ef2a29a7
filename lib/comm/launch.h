/* SPDX-License-Identifier: Apache-2.0 */
/* launch.h -- was this process started as one of several?
 *
 * Launchers number the processes that they start by variables of the environment: mpirun of Open MPI (OMPI_COMM_WORLD_RANK,
 * _SIZE), srun of Slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS), other launchers of PMIx (PMIX_RANK) and of PMI (PMI_RANK,
 * PMI_SIZE).  A tool that starts its own ranks on this machine (open.h) sets LM_RANK, LM_RANKS and LM_RANKS_MEMORY.  A batch script of Slurm is one process, although SLURM_PROCID is set in it. */
#ifndef LM_COMM_LAUNCH_H
#define LM_COMM_LAUNCH_H

#include <stddef.h>

#define LM_RANK_VARIABLE   "LM_RANK"
#define LM_RANKS_VARIABLE  "LM_RANKS"
#define LM_MEMORY_VARIABLE "LM_RANKS_MEMORY"

/* A variable of the environment, or NULL: getenv of the program, because the library does not read the environment. */
typedef char *lm_env_fn(const char *name);

typedef struct {
    const char *launcher; /* "mpirun", "srun", "PMIx", "PMI", "the tool"; NULL: started alone */
    int rank;
    int ranks; /* 1: started alone, or as the only one; 0: several, and the launcher does not say how many */
    const char *memory; /* of the tool's own ranks: text of lm_comm_memory_text; NULL */
} lm_launch;

lm_launch lm_launched(lm_env_fn *get);
/* "mpirun has started 4 ranks", for errors. */
void lm_launch_says(const lm_launch *l, char *out, size_t size);

#endif
