/* SPDX-License-Identifier: Apache-2.0 */
/* cpu.c -- CPUID and XGETBV, and the request for AMX tiles that Linux requires (arch_prctl). */
#include "base/cpu.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>

enum { REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 }; /* asm/prctl.h, x86 xstate numbers */

static bool has(unsigned reg, int bit)
{
    return reg >> bit & 1;
}

static unsigned enabled_state(void)
{
    unsigned lo, hi;

    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return lo;
}

static lm_cpu_level detect(void)
{
    unsigned a, b, c, d, b7, c7, d7, c1, a71 = 0, state;

    if (!__get_cpuid(1, &a, &b, &c1, &d) || !has(c1, 27)) /* OSXSAVE */
        return LM_CPU_REF;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7))
        return LM_CPU_REF;
    if (a >= 1 && !__get_cpuid_count(7, 1, &a71, &b, &c, &d))
        a71 = 0;
    state = enabled_state();
    if ((state & 0x6) != 0x6 || !has(c1, 12) || !has(c1, 29) || !has(b7, 5)) /* FMA F16C AVX2 */
        return LM_CPU_REF;
    if (!has(b7, 8) || !__get_cpuid(0x80000001u, &a, &b, &c, &d) || !has(c, 5)) /* BMI2 LZCNT */
        return LM_CPU_REF;
    if ((state & 0xe6) != 0xe6 || !has(b7, 16) || !has(b7, 17) || !has(b7, 30) || !has(b7, 31))
        return LM_CPU_AVX2; /* AVX512 F DQ BW VL */
    if (!has(a71, 5))
        return LM_CPU_AVX512;
    if ((state & 0x60000) != 0x60000 || !has(d7, 22) || !has(d7, 24) || !has(d7, 25) || !has(c7, 1))
        return LM_CPU_BF16; /* AMX-BF16 AMX-TILE AMX-INT8 VBMI */
    if (syscall(SYS_arch_prctl, REQ_XCOMP_PERM, XFEATURE_XTILEDATA))
        return LM_CPU_BF16;
    return LM_CPU_AMX;
}

static bool detect_vnni(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && has(c, 11);
}

static void read_model(char out[49])
{
    unsigned r[12];

    if ((unsigned)__get_cpuid_max(0x80000000u, NULL) < 0x80000004u)
        return;
    for (unsigned i = 0; i < 3; i++)
        __get_cpuid(0x80000002u + i, &r[4 * i], &r[4 * i + 1], &r[4 * i + 2], &r[4 * i + 3]);
    memcpy(out, r, 48);
}
#else
static lm_cpu_level detect(void)
{
    return LM_CPU_REF;
}

static bool detect_vnni(void)
{
    return false;
}

static void read_model(char out[49])
{
    (void)out;
}
#endif

static pthread_once_t once = PTHREAD_ONCE_INIT;
static lm_cpu_level level;
static bool vnni;
static char model[49];
static const char *const names[] = { "ref", "avx2", "avx512", "avx512bf16", "amx", NULL };

static void detect_once(void)
{
    char text[49] = "";
    size_t n = 0;

    level = detect();
    vnni = level >= LM_CPU_AVX512 && detect_vnni();
    read_model(text);
    for (const char *s = text; *s; s++) { /* the brand string is padded with spaces */
        if (*s != ' ' || (n && model[n - 1] != ' '))
            model[n++] = *s;
    }
    if (n && model[n - 1] == ' ')
        n--;
    model[n] = 0;
    if (!n)
        strcpy(model, "unknown processor");
}

lm_cpu_level lm_cpu_detect(void)
{
    pthread_once(&once, detect_once);
    return level;
}

bool lm_cpu_has_vnni(void)
{
    pthread_once(&once, detect_once);
    return vnni;
}

const char *lm_cpu_level_name(lm_cpu_level l)
{
    return l >= LM_CPU_REF && l <= LM_CPU_AMX ? names[l] : "unknown";
}

lm_code lm_cpu_level_parse(const char *name, lm_cpu_level *out, lm_err *e)
{
    lm_cpu_level most = lm_cpu_detect();

    for (int i = 0; names[i]; i++) {
        if (strcmp(name, names[i]))
            continue;
        if (i > (int)most)
            return lm_fail(e, LM_EUSAGE, "LM_CPU", NULL,
                           "'%s' is requested, this processor supports '%s' at most", name,
                           names[most]);
        *out = (lm_cpu_level)i;
        return LM_OK;
    }
    return lm_fail(e, LM_EUSAGE, "LM_CPU", "choose from ref, avx2, avx512, avx512bf16, amx",
                   "unknown level '%s'", name);
}

const char *lm_cpu_model(void)
{
    pthread_once(&once, detect_once);
    return model;
}
