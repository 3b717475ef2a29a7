/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c -- memory of the emulated device and pinned memory of the host: separate mappings with
 * guards on both sides, filled with 0xff (NaN) up to 16 MiB. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emu_impl.h"

enum { GUARD = 512, FILLED = 16 << 20, GRAIN = 512 };
#define GUARD_BYTE 0xc3

typedef struct {
    unsigned char *at;
    size_t bytes;
    bool pinned;
    int device;
} region;

static region *regions; /* sorted by address */
static size_t n_regions, max_regions, used[DEVICES_MAX];

static size_t mapped(size_t bytes)
{
    return (bytes + 2 * GUARD + 4095) & ~(size_t)4095;
}
static size_t counted(size_t bytes)
{
    return (bytes + GRAIN - 1) & ~(size_t)(GRAIN - 1);
}

/* The last region that begins at or before p. */
static region *find(const void *p)
{
    size_t lo = 0, hi = n_regions;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (regions[mid].at <= (const unsigned char *)p)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo ? &regions[lo - 1] : NULL;
}

static void insert(region r)
{
    if (n_regions == max_regions) {
        max_regions = max_regions ? 2 * max_regions : 64;
        regions = realloc(regions, max_regions * sizeof *regions);
        if (!regions)
            abort();
    }
    region *before = find(r.at);
    size_t i = before ? (size_t)(before - regions) + 1 : 0;
    memmove(regions + i + 1, regions + i, (n_regions - i) * sizeof *regions);
    regions[i] = r;
    n_regions++;
}

static bool whole(const region *r)
{
#if !defined(__SANITIZE_ADDRESS__)
    for (int i = 0; i < GUARD; i++)
        if (r->at[-1 - i] != GUARD_BYTE || r->at[r->bytes + (size_t)i] != GUARD_BYTE)
            return false;
#else
    (void)r; /* the guards are poisoned: a write there has been reported */
#endif
    return true;
}

static cudaError_t get(void **p, size_t bytes, bool pinned)
{
    *p = NULL;
    if (!bytes)
        return cudaSuccess;
    const int device = emu_device();
    if (!pinned && (bytes > emu_set.memory || counted(bytes) > emu_set.memory - used[device]))
        return cudaErrorMemoryAllocation;
    unsigned char *map = mmap(NULL, mapped(bytes), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        return cudaErrorMemoryAllocation;
    memset(map, GUARD_BYTE, GUARD);
    memset(map + GUARD, 0xff, bytes < FILLED ? bytes : FILLED);
    memset(map + GUARD + bytes, GUARD_BYTE, GUARD);
    POISON(map, GUARD);
    POISON(map + GUARD + bytes, mapped(bytes) - GUARD - bytes);
    insert((region){ map + GUARD, bytes, pinned, device });
    used[device] += pinned ? 0 : counted(bytes);
    *p = map + GUARD;
    return cudaSuccess;
}

static cudaError_t put_back(void *p, bool pinned)
{
    if (!p)
        return cudaSuccess;
    emu_drain(); /* work that uses it is executed first */
    region *r = find(p);
    if (!r || r->at != p || r->pinned != pinned) {
        emu_say("%p is freed and is no %s memory", p, pinned ? "pinned" : "device");
        return cudaErrorInvalidValue;
    }
    if (!whole(r))
        emu_break(cudaErrorLaunchFailure, "%zu bytes at %p are freed: their guards are damaged",
                  r->bytes, p);
    unsigned char *map = r->at - GUARD;
    size_t bytes = r->bytes;
    used[r->device] -= pinned ? 0 : counted(bytes);
    memmove(r, r + 1, (size_t)(regions + n_regions - (r + 1)) * sizeof *r);
    n_regions--;
    UNPOISON(map, mapped(bytes));
    munmap(map, mapped(bytes));
    return cudaSuccess;
}

bool emu_memory_known(const void *p)
{
    const region *r = find(p);
    return r && (const unsigned char *)p <= r->at + r->bytes;
}

int emu_memory_device(const void *p)
{
    const region *r = find(p);
    return r && !r->pinned && (const unsigned char *)p < r->at + r->bytes ? r->device : -1;
}

bool emu_memory_fits(const void *p, size_t n)
{
    const region *r = find(p);
    if (!r || (const unsigned char *)p >= r->at + r->bytes)
        return true;
    return n <= r->bytes - (size_t)((const unsigned char *)p - r->at);
}

void emu_memory_check(const char *after)
{
    for (size_t i = 0; i < n_regions; i++)
        if (!whole(&regions[i])) {
            emu_break(cudaErrorLaunchFailure,
                      "kernel %s: wrote before or behind an allocation of %zu bytes at %p", after,
                      regions[i].bytes, (void *)regions[i].at);
            return;
        }
}

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    emu_enter();
    cudaError_t code = emu_uncaptured();
    if (!code && !emu_broken() && emu_set.devices > 0)
        code = get(p, bytes, false);
    return emu_leave(code);
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags)
{
    (void)flags;
    emu_enter();
    cudaError_t code = emu_uncaptured();
    if (!code && !emu_broken() && emu_set.devices > 0)
        code = get(p, bytes, true);
    return emu_leave(code);
}

cudaError_t cudaMallocHost(void **p, size_t bytes)
{
    return cudaHostAlloc(p, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFree(void *p)
{
    emu_enter();
    cudaError_t code = emu_uncaptured();
    return emu_leave_freed(code ? code : put_back(p, false));
}

cudaError_t cudaFreeHost(void *p)
{
    emu_enter();
    cudaError_t code = emu_uncaptured();
    return emu_leave_freed(code ? code : put_back(p, true));
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    emu_enter();
    *total = emu_set.memory;
    const size_t n = used[emu_device()];
    *free_bytes = emu_set.memory > n ? emu_set.memory - n : 0;
    return emu_leave(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attr, const void *p)
{
    emu_enter();
    const region *r = find(p);
    *attr = (struct cudaPointerAttributes){ .type = cudaMemoryTypeUnregistered, .device = -2 };
    if (r && (const unsigned char *)p < r->at + r->bytes)
        *attr = (struct cudaPointerAttributes){
            .type = r->pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice,
            .device = r->device,
            .devicePointer = (void *)p,
            .hostPointer = r->pinned ? (void *)p : NULL,
        };
    return emu_leave(cudaSuccess);
}
