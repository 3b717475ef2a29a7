/* SPDX-License-Identifier: Apache-2.0 */
/* device.c -- the emulated device: its properties, its errors, and the lock that calls hold. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "emu_impl.h"

emu_settings emu_set = { .memory = (size_t)2 << 30, .devices = 1 };

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static int depth; /* how often its owner holds the lock */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static cudaError_t broken;                /* error of the device, which is permanent */
static _Thread_local cudaError_t latched; /* error of the last failed call */
static _Thread_local int device_now;
static char report[512];

static struct {
    const void *kernel;
    size_t bytes;
} * allowed;
static size_t n_allowed, max_allowed;

/* ---- settings ---- */

static size_t read_size(const char *s)
{
    char *end;
    size_t n = strtoull(s, &end, 10);
    return n << (*end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0);
}

static void read_settings(void)
{
    const char *s = getenv("LM_EMU_ORDER");
    if (s && strcmp(s, "backward") == 0) {
        emu_set.order = LM_EMU_BACKWARD;
    } else if (s && strcmp(s, "forward") != 0 && *s) {
        emu_set.order = LM_EMU_SHUFFLED;
        emu_set.seed = strtoull(s, NULL, 10);
    }
    if ((s = getenv("LM_EMU_EAGER")) && *s)
        emu_set.eager = atoi(s) != 0;
    if ((s = getenv("LM_EMU_STRICT")) && *s)
        emu_set.strict = atoi(s) != 0;
    if ((s = getenv("LM_EMU_PICKY")) && *s)
        emu_set.picky = atoi(s);
    if ((s = getenv("LM_EMU_MEMORY")) && *s)
        emu_set.memory = read_size(s);
    if ((s = getenv("LM_EMU_DEVICES")) && *s)
        emu_set.devices = atoi(s) < DEVICES_MAX ? atoi(s) : DEVICES_MAX;
    if ((s = getenv("LM_EMU_FAIL")) && *s)
        emu_set.fail_at = strtoull(s, NULL, 10);
}

void emu_enter(void)
{
    pthread_once(&once, read_settings);
    pthread_mutex_lock(&lock);
    depth++;
}

static void leave(void)
{
    depth--;
    pthread_mutex_unlock(&lock);
}

void emu_wait(void)
{
    const int held = depth;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 10000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    while (depth > 1)
        leave();
    depth = 0;
    pthread_cond_timedwait(&moved, &lock, &until);
    depth = 1;
    while (depth < held)
        emu_enter();
}

void emu_signal(void)
{
    pthread_cond_broadcast(&moved);
}

cudaError_t emu_leave(cudaError_t code)
{
    if (broken)
        code = broken;
    else if (emu_set.devices < 1)
        code = cudaErrorNoDevice;
    if (code && code != cudaErrorNotReady)
        latched = code;
    leave();
    return code;
}

cudaError_t emu_leave_freed(cudaError_t code)
{
    leave();
    return code;
}

int emu_device(void)
{
    return device_now;
}

cudaError_t emu_broken(void)
{
    return broken;
}

static void say(const char *fmt, va_list ap)
{
    char line[sizeof report];
    vsnprintf(line, sizeof line, fmt, ap);
    if (!report[0])
        memcpy(report, line, sizeof report);
    if (!emu_set.quiet)
        fprintf(stderr, "emulated GPU: %s\n", line);
}

void emu_say(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    say(fmt, ap);
    va_end(ap);
}

void emu_break(cudaError_t code, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    say(fmt, ap);
    va_end(ap);
    if (!broken)
        broken = code;
}

bool emu_kernel_begins(const char *name)
{
    if (++emu_kernels != emu_set.fail_at)
        return true;
    emu_break(cudaErrorLaunchFailure, "kernel %s, number %llu: the device is gone", name,
              (unsigned long long)emu_kernels);
    return false;
}

/* ---- control ---- */

