/* SPDX-License-Identifier: Apache-2.0 */
/* nccl.h -- NCCL, opened when the first group is made.  Private to lib/graph/cuda. */
#ifndef LM_GRAPH_CUDA_NCCL_H
#define LM_GRAPH_CUDA_NCCL_H

#ifdef LM_NCCL
#include <nccl.h>

#include "base/err.h"

#define LM_NCCL_CALLS(X)     \
    X(ncclGetVersion)        \
    X(ncclGetUniqueId)       \
    X(ncclCommInitRank)      \
    X(ncclCommDestroy)       \
    X(ncclCommAbort)         \
    X(ncclCommGetAsyncError) \
    X(ncclGetErrorString)    \
    X(ncclGetLastError)      \
    X(ncclGroupStart)        \
    X(ncclGroupEnd)          \
    X(ncclAllReduce)         \
    X(ncclReduceScatter)     \
    X(ncclAllGather)         \
    X(ncclSend)              \
    X(ncclRecv)

typedef struct {
#define LM_NCCL_MEMBER(name) __typeof__(name) *name;
    LM_NCCL_CALLS(LM_NCCL_MEMBER)
#undef LM_NCCL_MEMBER
} lm_nccl;

/* It stays open until the process ends.  Fails: LM_EIO when the library cannot be loaded, or lacks a function. */
lm_code lm_nccl_open(const lm_nccl **out, lm_err *e);
#endif

#endif
