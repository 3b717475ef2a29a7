/* SPDX-License-Identifier: Apache-2.0 */
/* device.h -- LM_DEVICE_TOO, in front of functions of a contract that kernels on a GPU call, too. */
#ifndef LM_KERNELS_DEVICE_H
#define LM_KERNELS_DEVICE_H

#ifdef __CUDACC__
#define LM_DEVICE_TOO __host__ __device__
#else
#define LM_DEVICE_TOO
#endif

#endif
