/* SPDX-License-Identifier: Apache-2.0 */
/* peer_cpuid.h -- lets oneDNN use AMX where the hypervisor hides CPUID leaf 1Dh.
 *
 * Some virtual machines offer AMX (leaf 7, XCR0, arch_prctl) but answer zeros for the tile palette,
 * leaf 1Dh. oneDNN takes its palette number from there, configures tiles with palette 0 and dies of
 * an illegal instruction.  Once the trap is set, CPUID faults (arch_prctl ARCH_SET_CPUID) and a
 * handler answers with what the processor says, except for the published palette 1 in leaves 1Dh
 * and 1Eh. */
#ifndef LM_BENCH_PEER_CPUID_H
#define LM_BENCH_PEER_CPUID_H

#include <stdbool.h>

/* Set the trap for this thread and those it starts, for good; true if it was needed and possible.
 */
bool lm_peer_cpuid_repair(void);

#endif
