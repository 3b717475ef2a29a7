/* SPDX-License-Identifier: Apache-2.0 */
/* emu_impl.h -- shared by the files of the emulated runtime. */
#ifndef LM_EMU_IMPL_H
#define LM_EMU_IMPL_H

#include "cuda_runtime_api.h"
#include "emu.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define POISON(p, n)   __asan_poison_memory_region(p, n)
#define UNPOISON(p, n) __asan_unpoison_memory_region(p, n)
#else
#define POISON(p, n)   ((void)(p), (void)(n))
#define UNPOISON(p, n) ((void)(p), (void)(n))
#endif

enum {
    SHARED_PLAIN = 48 << 10, /* bytes of shared memory without and with LM_ALLOW_SHARED */
    SHARED_MAX = 227 << 10,
    THREADS_MAX = 1024,
    WARPS_MAX = THREADS_MAX / 32,
    DEVICES_MAX = 16
};

typedef struct {
    size_t memory;
    int devices, order;
    uint64_t seed, fail_at;
    bool eager, strict, quiet;
    int picky; /* emu.h */
} emu_settings;

/* device.c: settings, errors, the lock that every call of the API holds */
extern LM_EMU_HIDDEN emu_settings emu_set;
LM_EMU_HIDDEN void emu_enter(void);
/* Releases the lock; returns `code`, or the permanent error of the device; errors are latched. */
LM_EMU_HIDDEN cudaError_t emu_leave(cudaError_t code);
/* Releases the lock without an error: for functions that free. */
LM_EMU_HIDDEN cudaError_t emu_leave_freed(cudaError_t code);
/* Let other threads have the lock until one calls emu_signal, or for moments. */
LM_EMU_HIDDEN void emu_wait(void);
LM_EMU_HIDDEN void emu_signal(void);
/* That of this thread (cudaSetDevice). */
LM_EMU_HIDDEN int emu_device(void);
/* The devices' error, if they have one. */
LM_EMU_HIDDEN cudaError_t emu_broken(void);
LM_EMU_HIDDEN void emu_break(cudaError_t code, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* Print an error of a call, which is not an error of the device. */
LM_EMU_HIDDEN void emu_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
LM_EMU_HIDDEN size_t emu_shared_allowed(const void *kernel);

/* Count a kernel; false if the device is lost at it (LM_EMU_FAIL). */
LM_EMU_HIDDEN bool emu_kernel_begins(const char *name);

/* block.c */
LM_EMU_HIDDEN void emu_run_grid(const lm_emu_launch *k, const void *args);
LM_EMU_HIDDEN extern uint64_t emu_kernels, emu_switches;

/* memory.c: whether p is in, or just after, device or pinned memory; the device in whose memory p is, or -1; whether n bytes
 * at p are inside the allocation in which they begin, if any; whether all guards are intact */
LM_EMU_HIDDEN bool emu_memory_known(const void *p);
LM_EMU_HIDDEN int emu_memory_device(const void *p);
LM_EMU_HIDDEN bool emu_memory_fits(const void *p, size_t n);
LM_EMU_HIDDEN void emu_memory_check(const char *after);

/* queue.c: appends a piece of work to a stream, or to its capture; data is copied.
 * drop(data): it will not run again. */
typedef void (*emu_work)(void *data);
LM_EMU_HIDDEN cudaError_t emu_put(cudaStream_t s, emu_work run, emu_work drop, const void *data,
                                  size_t bytes);
/* The same of work at which its stream stops until ready(data), which may be called any number of times. */
typedef bool (*emu_gate)(void *data);
LM_EMU_HIDDEN cudaError_t emu_put_gate(cudaStream_t s, emu_gate ready, emu_work run, emu_work drop,
                                       const void *data, size_t bytes);
/* Whether p is memory of another device than that of the stream; those of the default stream are not looked at. */
LM_EMU_HIDDEN bool emu_elsewhere(const void *p, cudaStream_t s);
/* Execute all work of this thread's device; drop that of all streams. */
LM_EMU_HIDDEN void emu_drain(void);
LM_EMU_HIDDEN void emu_drop(void);
/* For calls that are not allowed during a capture: invalidates active captures and returns the
 * error. */
LM_EMU_HIDDEN cudaError_t emu_uncaptured(void);

#endif
