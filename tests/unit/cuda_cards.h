/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_cards.h -- a kernel_case on cards of several sizes. */
#ifndef LM_TESTS_CUDA_CARDS_H
#define LM_TESTS_CUDA_CARDS_H

#include "cuda_case.h"
#include "kernels/cuda/stream.h"

/* The size of a grid depends on the number of multiprocessors; the bits of the results must not. */
static inline void check_on_cards(const kernel_case *k, lm_dtype act)
{
    static const int sms[] = { 132, 1, 7 };
    const int own = device->main->sms;
    instance first, x;
    for (int i = 0; i < 3; i++) {
        instance *it = i ? &x : &first;
        build(k, act, act, it);
        device->main->sms = sms[i];
        run_on_device(it, device_kernel(k->op, act), 0);
        device->main->sms = own;
        for (int o = 0; i && o < 4; o++)
            if (k->out[o].kind != ABSENT &&
                memcmp(x.out[o].data, first.out[o].data, bytes_of(&x.out[o])))
                fail_msg("%s %s out %d: other bits on %d multiprocessors than on %d", k->op,
                         lm_dtype_name(act), o, sms[i], sms[0]);
        if (i)
            drop(k, &x);
    }
    drop(k, &first);
}

#endif
