/* SPDX-License-Identifier: Apache-2.0 */
/* comm.h -- exchanges of ranks on a device: their kernels, and sums in the order of lib/comm. */
#ifndef LM_KERNELS_CUDA_COMM_H
#define LM_KERNELS_CUDA_COMM_H

#include "kernels/comm.h"
#include "kernels/cuda/stream.h"

extern const lm_kernel lm_comm_cuda_kernels[]; /* of any type of activations */

/* out[i] = the combination over r = 0 .. ranks-1 of parts[r * stride + i], for n elements of type d: a binary tree, split behind
 * the largest power of two, nodes in F32 for narrower types and rounded once.  out may be one of the parts. */
void lm_cuda_tree(const void *parts, size_t stride, int ranks, size_t n, lm_dtype d,
                  lm_exchange_op op, void *out, const lm_stream *s);

/* part_ids of n ids; real may be NULL. */
void lm_cuda_part_ids(const int32_t *id, int64_t n, int64_t first, int64_t count, int32_t *to,
                      float *real, const lm_stream *s);

#endif
