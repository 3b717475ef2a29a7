/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_pipeline.c -- rows of a pipeline schedule: what is read is whole, is written and read again as the same, and can be
 * simulated, unless its rows wait for each other. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "parallel/pipeline.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    lm_pipeline p, again;
    lm_buf text = { 0 };
    lm_pipe_times t;
    lm_err e = { 0 };

    if (lm_pipeline_read((const char *)data, size, "fuzz", &p, &e)) {
        if (e.code != LM_EFORMAT)
            abort();
        return 0;
    }
    lm_pipe_cost *cost = calloc((size_t)p.stages, sizeof *cost);
    if (!cost || lm_pipeline_write(&p, &text, &e) ||
        lm_pipeline_read(text.data, text.len, "again", &again, &e))
        abort();
    if (p.ranks != again.ranks || p.stages != again.stages || p.micros != again.micros)
        abort();
    for (int s = 0; s < p.stages; s++)
        cost[s] = (lm_pipe_cost){ 1, 1, 1, 1 };
    if (lm_pipeline_time(&p, cost, &t, &e) && e.code != LM_EFORMAT)
        abort();
    lm_pipe_times_fini(&t, p.ranks);
    lm_pipeline_fini(&p);
    lm_pipeline_fini(&again);
    lm_buf_fini(&text);
    free(cost);
    return 0;
}
