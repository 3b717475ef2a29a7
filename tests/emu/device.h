/* SPDX-License-Identifier: Apache-2.0 */
/* device.h -- the language of kernels as C++ for the host; device.cuh includes it if LM_EMU is
 * defined.  block.c implements threads, queue.c streams. */
#ifndef LM_EMU_DEVICE_H
#define LM_EMU_DEVICE_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <type_traits>

#include "cuda_runtime_api.h"
#include "emu.h"

/* ---- keywords of the language ---- */

#define __global__
#define __device__
#define __host__
#define __constant__
/* Blocks run one at a time, so one copy serves them all. */
#define __shared__      static
#define __forceinline__ __inline__ __attribute__((always_inline))
#ifndef __noinline__
#define __noinline__ __attribute__((noinline))
#endif
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

/* ---- vector types ---- */

#define LM_EMU_VECTORS(type, name, align2, align4)                \
    struct name##1                                                \
    {                                                             \
        type x;                                                   \
    };                                                            \
    struct alignas(align2) name##2                                \
    {                                                             \
        type x, y;                                                \
    };                                                            \
    struct name##3                                                \
    {                                                             \
        type x, y, z;                                             \
    };                                                            \
    struct alignas(align4) name##4                                \
    {                                                             \
        type x, y, z, w;                                          \
    };                                                            \
    inline name##1 make_##name##1(type x)                         \
    {                                                             \
        return name##1 { x };                                     \
    }                                                             \
    inline name##2 make_##name##2(type x, type y)                 \
    {                                                             \
        return name##2 { x, y };                                  \
    }                                                             \
    inline name##3 make_##name##3(type x, type y, type z)         \
    {                                                             \
        return name##3 { x, y, z };                               \
    }                                                             \
    inline name##4 make_##name##4(type x, type y, type z, type w) \
    {                                                             \
        return name##4 { x, y, z, w };                            \
    }

LM_EMU_VECTORS(signed char, char, 2, 4)
LM_EMU_VECTORS(unsigned char, uchar, 2, 4)
LM_EMU_VECTORS(short, short, 4, 8)
LM_EMU_VECTORS(unsigned short, ushort, 4, 8)
LM_EMU_VECTORS(int, int, 8, 16)
LM_EMU_VECTORS(unsigned, uint, 8, 16)
LM_EMU_VECTORS(long long, longlong, 16, 16)
LM_EMU_VECTORS(unsigned long long, ulonglong, 16, 16)
LM_EMU_VECTORS(float, float, 8, 16)
LM_EMU_VECTORS(double, double, 16, 16)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};

/* ---- indices ---- */

#define threadIdx lm_emu_thread_idx
#define blockIdx  lm_emu_block_idx
#define blockDim  lm_emu_block_dim
#define gridDim   lm_emu_grid_dim
#define warpSize  32

/* ---- launches ---- */

template <class T> struct lm_emu_same {
    typedef T type;
};

template <class T> inline const void *lm_emu_pointer(const T &)
{
    return nullptr;
}
template <class T> inline const void *lm_emu_pointer(T *const &p)
{
    return (const void *)p;
}

/* The arguments are converted to the kernel's parameters here and copied with the call. */
template <class... P>
inline void lm_emu_start(const char *name, void (*kernel)(P...), dim3 grid, dim3 block,
                         size_t shared, void *stream, typename lm_emu_same<P>::type... args)
{
    auto call = [=] { kernel(args...); };
    typedef decltype(call) closure;
    static_assert(std::is_trivially_copyable<closure>::value &&
                      sizeof(closure) <= LM_EMU_ARGS_MAX && alignof(closure) <= 16,
                  "a kernel's parameters are plain data of at most 4 KiB");
    const void *pointers[] = { lm_emu_pointer(args)..., nullptr };
    lm_emu_launch k = { name,
                        (const void *)kernel,
                        [](const void *c) { (*(const closure *)c)(); },
                        { grid.x, grid.y, grid.z },
                        { block.x, block.y, block.z },
                        shared };
    lm_emu_enqueue(&k, &call, sizeof call, pointers, (int)sizeof...(P), stream);
}

