/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_case.h -- runs a kernel_case on the CUDA backend and compares it with the reference in
 * double. */
#ifndef LM_TESTS_CUDA_CASE_H
#define LM_TESTS_CUDA_CASE_H

#include "cuda_open.h"
#include "kernel_case.h"

static inline void device_must(lm_code rc, const lm_err *e)
{
    if (rc)
        fail_msg("%s: %s", e->where, e->what);
}

static inline void device_copy(void *dst, const void *src, size_t bytes)
{
    lm_err e = { 0 };
    device_must(device->copy(device, dst, src, bytes, device->main, &e), &e);
    device_must(device->sync(device, NULL, &e), &e);
}

/* A copy of host memory, `shift` bytes after the beginning of an allocation. */
static inline void *device_twin(const void *host, size_t bytes, size_t shift)
{
    lm_err e = { 0 };
    void *p = NULL;
    device_must(device->alloc(device, bytes + shift, "a test operand", &p, &e), &e);
    device_copy((char *)p + shift, host, bytes);
    return (char *)p + shift;
}

static inline void device_drop(void *twin, size_t bytes, size_t shift)
{
    device->free(device, (char *)twin - shift, bytes + shift);
}

/* Run x on the device and copy every operand back, guards included.  `shift`: misalignment of the
 * operands in elements. */
static inline void run_on_device(instance *x, const lm_kernel *kernel, int shift)
{
    instance d = *x;
    lm_tensor *host[10], *dev[10];
    lm_err e = { 0 };
    d.call.stream = device->main;
    size_t work = kernel->work ? kernel->work(&d.call, device->threads) : 0;
    void *junk = take(work);
    for (int i = 0; i < 10; i++) {
        host[i] = i < 6 ? &x->in[i] : &x->out[i - 6];
        dev[i] = i < 6 ? &d.in[i] : &d.out[i - 6];
        dev[i]->data = NULL;
        for (int k = 0; k < i; k++) /* aliased operands share device memory, too */
            if (host[i]->data && host[k]->data == host[i]->data)
                dev[i]->data = dev[k]->data;
        if (host[i]->data && !dev[i]->data)
            dev[i]->data = device_twin(host[i]->data, bytes_of(host[i]) + GUARD,
                                       (size_t)shift * lm_dtype_size(host[i]->dtype));
    }
    memset(junk, 0xff, work); /* kernels must not rely on the content of scratch memory */
    d.call.in = d.in;
    d.call.out = d.out;
    d.call.work = device_twin(junk, work + GUARD, 0);
    device_must(device->step(device, x->call.step, device->main, &e), &e);
    kernel->run(&d.call);
    device_must(device->sync(device, NULL, &e), &e);
    device_copy(junk, d.call.work, work + GUARD);
    device_drop(d.call.work, work + GUARD, 0);
    for (int g = 0; g < GUARD; g++)
        assert_int_equal(((unsigned char *)junk)[work + (size_t)g], 0x5a);
    lm_free(junk);
    for (int i = 0; i < 10; i++) {
        size_t bytes = host[i]->data ? bytes_of(host[i]) : 0;
        bool twice = false;
        for (int k = 0; k < i; k++)
            twice |= host[k]->data == host[i]->data;
        if (!host[i]->data || twice)
            continue;
        device_copy(host[i]->data, dev[i]->data, bytes + GUARD);
        device_drop(dev[i]->data, bytes + GUARD, (size_t)shift * lm_dtype_size(host[i]->dtype));
        for (int g = 0; g < GUARD; g++)
            assert_int_equal(((unsigned char *)host[i]->data)[bytes + (size_t)g], 0x5a);
    }
}

static inline const lm_kernel *device_kernel(const char *op, lm_dtype act)
{
    const lm_kernel *k = device->kernel(device, op, act);
    if (!k)
        fail_msg("no kernel %s for %s", op, lm_dtype_name(act));
    return k;
}

/* Under the emulation also with threads and blocks in other orders.  `fixed`: the order must not
 * change a bit of the result. */
static inline void check_on_device(const kernel_case *k, lm_dtype act, double tol, int shift,
                                   bool fixed)
{
    instance want, first, x;
    build(k, LM_DTYPE_F64, act, &want);
    run(&want, lm_cpu_kernel(k->op, LM_DTYPE_F64, LM_CPU_REF), NULL);
    for (int order = 0; order < emu_order(order); order++) {
        instance *it = order ? &x : &first;
        build(k, act, act, it);
        run_on_device(it, device_kernel(k->op, act), shift);
        for (int o = 0; o < 4; o++) {
            lm_tensor *t = &it->out[o];
            if (k->out[o].kind == ABSENT)
                continue;
            double d = distance(t, &want.out[o]);
            if (d > tol)
                fail_msg("%s %s out %d of %lld x %lld: relative error %.3g, allowed %.3g", k->op,
                         lm_dtype_name(act), o, (long long)k->out[o].rows,
                         (long long)k->out[o].cols, d, tol);
            if (order && fixed && memcmp(t->data, first.out[o].data, bytes_of(t)))
                fail_msg("%s %s out %d: other bits when threads run in another order", k->op,
                         lm_dtype_name(act), o);
        }
        if (order)
            drop(k, &x);
    }
    emu_order(0);
    drop(k, &first);
    drop(k, &want);
}

#endif
