/* SPDX-License-Identifier: Apache-2.0 */
/* kv_example.h -- shared by the operators of coded caches.  Private to lib/op. */
#ifndef LM_OP_KV_EXAMPLE_H
#define LM_OP_KV_EXAMPLE_H

#include "kernels/kv.h"
#include "op/example.h"

/* Keys [0] and values [1] fit their tails (absent ones among them), and slots (absent or not) go with these. */
lm_code lm_kv_check_sides(const char *op, const lm_kv_attr *a, const lm_tensor *const pages[2],
                          const lm_tensor *const tail[2], const lm_tensor *slot, lm_err *e);
/* lm_op.splits: whether heads of this call can be on ranks of their own. */
bool lm_kv_splits(const lm_call *c, char letter);
/* Bytes of a token of one head. */
double lm_kv_token_bytes(const lm_tensor *t, lm_dtype act);

/* A format of keys or values by any number; NULL: plain, one in 8. */
const lm_kv_format *lm_kv_example_format(bool values, uint64_t i);
/* Residual and sinks of an example's side with pages of T tokens; a, b: drawn numbers. */
void lm_kv_example_side(lm_kv_attr *to, int side, const lm_kv_format *f, int64_t T, uint64_t a,
                        uint64_t b);
/* One in four examples has latents: sizes of `a`, and a format of the second side in the order of keys; five draws from number
 * `draws` on. */
void lm_kv_example_latent(lm_rng r, int i, uint64_t draws, lm_kv_attr *a, const lm_kv_format *f[2]);
/* Normal numbers with an offset that changes with the channel, encoded by the definition; plain pages keep theirs. */
void lm_kv_example_pages(lm_rng r, const lm_tensor *t);

#endif