void lm_emu_order(int order, uint64_t seed)
{
    emu_enter();
    emu_set.order = order;
    emu_set.seed = seed;
    leave();
}
void lm_emu_eager(bool eager)
{
    emu_enter();
    emu_set.eager = eager;
    leave();
}
void lm_emu_strict(bool strict)
{
    emu_enter();
    emu_set.strict = strict;
    leave();
}
void lm_emu_picky(int how)
{
    emu_enter();
    emu_set.picky = how;
    leave();
}
void lm_emu_quiet(bool quiet)
{
    emu_enter();
    emu_set.quiet = quiet;
    leave();
}
void lm_emu_devices(int n)
{
    emu_enter();
    emu_set.devices = n < DEVICES_MAX ? n : DEVICES_MAX;
    leave();
}
void lm_emu_memory(size_t bytes)
{
    emu_enter();
    emu_set.memory = bytes;
    leave();
}
void lm_emu_fail(uint64_t n)
{
    emu_enter();
    emu_set.fail_at = n ? emu_kernels + n : 0;
    leave();
}
void lm_emu_reset(void)
{
    emu_enter();
    emu_drop();
    broken = cudaSuccess;
    latched = cudaSuccess;
    report[0] = 0;
    emu_set.fail_at = 0;
    leave();
}
const char *lm_emu_report(void)
{
    return report;
}
void lm_emu_counts(uint64_t *kernels, uint64_t *switches)
{
    *kernels = emu_kernels;
    *switches = emu_switches;
}

/* ---- errors ---- */

