/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_runtime.h -- the C++ side of the emulated runtime's header. */
#ifndef LM_EMU_CUDA_RUNTIME_H
#define LM_EMU_CUDA_RUNTIME_H

#include "cuda_runtime_api.h"
#ifdef __cplusplus
#include "device.h"
#endif

#endif
