/* SPDX-License-Identifier: Apache-2.0 */
/* kv_rows.cuh -- the rows and sequences of kv_attention and kv_write on a device, and where plain tokens lie. */
#ifndef LM_KERNELS_CUDA_KV_ROWS_CUH
#define LM_KERNELS_CUDA_KV_ROWS_CUH

#include "kernels/cuda/attention_cached.cuh"
#include "kernels/cuda/kv_format.cuh"

/* As of attention_cached; table, page and width are those of the pages. */
struct kv_rows : cached {
    int64_t most_rows; /* of a sequence */
    bool latent;       /* the value of a token is a part of its key (kernels/kv.h) */
    const int32_t *slot;
};

/* Operands by their numbers; -1: none.  Without a table sequence b has the page b. */
inline kv_rows kv_rows_of(const lm_call *call, const lm_attention_attr *a, bool latent,
                          const lm_tensor *keys, int first, int kind, int table, int slot)
{
    kv_rows r = {};
    r.latent = r.shared = latent;
    r.batch = a->batch;
    r.seq = a->seq;
    r.heads = a->heads;
    r.kv_heads = a->kv_heads;
    r.group = (int)(a->heads / a->kv_heads);
    r.window = a->window;
    r.dim = (int)a->head_dim;
    r.vdim = r.vline = (int)(latent ? a->value_dim : a->head_dim);
    r.causal = !a->reads;
    r.reads = a->reads;
    r.scale = (float)a->scale;
    r.soft_cap = (float)a->soft_cap;
    r.used = in_ptr<const int32_t>(call, 1);
    r.fresh = in_ptr<const int32_t>(call, 2);
    r.first = in_ptr<const int32_t>(call, first);
    r.kind = kind < 0 ? nullptr : in_ptr<const int32_t>(call, kind);
    r.table = in_ptr<const int32_t>(call, table);
    r.slot = in_ptr<const int32_t>(call, slot);
    r.rows = call->in[0].dim[0];
    r.page = (int)keys->dim[2];
    r.width = call->in[table].ndim ? (int)call->in[table].dim[1] : 1;
    r.room = r.page * (int64_t)r.width;
    r.most_rows = a->seq > 0 ? a->seq : r.rows;
    return r;
}

/* The tokens of [0, n) that are in pages, without the sinks, end here. */
__device__ inline int kv_coded_end(const kv_side &s, int n)
{
    const int end = kv_coded(s, n);
    return end > s.sinks ? end : s.sinks;
}

/* The page of a key/value head of sequence b that has token j. */
__device__ inline char *kv_page_of(const kv_rows &r, const kv_side &s, int64_t b, int64_t kv, int j)
{
    return kv_page_at(s, r.table ? r.table[b * r.width + j / s.T] : (int32_t)b, kv);
}

/* The plain tokens of a key/value head of a sequence: its tail, and its new rows. */
template <class T> struct kv_source {
    const T *tail, *fresh;
    int64_t pitch; /* of qkv */
    int used, end, sinks, residual, dim;
    /* The row of a token that is not in a page. */
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
    s.end = (int)held_of(r, b);
    s.sinks = f.sinks;
    s.residual = f.residual;
    s.tail = f.rows ? (const T *)f.tail + (r.slot[b] * r.kv_heads + kv) * f.rows * f.D : nullptr;
    s.pitch = qkv_pitch(r);
    s.fresh = qkv + first_of<true>(r, b) * s.pitch + r.heads * r.dim +
              (r.latent                ? (side ? r.vdim : 0)
               : side == 0 || r.shared ? kv * r.dim
                                       : r.kv_heads * r.dim + kv * r.vdim);
    return s;
}

#endif
