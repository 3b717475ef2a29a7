/* SPDX-License-Identifier: Apache-2.0 */
/* copy.c -- transfers between and within the memories, in stream order. */
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "emu_impl.h"

enum { MANY_PAGES = 1 << 26 };

typedef struct {
    unsigned char *dst;
    const unsigned char *src;
    size_t dpitch, spitch, width, height;
    int value;
} transfer;

static void run_copy(void *data)
{
    const transfer *t = data;
    for (size_t i = 0; i < t->height; i++)
        memmove(t->dst + i * t->dpitch, t->src + i * t->spitch, t->width);
}
/* Many pages are zeroed by mapping them anew, so that tensors of gigabytes need only the touched
 * pages. */
static void run_fill(void *data)
{
    const transfer *t = data;
    uintptr_t page = 4096, begin = (uintptr_t)t->dst, end = begin + t->width;
    uintptr_t first = (begin + page - 1) / page * page, last = end / page * page;
    if (!t->value && t->width > MANY_PAGES &&
        !madvise((void *)first, last - first, MADV_DONTNEED)) {
        memset(t->dst, 0, first - begin);
        memset((void *)last, 0, end - last);
        return;
    }
    memset(t->dst, t->value, t->width);
}

static cudaError_t put_transfer(const transfer *t, enum cudaMemcpyKind kind, cudaStream_t s)
{
    size_t last = t->height ? t->height - 1 : 0;
    struct cudaPointerAttributes d, from;
    if (!t->width || !t->height)
        return cudaSuccess;
    if (!t->dst || !emu_memory_fits(t->dst, last * t->dpitch + t->width) ||
        (t->src && !emu_memory_fits(t->src, last * t->spitch + t->width))) {
        emu_say("a transfer of %zu bytes to %p leaves an allocation", t->width, (void *)t->dst);
        return cudaErrorInvalidValue;
    }
    cudaPointerGetAttributes(&d, t->dst);
    cudaPointerGetAttributes(&from, t->src);
    bool to_device = d.type == cudaMemoryTypeDevice, of_device = from.type == cudaMemoryTypeDevice;
    if ((!t->src && !to_device) || (kind == cudaMemcpyHostToDevice && (of_device || !to_device)) ||
        (kind == cudaMemcpyDeviceToHost && (to_device || !of_device)) ||
        (kind == cudaMemcpyDeviceToDevice && t->src && !(to_device && of_device))) {
        emu_say("a transfer of %zu bytes from %p to %p: not in that direction", t->width,
                (const void *)t->src, (void *)t->dst);
        return cudaErrorInvalidValue;
    }
    if (emu_elsewhere(t->dst, s) || emu_elsewhere(t->src, s)) {
        emu_say("a transfer of %zu bytes from %p to %p: memory of another device than its stream",
                t->width, (const void *)t->src, (void *)t->dst);
        return cudaErrorInvalidValue;
    }
    return emu_put(s, t->src ? run_copy : run_fill, NULL, t, sizeof *t);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s)
{
    emu_enter();
    transfer t = { .dst = dst, .src = src, .width = bytes, .height = 1 };
    return emu_leave(bytes && !src ? cudaErrorInvalidValue : put_transfer(&t, kind, s));
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dpitch, const void *src, size_t spitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t s)
{
    emu_enter();
    transfer t = { dst, src, dpitch, spitch, width, height, 0 };
    bool bad = !src || dpitch < width || spitch < width;
    return emu_leave(bad ? cudaErrorInvalidValue : put_transfer(&t, kind, s));
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s)
{
    emu_enter();
    transfer t = { .dst = p, .width = bytes, .height = 1, .value = value };
    return emu_leave(put_transfer(&t, cudaMemcpyDeviceToDevice, s));
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
    emu_enter();
    cudaError_t code = emu_uncaptured();
    if (!code)
        code = cudaMemcpyAsync(dst, src, bytes, kind, NULL);
    if (!code)
        code = cudaStreamSynchronize(NULL);
    return emu_leave(code);
}

cudaError_t cudaMemset(void *p, int value, size_t bytes)
{
    emu_enter();
    cudaError_t code = emu_uncaptured();
    if (!code)
        code = cudaMemsetAsync(p, value, bytes, NULL);
    return emu_leave(code);
}
