/* SPDX-License-Identifier: Apache-2.0 */
/* launch.c -- see launch.h. */
#include "comm/launch.h"

#include <stdio.h>
#include <stdlib.h>

/* A number 0..2^24, or -1. */
static int number(lm_env_fn *get, const char *name)
{
    const char *s = name ? get(name) : NULL;
    char *end;
    long v = s ? strtol(s, &end, 10) : -1;

    return s && end != s && !*end && v >= 0 && v <= 1 << 24 ? (int)v : -1;
}

lm_launch lm_launched(lm_env_fn *get)
{
    /* The first that is complete: ranks of mpirun inside a job of Slurm have the variables of both. */
    static const struct {
        const char *launcher, *rank, *ranks;
    } known[] = {
        { "the tool", LM_RANK_VARIABLE, LM_RANKS_VARIABLE },
        { "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE" },
        { "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS" },
        { "PMI", "PMI_RANK", "PMI_SIZE" },
        { "PMIx", "PMIX_RANK", NULL },
    };

    for (unsigned i = 0; i < sizeof known / sizeof *known; i++) {
        int rank = number(get, known[i].rank), ranks = number(get, known[i].ranks);

        if (rank < 0 || (known[i].ranks && ranks <= rank) || (i == 0 && !get(LM_MEMORY_VARIABLE)))
            continue;
        return (lm_launch){ .launcher = known[i].launcher,
                            .rank = rank,
                            .ranks = known[i].ranks ? ranks : 0,
                            .memory = i == 0 ? get(LM_MEMORY_VARIABLE) : NULL };
    }
    return (lm_launch){ .ranks = 1 };
}

void lm_launch_says(const lm_launch *l, char *out, size_t size)
{
    char number[16] = "several";

    if (l->ranks)
        snprintf(number, sizeof number, "%d", l->ranks);
    snprintf(out, size, "%s has started %s ranks", l->launcher, number);
}
