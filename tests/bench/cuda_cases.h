/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_cases.h -- the cases of bench_cuda: one call of each kernel on shapes of GPT-2 and Llama. */
#ifndef LM_BENCH_CUDA_CASES_H
#define LM_BENCH_CUDA_CASES_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph/op.h"

/* STEPS: x times the index.  BLOCKS: rows of lm_sum_block, of x elements each.  CODED: a coded cache of zeros, in the format
 * cuda_cache_format(x). */
enum fill { NOTHING, NORMAL, POSITIVE, IDS, VALUE, POSITIONS, STEPS, BLOCKS, CODED };

typedef struct {
    lm_dtype dtype;
    int ndim;
    int64_t dim[4];
    enum fill fill;
    double x; /* deviation of NORMAL and POSITIVE, bound of IDS and POSITIONS, the VALUE, a step */
} operand;

enum { PARTS = 3 };

/* A case by its name. */
typedef struct {
    const char *op;
    char shape[64];
} bench_part;

typedef struct {
    const char *op;
    char shape[64];
    lm_dtype act;
    _Alignas(16) char attr[512];
    operand in[LM_MAX_IN], out[LM_MAX_OUT];
    double bytes, flops;     /* for kernels that are not operators of graphs */
    const lm_kernel *kernel; /* a kernel that is in no table: on every path */
    bench_part part[PARTS];  /* the operators that a joined one replaces, measured before */
} bench_case;

/* Measures a case, which it must not keep. */
typedef void cuda_measure(const bench_case *c);

/* All kernels of training and decoding for the models, joined ones after their parts, for the first
 * model also in F32; toy: shapes small enough for the emulated device, quick: the two models that
 * differ most.  begin_model(name) comes before a model's. */
void cuda_training_cases(bool quick, bool toy, void (*begin_model)(const char *name),
                         cuda_measure *measure);
void cuda_decoding_cases(bool toy, cuda_measure *measure);
void cuda_sampling_cases(bool toy, cuda_measure *measure);
void cuda_optimiser_cases(bool toy, cuda_measure *measure);

/* Keys (0, 1, 2) and values (3, 4, 5) in 8, 4 and 2 bits. */
const struct lm_kv_format *cuda_cache_format(int i);

/* The attributes of a case; a copy that c has no memory for ends the program. */
static inline void cuda_set_attr(bench_case *c, const void *attr, size_t size)
{
    if (size > sizeof c->attr) {
        fprintf(stderr, "%s: %zu bytes of attributes, a case keeps %zu\n", c->op, size,
                sizeof c->attr);
        abort();
    }
    memcpy(c->attr, attr, size);
}

/* A matrix of normal numbers. */
static inline operand cuda_matrix(lm_dtype d, int64_t rows, int64_t cols)
{
    return (operand){ d, 2, { rows, cols }, NORMAL, 1 };
}

/* ---- cuda_experts.c: grouped products of mixtures of experts, each with as many rows ---- */

void cuda_expert_cases(bool toy, cuda_measure *measure);

/* ---- cuda_fp8.c: products of FP8, and the quantisation of their factors ---- */

/* False if the module has no such functions; then there are no cases. */
bool cuda_fp8_open(const char *modules);
void cuda_fp8_cases(bool toy, cuda_measure *measure);
/* A square product, scaled by tensor. */
bench_case cuda_fp8_square(int64_t n);

#endif
