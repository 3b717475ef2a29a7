/* SPDX-License-Identifier: Apache-2.0 */
/* joint_ref.c -- pairs and rests of BF16, element by element: the definition. */
#include "kernels/joint.h"

static void split(const lm_joint_map *map, const void *x, size_t n, uint8_t *pair, uint8_t *rest)
{
    const uint8_t *from = x;
    for (size_t i = 0; i < n; i++) {
        unsigned v = from[2 * i] | (unsigned)from[2 * i + 1] << 8, e = v >> 7 & 255;
        unsigned d = e - map->low, m = map->m, index = !e ? 0 : d < m - 1 ? d + 1 : m;
        unsigned rank = map->rank[index << 2 | (v >> 5 & 3)];
        pair[i / 2] = (uint8_t)(i % 2 ? pair[i / 2] | rank >> 2 << 4 : rank >> 2);
        rest[i] = (uint8_t)((v & 31) | (rank & 3) << 5 | v >> 15 << 7);
    }
}

static size_t join(const lm_joint_map *map, const uint8_t *pair, const uint8_t *rest, size_t n,
                   void *x, lm_joint_places *rare)
{
    static const uint8_t set[2][16] = { [LM_JOINT_RARE >> 7] = { 1 << (LM_JOINT_RARE >> 4 & 7) } };
    uint8_t *out = x;
    for (size_t i = 0; i < n; i++) {
        unsigned rank = (pair[i / 2] >> i % 2 * 4 & 15) << 2 | (rest[i] >> 5 & 3);
        out[2 * i] = (uint8_t)(map->below[rank] | (rest[i] & 31));
        out[2 * i + 1] = (uint8_t)(map->high[rank] | (rest[i] & 0x80));
    }
    return lm_joint_ref.find(set, pair, n, rare);
}

static size_t find(const uint8_t set[2][16], const uint8_t *pair, size_t n, lm_joint_places *found)
{
    size_t pairs = (n + 1) / 2, some = 0;
    for (size_t i = 0; i < pairs; i += 32) {
        lm_joint_places p = { (uint32_t)i, 0 };
        for (size_t k = i; k < pairs && k < i + 32; k++) {
            uint32_t in = set[pair[k] >> 7][pair[k] & 15] >> (pair[k] >> 4 & 7) & 1;
            p.bits |= in << (k - i);
        }
        found[some] = p;
        some += p.bits != 0;
    }
    return some;
}

const lm_joint_kernels lm_joint_ref = { split, join, find };