#define LM_LAUNCH(kernel, grid, block, bytes, s, ...) \
    lm_emu_start(#kernel, kernel, (grid), (block), (bytes), (s)->handle, ##__VA_ARGS__)
#define LM_ALLOW_SHARED(kernel, bytes)                                       \
    do {                                                                     \
        auto allowed_ = kernel;                                              \
        lm_emu_allow_shared((const void *)allowed_, #kernel, (long)(bytes)); \
    } while (0)
#define LM_DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(lm_emu_shared)

/* ---- threads of a block ---- */

inline void __syncthreads(void)
{
    lm_emu_barrier(0, 0);
}
inline int __syncthreads_count(int x)
{
    return (int)lm_emu_barrier(x != 0, 0).sum;
}
inline int __syncthreads_or(int x)
{
    return lm_emu_barrier(0, x != 0).bits != 0;
}
inline int __syncthreads_and(int x)
{
    return lm_emu_barrier(0, x == 0).bits == 0;
}
/* There is one memory, and threads do not run at the same time. */
inline void __threadfence(void)
{
}
inline void __threadfence_block(void)
{
}
inline void __threadfence_system(void)
{
}
inline void __nanosleep(unsigned)
{
}
inline void __trap(void)
{
    lm_emu_trap("__trap");
}

/* ---- threads of a warp ---- */

inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    lm_emu_meet(mask, LM_EMU_SYNC, 0, false);
}
inline unsigned __ballot_sync(unsigned mask, int x)
{
    return lm_emu_meet(mask, LM_EMU_VOTE, 0, x != 0).votes;
}
inline int __any_sync(unsigned mask, int x)
{
    return __ballot_sync(mask, x) != 0;
}
inline int __all_sync(unsigned mask, int x)
{
    return __ballot_sync(mask, !x) == 0;
}
inline unsigned __activemask(void)
{
    return 0xffffffffu;
}

/* A lane that does not exist, or passed no value, gives all ones: a NaN. */
template <class T> inline lm_emu_met lm_emu_bring(unsigned mask, T x)
{
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    return lm_emu_meet(mask, LM_EMU_SHUFFLE, bits, false);
}
template <class T> inline T lm_emu_take(const lm_emu_met &m, unsigned mask, unsigned lane)
{
    uint64_t bits = mask >> lane & 1 ? m.value[lane] : ~(uint64_t)0;
    T x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

template <class T> inline T __shfl_sync(unsigned mask, T x, int lane, int width = 32)
{
    lm_emu_met m = lm_emu_bring(mask, x);
    unsigned w = (unsigned)width;
    return lm_emu_take<T>(m, mask, (m.lane & ~(w - 1)) | ((unsigned)lane & (w - 1)));
}
template <class T> inline T __shfl_up_sync(unsigned mask, T x, unsigned delta, int width = 32)
{
    lm_emu_met m = lm_emu_bring(mask, x);
    unsigned first = m.lane & ~((unsigned)width - 1);
    return lm_emu_take<T>(m, mask, m.lane >= first + delta ? m.lane - delta : m.lane);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T x, unsigned delta, int width = 32)
{
    lm_emu_met m = lm_emu_bring(mask, x);
    unsigned last = m.lane | ((unsigned)width - 1);
    return lm_emu_take<T>(m, mask, m.lane + delta <= last ? m.lane + delta : m.lane);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32)
{
    lm_emu_met m = lm_emu_bring(mask, x);
    unsigned last = m.lane | ((unsigned)width - 1), from = m.lane ^ (unsigned)lanes;
    return lm_emu_take<T>(m, mask, from <= last ? from : m.lane);
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned x)
{
    lm_emu_met m = lm_emu_bring(mask, x);
    unsigned sum = 0;
    for (unsigned i = 0; i < 32; i++)
        sum += mask >> i & 1 ? (unsigned)m.value[i] : 0;
    return sum;
}

/* ---- atomics: one thread runs at a time, so plain code is atomic ---- */

template <class T> inline T lm_emu_swap(T *p, T x)
{
    T old = *p;
    *p = x;
    return old;
}

#define LM_EMU_ATOMICS(T)                      \
    inline T atomicAdd(T *p, T x)              \
    {                                          \
        return lm_emu_swap<T>(p, (T)(*p + x)); \
    }                                          \
    inline T atomicExch(T *p, T x)             \
    {                                          \
        return lm_emu_swap<T>(p, x);           \
    }
#define LM_EMU_INTEGER_ATOMICS(T)                      \
    LM_EMU_ATOMICS(T)                                  \
    inline T atomicMax(T *p, T x)                      \
    {                                                  \
        return lm_emu_swap<T>(p, *p > x ? *p : x);     \
    }                                                  \
    inline T atomicMin(T *p, T x)                      \
    {                                                  \
        return lm_emu_swap<T>(p, *p < x ? *p : x);     \
    }                                                  \
    inline T atomicCAS(T *p, T seen, T x)              \
    {                                                  \
        return lm_emu_swap<T>(p, *p == seen ? x : *p); \
    }                                                  \
    inline T atomicAnd(T *p, T x)                      \
    {                                                  \
        return lm_emu_swap<T>(p, *p & x);              \
    }                                                  \
    inline T atomicOr(T *p, T x)                       \
    {                                                  \
        return lm_emu_swap<T>(p, *p | x);              \
    }                                                  \
    inline T atomicXor(T *p, T x)                      \
    {                                                  \
        return lm_emu_swap<T>(p, *p ^ x);              \
    }

LM_EMU_INTEGER_ATOMICS(int)
LM_EMU_INTEGER_ATOMICS(unsigned)
LM_EMU_INTEGER_ATOMICS(unsigned long long)
LM_EMU_ATOMICS(float)
LM_EMU_ATOMICS(double)

inline int atomicSub(int *p, int x)
{
    return lm_emu_swap<int>(p, *p - x);
}
inline unsigned atomicSub(unsigned *p, unsigned x)
{
    return lm_emu_swap<unsigned>(p, *p - x);
}
inline unsigned atomicInc(unsigned *p, unsigned last)
{
    return lm_emu_swap<unsigned>(p, *p >= last ? 0 : *p + 1);
}

/* ---- memory ---- */

template <class T> inline T __ldg(const T *p)
{
    return *p;
}
template <class T> inline T __ldcs(const T *p)
{
    return *p;
}
template <class T> inline T __ldcg(const T *p)
{
    return *p;
}
template <class T> inline void __stcs(T *p, T x)
{
    *p = x;
}
template <class T> inline void __stcg(T *p, T x)
{
    *p = x;
}

/* ---- bits ---- */

#ifndef __FLT16_MANT_DIG__
extern "C" float lm_f16_to_f32(uint16_t bits); /* numeric/dtype.h */
#endif

template <class To, class From> inline To lm_emu_bits(From x)
{
    static_assert(sizeof(To) == sizeof(From), "same size");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
/* The number whose binary16 bits these are. */
inline float lm_emu_half(uint16_t bits)
{
#ifdef __FLT16_MANT_DIG__
    return (float)lm_emu_bits<_Float16>(bits);
#else
    return lm_f16_to_f32(bits);
#endif
}
inline unsigned __float_as_uint(float x)
{
    return lm_emu_bits<unsigned>(x);
}
inline int __float_as_int(float x)
{
    return lm_emu_bits<int>(x);
}
inline float __uint_as_float(unsigned x)
{
    return lm_emu_bits<float>(x);
}
inline float __int_as_float(int x)
{
    return lm_emu_bits<float>(x);
}
inline long long __double_as_longlong(double x)
{
    return lm_emu_bits<long long>(x);
}
inline double __longlong_as_double(long long x)
{
    return lm_emu_bits<double>(x);
}
inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x)
{
    return __builtin_popcountll(x);
}
inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned)x) : 32;
}
inline int __clzll(long long x)
{
    return x ? __builtin_clzll((unsigned long long)x) : 64;
}
inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
inline int __ffsll(long long x)
{
    return __builtin_ffsll(x);
}
inline unsigned __brev(unsigned x)
{
    unsigned y = 0;
    for (int i = 0; i < 32; i++)
        y |= (x >> i & 1) << (31 - i);
    return y;
}
inline unsigned __umulhi(unsigned a, unsigned b)
{
    return (unsigned)((uint64_t)a * b >> 32);
}
inline int __mulhi(int a, int b)
{
    return (int)((int64_t)a * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n)
{
    return (unsigned)(((uint64_t)hi << 32 | lo) << (n & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n)
{
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (n & 31));
}

/* ---- arithmetic ---- */

#define LM_EMU_MINMAX(R, A, B)            \
    inline R min(A a, B b)                \
    {                                     \
        return (R)a < (R)b ? (R)a : (R)b; \
    }                                     \
    inline R max(A a, B b)                \
    {                                     \
        return (R)a > (R)b ? (R)a : (R)b; \
    }
LM_EMU_MINMAX(int, int, int)
LM_EMU_MINMAX(unsigned, unsigned, unsigned)
LM_EMU_MINMAX(unsigned, int, unsigned)
LM_EMU_MINMAX(unsigned, unsigned, int)
LM_EMU_MINMAX(long, long, long)
LM_EMU_MINMAX(unsigned long, unsigned long, unsigned long)
LM_EMU_MINMAX(unsigned long, long, unsigned long)
LM_EMU_MINMAX(unsigned long, unsigned long, long)
LM_EMU_MINMAX(long long, long long, long long)
LM_EMU_MINMAX(unsigned long long, unsigned long long, unsigned long long)
LM_EMU_MINMAX(unsigned long long, long long, unsigned long long)
LM_EMU_MINMAX(unsigned long long, unsigned long long, long long)
inline float min(float a, float b)
{
    return fminf(a, b);
}
inline float max(float a, float b)
{
    return fmaxf(a, b);
}
inline double min(double a, double b)
{
    return fmin(a, b);
}
inline double max(double a, double b)
{
    return fmax(a, b);
}

#define LM_EMU_MATH1(name, expr) \
    inline float name(float x)   \
    {                            \
        return (float)(expr);    \
    }
#define LM_EMU_MATH2(name, expr)        \
    inline float name(float x, float y) \
    {                                   \
        return (float)(expr);           \
    }
LM_EMU_MATH1(rsqrtf, 1.0f / sqrtf(x))
LM_EMU_MATH1(__frsqrt_rn, 1.0f / sqrtf(x))
LM_EMU_MATH1(__frcp_rn, 1.0f / x)
LM_EMU_MATH1(__fsqrt_rn, sqrtf(x))
LM_EMU_MATH1(__expf, expf(x))
LM_EMU_MATH1(__exp10f, powf(10.0f, x))
LM_EMU_MATH1(__logf, logf(x))
LM_EMU_MATH1(__log2f, log2f(x))
LM_EMU_MATH1(__log10f, log10f(x))
LM_EMU_MATH1(__sinf, sinf(x))
LM_EMU_MATH1(__cosf, cosf(x))
LM_EMU_MATH1(__tanhf, tanhf(x))
LM_EMU_MATH1(__saturatef, x > 0 ? (x < 1 ? x : 1.0f) : 0.0f)
LM_EMU_MATH2(__powf, powf(x, y))
LM_EMU_MATH2(__fdividef, x / y)
LM_EMU_MATH2(__fdiv_rn, x / y)
LM_EMU_MATH2(__fmul_rn, x *y)
LM_EMU_MATH2(__fadd_rn, x + y)
LM_EMU_MATH2(__fsub_rn, x - y)
inline float __fmaf_rn(float x, float y, float z)
{
    return fmaf(x, y, z);
}
inline double __dmul_rn(double x, double y)
{
    return x * y;
}
inline double __dadd_rn(double x, double y)
{
    return x + y;
}
inline double __fma_rn(double x, double y, double z)
{
    return fma(x, y, z);
}
inline double rsqrt(double x)
{
    return 1.0 / sqrt(x);
}
inline void __sincosf(float x, float *s, float *c)
{
    *s = sinf(x);
    *c = cosf(x);
}
inline int __float2int_rn(float x)
{
    return (int)rintf(x);
}
inline int __float2int_rz(float x)
{
    return (int)x;
}
inline float __int2float_rn(int x)
{
    return (float)x;
}
inline float __uint2float_rn(unsigned x)
{
    return (float)x;
}
inline float __double2float_rn(double x)
{
    return (float)x;
}

#endif
