/* SPDX-License-Identifier: Apache-2.0 */
/* op.h -- what an operator is: one entry with its shape rule, gradient rule, cost and examples.
 *
 * Kernels are found by name in a backend's table; everything else that the house knows about an
 * operator is in its entry (lib/op/FAMILY.c).  Rules see a node as an lm_call whose operands have
 * shapes but no data, the same structure that the kernel will be given, so attributes and operand
 * order are those of kernels/FAMILY.h. */
#ifndef LM_GRAPH_OP_H
#define LM_GRAPH_OP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/rng.h"
#include "kernels/kernel.h"

#define LM_MAX_IN  8
#define LM_MAX_OUT 4

/* How the precision pass treats an operator (the lists of AMP). */
typedef enum {
    LM_PREC_ALLOW, /* runs in the low type: matrix products, attention, look-ups */
    LM_PREC_INFER, /* follows its first operand                                 */
    LM_PREC_DENY,  /* stays in F32                                              */
} lm_prec;

typedef struct {
    double flops; /* multiply-add = 2 */
    double bytes; /* read and written once, nothing cached */
} lm_cost;

struct lm_grad;
struct lm_node;

/* A random valid instance for tests: attributes, shapes of the inputs, and which outputs are
 * wanted. */
typedef struct {
    _Alignas(16) char attr[128];
    lm_tensor in[LM_MAX_IN]; /* act operands F32; dtype of integer operands I32; ndim 0: absent */
    int n_in;
    unsigned want; /* bit i: output i */
    /* Outputs whose shape or type the caller chooses (a cast's type, caches), dtypes as for inputs;
     * ndim 0: the shape rule says. */
    lm_tensor out[LM_MAX_OUT];
} lm_example;

typedef struct lm_op {
    const char *name;
    size_t attr_size;
    int n_in, n_out;
    unsigned optional_in; /* bit i: input i may be absent */
    unsigned act_in;      /* bit i: input i has the dtype of activations */
    unsigned
        low_param; /* bit i: a parameter at input i follows the low type (weights, not biases) */
    unsigned inplace[LM_MAX_OUT]; /* bit i: this output may share memory with input i */
    unsigned fixed_in;            /* bit i: float input i never gets a gradient (tables, scales) */
    unsigned saved_out; /* bit i: output i serves the backward only (statistics): no gradient flows
                           into it */
    lm_prec prec;
    /* Relative L2 error that a kernel may have against the reference in double, in F32 and BF16, as
     * kernels/FAMILY.h says; 0: 1e-6 and 4e-3. */
    double tolerance[2];

    /* Set dtype, ndim and dim of every output in `want` from the inputs and the attributes; the
     * others get ndim 0.  Fails: LM_EUSAGE naming what does not fit. */
    lm_code (*shape)(lm_call *c, unsigned want, lm_err *e);
    /* Append the nodes of the backward; NULL: not differentiable. */
    lm_code (*grad)(struct lm_grad *g, const struct lm_node *n, lm_err *e);
    void (*cost)(const lm_call *c, lm_cost *out);
    /* The i-th example of a deterministic, endless series; NULL: covered by the forward operator's.
     */
    void (*example)(lm_rng r, int i, lm_example *out);
    /* Fill the integer inputs of an example with valid values; NULL: there are none. */
    void (*fill)(lm_rng r, const lm_call *c);
} lm_op;

/* The two operators that passes insert by themselves (lib/op/elementwise.c). */
extern const lm_op lm_op_add, lm_op_cast;

/* Helpers for rules. */
static inline lm_dtype lm_wide(lm_dtype act) /* the type of statistics and gradients of weights */
{
    return act == LM_DTYPE_F64 ? LM_DTYPE_F64 : LM_DTYPE_F32;
}
static inline bool lm_absent(const lm_tensor *t)
{
    return t->ndim == 0;
}
lm_tensor lm_shape1(lm_dtype d, int64_t a);
lm_tensor lm_shape2(lm_dtype d, int64_t a, int64_t b);
lm_tensor lm_shape3(lm_dtype d, int64_t a, int64_t b, int64_t c);
bool lm_same_shape(const lm_tensor *a, const lm_tensor *b);
/* Bytes of all present operands together. */
double lm_call_bytes(const lm_call *c);
/* LM_EUSAGE "operator: what", unless ok. */
lm_code lm_expect(bool ok, const char *op, lm_err *e, const char *what, ...) LM_PRINTF(4, 5);

#endif
