/* SPDX-License-Identifier: Apache-2.0 */
/* block.c -- the threads of a block, as fibers of one thread of the host.
 *
 * A fiber runs threads of the block one after the other as long as no thread waits.  A thread that
 * waits keeps its fiber, and another fiber continues.  So a kernel without barriers runs on one
 * fiber without a switch.  Threads released by a barrier or shuffle are pushed on a stack of
 * runnable threads, in the requested order.  If the stack is empty, the next thread is started;
 * after the last one, either all threads have ended or the block is deadlocked. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emu_impl.h"

enum {
    STACK = 256 << 10,
    STACK_GUARD = 4096,
    GUARD = 1024, /* bytes checked after the dynamic shared memory */
    MEETS = 8     /* groups of lanes with different masks in one warp at a time */
};
#define GUARD_BYTE 0xa5

#if defined(__x86_64__)
typedef struct {
    void *sp, *bp, *ip;
} context;
#else
#include <ucontext.h>
typedef ucontext_t context;
#endif

typedef struct {
    context at; /* first: the switch writes it */
    char *stack;
#if defined(__SANITIZE_ADDRESS__)
    void *fake;
#endif
} fiber;

typedef struct {
    uint32_t mask, here, unread; /* lanes awaited, arrived, and let go but not yet back */
    uint32_t votes[2];
    int kind, turn;
    uint64_t value[2][32];
} meet;

typedef struct {
    uint32_t lanes; /* that exist */
    meet at[MEETS];
} warp;

enum { NOT_STARTED, RUNNING, IN_BARRIER, IN_WARP, ENDED };
static const char *const kinds[] = { "__syncwarp", "a shuffle", "a vote" };

lm_emu_dim lm_emu_thread_idx, lm_emu_block_idx, lm_emu_block_dim, lm_emu_grid_dim;
unsigned char *lm_emu_shared;
uint64_t emu_kernels, emu_switches;

static struct {
    const lm_emu_launch *kernel;
    const void *args;
    int threads, warps, now, started, ready_n, free_n, fibers_n;
    uint64_t rng;
    fiber host;
    fiber *current;
    bool trapped;
    unsigned arrived, sum[2], bits[2];
    int turn;
    unsigned char *shared;
    lm_emu_dim place[THREADS_MAX];
    uint16_t order[THREADS_MAX]; /* in which threads start */
    uint16_t ready[THREADS_MAX]; /* a stack */
    uint8_t state[THREADS_MAX];
    fiber *fiber_of[THREADS_MAX];
    fiber *free[THREADS_MAX + 1];
    fiber fibers[THREADS_MAX + 1];
    warp warp[WARPS_MAX];
} b;

/* ---- switching ---- */

#if defined(__x86_64__)
static inline void swap(context *from, context *to)
{
    /* rbp cannot be declared as clobbered; all other registers are, so that the compiler keeps what
     * it needs on the stack that it leaves. */
    __asm__ volatile("movq %%rsp, 0(%0)\n\t"
                     "movq %%rbp, 8(%0)\n\t"
                     "leaq 1f(%%rip), %%rax\n\t"
                     "movq %%rax, 16(%0)\n\t"
                     "movq 0(%1), %%rsp\n\t"
                     "movq 8(%1), %%rbp\n\t"
                     "jmp *16(%1)\n"
                     "1:\n\t"
                     : "+D"(from), "+S"(to)
                     :
                     : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14",
                       "r15", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",
                       "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
                       "memory", "cc");
}
#else
static void swap(context *from, context *to)
{
    swapcontext(from, to);
}
#endif

#if defined(__SANITIZE_ADDRESS__)
static const void *host_bottom;
static size_t host_size;

static void find_host_stack(void)
{
    pthread_attr_t attr;
    void *bottom = NULL;
    pthread_getattr_np(pthread_self(), &attr);
    pthread_attr_getstack(&attr, &bottom, &host_size);
    pthread_attr_destroy(&attr);
    host_bottom = bottom;
}
static void before(fiber *from, fiber *to)
{
    if (to->stack)
        __sanitizer_start_switch_fiber(&from->fake, to->stack + STACK_GUARD, STACK - STACK_GUARD);
    else
        __sanitizer_start_switch_fiber(&from->fake, host_bottom, host_size);
}
static void after(fiber *f)
{
    __sanitizer_finish_switch_fiber(f->fake, NULL, NULL);
}
#else
static void find_host_stack(void)
{
}
static inline void before(fiber *from, fiber *to)
{
    (void)from, (void)to;
}
static inline void after(fiber *f)
{
    (void)f;
}
#endif

