/* SPDX-License-Identifier: Apache-2.0 */
/* mma.cuh -- the product of tensor cores, m16n8k16 with F32 sums, in two forms of one arrangement: the PTX
 * instructions, and ordinary arithmetic that exchanges the same fragments through shared memory, which
 * also runs where there are no such instructions (tests/emu).
 *
 * Fragments of a warp (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"), with
 * g = lane / 4 and t = lane % 4; every 32-bit register holds two neighbours, the lower one in its low half:
 *   A [16 rows, 16 k]  r0: (g, 2t..)  r1: (g+8, 2t..)  r2: (g, 2t+8..)  r3: (g+8, 2t+8..)
 *   B [16 k, 8 cols]   r0: (2t.., g)  r1: (2t+8.., g)
 *   C [16 rows, 8 cols], one number a register
 *                      r0: (g, 2t)  r1: (g, 2t+1)  r2: (g+8, 2t)  r3: (g+8, 2t+1)
 * All 32 lanes of a warp call each function.  `box` is MMA_BOX words of shared memory, 16-byte
 * aligned and the warp's own. */
#ifndef LM_KERNELS_CUDA_MMA_CUH
#define LM_KERNELS_CUDA_MMA_CUH

#include "kernels/cuda/pair.cuh"

#ifdef LM_EMU
#define LM_NOINLINE __attribute__((noinline))
#else
#define LM_NOINLINE __noinline__
#endif

/* Lines of 16 numbers lie 20 apart: packs of 8 lines are in different banks. */
enum { MMA_PITCH = 20, MMA_BOX = 24 * MMA_PITCH };

struct mma_a {
    uint32_t r[4];
};
struct mma_b {
    uint32_t r[2];
};
struct mma_c {
    float r[4];
};

/* ---- by ordinary arithmetic ---- */

/* c + a b, sums over k in order. */
template <class T> __device__ LM_NOINLINE mma_c mma_plain(mma_c c, mma_a a, mma_b b, uint32_t *box)
{
    const int pitch = MMA_PITCH;
    int lane = (int)(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    float *rows = reinterpret_cast<float *>(box),
          *cols = rows + 16 * pitch; /* 16 and 8 lines of k */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float *at = rows + (g + i % 2 * 8) * pitch + 2 * t + i / 2 * 8;
        at[0] = low<T>(a.r[i]);
        at[1] = high<T>(a.r[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float *at = cols + g * pitch + 2 * t + i * 8;
        at[0] = low<T>(b.r[i]);
        at[1] = high<T>(b.r[i]);
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 16; k += 4) {
        typedef pack<float, 4> P;
        P x[2], y[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            x[i] = *reinterpret_cast<const P *>(rows + (g + 8 * i) * pitch + k);
            y[i] = *reinterpret_cast<const P *>(cols + (2 * t + i) * pitch + k);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int v = 0; v < 4; v++)
                c.r[i] += x[i / 2].v[v] * y[i % 2].v[v]; /* exact products: 22 bits at most */
        }
    }
    __syncwarp();
    return c;
}

/* ldmatrix .x4: lane 8m + i points to row i (8 elements) of matrix m; register m of lane 4i + t gets
 * elements 2t and 2t+1 of row i, or with TURNED of column i. */
template <class T, bool TURNED>
__device__ LM_NOINLINE mma_a ldmatrix_plain(const T *row, uint32_t *box)
{
    int lane = (int)(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    const char *here = reinterpret_cast<const char *>(box);
    mma_a x;
    box[lane] = (uint32_t)(reinterpret_cast<const char *>(row) - here);
    __syncwarp();
#pragma unroll
    for (int m = 0; m < 4; m++) {
        if (TURNED) {
            const char *lo = here + (int32_t)box[8 * m + 2 * t];
            const char *hi = here + (int32_t)box[8 * m + 2 * t + 1];
            x.r[m] =
                pair_bits(reinterpret_cast<const T *>(lo)[g], reinterpret_cast<const T *>(hi)[g]);
        } else {
            const T *at = reinterpret_cast<const T *>(here + (int32_t)box[8 * m + g]);
            x.r[m] = pair_bits(at[2 * t], at[2 * t + 1]);
        }
    }
    __syncwarp();
    return x;
}

/* ---- by instructions ---- */

#ifndef LM_EMU
__device__ inline uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

#define LM_MMA_SYNC(type)                                                          \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "    \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(c.r[0]), "+f"(c.r[1]), "+f"(c.r[2]), "+f"(c.r[3])          \
                 : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]))
template <class T> __device__ inline mma_c mma_tensor(mma_c c, mma_a a, mma_b b);
template <> __device__ inline mma_c mma_tensor<bf16>(mma_c c, mma_a a, mma_b b)
{
    LM_MMA_SYNC("bf16");
    return c;
}
template <> __device__ inline mma_c mma_tensor<f16>(mma_c c, mma_a a, mma_b b)
{
    LM_MMA_SYNC("f16");
    return c;
}
#undef LM_MMA_SYNC

template <bool TURNED> __device__ inline mma_a ldmatrix_tensor(const void *row)
{
    mma_a x;
    if (TURNED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.r[0]), "=r"(x.r[1]), "=r"(x.r[2]), "=r"(x.r[3])
                     : "r"(shared_address(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.r[0]), "=r"(x.r[1]), "=r"(x.r[2]), "=r"(x.r[3])
                     : "r"(shared_address(row))
                     : "memory");
    return x;
}
#endif

/* ---- either ---- */

template <class T, bool TENSOR>
__device__ inline void mma(mma_c &c, const mma_a &a, const mma_b &b, uint32_t *box)
{
#ifndef LM_EMU
    if (TENSOR) {
        (void)box;
        c = mma_tensor<T>(c, a, b);
        return;
    }
#endif
    c = mma_plain<T>(c, a, b, box);
}

template <class T, bool TURNED, bool TENSOR>
__device__ inline mma_a ldmatrix(const T *row, uint32_t *box)
{
#ifndef LM_EMU
    if (TENSOR) {
        (void)box;
        return ldmatrix_tensor<TURNED>(row);
    }
#endif
    return ldmatrix_plain<T, TURNED>(row, box);
}

/* 16 bytes from global to shared memory, zeros unless `there`.  With TENSOR the copy may be pending
 * until copies_done. */
template <bool TENSOR, class P> __device__ inline void copy_pack(P *to, const P *from, bool there)
{
#ifndef LM_EMU
    if (TENSOR) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
                     : "memory");
        return;
    }
#endif
    *to = there ? *from : P{};
}
template <bool TENSOR> __device__ inline void copies_done(void)
{
#ifndef LM_EMU
    if (TENSOR)
        asm volatile("cp.async.wait_all;" : : : "memory");
#endif
}
/* Several stages in flight: copies_close ends the group of this thread's copies since the group before it, which may be
 * empty; copies_wait waits for all groups but the last N. */
template <bool TENSOR> __device__ inline void copies_close(void)
{
#ifndef LM_EMU
    if (TENSOR)
        asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}
template <bool TENSOR, int N> __device__ inline void copies_wait(void)
{
#ifndef LM_EMU
    if (TENSOR)
        asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
#endif
}

#endif
