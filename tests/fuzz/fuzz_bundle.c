/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_bundle -- any bytes as a model in a file (tar, compressed tar, .safetensors, .lmz) and on a
 * pipe.
 *
 * Both must open and be read to their end, or fail with a message; if both succeed, they must have
 * the same tensors. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"
#include "format/folder.h"

enum { PIPE = 65536, MOST = 1 << 20 };

/* A digest of names and bytes of all tensors, 0 on failure. */
static uint64_t read_model(const char *path)
{
    static uint8_t bytes[MOST];
    const lm_bundle_opts o = { .tmpdir = "/tmp" };
    lm_model_source *m = NULL;
    const lm_st_tensor *t = NULL;
    uint64_t sum = 1;
    lm_err e = { 0 };
    lm_code rc = lm_model_source_open(path, &o, &m, &e);

    while (!rc && !(rc = lm_model_source_next(m, &t, &e)) && t) {
        sum += lm_hash_str(t->name) ^ t->bytes;
        if (t->bytes > MOST)
            continue;
        rc = lm_model_source_read(m, t, 0, bytes, (size_t)t->bytes, &e);
        if (!rc)
            sum += lm_hash64(bytes, (size_t)t->bytes, 1);
    }
    if (!rc)
        rc = lm_model_source_finish(m, &e);
    if (rc && !e.what[0])
        abort();
    lm_model_source_close(m);
    return rc ? 0 : sum | 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[64];
    uint64_t as_file, as_pipe;
    int fd[2], file;

    if (size > PIPE)
        return 0;
    snprintf(path, sizeof path, "/tmp/lm-fuzz-bundle.%ld", (long)getpid());
    file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0 || write(file, data, size) != (ssize_t)size || close(file))
        abort();
    as_file = read_model(path);
    unlink(path);
    if (pipe2(fd, O_CLOEXEC) || write(fd[1], data, size) != (ssize_t)size || close(fd[1]))
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd[0]);
    as_pipe = read_model(path);
    close(fd[0]);
    if (as_file && as_pipe && as_file != as_pipe)
        abort();
    return 0;
}