static __attribute__((noinline)) void go(fiber *from, fiber *to)
{
    emu_switches++;
    b.current = to;
    before(from, to);
    swap(&from->at, &to->at);
    after(from);
}

static void fiber_main(void);

/* At its beginning, with an empty stack.  Tops are spread over cache sets, which equal offsets in
 * stacks of a power of two would all share. */
static void fiber_rewind(fiber *f)
{
    size_t spread = (size_t)(f - b.fibers) % 61 * 448;
    UNPOISON(f->stack + STACK_GUARD, STACK - STACK_GUARD);
#if defined(__SANITIZE_ADDRESS__)
    f->fake = NULL;
#endif
#if defined(__x86_64__)
    void **sp = (void **)(f->stack + STACK - 64 - spread);
    *--sp = NULL; /* where the return address of a call would be */
    f->at = (context){ .sp = sp, .bp = NULL, .ip = (void *)fiber_main };
#else
    getcontext(&f->at);
    f->at.uc_stack.ss_sp = f->stack + STACK_GUARD;
    f->at.uc_stack.ss_size = STACK - STACK_GUARD - spread;
    f->at.uc_link = NULL;
    makecontext(&f->at, fiber_main, 0);
#endif
}

static fiber *fiber_get(void)
{
    if (b.free_n > 0)
        return b.free[--b.free_n];
    fiber *f = &b.fibers[b.fibers_n++];
    f->stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (f->stack == MAP_FAILED) {
        fprintf(stderr, "emulated GPU: no memory for the stack of a thread\n");
        abort();
    }
    mprotect(f->stack, STACK_GUARD, PROT_NONE);
    fiber_rewind(f);
    return f;
}

/* ---- scheduling ---- */

static uint64_t draw(void)
{
    b.rng ^= b.rng << 13;
    b.rng ^= b.rng >> 7;
    b.rng ^= b.rng << 17;
    return b.rng;
}

static void shuffle(uint16_t *x, int n)
{
    for (int i = n - 1; i > 0; i--) {
        int j = (int)((draw() & 0xffffffffu) * (uint64_t)(i + 1) >> 32);
        uint16_t y = x[i];
        x[i] = x[j];
        x[j] = y;
    }
}

static void order_threads(void)
{
    int n = b.threads;
    for (int i = 0; i < n; i++)
        b.order[i] = (uint16_t)(emu_set.order == LM_EMU_BACKWARD ? n - 1 - i : i);
    if (emu_set.order == LM_EMU_SHUFFLED)
        shuffle(b.order, n);
}

/* The fiber to continue with; its thread becomes the running one. */
static fiber *next(void)
{
    if (b.ready_n > 0) {
        b.now = b.ready[--b.ready_n];
        lm_emu_thread_idx = b.place[b.now];
        return b.fiber_of[b.now];
    }
    return b.started < b.threads ? fiber_get() : &b.host;
}

static void fiber_main(void)
{
    after(b.current);
    for (;;) {
        while (b.ready_n == 0 && b.started < b.threads) {
            int t = b.order[b.started++];
            b.now = t;
            lm_emu_thread_idx = b.place[t];
            b.state[t] = RUNNING;
            b.kernel->thread(b.args);
            b.state[t] = ENDED;
        }
        fiber *me = b.current;
        b.free[b.free_n++] = me;
        go(me, next());
    }
}

static void wait_here(int state)
{
    int t = b.now;
    fiber *me = b.current;
    b.fiber_of[t] = me;
    b.state[t] = (uint8_t)state;
    fiber *to = next();
    if (to != me)
        go(me, to);
    b.state[t] = RUNNING;
}

/* ---- collectives ---- */

lm_emu_tally lm_emu_barrier(unsigned add, unsigned bits)
{
    int turn = b.turn;
    if (b.arrived++ == 0)
        b.sum[turn] = b.bits[turn] = 0;
    b.sum[turn] += add;
    b.bits[turn] |= bits;
    if (b.arrived == (unsigned)b.threads) {
        b.arrived = 0;
        b.turn ^= 1;
        if (emu_set.order == LM_EMU_SHUFFLED)
            shuffle(b.order, b.threads);
        for (int i = 0, n = b.threads; i < n; i++)
            b.ready[n - 1 - i] = b.order[i];
        b.ready_n = b.threads;
    }
    wait_here(IN_BARRIER);
    return (lm_emu_tally){ b.sum[turn], b.bits[turn] };
}

