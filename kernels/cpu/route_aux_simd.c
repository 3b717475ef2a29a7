/* SPDX-License-Identifier: Apache-2.0 */
/* route_aux_simd.c -- losses of routing and their gradient: sums over blocks of tokens, in F32
 * within a block, in double over blocks, in order. */
#include "kernels/route.h"

#include "kernels/cpu/route_scores.h"
#include "kernels/cpu/tables.h"

enum { TOKENS = 64 }; /* of a block; sequences begin with a block */

typedef struct {
    const lm_call *c;
    const lm_route_aux_attr *a;
    int64_t tokens, experts, k, seq, sequences, each; /* each: blocks of a sequence */
    int32_t *count, *lost;      /* [blocks,E]; [blocks] of dropped assignments */
    float *sum;                 /* [blocks,E] of p; of the gradient dp [sequences,E] */
    float *row;                 /* [threads,E] */
    double *square;             /* [blocks] of the squared logarithms */
    double *together;           /* [blocks] of the squared shares of nodes */
    double *balance, *sequence; /* [E] */
    const float *given;         /* the operand `count`; NULL: absent */
} aux_job;

static size_t divide_aux(aux_job *j, const lm_call *c, int threads)
{
    const lm_route_aux_attr *a = c->attr;
    char *base = c->work;
    size_t at = 0;
    *j = (aux_job){ .c = c, .a = a, .tokens = c->in[0].dim[0], .experts = c->in[0].dim[1] };
    j->k = c->in[1].dim[1];
    j->seq = a->seq ? a->seq : j->tokens;
    j->sequences = j->tokens / j->seq;
    j->each = (j->seq + TOKENS - 1) / TOKENS;
    int64_t blocks = j->sequences * j->each;
    ROUTE_PART(j, count, base, at, blocks * j->experts);
    ROUTE_PART(j, lost, base, at, blocks);
    ROUTE_PART(j, sum, base, at, blocks * j->experts);
    ROUTE_PART(j, row, base, at, threads * j->experts);
    ROUTE_PART(j, square, base, at, blocks);
    ROUTE_PART(j, together, base, at, blocks);
    ROUTE_PART(j, balance, base, at, j->experts);
    ROUTE_PART(j, sequence, base, at, j->experts);
    return at;
}

static size_t aux_work(const lm_call *c, int threads)
{
    aux_job j;
    return divide_aux(&j, c, threads);
}

/* Tokens [*from, *to) of a block. */
static void block_of(const aux_job *j, int64_t block, int64_t *from, int64_t *to)
{
    int64_t first = block / j->each * j->seq;
    *from = first + block % j->each * TOKENS;
    *to = least(*from + TOKENS, first + j->seq);
}

static void count_loads(void *ctx, int64_t begin, int64_t end, int worker)
{
    const aux_job *j = ctx;
    const int32_t *expert = j->c->in[1].data;
    (void)worker;
    for (int64_t b = begin; b < end; b++) {
        int32_t *count = j->count + b * j->experts;
        int64_t from, to;
        block_of(j, b, &from, &to);
        memset(count, 0, (size_t)j->experts * sizeof *count);
        j->lost[b] = 0;
        for (int64_t i = from * j->k; i < to * j->k; i++) {
            int32_t e = lm_route_counted(j->a, expert[i]);
            if (e >= 0)
                count[e]++;
            j->lost[b] += expert[i] < 0 && e >= 0;
        }
    }
}

/* p, its sum and *lse of a row of logits that are not all finite. */
static float mark_row(const float *z, int64_t experts, float *p, float *lse)
{
    for (int64_t e = 0; e < experts; e++)
        p[e] = isfinite(z[e]) ? 0 : NAN;
    *lse = NAN;
    return 1;
}

/* p of a token, not divided by its sum yet, and what divides it; *lse: the logarithm of the sum of
 * exp z. */
static float shares_of(const aux_job *j, int64_t t, float *p, float *lse)
{
    const float *z = (const float *)j->c->in[0].data + t * j->experts;
    bool finite;
    const float top = top_of(z, j->experts, &finite);
    if (!finite)
        return mark_row(z, j->experts, p, lse);
    const float sum = exp_row(z, top, j->experts, p);
    *lse = top + logf(sum);
    return j->a->sigmoid ? sigmoid_row(z, j->experts, p) : sum;
}

