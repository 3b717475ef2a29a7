/* SPDX-License-Identifier: Apache-2.0 */
/* emu.h -- control of the emulated GPU for tests, and functions that device.h needs.
 *
 * Environment, read once at the first call:
 *   LM_EMU_ORDER=forward|backward|SEED  the order of threads and blocks (SEED: shuffled by it)
 *   LM_EMU_EAGER=1     work is executed when it is enqueued on a stream
 *   LM_EMU_MEMORY=N    bytes of memory of each device, with K, M, G (default 2G)
 *   LM_EMU_DEVICES=N   number of devices (default 1, at most 16)
 *   LM_EMU_FAIL=N      all devices are lost at the N-th kernel
 *   LM_EMU_PICKY=1     cuBLASLt serves pointers and pitches of multiples of 16 bytes only
 *   LM_EMU_PICKY=2     it serves all of these, but no epilogue other than a bias
 *   LM_EMU_STRICT=1    pointers among a kernel's arguments must be memory of the device or pinned
 *
 * An error of a kernel (threads that wait for others that have ended, an overrun of shared memory
 * or of an allocation) is printed as one line, stored for lm_emu_report, and becomes the error of
 * the device: cudaErrorLaunchFailure, as after a fault of a GPU, until lm_emu_reset. */
#ifndef LM_EMU_EMU_H
#define LM_EMU_EMU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- for tests ---- */

#define LM_EMU_PUBLIC __attribute__((visibility("default")))

enum { LM_EMU_FORWARD = 0, LM_EMU_BACKWARD = 1, LM_EMU_SHUFFLED = 2 };

/* Between two barriers the threads of a block run one after the other, in this order; so do blocks.
 * A kernel whose bits depend on it has a race.  Applies to kernels that run after the call. */
LM_EMU_PUBLIC void lm_emu_order(int order, uint64_t seed);
LM_EMU_PUBLIC void lm_emu_eager(bool eager);
LM_EMU_PUBLIC void lm_emu_strict(bool strict);
LM_EMU_PUBLIC void lm_emu_picky(int how); /* as LM_EMU_PICKY; 0: not */
/* Bytes of memory of each device, and the number of devices. */
LM_EMU_PUBLIC void lm_emu_memory(size_t bytes);
LM_EMU_PUBLIC void lm_emu_devices(int n);
/* The device is lost at the n-th kernel after this call; 0: never. */
LM_EMU_PUBLIC void lm_emu_fail(uint64_t n);
/* The n-th call of NCCL that comes to the front of a stream after this one is never complete, and its group has an error; 0: all are
 * complete. */
LM_EMU_PUBLIC void lm_emu_nccl_fail(uint64_t n);
/* Reset the device: errors are cleared, queued work is dropped.  Allocations are kept. */
LM_EMU_PUBLIC void lm_emu_reset(void);
/* Do not print errors of kernels. */
LM_EMU_PUBLIC void lm_emu_quiet(bool quiet);
/* The first error since the last reset; "" if there is none. */
LM_EMU_PUBLIC const char *lm_emu_report(void);
/* Kernels run, and switches between threads of blocks, since the process began. */
LM_EMU_PUBLIC void lm_emu_counts(uint64_t *kernels, uint64_t *switches);

/* ---- for device.h ---- */

#define LM_EMU_HIDDEN __attribute__((visibility("hidden")))

typedef struct {
    unsigned x, y, z;
} lm_emu_dim;

enum { LM_EMU_ARGS_MAX = 4096 }; /* bytes of a kernel's parameters */

typedef struct {
    const char *name;
    const void *kernel;               /* the kernel as in LM_ALLOW_SHARED */
    void (*thread)(const void *args); /* one thread of it */
    lm_emu_dim grid, block;
    size_t shared; /* bytes of dynamic shared memory */
} lm_emu_launch;

/* Indices of the running thread. */
extern LM_EMU_HIDDEN lm_emu_dim lm_emu_thread_idx, lm_emu_block_idx, lm_emu_block_dim,
    lm_emu_grid_dim;
extern LM_EMU_HIDDEN unsigned char *lm_emu_shared;

/* `stream` is a cudaStream_t; args are copied.  `pointers`: the arguments that are pointers, which
 * strict mode checks. */
LM_EMU_HIDDEN void lm_emu_enqueue(const lm_emu_launch *k, const void *args, size_t args_size,
                                  const void *const *pointers, int n_pointers, void *stream);
LM_EMU_HIDDEN void lm_emu_allow_shared(const void *kernel, const char *name, long bytes);

/* Wait for all threads of the block; the sum over them of `add`, and the or of `bits`. */
typedef struct {
    unsigned sum, bits;
} lm_emu_tally;
LM_EMU_HIDDEN lm_emu_tally lm_emu_barrier(unsigned add, unsigned bits);
/* Wait for the lanes in `mask`; returns the values that they passed, by lane, valid until this
 * thread's next collective.  Lanes with different `kind`s must not wait for each other; vote: the
 * lanes that passed a value. */
enum { LM_EMU_SYNC, LM_EMU_SHUFFLE, LM_EMU_VOTE };
typedef struct {
    const uint64_t *value;
    unsigned votes;
    unsigned lane;
} lm_emu_met;
LM_EMU_HIDDEN lm_emu_met lm_emu_meet(unsigned mask, int kind, uint64_t value, bool vote);
/* End this kernel with an error and a line of text; does not return. */
LM_EMU_HIDDEN void lm_emu_trap(const char *why);

#ifdef __cplusplus
}
#endif
#endif