/* The group of this mask; one where a thread waits, or whose results are not read yet, cannot be
 * used for another mask. */
static meet *find_meet(warp *w, uint32_t mask)
{
    if (w->at[0].mask == mask)
        return &w->at[0];
    meet *empty = NULL;
    for (int i = 0; i < MEETS; i++) {
        if (w->at[i].mask == mask)
            return &w->at[i];
        if (!empty && !w->at[i].here && !w->at[i].unread)
            empty = &w->at[i];
    }
    if (!empty)
        lm_emu_trap("too many groups of lanes wait in one warp");
    empty->mask = mask;
    return empty;
}

static void release(uint32_t first, uint32_t lanes)
{
    uint16_t *top = b.ready + b.ready_n;
    int n = 0;
    if (emu_set.order == LM_EMU_BACKWARD) {
        for (uint32_t l = lanes; l; l &= l - 1)
            top[n++] = (uint16_t)(first + (uint32_t)__builtin_ctz(l));
    } else {
        for (uint32_t l = lanes; l; l &= ~(0x80000000u >> __builtin_clz(l)))
            top[n++] = (uint16_t)(first + 31 - (uint32_t)__builtin_clz(l));
    }
    if (emu_set.order == LM_EMU_SHUFFLED)
        shuffle(top, n);
    b.ready_n += n;
}

lm_emu_met lm_emu_meet(unsigned mask, int kind, uint64_t value, bool vote)
{
    uint32_t lane = (uint32_t)b.now % 32;
    warp *w = &b.warp[b.now / 32];
    if (!(mask >> lane & 1))
        lm_emu_trap("a lane takes part in a collective whose mask leaves it out");
    meet *m = find_meet(w, mask);
    int turn = m->turn;
    if (m->here == 0) {
        m->votes[turn] = 0;
        m->kind = kind;
    } else if (m->kind != kind) {
        lm_emu_trap("lanes of one warp meet in different collectives");
    }
    m->value[turn][lane] = value;
    m->votes[turn] |= (uint32_t)vote << lane;
    m->here |= (uint32_t)1 << lane;
    if (m->here == (mask & w->lanes)) {
        m->unread = m->here;
        m->here = 0;
        m->turn ^= 1;
        release((uint32_t)(b.now / 32 * 32), m->unread);
    }
    wait_here(IN_WARP);
    m->unread &= ~((uint32_t)1 << lane);
    return (lm_emu_met){ m->value[turn], m->votes[turn], lane };
}

/* ---- blocks ---- */

/* Reset all fibers; the work of their threads is discarded. */
static void rewind_all(void)
{
    b.free_n = 0;
    for (int i = b.fibers_n - 1; i >= 0; i--) {
        fiber_rewind(&b.fibers[i]);
        b.free[b.free_n++] = &b.fibers[i];
    }
}

void lm_emu_trap(const char *why)
{
    lm_emu_dim t = lm_emu_thread_idx, at = lm_emu_block_idx;
    emu_break(cudaErrorLaunchFailure, "kernel %s: block (%u,%u,%u), thread (%u,%u,%u): %s",
              b.kernel->name, at.x, at.y, at.z, t.x, t.y, t.z, why);
    b.trapped = true;
    go(b.current, &b.host);
    abort(); /* no thread returns */
}

static void report_stuck(void)
{
    int count[ENDED + 1] = { 0 }, first[ENDED + 1] = { 0 };
    char warp_text[96] = "";
    for (int t = b.threads - 1; t >= 0; t--) {
        count[b.state[t]]++;
        first[b.state[t]] = t;
    }
    if (count[IN_WARP]) {
        for (int i = 0; i < MEETS; i++) {
            meet *m = &b.warp[first[IN_WARP] / 32].at[i];
            if (m->here)
                snprintf(warp_text, sizeof warp_text, " (thread %d: %s of mask %08x, here %08x)",
                         first[IN_WARP], kinds[m->kind], m->mask, m->here);
        }
    }
    emu_break(cudaErrorLaunchFailure,
              "kernel %s: block (%u,%u,%u): of %d threads %d wait at __syncthreads (first: %d), %d "
              "in a warp's collective%s, and %d have ended (first: %d): a barrier that not all "
              "reach",
              b.kernel->name, lm_emu_block_idx.x, lm_emu_block_idx.y, lm_emu_block_idx.z, b.threads,
              count[IN_BARRIER], first[IN_BARRIER], count[IN_WARP], warp_text, count[ENDED],
              first[ENDED]);
}

