/* SPDX-License-Identifier: Apache-2.0 */
/* nvToolsExt.h -- an empty replacement of NVTX, the named ranges of a profiler. */
#ifndef LM_EMU_NVTOOLSEXT_H
#define LM_EMU_NVTOOLSEXT_H

static inline int nvtxRangePushA(const char *name)
{
    (void)name;
    return 0;
}
static inline int nvtxRangePop(void)
{
    return 0;
}
static inline void nvtxMarkA(const char *name)
{
    (void)name;
}

#endif
