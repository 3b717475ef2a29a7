/* SPDX-License-Identifier: Apache-2.0 */
/* map_simd.c -- formulas over tiles that stay in the first cache: each step of the program is one loop over a
 * tile, so the choice of a step costs once for 512 elements, and memory is passed once.
 *
 * Operands of the shape of the result, in F32, are read in place; others are expanded into a tile.
 * Steps are single rounded operations, so AVX2 and AVX-512 give the same bits. */
#include "kernels/map.h"

#include <math.h>

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

enum { TILE = 512, GRAIN = 32768, BLOCK = 65536 };

typedef struct {
    const lm_call *call;
    const lm_map_program *program;
    float single[LM_MAP_SINGLES];
    int8_t to_y[LM_MAP_STEPS]; /* the y that a step may write at once, -1: none */
} map_job;

/* The operands of a step: where a tile begins, or one number. */
typedef struct {
    const float *at;
    float one;
} map_operand;

typedef struct {
    const float *tile[LM_MAP_TILES]; /* in `room`, or in an operand's own memory */
    float room[LM_MAP_TILES][TILE] __attribute__((aligned(64)));
} map_tiles;

/* ---- loads and stores ---- */

LM_INLINE void copy_in(lm_dtype t, const void *x, int64_t from, int64_t count, float *dst)
{
    VF_FOR(i, n, count, { vf_put_any(LM_DTYPE_F32, dst, i, vf_get_any(t, x, from + i, n), n); });
}

static void load_flat(const lm_tensor *x, int64_t from, int64_t count, float *dst)
{
    if (x->dtype == LM_DTYPE_BF16)
        copy_in(LM_DTYPE_BF16, x->data, from, count, dst);
    else
        copy_in(LM_DTYPE_F32, x->data, from, count, dst);
}

static float one_of(const lm_tensor *x, int64_t i)
{
    return (float)lm_get(x->dtype, x->data, i);
}

/* Elements [from, from + count) of y in x, which is repeated along rows or columns of length `cols`. */
static void load_spread(const lm_tensor *x, int64_t cols, int64_t from, int64_t count, float *dst)
{
    bool repeats_rows = x->dim[0] == 1;
    for (int64_t i = 0; i < count;) {
        int64_t row = (from + i) / cols, col = (from + i) % cols, run = cols - col;
        run = run < count - i ? run : count - i;
        if (repeats_rows) {
            load_flat(x, col, run, dst + i);
        } else {
            float one = one_of(x, row);
            for (int64_t k = 0; k < run; k++)
                dst[i + k] = one;
        }
        i += run;
    }
}

static const float *load(const map_job *j, int which, int64_t from, int64_t count, float *room)
{
    const lm_tensor *x = &j->call->in[LM_MAP_FIRST_X + which], *y = &j->call->out[0];
    int64_t have = lm_tensor_count(x);
    if (have == lm_tensor_count(y)) {
        if (x->dtype == LM_DTYPE_F32 && count == TILE) {
            const float *at = (const float *)x->data + from;
            for (int i = 0; i < TILE; i += 16) /* the next tile, while this one is worked on */
                _mm_prefetch((const char *)(at + TILE + i), _MM_HINT_T0);
            return at;
        }
        load_flat(x, from, count, room);
    } else if (have == 1) {
        float one = one_of(x, 0);
        for (int64_t i = 0; i < count; i++)
            room[i] = one;
    } else {
        load_spread(x, last_dim(y), from, count, room);
    }
    return room;
}

static void store(lm_tensor *y, int64_t from, int64_t count, map_operand v)
{
    if (y->dtype == LM_DTYPE_BF16)
        VF_FOR(i, n, count, {
            vf x = v.at ? vf_load(v.at + i) : vf_set(v.one);
            vf_put_any(LM_DTYPE_BF16, y->data, from + i, x, n);
        });
    else
        VF_FOR(i, n, count, {
            vf x = v.at ? vf_load(v.at + i) : vf_set(v.one);
            vf_put_any(LM_DTYPE_F32, y->data, from + i, x, n);
        });
}

