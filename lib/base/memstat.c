/* SPDX-License-Identifier: Apache-2.0 */
/* memstat.c -- how much memory this process uses, used at its peak, and may still allocate. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cgroup.h"
#include "base/mem.h"

/* The number of kB after `key` in a /proc file, as bytes; 0 if unknown. */
static size_t proc_bytes(const char *path, const char *key)
{
    char line[256];
    size_t n = 0;
    FILE *f = fopen(path, "re");

    while (f && !n && fgets(line, sizeof line, f)) {
        if (!strncmp(line, key, strlen(key)))
            n = (size_t)strtoull(line + strlen(key), NULL, 10) * 1024;
    }
    if (f)
        fclose(f);
    return n;
}

size_t lm_rss_now(void)
{
    return proc_bytes("/proc/self/status", "VmRSS:");
}

size_t lm_rss_peak(void)
{
    return proc_bytes("/proc/self/status", "VmHWM:");
}

size_t lm_mem_available(void)
{
    size_t host = proc_bytes("/proc/meminfo", "MemAvailable:");
    size_t group = lm_cgroup_memory_left();

    host += proc_bytes("/proc/meminfo", "SwapFree:");
    if (!host)
        host = SIZE_MAX;
    return host < group ? host : group;
}
