/* SPDX-License-Identifier: Apache-2.0 */
/* joint_simd.c -- pairs and rests of BF16 with vectors. */
#include "kernels/cpu/joint_body.h"