/* ---- steps ---- */

/* Of angles and the like, which are few. */
LM_INLINE vf by_lane(float (*f)(float), vf a)
{
    float v[VF_LANES];
    vf_store(v, a);
    for (int i = 0; i < VF_LANES; i++)
        v[i] = f(v[i]);
    return vf_load(v);
}

LM_INLINE vf value_of(lm_map_code code, vf a, vf b, vf c)
{
    vf zero = vf_zero(), one = vf_set(1);
    switch (code) {
    case LM_MAP_NEG:
        return vf_set(-0.0f) - a;
    case LM_MAP_ABS:
        return vf_abs(a);
    case LM_MAP_SQRT:
        return vf_sqrt(a);
    case LM_MAP_ROUND:
        return vf_round(a);
    case LM_MAP_ADD:
        return a + b;
    case LM_MAP_SUB:
        return a - b;
    case LM_MAP_MUL:
        return a * b;
    case LM_MAP_DIV:
        return a / b;
    case LM_MAP_MIN:
        return vf_min(a, b);
    case LM_MAP_MAX:
        return vf_max(a, b);
    case LM_MAP_LESS:
        return vf_if_lt(a, b, one, zero);
    case LM_MAP_WHERE:
        return vf_if_lt(zero, vf_abs(a), b, c);
    case LM_MAP_EXP:
        return vf_exp(a);
    case LM_MAP_LOG:
        return vf_log(a);
    case LM_MAP_TANH:
        return vf_tanh(a);
    case LM_MAP_SIN:
        return by_lane(sinf, a);
    case LM_MAP_COS:
        return by_lane(cosf, a);
    case LM_MAP_ERF:
        return by_lane(erff, a);
    default:
        return a;
    }
}

/* Tiles consist of whole vectors, and a tile in an operand's memory is complete: no ragged end. */
LM_INLINE void loop(lm_map_code code, bool a_one, bool b_one, const map_operand *v, float *to,
                    int64_t count)
{
    vf a1 = vf_set(v[0].one), b1 = vf_set(v[1].one), c1 = vf_set(v[2].one);
    for (int64_t i = 0; i < count; i += VF_LANES) {
        vf a = a_one ? a1 : vf_load(v[0].at + i), b = b_one ? b1 : vf_load(v[1].at + i);
        vf c = code == LM_MAP_WHERE && v[2].at ? vf_load(v[2].at + i) : c1;
        vf_store(to + i, value_of(code, a, b, c));
    }
}

LM_INLINE void one_operand(lm_map_code code, const map_operand *v, float *to, int64_t count)
{
    if (v[0].at)
        loop(code, false, true, v, to, count);
    else
        loop(code, true, true, v, to, count);
}

LM_INLINE void two_operands(lm_map_code code, const map_operand *v, float *to, int64_t count)
{
    if (v[0].at && v[1].at)
        loop(code, false, false, v, to, count);
    else if (v[0].at)
        loop(code, false, true, v, to, count);
    else if (v[1].at)
        loop(code, true, false, v, to, count);
    else
        loop(code, true, true, v, to, count);
}

