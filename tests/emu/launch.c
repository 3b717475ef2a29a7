/* SPDX-License-Identifier: Apache-2.0 */
/* launch.c -- launches of kernels: checks of their parameters. */
#include <stdalign.h>
#include <string.h>

#include "emu_impl.h"

typedef struct {
    lm_emu_launch kernel;
    alignas(16) unsigned char args[LM_EMU_ARGS_MAX];
} launch;

static void run_kernel(void *data)
{
    const launch *l = data;
    if (emu_kernel_begins(l->kernel.name))
        emu_run_grid(&l->kernel, l->args);
}

static cudaError_t check_launch(const lm_emu_launch *k, const void *const *pointers, int n,
                                cudaStream_t stream)
{
    uint64_t threads = (uint64_t)k->block.x * k->block.y * k->block.z;
    if (threads < 1 || threads > THREADS_MAX || k->block.x > 1024 || k->block.y > 1024 ||
        k->block.z > 64 || k->grid.x < 1 || k->grid.x > 0x7fffffff || k->grid.y < 1 ||
        k->grid.y > 65535 || k->grid.z < 1 || k->grid.z > 65535) {
        emu_say("kernel %s: cannot launch %ux%ux%u blocks of %ux%ux%u threads", k->name, k->grid.x,
                k->grid.y, k->grid.z, k->block.x, k->block.y, k->block.z);
        return cudaErrorInvalidConfiguration;
    }
    size_t most = emu_shared_allowed(k->kernel);
    if (k->shared > most) {
        emu_say("kernel %s: asks for %zu bytes of shared memory, may have %zu", k->name, k->shared,
                most);
        return cudaErrorInvalidValue;
    }
    for (int i = 0; i < n && emu_set.strict; i++)
        if (pointers[i] && !emu_memory_known(pointers[i])) {
            emu_say("kernel %s: pointer %p is neither device nor pinned memory", k->name,
                    pointers[i]);
            return cudaErrorIllegalAddress;
        }
    for (int i = 0; i < n; i++)
        if (emu_elsewhere(pointers[i], stream)) {
            emu_say("kernel %s: pointer %p is memory of another device than its stream", k->name,
                    pointers[i]);
            return cudaErrorIllegalAddress;
        }
    return cudaSuccess;
}

void lm_emu_enqueue(const lm_emu_launch *k, const void *args, size_t args_size,
                    const void *const *pointers, int n_pointers, void *stream)
{
    emu_enter();
    cudaError_t code = emu_set.devices < 1 || emu_broken()
                           ? cudaErrorNoDevice
                           : check_launch(k, pointers, n_pointers, stream);
    if (!code) {
        launch l = { .kernel = *k };
        memcpy(l.args, args, args_size);
        code =
            emu_put((cudaStream_t)stream, run_kernel, NULL, &l, offsetof(launch, args) + args_size);
    }
    emu_leave(code);
}
