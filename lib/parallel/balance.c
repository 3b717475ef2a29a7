/* SPDX-License-Identifier: Apache-2.0 */
/* balance.c -- packing, copying and packing again: groups on nodes, copies of experts, slots on ranks. */
#include "parallel/balance.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>

#include "base/mem.h"

typedef struct {
    double weight;
    int32_t index;
} item;

/* Room for one node's work. */
typedef struct {
    item *order;              /* [most] */
    double *sum;              /* of each pack */
    int32_t *pack, *rank;     /* of each item: its pack, and its place there */
    int32_t *of;              /* of each slot of a node: its expert, counted there */
    int32_t *node, *place;    /* of each group */
    double *weight, *of_slot; /* of the experts of a node; of its slots */
    int32_t *count;           /* copies of these experts; items of each pack */
} space;

static int by_weight(const void *a, const void *b)
{
    const item *x = a, *y = b;
    if (x->weight > y->weight || x->weight < y->weight)
        return x->weight > y->weight ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

/* n items in m packs of n / m each. */
static void pack_items(space *s, const double *weight, int64_t n, int64_t m, int32_t *pack,
                       int32_t *rank)
{
    const int64_t each = n / m;
    for (int64_t i = 0; i < n; i++) {
        s->order[i] = (item){ weight[i], (int32_t)i };
        pack[i] = (int32_t)i;
        rank[i] = 0;
    }
    if (each == 1)
        return;
    qsort(s->order, (size_t)n, sizeof *s->order, by_weight);
    for (int64_t p = 0; p < m; p++) {
        s->sum[p] = 0;
        s->count[p] = 0;
    }
    for (int64_t i = 0; i < n; i++) {
        const item *x = &s->order[i];
        int64_t least = -1;
        for (int64_t p = 0; p < m; p++)
            if (s->count[p] < each && (least < 0 || s->sum[p] < s->sum[least]))
                least = p;
        pack[x->index] = (int32_t)least;
        rank[x->index] = s->count[least]++;
        s->sum[least] += x->weight;
    }
}

/* The experts of the slots of a node: each once, then the hottest again. */
static void copy_experts(space *s, int64_t experts, int64_t slots)
{
    for (int64_t i = 0; i < experts; i++) {
        s->of[i] = (int32_t)i;
        s->count[i] = 1;
    }
    for (int64_t k = experts; k < slots; k++) {
        int64_t hot = 0;
        for (int64_t i = 1; i < experts; i++)
            if (s->weight[i] / s->count[i] > s->weight[hot] / s->count[hot])
                hot = i;
        s->of[k] = (int32_t)hot;
        s->count[hot]++;
    }
    for (int64_t k = 0; k < slots; k++)
        s->of_slot[k] = s->weight[s->of[k]] / s->count[s->of[k]];
}

/* The slots of node number `node`, whose experts are those of the groups packed there, in their order. */
static void fill_node(space *s, const double *load, const lm_balance_ask *a, int64_t groups,
                      int64_t nodes, int64_t node, int32_t *expert_of)
{
    const int64_t size = a->experts / groups, experts = a->experts / nodes,
                  slots = a->slots / nodes, ranks = a->ranks / nodes, each = slots / ranks;
    for (int64_t g = 0; g < groups; g++)
        if (s->node[g] == node)
            for (int64_t i = 0; i < size; i++)
                s->weight[s->place[g] * size + i] = load[g * size + i];
    copy_experts(s, experts, slots);
    pack_items(s, s->of_slot, slots, ranks, s->pack, s->rank);
    for (int64_t k = 0; k < slots; k++) {
        const int64_t place = s->of[k] / size, in = s->of[k] % size;
        int64_t g = 0;
        while (s->node[g] != node || s->place[g] != place)
            g++;
        expert_of[node * slots + s->pack[k] * each + s->rank[k]] = (int32_t)(g * size + in);
    }
}

static lm_code check(const lm_balance_ask *a, lm_err *e)
{
    if (a->experts < 1 || a->groups < 1 || a->experts % a->groups)
        return lm_fail(e, LM_EUSAGE, "groups", NULL,
                       "%" PRId64 " do not divide %" PRId64 " experts", a->groups, a->experts);
    if (a->nodes < 1 || a->ranks < 1 || a->ranks % a->nodes)
        return lm_fail(e, LM_EUSAGE, "nodes", NULL, "%" PRId64 " do not divide %" PRId64 " ranks",
                       a->nodes, a->ranks);
    if (a->slots < a->experts || a->slots % a->ranks || a->slots > INT32_MAX)
        return lm_fail(e, LM_EUSAGE, "slots", NULL,
                       "%" PRId64 " are fewer than %" PRId64
                       " experts, or do not divide by %" PRId64 " ranks",
                       a->slots, a->experts, a->ranks);
    return LM_OK;
}

static lm_code make_space(space *s, size_t n, lm_err *e)
{
    const char *why = "loads of experts";
    return lm_alloc_n(&s->order, n, sizeof *s->order, why, e) ||
                   lm_alloc_n(&s->sum, n, sizeof *s->sum, why, e) ||
                   lm_alloc_n(&s->pack, n, sizeof *s->pack, why, e) ||
                   lm_alloc_n(&s->rank, n, sizeof *s->rank, why, e) ||
                   lm_alloc_n(&s->of, n, sizeof *s->of, why, e) ||
                   lm_alloc_n(&s->node, n, sizeof *s->node, why, e) ||
                   lm_alloc_n(&s->place, n, sizeof *s->place, why, e) ||
                   lm_alloc_n(&s->weight, n, sizeof *s->weight, why, e) ||
                   lm_alloc_n(&s->of_slot, n, sizeof *s->of_slot, why, e) ||
                   lm_alloc_n(&s->count, n, sizeof *s->count, why, e)
               ? e->code
               : LM_OK;
}

static void free_space(space *s)
{
    lm_free(s->order);
    lm_free(s->sum);
    lm_free(s->pack);
    lm_free(s->rank);
    lm_free(s->of);
    lm_free(s->node);
    lm_free(s->place);
    lm_free(s->weight);
    lm_free(s->of_slot);
    lm_free(s->count);
}

lm_code lm_balance_experts(const double *load, const lm_balance_ask *a, int32_t *expert_of,
                           int32_t *copies, lm_err *e)
{
    space s = { 0 };
    if (check(a, e))
        return e->code;
    const bool by_node = a->groups % a->nodes == 0 && a->experts % a->nodes == 0;
    const int64_t groups = by_node ? a->groups : 1, nodes = by_node ? a->nodes : 1,
                  size = a->experts / groups;
    if (!make_space(&s, (size_t)a->slots, e)) {
        for (int64_t g = 0; g < groups; g++) {
            s.weight[g] = 0;
            for (int64_t i = 0; i < size; i++)
                s.weight[g] += load[g * size + i];
        }
        pack_items(&s, s.weight, groups, nodes, s.node, s.place);
        for (int64_t n = 0; n < nodes; n++)
            fill_node(&s, load, a, groups, nodes, n, expert_of);
        for (int64_t i = 0; i < a->experts; i++)
            copies[i] = 0;
        for (int64_t k = 0; k < a->slots; k++)
            copies[expert_of[k]]++;
    }
    free_space(&s);
    return e->code;
}

double lm_balance_peak(const double *load, const lm_balance_ask *a, const int32_t *expert_of,
                       const int32_t *copies)
{
    const int64_t each = a->slots / a->ranks;
    double most = 0, all = 0;
    for (int64_t r = 0; r < a->ranks; r++) {
        double sum = 0;
        for (int64_t k = r * each; k < (r + 1) * each; k++)
            sum += load[expert_of[k]] / copies[expert_of[k]];
        all += sum;
        most = sum > most ? sum : most;
    }
    return all > 0 ? most * (double)a->ranks / all : 1;
}
