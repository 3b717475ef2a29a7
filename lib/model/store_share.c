/* SPDX-License-Identifier: Apache-2.0 */
/* store_share.c -- rank 0 reads, and the stores of all ranks take their parts. */
#include "model/store_impl.h"

/* In front of a tensor's bytes: the number of its block and its own there; block -1: that was the last. */
typedef struct {
    int32_t block, tensor;
} heading;

lm_code store_send(lm_store *s, const lm_store_block *k, const store_piece *p, const void *made,
                   lm_err *e)
{
    const store_piece whole = store_whole(p);
    heading h = { (int32_t)(k - s->block), k->state ? 0 : p->tensor };
    while (store_piece_of(s, k, h.tensor).tensor != p->tensor)
        h.tensor++;
    return lm_comm_broadcast(s->shared, &h, sizeof h, 0, e) ||
                   lm_comm_broadcast(s->shared, (void *)(uintptr_t)made, store_bytes(k, &whole), 0,
                                     e)
               ? e->code
               : LM_OK;
}

lm_code lm_store_share(lm_store *s, lm_comm *c, lm_err *e)
{
    heading end = { -1, 0 };
    lm_comm *before = s->shared;
    s->shared = c;
    return before && !c ? lm_comm_broadcast(before, &end, sizeof end, 0, e) : LM_OK;
}

/* True for the number of a tensor of a block of this store. */
static bool is_here(const lm_store *s, const heading *h)
{
    return h->block < s->n_blocks && h->tensor >= 0 &&
           h->tensor < lm_store_tensors(s, &s->block[h->block]);
}

lm_code lm_store_receive(lm_store *s, lm_comm *c, lm_err *e)
{
    heading h;
    while (!lm_comm_broadcast(c, &h, sizeof h, 0, e) && h.block >= 0) {
        if (!is_here(s, &h)) {
            lm_fail(e, LM_EBUG, "ranks", NULL, "have stores of different blocks");
            break;
        }
        const lm_store_block *k = &s->block[h.block];
        const store_piece p = store_piece_of(s, k, h.tensor), whole = store_whole(&p);
        void *to = store_open(s, k, &p, e);
        if (!to || lm_comm_broadcast(c, to, store_bytes(k, &whole), 0, e) ||
            store_close(s, k, &p, to, e) || store_into_panels(s, k, h.tensor, e))
            break;
    }
    store_end(s);
    return e->code;
}
