/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_kv_llama.c -- the state of a sequence of llama.cpp, for a model of two layers: what is read has that model's
 * shapes, ids and positions, and finite numbers. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kv/file_llama.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const int64_t heads[2] = { 2, 1 }, width[2] = { 4, 6 };

static void check(const lm_kv_image *m)
{
    const lm_kv_about *a = &m->about;
    for (int64_t i = 0; i < a->tokens; i++)
        if (m->content.ids[i] < 0 || m->content.ids[i] >= 100 || m->content.positions[i] != i)
            abort();
    for (int64_t p = 0; p < 4; p++)
        for (int64_t i = 0; i < a->tokens * heads[p / 2] * width[p / 2]; i++)
            if (!isfinite(lm_get(a->act, m->content.part[p].data[LM_KV_PLAIN], i)))
                abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    const lm_kv_about a = { .model_type = "llama",
                            .weights = "",
                            .config = "",
                            .rope = "{}",
                            .layers = 2,
                            .kv_heads = heads,
                            .head_dim = width,
                            .act = LM_DTYPE_F16 };
    lm_kv_llama *f;
    lm_kv_image *m;
    lm_err e = { 0 };
    char path[32];
    if (fd < 0)
        fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (ftruncate(fd, 0) || pwrite(fd, data, size, 0) != (ssize_t)size)
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (!lm_kv_llama_open(path, &f, &e)) {
        if (!lm_kv_llama_read(f, &a, size % 2, 100, &m, &e)) {
            check(m);
            lm_kv_image_free(m);
        }
        lm_kv_llama_close(f);
    }
    if (e.code && !e.what[0])
        abort();
    return 0;
}