/* The sum of the numbers p of node n. */
LM_INLINE float node_sum(const aux_job *j, const float *p, int64_t n)
{
    const int64_t each = j->experts / j->a->nodes;
    vf sum = vf_zero();
    VF_FOR(i, m, each, { sum = sum + vf_get_any(LM_DTYPE_F32, p, n * each + i, m); });
    return vf_sum(sum);
}

/* The sum of the squared shares of nodes in p, whose sum is 1 / inv. */
static double squared_shares(const aux_job *j, const float *p, float inv)
{
    double sum = 0;
    for (int64_t n = 0; n < j->a->nodes; n++) {
        const double q = (double)(node_sum(j, p, n) * inv);
        sum += q * q;
    }
    return sum;
}

static void sum_blocks(void *ctx, int64_t begin, int64_t end, int worker)
{
    const aux_job *j = ctx;
    float *p = j->row + worker * j->experts;
    for (int64_t b = begin; b < end; b++) {
        float *sum = j->sum + b * j->experts, lse;
        int64_t from, to;
        block_of(j, b, &from, &to);
        memset(sum, 0, (size_t)j->experts * sizeof *sum);
        j->square[b] = j->together[b] = 0;
        for (int64_t t = from; t < to; t++) {
            const float one = 1 / shares_of(j, t, p, &lse);
            const vf inv = vf_set(one);
            j->square[b] += (double)lse * lse;
            if (j->a->affinity > 0)
                j->together[b] += squared_shares(j, p, one);
            VF_FOR(i, n, j->experts, {
                vf s = vf_get_any(LM_DTYPE_F32, sum, i, n);
                s = vf_fma(vf_get_any(LM_DTYPE_F32, p, i, n), inv, s);
                vf_put_any(LM_DTYPE_F32, sum, i, s, n);
            });
        }
    }
    count_loads(ctx, begin, end, worker);
}

static void sum_experts(void *ctx, int64_t begin, int64_t end, int worker)
{
    const aux_job *j = ctx;
    float *mean = opt_data(j->c->out, j->c->n_out, 1), *load = opt_data(j->c->out, j->c->n_out, 2);
    (void)worker;
    for (int64_t e = begin; e < end; e++) {
        double all_p = 0, all_n = 0;
        j->sequence[e] = 0;
        for (int64_t s = 0; s < j->sequences; s++) {
            double p = 0, n = 0;
            for (int64_t b = s * j->each; b < (s + 1) * j->each; b++) {
                p += j->sum[b * j->experts + e];
                n += j->count[b * j->experts + e];
            }
            all_p += p;
            all_n += n;
            j->sequence[e] += n * p;
        }
        j->balance[e] = (j->given ? (double)j->given[e] : all_n) * all_p;
        if (mean)
            mean[e] = (float)(all_p / (double)j->tokens);
        if (load)
            load[e] = (float)all_n;
    }
}

static void route_aux(const lm_call *c)
{
    aux_job j;
    divide_aux(&j, c, lm_par_threads(c->par));
    j.given = opt_data(c->in, c->n_in, 2);
    int64_t blocks = j.sequences * j.each;
    double T = (double)j.tokens, each = (double)j.experts / ((double)j.k * T), loss = 0, square = 0;
    double together = 0;
    float *dropped = opt_data(c->out, c->n_out, 3);
    int64_t lost = 0;
    lm_par_for(c->par, blocks, 1, sum_blocks, &j);
    lm_par_for(c->par, j.experts, 16, sum_experts, &j);
    for (int64_t e = 0; e < j.experts; e++)
        loss += each *
                (j.a->balance * j.balance[e] / T + j.a->sequence * j.sequence[e] / (double)j.seq);
    for (int64_t b = 0; b < blocks; b++) {
        square += j.square[b];
        together += j.together[b];
        lost += j.lost[b];
    }
    if (dropped)
        *dropped = (float)lost;
    if (j.a->affinity > 0)
        loss += j.a->affinity * (1 - together / T);
    *(float *)c->out[0].data = (float)(loss + j.a->z * square / T);
}