static const struct {
    cudaError_t code;
    const char *name, *text;
} errors[] = {
#define E(code, text)     \
    {                     \
        code, #code, text \
    }
    E(cudaSuccess, "no error"),
    E(cudaErrorInvalidValue, "invalid argument"),
    E(cudaErrorMemoryAllocation, "out of memory"),
    E(cudaErrorInitializationError, "initialization error"),
    E(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    E(cudaErrorInvalidDevicePointer, "invalid device pointer"),
    E(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    E(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version"),
    E(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable"),
    E(cudaErrorInvalidDeviceFunction, "invalid device function"),
    E(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    E(cudaErrorInvalidDevice, "invalid device ordinal"),
    E(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    E(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    E(cudaErrorNotReady, "device not ready"),
    E(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    E(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    E(cudaErrorLaunchTimeout, "the launch timed out and was terminated"),
    E(cudaErrorAssert, "device-side assert triggered"),
    E(cudaErrorLaunchFailure, "unspecified launch failure"),
    E(cudaErrorNotSupported, "operation not supported"),
    E(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    E(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    E(cudaErrorStreamCaptureUnmatched, "capture was not initiated in this stream"),
    E(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    E(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    E(cudaErrorStreamCaptureImplicit,
      "operation would make the legacy stream depend on a capturing "
      "blocking stream"),
    E(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing "
                              "stream"),
    E(cudaErrorUnknown, "unknown error"),
#undef E
};

const char *cudaGetErrorName(cudaError_t error)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error)
            return errors[i].name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error)
            return errors[i].text;
    return "unrecognized error code";
}

cudaError_t cudaPeekAtLastError(void)
{
    emu_enter();
    cudaError_t code = broken ? broken : latched;
    leave();
    return code;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t code = cudaPeekAtLastError();
    latched = cudaSuccess;
    return code;
}

/* ---- the device ---- */

cudaError_t cudaGetDeviceCount(int *count)
{
    emu_enter();
    *count = emu_set.devices;
    return emu_leave(cudaSuccess);
}

static cudaError_t check_device(int device)
{
    return device >= 0 && device < emu_set.devices ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaSetDevice(int device)
{
    emu_enter();
    cudaError_t code = check_device(device);
    if (!code)
        device_now = device;
    return emu_leave(code);
}

cudaError_t cudaGetDevice(int *device)
{
    emu_enter();
    *device = device_now;
    return emu_leave(cudaSuccess);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    emu_enter();
    cudaError_t code = check_device(device);
    if (!code)
        *prop = (struct cudaDeviceProp){
            .name = "emulated GPU",
            .totalGlobalMem = emu_set.memory,
            .sharedMemPerBlock = SHARED_PLAIN,
            .regsPerBlock = 65536,
            .warpSize = 32,
            .maxThreadsPerBlock = THREADS_MAX,
            .maxThreadsDim = { 1024, 1024, 64 },
            .maxGridSize = { 2147483647, 65535, 65535 },
            .totalConstMem = 65536,
            .major = 9,
            .minor = 0,
            .multiProcessorCount = 4,
            .canMapHostMemory = 1,
            .concurrentKernels = 1,
            .pciBusID = device,
            .asyncEngineCount = 1,
            .unifiedAddressing = 1,
            .memoryBusWidth = 64,
            .l2CacheSize = 1 << 20,
            .maxThreadsPerMultiProcessor = 2048,
            .sharedMemPerMultiprocessor = 228 << 10,
            .regsPerMultiprocessor = 65536,
            .sharedMemPerBlockOptin = SHARED_MAX,
        };
    if (!code && getenv("LM_EMU_CARD")) /* a name of the table of cards, for tests of its figures */
        snprintf(prop->name, sizeof prop->name, "%s", getenv("LM_EMU_CARD"));
    return emu_leave(code);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    emu_enter();
    cudaError_t code = check_device(device);
    static const struct {
        enum cudaDeviceAttr attr;
        int value;
    } known[] = {
        { cudaDevAttrMaxThreadsPerBlock, THREADS_MAX },
        { cudaDevAttrMaxSharedMemoryPerBlock, SHARED_PLAIN },
        { cudaDevAttrWarpSize, 32 },
        { cudaDevAttrMultiProcessorCount, 4 },
        { cudaDevAttrComputeMode, 0 },
        { cudaDevAttrComputeCapabilityMajor, 9 },
        { cudaDevAttrComputeCapabilityMinor, 0 },
        { cudaDevAttrMaxSharedMemoryPerMultiprocessor, 228 << 10 },
        { cudaDevAttrMaxRegistersPerMultiprocessor, 65536 },
        { cudaDevAttrMaxSharedMemoryPerBlockOptin, SHARED_MAX },
    };
    size_t i = 0, n = sizeof known / sizeof *known;
    while (i < n && known[i].attr != attr)
        i++;
    if (!code && i == n)
        code = cudaErrorInvalidValue;
    if (!code)
        *value = known[i].value;
    return emu_leave(code);
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int len, int device)
{
    emu_enter();
    cudaError_t code = check_device(device);
    if (!code && (len < 13 || device > 255))
        code = cudaErrorInvalidValue;
    if (!code)
        snprintf(id, (size_t)len, "0000:%02x:00.0", (unsigned)device);
    return emu_leave(code);
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

/* ---- more than 48 KiB of shared memory ---- */

static cudaError_t allow(const void *kernel, long bytes)
{
    if (bytes < 0 || bytes > SHARED_MAX)
        return cudaErrorInvalidValue;
    size_t i = 0;
    while (i < n_allowed && allowed[i].kernel != kernel)
        i++;
    if (i == max_allowed) {
        max_allowed = max_allowed ? 2 * max_allowed : 64;
        allowed = realloc(allowed, max_allowed * sizeof *allowed);
        if (!allowed)
            abort();
    }
    allowed[i].kernel = kernel;
    allowed[i].bytes = (size_t)bytes;
    n_allowed += i == n_allowed;
    return cudaSuccess;
}

size_t emu_shared_allowed(const void *kernel)
{
    for (size_t i = 0; i < n_allowed; i++)
        if (allowed[i].kernel == kernel)
            return allowed[i].bytes > SHARED_PLAIN ? allowed[i].bytes : SHARED_PLAIN;
    return SHARED_PLAIN;
}

void lm_emu_allow_shared(const void *kernel, const char *name, long bytes)
{
    emu_enter();
    cudaError_t code = allow(kernel, bytes);
    if (code)
        emu_say("kernel %s: %ld bytes of shared memory allowed: at most %d", name, bytes,
                SHARED_MAX);
    emu_leave(code);
}

cudaError_t cudaFuncSetAttribute(const void *func, enum cudaFuncAttribute attr, int value)
{
    emu_enter();
    bool size = attr == cudaFuncAttributeMaxDynamicSharedMemorySize;
    return emu_leave(size ? allow(func, value) : cudaSuccess);
}