static void run_step(lm_map_code code, const map_operand *v, float *to, int64_t count)
{
    switch (code) {
    case LM_MAP_LOAD:
        break;
    case LM_MAP_MOVE:
        one_operand(LM_MAP_MOVE, v, to, count);
        break;
    case LM_MAP_NEG:
        one_operand(LM_MAP_NEG, v, to, count);
        break;
    case LM_MAP_ABS:
        one_operand(LM_MAP_ABS, v, to, count);
        break;
    case LM_MAP_SQRT:
        one_operand(LM_MAP_SQRT, v, to, count);
        break;
    case LM_MAP_ROUND:
        one_operand(LM_MAP_ROUND, v, to, count);
        break;
    case LM_MAP_EXP:
        one_operand(LM_MAP_EXP, v, to, count);
        break;
    case LM_MAP_LOG:
        one_operand(LM_MAP_LOG, v, to, count);
        break;
    case LM_MAP_TANH:
        one_operand(LM_MAP_TANH, v, to, count);
        break;
    case LM_MAP_SIN:
        one_operand(LM_MAP_SIN, v, to, count);
        break;
    case LM_MAP_COS:
        one_operand(LM_MAP_COS, v, to, count);
        break;
    case LM_MAP_ERF:
        one_operand(LM_MAP_ERF, v, to, count);
        break;
    case LM_MAP_ADD:
        two_operands(LM_MAP_ADD, v, to, count);
        break;
    case LM_MAP_SUB:
        two_operands(LM_MAP_SUB, v, to, count);
        break;
    case LM_MAP_MUL:
        two_operands(LM_MAP_MUL, v, to, count);
        break;
    case LM_MAP_DIV:
        two_operands(LM_MAP_DIV, v, to, count);
        break;
    case LM_MAP_MIN:
        two_operands(LM_MAP_MIN, v, to, count);
        break;
    case LM_MAP_MAX:
        two_operands(LM_MAP_MAX, v, to, count);
        break;
    case LM_MAP_LESS:
        two_operands(LM_MAP_LESS, v, to, count);
        break;
    case LM_MAP_WHERE:
        two_operands(LM_MAP_WHERE, v, to, count);
        break;
    }
}

static map_operand operand_at(const map_job *j, const map_tiles *t, uint8_t which)
{
    if (which & LM_MAP_SINGLE)
        return (map_operand){ .one = j->single[which & ~LM_MAP_SINGLE] };
    return (map_operand){ .at = t->tile[which] };
}

/* Where step k writes its tile: its room, or the memory of a y. */
static float *target(const map_job *j, map_tiles *t, int k, int64_t from, int64_t count)
{
    int y = j->to_y[k];
    if (y >= 0 && count == TILE)
        return (float *)j->call->out[y].data + from;
    return t->room[j->program->step[k].to];
}

static void run_tile(const map_job *j, map_tiles *t, int64_t from, int64_t count)
{
    const lm_map_program *p = j->program;
    for (int k = p->n_single; k < p->n_steps; k++) {
        const lm_map_step *s = &p->step[k];
        if (s->code == LM_MAP_LOAD) {
            t->tile[s->to] = load(j, s->a, from, count, t->room[s->to]);
            continue;
        }
        map_operand v[3] = { operand_at(j, t, s->a), operand_at(j, t, s->b),
                             operand_at(j, t, s->c) };
        float *to = target(j, t, k, from, count);
        run_step(s->code, v, to, count);
        t->tile[s->to] = to;
    }
    for (int i = 0; i < LM_MAP_Y && i < j->call->n_out; i++)
        if (j->call->out[i].data &&
            (count < TILE || !p->direct[i] || j->to_y[p->direct[i] - 1] != i))
            store(&j->call->out[i], from, count, operand_at(j, t, p->from[i]));
}

static void map_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    map_tiles t;
    (void)worker;
    for (int i = 0; i < LM_MAP_TILES; i++)
        t.tile[i] = t.room[i];
    for (int64_t at = begin; at < end; at += TILE)
        run_tile(ctx, &t, at, end - at < TILE ? end - at : TILE);
}

static void map(const lm_call *c)
{
    map_job j = { .call = c, .program = &((const lm_map_attr *)c->attr)->program };
    double single[LM_MAP_SINGLES] = { 0 };
    if (!lm_map_opens(c))
        return;
    lm_map_singles(c, single);
    for (int i = 0; i < LM_MAP_SINGLES; i++)
        j.single[i] = (float)single[i];
    memset(j.to_y, -1, sizeof j.to_y);
    for (int i = 0; i < LM_MAP_Y && i < c->n_out; i++)
        if (c->out[i].data && c->out[i].dtype == LM_DTYPE_F32 && j.program->direct[i])
            j.to_y[j.program->direct[i] - 1] = (int8_t)i;
    lm_par_for(c->par, lm_tensor_count(&c->out[0]), GRAIN, map_span, &j);
}

