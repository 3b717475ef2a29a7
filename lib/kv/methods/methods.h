/* SPDX-License-Identifier: Apache-2.0 */
/* methods.h -- the list of methods, X(NAME) in the order in which lists show them: lm_kv_NAME is defined in the
 * file of its family (turboquant in codebook.c, kvarn in balanced.c).  Private to lib/kv. */
#ifndef LM_KV_METHODS_H
#define LM_KV_METHODS_H

#include "kv/method.h"

/* Methods that code, and policies that drop or merge tokens. */
#define LM_KV_CODES(X) \
    X(auto)            \
    X(f32)             \
    X(f16)             \
    X(bf16)            \
    X(fp8_e4m3)        \
    X(fp8_e5m2)        \
    X(int8)            \
    X(int6)            \
    X(int5)            \
    X(int4)            \
    X(int3)            \
    X(int2)            \
    X(q8_0)            \
    X(q5_1)            \
    X(q5_0)            \
    X(q4_1)            \
    X(q4_0)            \
    X(iq4_nl)          \
    X(kivi)            \
    X(kvquant)         \
    X(turboquant)      \
    X(kvarn)

#define LM_KV_POLICIES(X) \
    X(streaming)          \
    X(h2o)                \
    X(snapkv)             \
    X(random)             \
    X(kvmerge)

#define LM_KV_METHODS(X) LM_KV_CODES(X) LM_KV_POLICIES(X)

#define LM_KV_DECLARE(name) extern const lm_kv_method lm_kv_##name;
LM_KV_METHODS(LM_KV_DECLARE)

/* A copy of *f for the side and with the name of *q into *out. */
lm_code lm_kv_put_format(const lm_kv_format *f, const lm_kv_ask *q, lm_kv_side *out, lm_err *e);

#endif
