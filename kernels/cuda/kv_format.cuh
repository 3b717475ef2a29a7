/* SPDX-License-Identifier: Apache-2.0 */
/* kv_format.cuh -- the pages of coded caches on a device: the description of a side that is passed with a launch, and
 * places in a page (numeric/kv_format.h).
 *
 * A format's table and constants are parameters of the kernel.  Its arrays (lower, upper, head) are borrowed where
 * the pages are: in device memory. */
#ifndef LM_KERNELS_CUDA_KV_FORMAT_CUH
#define LM_KERNELS_CUDA_KV_FORMAT_CUH

#include "kernels/cuda/device.cuh"

extern "C" {
#include "kernels/kv.h"
}

/* Keys or values.  Numbers in a page fit 32 bits: a page of a head has at most 4096 * 1024 numbers. */
struct kv_side {
    bool plain, values; /* plain: pages of act numbers */
    lm_kv_axis axis;
    lm_kv_levels levels;
    bool ggml, norm, renorm, zero, minima, second, fixed;
    lm_dtype scale, float8;
    int bits, low; /* of a code, of its low plane */
    int T, D, K;
    int group,
        groups; /* channels of a group and groups of a token, or tokens of a group and groups of a page */
    int span,
        step; /* tokens with one second scale (LM_KV_TOKEN); tokens that are encoded together */
    int tile, lines;            /* tokens and lines of a tile */
    int tile_bytes, high_plane; /* high_plane: bytes before it */
    int at_scale, at_min, at_second, at_outliers;
    int64_t page; /* bytes of a page of a head */
    int outliers;
    int residual, sinks, rows; /* rows: of a tail */
    float table[LM_KV_MAX_TABLE];
    double constant;
    const float *lower, *upper, *head;
    char *pages, *tail;
};

inline kv_side kv_side_of(const lm_tensor *t, const lm_tensor *tail, int64_t residual,
                          int64_t sinks)
{
    const lm_kv_format *f = t->kv;
    kv_side s = {};
    lm_kv_sections at;
    s.T = (int)t->dim[2];
    s.D = (int)t->dim[3];
    s.K = (int)t->dim[1];
    s.pages = (char *)t->data;
    s.tail = tail ? (char *)tail->data : nullptr;
    s.residual = (int)residual;
    s.sinks = (int)sinks;
    s.rows = (int)(residual + sinks);
    s.plain = !f;
    s.step = 1;
    if (!f) {
        s.page = (int64_t)s.T * s.D * (int64_t)lm_dtype_size(t->dtype);
        return s;
    }
    lm_kv_page(f, s.T, s.D, &at, nullptr);
    s.values = f->values;
    s.axis = f->axis;
    s.levels = f->levels;
    s.ggml = f->ggml;
    s.norm = f->norm;
    s.renorm = f->renorm;
    s.zero = f->zero;
    s.minima = lm_kv_has_min(f);
    s.second = f->second;
    s.fixed = f->lower != nullptr;
    s.scale = f->scale;
    s.float8 = f->float8;
    s.bits = f->bits;
    s.low = lm_kv_low_bits(f->bits);
    s.group = f->group ? f->group : f->axis == LM_KV_TOKEN ? s.D : s.T;
    s.groups = f->axis == LM_KV_TOKEN ? (int)lm_kv_groups(f, s.D) : s.T / s.group;
    s.span = f->span ? f->span : s.T;
    s.step = (int)lm_kv_step(f, s.T);
    s.tile = (int)lm_kv_tile_tokens(f->values, s.T);
    s.lines = (int)lm_kv_tile_lines(f->values, s.T, s.D);
    s.tile_bytes = (int)lm_kv_tile_bytes(f, s.T, s.D);
    s.high_plane = (int)lm_kv_plane_bytes(s.low, s.lines);
    s.at_scale = (int)at.scale;
    s.at_min = (int)at.min;
    s.at_second = (int)at.second;
    s.at_outliers = (int)at.outliers;
    s.page = (int64_t)at.all;
    s.outliers = f->outliers;
    for (int i = 0; i < f->n_table; i++)
        s.table[i] = f->table[i];
    s.constant = f->constant;
    s.lower = f->lower;
    s.upper = f->upper;
    s.head = f->head;
    return s;
}

/* Of n tokens those in [sinks, this) are in pages (lm_kv_coded). */
__device__ inline int kv_coded(const kv_side &s, int n)
{
    if (s.residual == 0)
        return n;
    if (s.step > 1)
        return n - n % s.residual;
    return n > s.residual ? n - s.residual : 0;
}

/* The row of token j in a tail. */
__device__ inline int kv_tail_row(const kv_side &s, int j)
{
    return j < s.sinks ? j : s.sinks + j % s.residual;
}

/* A page of key/value head kv. */
__device__ inline char *kv_page_at(const kv_side &s, int32_t page, int64_t kv)
{
    return s.pages + (page * (int64_t)s.K + kv) * s.page;
}

/* The place of the scale and minimum of token t, channel d, and of the second scale (lm_kv_scale_at, lm_kv_second_at). */
__device__ inline int kv_scale_at(const kv_side &s, int t, int d)
{
    if (s.axis == LM_KV_CHANNEL)
        return t / s.group * ((s.D + 15) / 16 * 16) + d;
    return (t / LM_KV_TILE * s.groups + d / s.group) * LM_KV_TILE + t % LM_KV_TILE;
}
__device__ inline int kv_second_at(const kv_side &s, int t, int d)
{
    return s.axis == LM_KV_CHANNEL ? t : t / s.span * ((s.D + 15) / 16 * 16) + d;
}

/* A stored scale as a float: without loss. */
__device__ inline float kv_get_scale(lm_dtype type, const char *from, int i)
{
    if (type == LM_DTYPE_F32)
        return ((const float *)from)[i];
    if (type == LM_DTYPE_F16)
        return to_float(((const f16 *)from)[i]);
    return to_float(((const bf16 *)from)[i]);
}

/* The number of an FP8 code. */
__device__ inline float kv_float8(bool e5m2, uint32_t code)
{
    const int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
    const uint32_t mag = code & 127, sign = (code & 128) << 24, e = mag >> mantissa;
    const uint32_t top = e5m2 ? 0x7b : 0x7e;
    uint32_t bits = (mag << (23 - mantissa)) + ((uint32_t)(127 - bias) << 23);
    if (e == 0)
        bits = __float_as_uint((float)mag * (e5m2 ? 0x1p-16f : 0x1p-9f));
    if (mag > top)
        bits = e5m2 && mag == 0x7c ? 0x7f800000u : 0x7fc00000u;
    return __uint_as_float(bits | sign);
}

#endif