/* ---- reduce ---- */

typedef struct {
    vd low, high; /* sums of the lower and upper lanes */
    vf top;
    vf bad; /* 0, or NaN in a lane that had a number that is not finite */
} tally;

LM_INLINE tally nothing(lm_reduce_kind kind)
{
    vf top = vf_set(kind == LM_REDUCE_MAX ? -INFINITY : 0);
    return (tally){
        .low = vf_low_f64(vf_zero()), .high = vf_low_f64(vf_zero()), .top = top, .bad = vf_zero()
    };
}

LM_INLINE tally with(lm_reduce_kind kind, tally t, vf x, int64_t n)
{
    if (kind == LM_REDUCE_SUM || kind == LM_REDUCE_SQUARES) {
        vd lo = vf_low_f64(x), hi = vf_high_f64(x);
        if (kind == LM_REDUCE_SUM) {
            t.low += lo;
            t.high += hi;
        } else {
            t.low = vd_fma(lo, lo, t.low);
            t.high = vd_fma(hi, hi, t.high);
        }
        return t;
    }
    t.bad += x - x;
    x = kind == LM_REDUCE_ABS_MAX ? vf_abs(x) : x;
    t.top = vf_max(vf_keep_n(x, n, t.top), t.top);
    return t;
}

LM_INLINE double result(lm_reduce_kind kind, tally t)
{
    if (kind == LM_REDUCE_SUM || kind == LM_REDUCE_SQUARES)
        return vd_sum(t.low + t.high);
    return vf_sum(t.bad) == 0 ? vf_top(t.top) : NAN;
}

LM_INLINE double reduce_run(lm_reduce_kind kind, lm_dtype type, const void *x, int64_t from,
                            int64_t count)
{
    tally t = nothing(kind);
    VF_FOR(i, n, count, { t = with(kind, t, vf_get_any(type, x, from + i, n), n); });
    return result(kind, t);
}

/* Of `count` numbers that lie end to end. */
static double reduce_end_to_end(lm_reduce_kind kind, const lm_tensor *x, int64_t from, int64_t n)
{
    bool low = x->dtype == LM_DTYPE_BF16;
    switch (kind) {
    case LM_REDUCE_SUM:
        return low ? reduce_run(LM_REDUCE_SUM, LM_DTYPE_BF16, x->data, from, n)
                   : reduce_run(LM_REDUCE_SUM, LM_DTYPE_F32, x->data, from, n);
    case LM_REDUCE_SQUARES:
        return low ? reduce_run(LM_REDUCE_SQUARES, LM_DTYPE_BF16, x->data, from, n)
                   : reduce_run(LM_REDUCE_SQUARES, LM_DTYPE_F32, x->data, from, n);
    case LM_REDUCE_MAX:
        return low ? reduce_run(LM_REDUCE_MAX, LM_DTYPE_BF16, x->data, from, n)
                   : reduce_run(LM_REDUCE_MAX, LM_DTYPE_F32, x->data, from, n);
    case LM_REDUCE_ABS_MAX:
        break;
    }
    return low ? reduce_run(LM_REDUCE_ABS_MAX, LM_DTYPE_BF16, x->data, from, n)
               : reduce_run(LM_REDUCE_ABS_MAX, LM_DTYPE_F32, x->data, from, n);
}

typedef struct {
    const lm_call *call;
    const lm_reduce_attr *attr;
    lm_reduce_sizes n;
} reduce_job;

static void put_result(const reduce_job *j, int64_t part, double r)
{
    ((float *)j->call->out[0].data)[part] = (float)(j->attr->mean ? r / (double)j->n.terms : r);
}

static void reduce_parts(void *ctx, int64_t begin, int64_t end, int worker)
{
    const reduce_job *j = ctx;
    (void)worker;
    for (int64_t p = begin; p < end; p++)
        put_result(j, p,
                   reduce_end_to_end(j->attr->kind, &j->call->in[0], p * j->n.terms, j->n.terms));
}

