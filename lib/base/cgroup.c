/* SPDX-License-Identifier: Apache-2.0 */
/* cgroup.c -- walk from the group of this process to the root and take the tightest limit. */
#include "base/cgroup.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The path of the group under `controller` ("" = version 2), from lines "ID:CONTROLLERS:PATH". */
static bool find_group(const char *controller, char *out, size_t size)
{
    char line[1024];
    bool found = false;
    FILE *f = fopen("/proc/self/cgroup", "re");

    while (f && !found && fgets(line, sizeof line, f)) {
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;

        if (!path)
            continue;
        *path++ = 0;
        path[strcspn(path, "\n")] = 0;
        names++;
        for (char *save = NULL, *one = *names ? strtok_r(names, ",", &save) : names; one && !found;
             one = *one ? strtok_r(NULL, ",", &save) : NULL) {
            found = !strcmp(one, controller);
        }
        if (found)
            snprintf(out, size, "%s", path);
    }
    if (f)
        fclose(f);
    return found;
}

static bool read_text(const char *root, const char *group, const char *file, char *buf, size_t size)
{
    char path[1200];
    size_t n;
    FILE *f;

    snprintf(path, sizeof path, "%s%s/%s", root, group, file);
    f = fopen(path, "re");
    if (!f)
        return false;
    n = fread(buf, 1, size - 1, f);
    buf[n] = 0;
    fclose(f);
    return n > 0;
}

/* "/a/b" -> "/a" -> "" -> false */
static bool to_parent(char *group)
{
    char *slash = strrchr(group, '/');

    if (!slash)
        return false;
    *slash = 0;
    return true;
}

double lm_cgroup_cpus(void)
{
    char group[1024], buf[128], more[128];
    double best = 0, quota, period;

    if (find_group("", group, sizeof group)) {
        do {
            if (read_text("/sys/fs/cgroup", group, "cpu.max", buf, sizeof buf) &&
                sscanf(buf, "%lf %lf", &quota, &period) == 2 && period > 0 &&
                (best == 0 || quota / period < best))
                best = quota / period;
        } while (to_parent(group));
    }
    if (find_group("cpu", group, sizeof group)) {
        do {
            if (read_text("/sys/fs/cgroup/cpu", group, "cpu.cfs_quota_us", buf, sizeof buf) &&
                read_text("/sys/fs/cgroup/cpu", group, "cpu.cfs_period_us", more, sizeof more) &&
                (quota = atof(buf)) > 0 && (period = atof(more)) > 0 &&
                (best == 0 || quota / period < best))
                best = quota / period;
        } while (to_parent(group));
    }
    return best;
}

static size_t number_after(const char *text, const char *key)
{
    const char *at = strstr(text, key);

    return at ? (size_t)strtoull(at + strlen(key), NULL, 10) : 0;
}

static void take_memory(const char *root, const char *group, const char *max, const char *current,
                        const char *cache, size_t *best)
{
    char limit[64], used[64], stat[8192] = "";
    size_t cap, now, left;

    if (!read_text(root, group, max, limit, sizeof limit) || limit[0] < '0' || limit[0] > '9' ||
        !read_text(root, group, current, used, sizeof used))
        return;
    cap = (size_t)strtoull(limit, NULL, 10);
    now = (size_t)strtoull(used, NULL, 10);
    if (read_text(root, group, "memory.stat", stat, sizeof stat)) {
        size_t file = number_after(stat, cache);
        now = now > file ? now - file : 0;
    }
    left = cap > now ? cap - now : 0;
    if (left < *best)
        *best = left;
}

size_t lm_cgroup_memory_left(void)
{
    char group[1024];
    size_t best = SIZE_MAX;

    if (find_group("", group, sizeof group)) {
        do {
            take_memory("/sys/fs/cgroup", group, "memory.max", "memory.current", "\ninactive_file ",
                        &best);
        } while (to_parent(group));
    }
    if (find_group("memory", group, sizeof group)) {
        do {
            take_memory("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes",
                        "memory.usage_in_bytes", "\ntotal_inactive_file ", &best);
        } while (to_parent(group));
    }
    return best;
}