static void run_block(void)
{
    b.started = b.ready_n = 0;
    b.arrived = 0;
    b.trapped = false;
    memset(b.state, NOT_STARTED, (size_t)b.threads);
    memset(b.shared, 0xff, b.kernel->shared);
    go(&b.host, fiber_get());
    bool stuck = !b.trapped && memchr(b.state, IN_BARRIER, (size_t)b.threads) != NULL;
    stuck |= !b.trapped && memchr(b.state, IN_WARP, (size_t)b.threads) != NULL;
    if (stuck)
        report_stuck();
    if (stuck || b.trapped) {
        rewind_all();
        memset(b.warp, 0, sizeof b.warp);
    }
}

static void check_shared(void)
{
#if !defined(__SANITIZE_ADDRESS__)
    for (int i = 0; i < GUARD; i++)
        if (b.shared[b.kernel->shared + (size_t)i] != GUARD_BYTE) {
            emu_break(
                cudaErrorLaunchFailure,
                "kernel %s: block (%u,%u,%u) wrote byte %zu of its %zu bytes of shared memory",
                b.kernel->name, lm_emu_block_idx.x, lm_emu_block_idx.y, lm_emu_block_idx.z,
                b.kernel->shared + (size_t)i, b.kernel->shared);
            return;
        }
#endif
}

static void set_up(const lm_emu_launch *k, const void *args)
{
    lm_emu_dim d = k->block;
    if (!b.shared) {
        size_t bytes = SHARED_MAX + GUARD;
        b.shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (b.shared == MAP_FAILED)
            abort();
        lm_emu_shared = b.shared;
    }
    UNPOISON(b.shared, SHARED_MAX + GUARD);
    memset(b.shared + k->shared, GUARD_BYTE, GUARD);
    POISON(b.shared + k->shared, GUARD);
    b.kernel = k;
    b.args = args;
    b.threads = (int)(d.x * d.y * d.z);
    b.rng = emu_set.seed * 0x9e3779b97f4a7c15u + emu_kernels * 0xd1342543de82ef95u + 1;
    b.rng += !b.rng;
    for (int t = 0; t < b.threads; t++)
        b.place[t] =
            (lm_emu_dim){ (unsigned)t % d.x, (unsigned)t / d.x % d.y, (unsigned)t / d.x / d.y };
    for (int w = 0; w * 32 < b.threads; w++)
        b.warp[w].lanes = b.threads - w * 32 >= 32 ? 0xffffffffu : (1u << (b.threads - w * 32)) - 1;
    lm_emu_block_dim = d;
    lm_emu_grid_dim = k->grid;
    order_threads();
    find_host_stack();
}

static uint64_t common(uint64_t x, uint64_t y)
{
    while (y) {
        uint64_t z = x % y;
        x = y;
        y = z;
    }
    return x;
}

void emu_run_grid(const lm_emu_launch *k, const void *args)
{
    uint64_t n = (uint64_t)k->grid.x * k->grid.y * k->grid.z, stride = 1, first = 0;
    set_up(k, args);
    if (emu_set.order == LM_EMU_BACKWARD) {
        first = n - 1;
        stride = n - 1;
    } else if (emu_set.order == LM_EMU_SHUFFLED) {
        /* A stride coprime to the number of blocks visits every block once. */
        first = draw() % n;
        stride = n > 2 ? 1 + draw() % (n - 1) : 1;
        while (common(stride, n) != 1)
            stride = stride % n + 1;
    }
    for (uint64_t i = 0, at = first; i < n && !emu_broken(); i++) {
        lm_emu_block_idx =
            (lm_emu_dim){ (unsigned)(at % k->grid.x), (unsigned)(at / k->grid.x % k->grid.y),
                          (unsigned)(at / k->grid.x / k->grid.y) };
        if (emu_set.order == LM_EMU_SHUFFLED && i > 0)
            shuffle(b.order, b.threads);
        run_block();
        check_shared();
        at = (at + stride) % n;
    }
    UNPOISON(b.shared, SHARED_MAX + GUARD);
    emu_memory_check(k->name);
}