static void reduce_blocks(void *ctx, int64_t begin, int64_t end, int worker)
{
    const reduce_job *j = ctx;
    double *part = j->call->work;
    (void)worker;
    for (int64_t b = begin; b < end; b++) {
        int64_t left = j->n.terms - b * BLOCK;
        part[b] = reduce_end_to_end(j->attr->kind, &j->call->in[0], b * BLOCK,
                                    left < BLOCK ? left : BLOCK);
    }
}

/* Columns [begin, end), VF_LANES of them at a time, down all rows. */
LM_INLINE void reduce_columns(lm_reduce_kind kind, lm_dtype type, const reduce_job *j,
                              int64_t begin, int64_t end)
{
    const void *x = j->call->in[0].data;
    VF_FOR(i, n, end - begin, {
        tally t = nothing(kind);
        for (int64_t r = 0; r < j->n.rows; r++)
            t = with(kind, t, vf_get_any(type, x, r * j->n.cols + begin + i, n), n);
        double sum[VF_LANES];
        float top[VF_LANES];
        float bad[VF_LANES];
        memcpy(sum, &t.low, sizeof t.low);
        memcpy(sum + VF_LANES / 2, &t.high, sizeof t.high);
        vf_store(top, t.top);
        vf_store(bad, t.bad);
        for (int64_t k = 0; k < n; k++) {
            bool is_sum = kind == LM_REDUCE_SUM || kind == LM_REDUCE_SQUARES;
            put_result(j, begin + i + k, is_sum ? sum[k] : bad[k] == 0 ? top[k] : NAN);
        }
    });
}

static void reduce_span(void *ctx, int64_t begin, int64_t end, int worker)
{
    const reduce_job *j = ctx;
    bool low = j->call->in[0].dtype == LM_DTYPE_BF16;
    (void)worker;
#define OF_KIND(which)                                           \
    if (j->attr->kind == (which)) {                              \
        if (low)                                                 \
            reduce_columns(which, LM_DTYPE_BF16, j, begin, end); \
        else                                                     \
            reduce_columns(which, LM_DTYPE_F32, j, begin, end);  \
    }
    OF_KIND(LM_REDUCE_SUM)
    OF_KIND(LM_REDUCE_SQUARES)
    OF_KIND(LM_REDUCE_MAX)
    OF_KIND(LM_REDUCE_ABS_MAX)
#undef OF_KIND
}

static void reduce_all(reduce_job *j)
{
    int64_t blocks = (j->n.terms + BLOCK - 1) / BLOCK;
    const double *part = j->call->work;
    double r = part[0];
    for (int64_t b = 1; b < blocks; b++) {
        bool top = j->attr->kind == LM_REDUCE_MAX || j->attr->kind == LM_REDUCE_ABS_MAX;
        r = !top ? r + part[b] : isnan(r) || part[b] <= r ? r : part[b];
    }
    put_result(j, 0, r);
}

static void reduce(const lm_call *c)
{
    reduce_job j = { c, c->attr, lm_reduce_sizes_of(c->attr, &c->in[0]) };
    int64_t grain = grain_rows(j.n.terms);
    if (j.attr->over == LM_OVER_ALL) {
        lm_par_for(c->par, (j.n.terms + BLOCK - 1) / BLOCK, 1, reduce_blocks, &j);
        reduce_all(&j);
    } else if (j.attr->over == LM_OVER_COLUMN) {
        lm_par_for(c->par, j.n.cols, 64, reduce_span, &j);
    } else {
        lm_par_for(c->par, j.n.parts, grain, reduce_parts, &j);
    }
}

static size_t reduce_work(const lm_call *c, int threads)
{
    (void)threads;
    return (size_t)((lm_tensor_count(&c->in[0]) + BLOCK - 1) / BLOCK) * sizeof(double);
}

const lm_kernel LM_TABLE_NAME(map, LM_SIMD)[] = {
    VF_KERNEL("map", map, NULL),
    { "reduce", LM_DTYPE_F32, LM_SIMD_LEVEL, reduce, reduce_work },
    VF_KERNEL_END,
};
