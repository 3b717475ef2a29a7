/* SPDX-License-Identifier: Apache-2.0 */
/* peer_cpuid.h -- lets oneDNN use AMX where the hypervisor hides CPUID leaf 1Dh.
 *
 * Some virtual machines offer AMX (leaf 7, XCR0, arch_prctl) but answer zeros for the tile palette,
 * leaf 1Dh. oneDNN reads its palette number there, configures tiles with palette 0 and is killed by
 * an illegal instruction.  Once the trap is set, CPUID faults (arch_prctl ARCH_SET_CPUID) and a
 * handler returns the processor's values, except for the published palette 1 in leaves 1Dh and
 * 1Eh. */
#ifndef LM_BENCH_PEER_CPUID_H
#define LM_BENCH_PEER_CPUID_H

#include <stdbool.h>

/* Set the trap permanently for this thread and those it starts; true if it was needed and possible.
 */
bool lm_peer_cpuid_repair(void);

#endif
