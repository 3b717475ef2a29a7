/* SPDX-License-Identifier: Apache-2.0 */
/* answers.c -- the data of align-model: records as answers, windows for them, and the objective. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "align-model/options.h"
#include "base/mem.h"
#include "base/stop.h"
#include "common/training.h"
#include "text/tokenizer_source.h"

enum { USUAL_LENGTH = 1024, USUAL_ROWS = 2048 };

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

int64_t align_length(const align_session *s)
{
    int64_t most = s->t.config.max_positions, unit = lm_offline_unit(&s->spec);
    if (opt.seq)
        most = least(most, opt.seq);
    most = most / unit +
           (lm_offline_rows(&s->spec, 1) == 0); /* of scores the last token has a row, too */
    return least(most, opt.length ? opt.length : USUAL_LENGTH);
}

/* ---- reading ---- */

lm_code align_open_text(align_session *s, lm_err *e)
{
    lm_err none = { 0 };
    if (lm_tokenizer_of(s->t.source, &s->tok, e))
        return e->code;
    if (!s->tok)
        return lm_fail(e, LM_EUSAGE, s->t.ask.model, "name a folder that has one",
                       "the model has no tokenizer");
    /* A model without template serves records without messages. */
    if (lm_chat_open(s->t.source, s->tok, opt.template, &s->chat, &none)) {
        s->chat = NULL;
        if (opt.template || none.code != LM_EUSAGE)
            *e = none;
    }
    return e->code ? e->code : lm_training_template(&opt.template, &s->template, e);
}

static void say_answers(const char *path, const lm_text_answers_stats *st)
{
    lm_say(&tool, LM_LOG_INFO,
           "%s: %" PRId64 " records (%s), %" PRId64 " good and %" PRId64 " bad answers", path,
           st->records, st->form, st->good, st->bad);
    if (st->dropped)
        lm_say(&tool, LM_LOG_WARN,
               "%s: %" PRId64 " of %" PRId64
               " records are left out: too long, or without an answer",
               path, st->dropped, st->records);
    if (st->cut)
        lm_say(&tool, LM_LOG_WARN, "%s: %" PRId64 " answers are cut to the longest length", path,
               st->cut);
}

static lm_code read_answers(align_session *s, const char *path, lm_text_answers **out, lm_err *e)
{
    const lm_text_answers_opts o = { .path = &path,
                                     .n = 1,
                                     .map = &s->map,
                                     .maker = { .tok = s->tok,
                                                .chat = s->chat,
                                                .most = align_length(s),
                                                .cut = LM_CUT_START,
                                                .eos = lm_config_eos(&s->t.config) },
                                     .pairs = lm_align_kind_of(&s->spec) != LM_ALIGN_UNPAIRED &&
                                              !align_distils(s),
                                     .given = align_distils(s),
                                     .limit = opt.max_examples,
                                     .sink = &tool.sink };
    lm_text_answers_opts own = o;
    for (int i = 0; lm_cut_names[i]; i++)
        if (!strcmp(lm_cut_names[i], opt.truncation))
            own.maker.cut = (lm_truncation)i;
    if (lm_text_answers_read(&own, s->t.par, out, e))
        return e->code;
    if (!*out)
        return LM_OK;
    say_answers(path, lm_text_answers_stat(*out));
    return LM_OK;
}

/* ---- windows ---- */

/* Windows of a micro-batch: about so many rows, but not more than a leaf of a step needs. */
static int64_t micro_of(const align_session *s)
{
    const int64_t seq = s->t.o.seq, few = USUAL_ROWS / seq, leaves = s->t.o.leaves;
    if (opt.micro)
        return opt.micro;
    return few < 1 ? 1 : least(few, (opt.batch + leaves - 1) / leaves);
}

static lm_code choose_windows(align_session *s, lm_err *e)
{
    lm_trainer_opts *o = &s->t.o;
    int64_t longest = s->train ? lm_text_answers_stat(s->train)->longest : align_length(s);
    if (s->val && lm_text_answers_stat(s->val)->longest > longest)
        longest = lm_text_answers_stat(s->val)->longest;
    const int64_t own = align_longest_own(s);
    if (own && align_check_positions(s, own - opt.most_new,
                                     "give a smaller one, or cut the data: --max-length", e))
        return e->code;
    longest = own > longest ? own : longest;
    int64_t need = lm_offline_rows(&s->spec, longest);
    if (opt.seq && opt.seq < need)
        return lm_fail(e, LM_EUSAGE, "--seq-len", "use longer windows, or a smaller --max-length",
                       "a record of answers needs %" PRId64 " tokens", need);
    o->seq = opt.seq ? opt.seq : need;
    o->batch = micro_of(s);
    return LM_OK;
}

lm_code align_open_answers(align_session *s, lm_err *e)
{
    lm_session_ask *a = &s->t.ask;
    if (!a->data)
        return choose_windows(s, e);
    if (align_open_text(s, e) || (align_longest_own(s) && align_read_ends(s, e)) ||
        read_answers(s, a->data, &s->train, e) ||
        (opt.loop.val && read_answers(s, opt.loop.val, &s->val, e)))
        return e->code;
    if (lm_strdup(&s->t.train_path, a->data, e) || lm_stopping())
        return e->code;
    return align_agree_on_data(lm_text_answers_digest(s->train), e) ||
                   (s->val && align_agree_on_data(lm_text_answers_digest(s->val), e))
               ? e->code
               : choose_windows(s, e);
}

/* ---- the objective ---- */

/* The weights from which a reference is computed: of a resumed run only an adapter's base still is that model. */
static lm_code digest_weights(align_session *s, const uint8_t **out, lm_err *e)
{
    if (!lm_align_reads_ref(&s->spec) || opt.reference || (s->t.ask.resume && !s->tuning.attach))
        return LM_OK;
    lm_model_source_set_par(s->t.source, s->t.par);
    *out = s->weights;
    return lm_model_source_weights_digest(s->t.source, s->weights, e);
}

lm_code align_make_objective(align_session *s, lm_err *e)
{
    const uint8_t *weights = NULL;
    if (digest_weights(s, &weights, e))
        return e->code;
    const lm_offline_opts o = { .spec = &s->spec,
                                .train = s->train,
                                .val = s->val,
                                .each = opt.batch,
                                .vocab = s->t.config.vocab,
                                .pad = s->t.config.pad,
                                .seq = s->t.o.seq,
                                .seed = (uint64_t)tool.seed,
                                .check = opt.loop.eval_batches,
                                .reference = s->reference,
                                .kept = s->kept,
                                .weights = weights,
                                .reference_model = s->ref_base,
                                .reference_adapter = s->ref_adapter,
                                .reference_shares = align_shares_reference(s),
                                .tokenizer = s->tok,
                                .sink = &tool.sink };
    if (lm_align_entropy(&s->spec) == LM_ENTROPY_COLLISION)
        s->t.o.entropy = LM_ENTROPY_COLLISION;
    if (lm_offline_new(&o, &s->offline, e))
        return e->code;
    s->t.ask.objective = lm_offline_objective(s->offline);
    double micros = ceil(lm_offline_micros(s->offline, s->t.o.batch));
    s->t.o.accumulate = micros > 1 ? (int64_t)micros : 1;
    return LM_OK;
}

void align_close_answers(align_session *s)
{
    lm_offline_free(s->offline);
    lm_text_answers_free(s->train);
    lm_text_answers_free(s->val);
    lm_text_record_map_fini(&s->map);
    lm_free(s->template);
    lm_chat_free(s->chat);
    lm_tokenizer_free(s->tok);
}
