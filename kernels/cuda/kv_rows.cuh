/* SPDX-License-Identifier: Apache-2.0 */
/* kv_rows.cuh -- the rows and sequences of kv_attention and kv_write on a device, and where plain tokens lie. */
#ifndef LM_KERNELS_CUDA_KV_ROWS_CUH
#define LM_KERNELS_CUDA_KV_ROWS_CUH

#include "kernels/cuda/kv_format.cuh"

struct kv_rows {
    int64_t batch, seq, heads, kv_heads, rows; /* rows: of qkv */
    int64_t most_rows;                         /* of a sequence */
    int64_t width;                             /* pages of a sequence */
    const int32_t *used, *fresh, *first, *table, *slot;
};

inline kv_rows kv_rows_of(const lm_call *call, int first, int table, int slot)
{
    const lm_attention_attr *a = &((const lm_kv_attr *)call->attr)->attention;
    kv_rows r = {};
    r.batch = a->batch;
    r.seq = a->seq;
    r.heads = a->heads;
    r.kv_heads = a->kv_heads;
    r.rows = call->in[0].dim[0];
    r.most_rows = a->seq > 0 ? a->seq : r.rows;
    r.width = call->in[table].dim[1];
    r.used = in_ptr<const int32_t>(call, 1);
    r.fresh = in_ptr<const int32_t>(call, 2);
    r.first = in_ptr<const int32_t>(call, first);
    r.table = in_ptr<const int32_t>(call, table);
    r.slot = in_ptr<const int32_t>(call, slot);
    return r;
}

inline kv_rows kv_rows_of_write(const lm_call *call)
{
    return kv_rows_of(call, 3, 4, 5);
}
inline kv_side kv_write_side(const lm_call *call, int x)
{
    const lm_kv_attr *a = (const lm_kv_attr *)call->attr;
    return kv_side_of(&call->out[x], call->n_out > 2 + x ? &call->out[2 + x] : nullptr,
                      a->residual[x], a->sinks[x]);
}

/* The first row of sequence b. */
__device__ inline int64_t kv_first_of(const kv_rows &r, int64_t b)
{
    return r.first ? r.first[b] : b * r.seq;
}

/* The sequence of a row: that of the last first row at or before it; batch if the row belongs to none. */
__device__ inline int64_t kv_sequence_of(const kv_rows &r, int64_t row)
{
    if (!r.first)
        return row / r.seq;
    if (row >= r.first[r.batch])
        return r.batch;
    int64_t lo = 0, hi = r.batch;
    while (hi - lo > 1) {
        const int64_t mid = (lo + hi) / 2;
        if (r.first[mid] <= row)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* The tokens of [0, n) that are coded, without the sinks, end here. */
__device__ inline int kv_coded_end(const kv_side &s, int n)
{
    const int end = kv_coded(s, n);
    return end > s.sinks ? end : s.sinks;
}

/* The plain tokens of a key/value head of a sequence: its tail, and its new rows. */
template <class T> struct kv_source {
    const T *tail, *fresh;
    int64_t pitch; /* of qkv */
    int used, end, sinks, residual, dim;
    /* The row of a token that is not coded. */
    __device__ inline const T *row(int j) const
    {
        if (j >= used)
            return fresh + (j - used) * pitch;
        return tail + (int64_t)(j < sinks ? j : sinks + j % residual) * dim;
    }
};

/* side: 0 of keys, 1 of values. */
template <class T>
__device__ inline kv_source<T> kv_source_of(const kv_rows &r, const kv_side &f, const T *qkv,
                                            int64_t b, int64_t kv, int side)
{
    kv_source<T> s;
    s.dim = f.D;
    s.used = r.used[b];
    s.end = s.used + r.fresh[b];
    s.sinks = f.sinks;
    s.residual = f.residual;
    s.tail = f.rows ? (const T *)f.tail + (r.slot[b] * r.kv_heads + kv) * f.rows * f.D : nullptr;
    s.pitch = (r.heads + 2 * r.kv_heads) * f.D;
    s.fresh = qkv + kv_first_of(r, b) * s.pitch + (r.heads + side * r.kv_heads + kv) * f.D;
    return s;
}

#endif
