/* cuda_cases.h -- what bench_cuda measures: one call of each kernel on shapes of GPT-2 and Llama. */
#ifndef LM_BENCH_CUDA_CASES_H
#define LM_BENCH_CUDA_CASES_H

#include "graph/op.h"

enum fill { NOTHING, NORMAL, POSITIVE, IDS, VALUE, POSITIONS };

typedef struct {
    lm_dtype dtype;
    int ndim;
    int64_t dim[4];
    enum fill fill;
    double x; /* deviation of NORMAL and POSITIVE, bound of IDS and POSITIONS, the VALUE */
} operand;

typedef struct {
    const char *op;
    char shape[64];
    lm_dtype act;
    _Alignas(16) char attr[128];
    operand in[LM_MAX_IN], out[LM_MAX_OUT];
    double bytes; /* of what is no operator of graphs */
} bench_case;

/* What becomes of a case; it is the caller's again afterwards. */
typedef void cuda_measure(const bench_case *c);

/* All kernels of training for the models, F32 too for the first of them, and of decoding; toy: shapes that an
 * emulated device can do, quick: the two models that are told apart most.  begin_model(name) comes before a model's. */
void cuda_training_cases(bool quick, bool toy, void (*begin_model)(const char *name),
                         cuda_measure *measure);
void cuda_decoding_cases(bool toy, cuda_measure *measure);
void cuda_optimiser_cases(bool toy, cuda_measure *measure);

/* A matrix of normal numbers. */
static inline operand cuda_matrix(lm_dtype d, int64_t rows, int64_t cols)
{
    return (operand){ d, 2, { rows, cols }, NORMAL, 1 };
}

#endif
