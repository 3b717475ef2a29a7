/* SPDX-License-Identifier: Apache-2.0 */
/* device.c -- the names of devices, for command lines. */
#include <string.h>

#include "graph/backend.h"

bool lm_device_named(const char *device)
{
    size_t n = strlen(device);

    if (!strcmp(device, "cpu") || !strcmp(device, "cuda"))
        return true;
    return n > 5 && n < 9 && !strncmp(device, "cuda:", 5) &&
           strspn(device + 5, "0123456789") == n - 5;
}
