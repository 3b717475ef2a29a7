/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer_match.c -- see tokenizer_match.h. */
#include "text/tokenizer_match.h"

#include <inttypes.h>

#include "base/hash.h"
#include "base/text.h"

static const char go_on[] = "use files that belong together, or go on without the tokenizer check";

/* XXH3-64 of the tokens 0 to ids-1, each followed by a zero byte (an id without a token is that
 * byte alone); the texts are those of lm_tokenizer_token. */
static uint64_t digest_tokens(const lm_tokenizer *t, int64_t ids)
{
    lm_hash128 h;
    lm_hash128_init(&h);
    for (int64_t i = 0; i < ids; i++) {
        size_t len = 0;
        const char *token = lm_tokenizer_token(t, (uint32_t)i, &len);
        if (token)
            lm_hash128_add(&h, token, len);
        lm_hash128_add(&h, "", 1);
    }
    return lm_hash128_end64(&h);
}

lm_tokens_tokenizer lm_tokenizer_identity(const lm_tokenizer *t)
{
    int64_t ids = lm_tokenizer_vocab_size(t);
    return (lm_tokens_tokenizer){ .ids = ids, .digest = digest_tokens(t, ids) };
}

lm_code lm_token_reader_check(const lm_token_reader *r, const lm_tokens *data, lm_err *e)
{
    lm_tokens_tokenizer made = lm_tokens_made_with(data);
    if (lm_tokens_vocab(data) > r->vocab)
        return lm_fail(e, LM_EUSAGE, lm_tokens_path(data), go_on,
                       "its vocabulary has %" PRId64 " ids, that of %s has %" PRId64,
                       lm_tokens_vocab(data), r->name, r->vocab);
    if (!r->tok || !made.ids)
        return LM_OK;
    int64_t ids = lm_tokenizer_vocab_size(r->tok);
    if (ids >= made.ids && digest_tokens(r->tok, made.ids) == made.digest)
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, lm_tokens_path(data), go_on,
                   "it was made with another tokenizer (%" PRId64 " id%s) than that of %s (%" PRId64
                   " id%s)",
                   made.ids, lm_plural(made.ids), r->name, ids, lm_plural(ids));
}

lm_code lm_tokens_check_same(const lm_tokens *a, const lm_tokens *b, lm_err *e)
{
    lm_tokens_tokenizer x = lm_tokens_made_with(a), y = lm_tokens_made_with(b);
    if (!x.ids || !y.ids || (x.ids == y.ids && x.digest == y.digest))
        return LM_OK;
    return lm_fail(e, LM_EUSAGE, lm_tokens_path(b), go_on,
                   "it was made with another tokenizer (%" PRId64 " id%s) than %s (%" PRId64
                   " id%s)",
                   y.ids, lm_plural(y.ids), lm_tokens_path(a), x.ids, lm_plural(x.ids));
}

lm_code lm_token_reader_accepts(const lm_token_reader *r, const lm_tokenizer *t, const char *path,
                                lm_err *e)
{
    int64_t ids = lm_tokenizer_vocab_size(t), own = r->tok ? lm_tokenizer_vocab_size(r->tok) : 0;
    int64_t both = own < ids ? own : ids;
    if (r->tok && digest_tokens(t, both) != digest_tokens(r->tok, both))
        return lm_fail(e, LM_EUSAGE, path, go_on, "it has other tokens than the tokenizer of %s",
                       r->name);
    if (!r->tok && ids < r->vocab / 10 * 9)
        return lm_fail(e, LM_EUSAGE, path, go_on,
                       "it has only %" PRId64 " id%s, the vocabulary of %s is %" PRId64, ids,
                       lm_plural(ids), r->name, r->vocab);
    return LM_OK;
}