/* Gradients of p, of each sequence: in double while they are summed, as loads are whole numbers. */
static void load_gradients(void *ctx, int64_t begin, int64_t end, int worker)
{
    const aux_job *j = ctx;
    double dloss = *(const float *)j->c->in[2].data, T = (double)j->tokens;
    double each = dloss * (double)j->experts / ((double)j->k * T);
    (void)worker;
    for (int64_t e = begin; e < end; e++) {
        double all = 0;
        for (int64_t b = 0; b < j->sequences * j->each; b++)
            all += j->count[b * j->experts + e];
        all = j->given ? (double)j->given[e] : all;
        for (int64_t s = 0; s < j->sequences; s++) {
            double n = 0;
            for (int64_t b = s * j->each; b < (s + 1) * j->each; b++)
                n += j->count[b * j->experts + e];
            j->sum[s * j->experts + e] =
                (float)(each * (j->a->balance * all / T + j->a->sequence * n / (double)j->seq));
        }
    }
}

/* dp with the gradients of the shares of nodes in p, whose sum is 1 / inv: a row in scratch. */
static const float *add_spread(const aux_job *j, const float *dp, const float *p, float inv,
                               float *row)
{
    const double dloss = *(const float *)j->c->in[2].data;
    const float by = (float)(-2 * j->a->affinity * dloss / (double)j->tokens) * inv;
    const int64_t each = j->experts / j->a->nodes;
    for (int64_t node = 0; node < j->a->nodes; node++) {
        const vf more = vf_set(by * node_sum(j, p, node));
        VF_FOR(i, n, each, {
            const vf v = vf_get_any(LM_DTYPE_F32, dp, node * each + i, n) + more;
            vf_put_any(LM_DTYPE_F32, row, node * each + i, v, n);
        });
    }
    return row;
}

static void aux_dz_rows(void *ctx, int64_t begin, int64_t end, int worker)
{
    const aux_job *j = ctx;
    const float *z = j->c->in[0].data;
    float of_z = (float)(2 * j->a->z * *(const float *)j->c->in[2].data / (double)j->tokens);
    for (int64_t t = begin; t < end; t++) {
        float *dz = (float *)j->c->out[0].data + t * j->experts, lse;
        const float *dp = j->sum + t / j->seq * j->experts;
        float inv = 1 / shares_of(j, t, dz, &lse);
        if (j->a->affinity > 0)
            dp = add_spread(j, dp, dz, inv, j->row + worker * j->experts);
        vf dot = vf_zero();
        VF_FOR(i, n, j->experts, {
            dot =
                vf_fma(vf_get_any(LM_DTYPE_F32, dz, i, n), vf_get_any(LM_DTYPE_F32, dp, i, n), dot);
        });
        vf all = vf_set(vf_sum(dot) * inv), of_lse = vf_set(of_z * lse);
        VF_FOR(i, n, j->experts, {
            vf v = vf_get_any(LM_DTYPE_F32, z, t * j->experts + i, n);
            vf p = vf_get_any(LM_DTYPE_F32, dz, i, n) * vf_set(inv);
            vf d = p * (vf_get_any(LM_DTYPE_F32, dp, i, n) - all);
            if (j->a->sigmoid)
                d *= vf_sigmoid(-v);
            d = vf_fma(of_lse, vf_exp(v - vf_set(lse)), d);
            vf_put_any(LM_DTYPE_F32, dz, i, d, n);
        });
    }
}

static void route_aux_dz(const lm_call *c)
{
    aux_job j;
    divide_aux(&j, c, lm_par_threads(c->par));
    j.given = opt_data(c->in, c->n_in, 3);
    lm_par_for(c->par, j.sequences * j.each, 1, count_loads, &j);
    lm_par_for(c->par, j.experts, 16, load_gradients, &j);
    lm_par_for(c->par, j.tokens, grain_tokens(j.experts), aux_dz_rows, &j);
}

const lm_kernel LM_TABLE_NAME(route_aux, LM_SIMD)[] = {
    VF_KERNEL_F32("route_aux", route_aux, aux_work),
    VF_KERNEL_F32("route_aux_dz", route_aux_dz, aux_work),
    VF_KERNEL_END,
};
