/* SPDX-License-Identifier: Apache-2.0 */
/* peer_cpuid.c -- the trap described in peer_cpuid.h. */
#include "tests/bench/peer_cpuid.h"

#include <cpuid.h>
#include <signal.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "base/cpu.h"

enum { ARCH_SET_CPUID_CODE = 0x1012 };

static long allow(int on)
{
    return syscall(SYS_arch_prctl, ARCH_SET_CPUID_CODE, on);
}

static void on_fault(int sig, siginfo_t *info, void *context)
{
    ucontext_t *u = context;
    greg_t *r = u->uc_mcontext.gregs;
    const unsigned char *ip = (const unsigned char *)r[REG_RIP];
    unsigned a, b, c, d, leaf = (unsigned)r[REG_RAX], sub = (unsigned)r[REG_RCX];

    (void)info;
    if (ip[0] != 0x0f || ip[1] != 0xa2) { /* a real fault */
        signal(sig, SIG_DFL);
        return;
    }
    allow(1);
    __cpuid_count(leaf, sub, a, b, c, d);
    allow(0);
    if (leaf == 0x1d && sub == 0)
        a = 1; /* highest palette */
    if (leaf == 0x1d && sub == 1) {
        a = 1024 << 16 | 8192; /* bytes of a tile, of all */
        b = 8 << 16 | 64;      /* tiles, bytes of a row */
        c = 16;                /* rows */
    }
    if (leaf == 0x1e && sub == 0)
        b = 64 << 8 | 16;
    r[REG_RAX] = a;
    r[REG_RBX] = b;
    r[REG_RCX] = c;
    r[REG_RDX] = d;
    r[REG_RIP] += 2;
}

bool lm_peer_cpuid_repair(void)
{
    struct sigaction act = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
    unsigned a, b, c, d;

    __cpuid_count(0x1d, 0, a, b, c, d);
    if (lm_cpu_detect() < LM_CPU_AMX || a != 0 || sigaction(SIGSEGV, &act, NULL))
        return false;
    return allow(0) == 0;
}
