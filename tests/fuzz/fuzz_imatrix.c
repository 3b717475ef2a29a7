/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_imatrix -- any bytes as an importance matrix of either format: accepted means must be finite
 * and not negative. */
#include <stdlib.h>

#include "format/imatrix.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const names[] = { "blk.0.attn_q.weight", "output.weight", "" };
    lm_imatrix *m = NULL;
    lm_err e = { 0 };
    size_t n = 0;

    if (lm_imatrix_parse(data, size, "input", &m, &e))
        return 0;
    if (!lm_imatrix_count(m))
        abort();
    for (int i = 0; i < 3; i++) {
        const float *v = lm_imatrix_find(m, names[i], &n);
        for (size_t k = 0; v && k < n; k++)
            if (!(v[k] >= 0.0f && v[k] <= 3.5e38f))
                abort();
    }
    lm_imatrix_free(m);
    return 0;
}
