/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv_spec.c -- specifications of caches: the grammar, canonical texts, binding to layers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/json.h"
#include "base/rng.h"
#include "kv/list.h"
#include "kv/spec.h"

enum { LAYERS = 6 };

/* Six layers of 64 numbers a head; the odd ones see 256 tokens, layer 5 sees 16. */
static void make_sites(lm_kv_site *site, int64_t layers)
{
    for (int64_t l = 0; l < layers; l++)
        site[l] = (lm_kv_site){ .layer = l,
                                .layers = layers,
                                .kv_heads = 2,
                                .head_dim = 64,
                                .window = l == 5  ? 16
                                          : l % 2 ? 256
                                                  : 0,
                                .max_positions = 4096,
                                .act = LM_DTYPE_BF16,
                                .rope = true };
}

/* ---- one text each: its canonical form, or its refusal by the grammar, or by the six layers ---- */

#define NO_METHOD "there is no method "
#define OF_ALL    " is of keys and values of all layers"
static const struct {
    const char *text, *canonical, *refused, *bound;
} cases[] = {
    /* names */
    { "auto", "auto", NULL, NULL },
    { "f32", "f32", NULL, NULL },
    { "BF16", "bf16", NULL, NULL },
    { "f16;", "f16", NULL, NULL },
    { "fp8", "fp8_e4m3", NULL, NULL },
    { "fp8-e5m2", "fp8_e5m2", NULL, NULL },
    { "Fp8_E4M3:scale=token", "fp8_e4m3:scale=token", NULL, NULL },
    { "int8", "int8", NULL, NULL },
    { "int6", "int6", NULL, NULL },
    { "q8_0", "q8_0", NULL, NULL },
    { "Q4-0", "q4_0", NULL, NULL },
    { "iq4_nl:rotate=off", "iq4_nl:rotate=off", NULL, NULL },
    { "*=int4", "int4", NULL, NULL },
    /* keys: those with their usual values disappear, in the order of the table */
    { "int4:group=32", "int4", NULL, NULL },
    { "int4:rotate=off,group=64", "int4:group=64,rotate=off", NULL, NULL },
    { "int4:axis=channel,rotate=off,residual=32", "int4:axis=channel", NULL,
      "a query sees 16 tokens, and groups of 32 are coded" },
    { "int4:axis=channel,rotate=on,skip=window", "int4:axis=channel,rotate=on,skip=window", NULL,
      NULL },
    { "int2:residual=0", "int2:residual=0", NULL, NULL },
    { "int2:residual=32", "int2", NULL, NULL },
    { "int8:first=-1,last=1", "int8:first=-1,last=1", NULL, NULL },
    { "int8:sinks=4,sym=off", "int8:sym=off,sinks=4", NULL, NULL },
    { "int8:group=064", "int8:group=64", NULL, NULL },
    /* sides */
    { "k=q8_0,v=q4_0", "k=q8_0,v=q4_0", NULL, NULL },
    { "v=q4_0,k=q8_0", "k=q8_0,v=q4_0", NULL, NULL },
    { "k=int8,v=int8", "int8", NULL, NULL },
    { "k=int8", "k=int8", NULL, NULL },
    { "k=int8,v=auto", "k=int8", NULL, NULL },
    { "k=auto,v=auto", "auto", NULL, NULL },
    { "k=int8;v=int4", "k=int8,v=int4", NULL, NULL },
    { "k=int8:group=32,v=int4:group=16", "k=int8:group=32,v=int4:group=16", NULL, NULL },
    { "v=int4:group=64,sym=on,k=fp8", "k=fp8_e4m3,v=int4:group=64,sym=on", NULL, NULL },
    /* layers */
    { "layers.0-3=int8;*=int4", "layers.0-3=int8;int4", NULL, NULL },
    { "int4;layers.0-3=int8", "layers.0-3=int8;int4", NULL, NULL },
    { "layers.0-3=int8", "layers.0-3=int8", NULL, NULL },
    { "layers.0-3=int8;auto", "layers.0-3=int8", NULL, NULL },
    { "layers.-2--1=bf16;int8", "layers.-2--1=bf16;int8", NULL, NULL },
    { "layers.-1=k=bf16;int8", "layers.-1=k=bf16;int8", NULL, NULL },
    { "layers.0|layers.2-2|-1=int8", "layers.0|2|-1=int8", NULL, NULL },
    { "layers.1--1=int8", "layers.1--1=int8", NULL, NULL },
    { "layers.-6-0=int8", "layers.-6-0=int8", NULL, NULL },
    { "layers.0=k=int8;layers.0=v=int4", "layers.0=k=int8;layers.0=v=int4", NULL, NULL },
    { "layers.0-1=int8;layers.0-2=int4;q8_0", "layers.0-1=int8;layers.0-2=int4;q8_0", NULL, NULL },
    { "layers.0=auto;int4", "layers.0=auto;int4", NULL, NULL },
    { "layers.007=int8", "layers.7=int8", NULL, "there is no layer 7: the model has 6, from 0" },
    /* policies */
    { "h2o", "h2o", NULL, NULL },
    { "h2o:keep=0.2+int8", "h2o+int8", NULL, NULL },
    { "H2O:keep=0.4+auto", "h2o:keep=0.4", NULL, NULL },
    { "*=h2o:keep=2e-1+k=int8,v=int4", "h2o+k=int8,v=int4", NULL, NULL },
    { "layers.0=int8;snapkv:capacity=512+int4", "layers.0=int8;snapkv:capacity=512+int4", NULL,
      NULL },
    { "layers.0=int8;streaming", "layers.0=int8;streaming", NULL, NULL },
    { "snapkv:budget=pyramid,beta=20", "snapkv:budget=pyramid", NULL, NULL },
    { "random:seed=5,protect=prompt", "random:protect=prompt,seed=5", NULL, NULL },
    { "kvmerge:keep=0.5,rule=pivot+k4v4", "kvmerge:rule=pivot+turboquant", NULL, NULL },
    { "kvmerge:threshold=1.5", NULL, "threshold of kvmerge is a number from -1 to 1, not '1.5'",
      NULL },
    { "auto:bits=0", "auto", NULL, NULL },
    { "auto:bits=3", "auto:bits=3", NULL, "auto with bits needs a calibration" },
    /* second names with values; keys of the text replace theirs */
    { "k8v4", "turboquant:kbits=8", NULL, NULL },
    { "K4V4", "turboquant", NULL, NULL },
    { "k8v4:kbits=4,first=0", "turboquant:first=0", NULL, NULL },
    { "k=k4v4,v=turboquant_3bit_nc", "k=turboquant,v=turboquant:kbits=3,vbits=3,rotate=keys", NULL,
      NULL },
    { "kvarn-k4v2-g64:skip=window", "kvarn:group=64,skip=window", NULL, NULL },
    { "k4v2", "kvarn", NULL, "a query sees 16 tokens, and groups of 128 are coded" },
    { "k=kivi:skip=window,v=kivi", "k=kivi:skip=window,v=kivi", NULL, NULL },
    { "kivi:residual=100,skip=window", "kivi:residual=100,skip=window", NULL,
      "100 newest tokens stay plain, and groups of 32 are coded" },
    { "turboquant:kbits=7,first=0", "turboquant:kbits=7,first=0", NULL,
      "there is no table of 7 bits" },
    { "k8v4:kbits=3,kbits=3", NULL, "kbits of turboquant is given twice", NULL },
    /* the grammar refuses */
    { "", NULL, NO_METHOD "''", NULL },
    { ";", NULL, NO_METHOD "''", NULL },
    { "int8;;int4", NULL, NO_METHOD "''", NULL },
    { "int9", NULL, NO_METHOD "'int9'", NULL },
    { " int8", NULL, NO_METHOD "' int8'", NULL },
    { "int", NULL, NO_METHOD "'int'", NULL },
    { "int80", NULL, NO_METHOD "'int80'", NULL },
    { "k=", NULL, NO_METHOD "''", NULL },
    { "*=", NULL, NO_METHOD "''", NULL },
    { "layers.0=", NULL, NO_METHOD "''", NULL },
    { "h2o+", NULL, NO_METHOD "''", NULL },
    { "int4:", NULL, "'' of int4 has no value", NULL },
    { "int4:group=32,", NULL, "'' of int4 has no value", NULL },
    { "int4:group", NULL, "'group' of int4 has no value", NULL },
    { "int4:grp=1", NULL, "int4 has no 'grp'", NULL },
    { "bf16:group=32", NULL, "bf16 has no 'group'", NULL },
    { "int4:group=3.5", NULL, "group of int4 is a whole number from 0 to 4096, not '3.5'", NULL },
    { "int4:group=-1", NULL, "group of int4 is a whole number from 0 to 4096, not '-1'", NULL },
    { "int4:group=nan", NULL, "group of int4 is a whole number from 0 to 4096, not 'nan'", NULL },
    { "int4:axis=row", NULL, "axis of int4 is one of: token channel; not 'row'", NULL },
    { "int4:group=32,group=64", NULL, "group of int4 is given twice", NULL },
    { "int4,group=32", NULL, "',group=32' does not belong to int4", NULL },
    { "int4,int8", NULL, "',int8' does not belong to int4", NULL },
    { "int4,k=int8", NULL, "a method of both keys and values precedes 'k='", NULL },
    { "int4:group=32,v=int8", NULL, "a method of both keys and values precedes 'v='", NULL },
    { "k=int8,k=int4", NULL, "the method of keys is given twice", NULL },
    { "int8;int4", NULL, "the method of keys is given twice", NULL },
    { "v=int8;int4", NULL, "the method of values is given twice", NULL },
    { "k=int8;v=int4;v=q8_0", NULL, "the method of values is given twice", NULL },
    { "K=int8", NULL, "'K=' names neither keys nor values nor layers", NULL },
    { "layer.0=int8", NULL, "'layer.0=' names neither keys nor values nor layers", NULL },
    { "*=layers.0=int8", NULL, "'layers.0=' names neither keys nor values nor layers", NULL },
    { "layers.=int8", NULL, "'layers.=int8' does not name layers", NULL },
    { "layers.0", NULL, "'layers.0' does not name layers", NULL },
    { "layers.-0=int8", NULL, "'layers.-0=int8' does not name layers", NULL },
    { "layers.1-=int8", NULL, "'layers.1-=int8' does not name layers", NULL },
    { "layers.0,1=int8", NULL, "'layers.0,1=int8' does not name layers", NULL },
    { "layers.0||1=int8", NULL, "'layers.0||1=int8' does not name layers", NULL },
    { "layers.9999999=int8", NULL, "'layers.9999999=int8' does not name layers", NULL },
    { "layers.3-1=int8", NULL, "layers 3-1: the first is above the last", NULL },
    { "layers.-1--2=int8", NULL, "layers -1--2: the first is above the last", NULL },
    { "int8+int4", NULL, "int8 is no policy", NULL },
    { "k=int8+int4", NULL, "int8 is no policy", NULL },
    { "k=h2o", NULL, "h2o" OF_ALL, NULL },
    { "layers.0=h2o+int8", NULL, "h2o" OF_ALL, NULL },
    { "h2o+snapkv+int8", NULL, "snapkv" OF_ALL, NULL },
    { "h2o;snapkv", NULL, "snapkv follows h2o: one policy is possible", NULL },
    { "h2o:keep=0.2,k=int8", NULL, "'k=' follows the policy h2o", NULL },
    { "h2o:keep=0", NULL, "keep of h2o is a number from 1e-06 to 1, not '0'", NULL },
    /* the layers refuse */
    { "layers.6=int8", "layers.6=int8", NULL, "there is no layer 6: the model has 6, from 0" },
    { "layers.-7=int8", "layers.-7=int8", NULL, "there is no layer -7: the model has 6, from 0" },
    { "layers.4--3=int8", "layers.4--3=int8", NULL,
      "layers 4--3 of 6: the first is above the last" },
    { "layers.0|0=int8;layers.-6=int4", "layers.0|0=int8;layers.-6=int4", NULL,
      "no keys are left for 'layers.-6'" },
    { "layers.0-5=v=int8;layers.1=k=int8,v=int4", "layers.0-5=v=int8;layers.1=k=int8,v=int4", NULL,
      "no values are left for 'layers.1'" },
    { "int4:group=20", "int4:group=20", NULL,
      "pages of 64 tokens and heads of 64 numbers: groups are multiples of 16, and groups of "
      "tokens "
      "divide a page" },
    { "int4:axis=channel,group=0", "int4:axis=channel,group=0", NULL,
      "scales of channels need groups of tokens" },
    { "int4:axis=channel,residual=48", "int4:axis=channel,residual=48", NULL,
      "48 newest tokens stay plain, and groups of 32 are coded" },
    { "int4:axis=channel,residual=0", "int4:axis=channel,residual=0", NULL,
      "0 newest tokens stay plain, and groups of 32 are coded" },
    { "int4:axis=channel,sinks=4", "int4:axis=channel,sinks=4", NULL,
      "4 first tokens stay plain, and groups of 32 are coded" },
    { "int4:axis=channel", "int4:axis=channel", NULL,
      "a query sees 16 tokens, and groups of 32 are coded" },
    { "layers.0=int4:axis=channel,group=1024;layers.2=int4:axis=channel,group=1072",
      "layers.0=int4:axis=channel,group=1024;layers.2=int4:axis=channel,group=1072", NULL,
      "no page of at most 4096 tokens holds whole groups of 1072 tokens and of the others" },
    { "h2o+int4:axis=channel,skip=window", "h2o+int4:axis=channel,skip=window", NULL,
      "h2o replaces single tokens, and int4:axis=channel,skip=window codes groups of them" },
    { "streaming+k=int2,v=int8", "streaming+k=int2,v=int8", NULL,
      "streaming replaces single tokens, and int2 keeps some plain beside its codes" },
    { "snapkv:window=2048", "snapkv:window=2048", NULL,
      "a capacity of 2048 has no room beside a window of 2048" },
    { "snapkv:kernel=4", "snapkv:kernel=4", NULL, "the kernel 4 is even" },
};

static void texts(void **state)
{
    lm_kv_site site[LAYERS];
    (void)state;
    make_sites(site, LAYERS);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lm_err e = { 0 };
        lm_kv_spec *s, *again;
        lm_kv_plan *p;
        print_message("%s\n", cases[i].text);
        lm_code rc = lm_kv_spec_parse(cases[i].text, &s, &e);
        assert_int_equal(rc, cases[i].refused ? LM_EUSAGE : LM_OK);
        assert_string_equal(e.what, cases[i].refused ? cases[i].refused : "");
        if (rc) {
            assert_string_equal(e.where, "kv cache");
            assert_true(*e.todo || strstr(e.what, "not '")); /* which says what is possible */
            assert_null(s);
            continue;
        }
        assert_string_equal(lm_kv_spec_text(s), cases[i].canonical);
        assert_int_equal(lm_kv_spec_parse(lm_kv_spec_text(s), &again, &e), LM_OK);
        assert_string_equal(lm_kv_spec_text(again), cases[i].canonical);
        rc = lm_kv_spec_bind(s, site, LAYERS, NULL, &p, &e);
        assert_int_equal(rc, cases[i].bound ? LM_EUSAGE : LM_OK);
        assert_string_equal(e.what, cases[i].bound ? cases[i].bound : "");
        if (cases[i].bound && !*e.todo)
            fail_msg("no cure: %s", e.what);
        lm_kv_plan_free(p);
        lm_kv_spec_free(s);
        lm_kv_spec_free(again);
    }
}

/* ---- what is bound ---- */

static lm_kv_plan *bind_text(const char *text, const lm_kv_site *site, int64_t layers)
{
    lm_err e = { 0 };
    lm_kv_spec *s;
    lm_kv_plan *p;
    assert_int_equal(lm_kv_spec_parse(text, &s, &e), LM_OK);
    assert_int_equal(lm_kv_spec_bind(s, site, layers, NULL, &p, &e), LM_OK);
    lm_kv_spec_free(s);
    return p;
}

static void forms(void **state)
{
    lm_kv_site site[LAYERS];
    (void)state;
    make_sites(site, LAYERS);
    lm_kv_plan *p = bind_text("layers.0=f16;layers.1=k=int2:sinks=4,v=q8_0;layers.2=iq4_nl;"
                              "layers.3=int8:group=16,first=4;fp8_e5m2",
                              site, LAYERS);
    const lm_kv_side *s = p->side;
    assert_int_equal(p->layers, LAYERS);
    assert_int_equal(p->page, 64);
    assert_null(p->policy);
    assert_null(s[0].format);
    assert_int_equal(s[1].plain, LM_DTYPE_F16);
    assert_int_equal(s[2].format->bits, 2);
    assert_int_equal(s[2].format->levels, LM_KV_ASYM);
    assert_int_equal(s[2].format->scale, LM_DTYPE_F16);
    assert_int_equal(s[2].residual, 32);
    assert_int_equal(s[2].sinks, 4);
    assert_true(s[2].rotate);
    assert_false(s[2].format->values);
    assert_string_equal(s[2].format->name, "int2:sinks=4");
    assert_true(s[3].format->ggml && s[3].format->values && !s[3].rotate);
    assert_int_equal(s[3].format->levels, LM_KV_SYM);
    assert_int_equal(s[4].format->n_table, 16);
    assert_int_equal(s[6].plain, LM_DTYPE_BF16); /* of the first four layers */
    assert_null(s[6].format);
    assert_int_equal(s[9].format->float8, LM_DTYPE_F8E5M2);
    assert_int_equal(s[9].format->scale, LM_DTYPE_NONE);
    lm_kv_plan_free(p);

    /* Groups of tokens set the page: the least multiple of 64 that holds whole groups of all. */
    p = bind_text(
        "k=int4:axis=channel,group=48,skip=window,v=int4:axis=channel,group=128,skip=window", site,
        LAYERS);
    assert_int_equal(p->page, 384);
    assert_null(p->side[2].format);
    assert_int_equal(p->side[0].residual, 48);
    lm_kv_plan_free(p);

    p = bind_text("streaming:sinks=2,window=100+q8_0", site, LAYERS);
    assert_int_equal(p->policy->kind, LM_KV_STREAMING);
    assert_int_equal(p->policy->sinks, 2);
    assert_int_equal(p->policy->window, 100);
    /* 2 sides, 2 heads, 2 blocks of 34 bytes a token. */
    assert_true(lm_kv_plan_bytes(p, site) == LAYERS * 2 * 2 * 68);
    lm_kv_plan_free(p);
}

/* first=-1: two layers, but at most a quarter of them. */
static void few_layers_are_left_alone(void **state)
{
    lm_kv_site site[16];
    (void)state;
    for (int64_t layers = 1; layers <= 16; layers++) {
        make_sites(site, layers);
        lm_kv_plan *p = bind_text("k=int8:first=-1,last=-1,v=int8:last=3", site, layers);
        int64_t few = layers / 4 < 2 ? layers / 4 : 2;
        for (int64_t l = 0; l < layers; l++) {
            assert_int_equal(!p->side[2 * l].format, l < few || l >= layers - few);
            assert_int_equal(!p->side[2 * l + 1].format, l >= layers - 3);
        }
        lm_kv_plan_free(p);
    }
}

/* Heads of an odd size are not rotated; ggml's blocks need heads of whole blocks. */
static void head_sizes(void **state)
{
    lm_kv_site site[1];
    (void)state;
    for (int64_t d = 1; d <= 256; d++) {
        lm_err e = { 0 };
        lm_kv_spec *s;
        lm_kv_plan *p;
        make_sites(site, 1);
        site[0].head_dim = d;
        p = bind_text("int4", site, 1);
        assert_int_equal(p->side[0].rotate, d % 2 == 0);
        lm_kv_plan_free(p);
        assert_int_equal(lm_kv_spec_parse("k=int8,v=q4_0", &s, &e), LM_OK);
        lm_code rc = lm_kv_spec_bind(s, site, 1, NULL, &p, &e);
        assert_int_equal(rc, d % 32 ? LM_EUSAGE : LM_OK);
        if (rc) {
            assert_string_equal(e.where, "kv cache: values of layer 0: q4_0");
            assert_non_null(strstr(e.what, "are not blocks of 32"));
        }
        lm_kv_plan_free(p);
        lm_kv_spec_free(s);
    }
}

/* ---- each layer and side has one form, or there is one refusal ---- */

typedef struct {
    lm_rng r;
    uint64_t at;
} draws;

static int64_t draw(draws *d, int64_t n)
{
    return (int64_t)lm_rng_below(d->r, d->at++, (uint64_t)n);
}

enum { MOST_ITEMS = 5, MOST_RANGES = 3, MOST_LAYERS = 9 };

typedef struct {
    int n;
    struct {
        int64_t from[MOST_RANGES], to[MOST_RANGES];
        int n_ranges;
        const char *side[2];
    } item[MOST_ITEMS];
    const char *all[2];
    bool wrong; /* a range that no model of these layers has */
} drawn;

static const char *const names[] = { "int8", "int4:group=16", "fp8_e4m3", "bf16", "q8_0" };

static void draw_sides(draws *d, const char *side[2], lm_buf *text, lm_err *e)
{
    int64_t kind = draw(d, 4); /* both, keys, values, each */
    side[0] = kind != 2 ? names[draw(d, 5)] : NULL;
    side[1] = kind == 0 ? side[0] : kind != 1 ? names[draw(d, 5)] : NULL;
    if (kind == 0)
        lm_buf_addf(text, e, "%s", side[0]);
    else
        lm_buf_addf(text, e, "%s%s%s%s%s", side[0] ? "k=" : "", side[0] ? side[0] : "",
                    kind == 3 ? "," : "", side[1] ? "v=" : "", side[1] ? side[1] : "");
}

static void draw_item(draws *d, drawn *t, int64_t layers, lm_buf *text, lm_err *e)
{
    int i = t->n++;
    t->item[i].n_ranges = 1 + (int)draw(d, MOST_RANGES);
    lm_buf_addf(text, e, "layers.");
    for (int k = 0; k < t->item[i].n_ranges; k++) {
        int64_t a = draw(d, layers + draw(d, 9) / 8), b = draw(d, layers);
        if (a > b && a < layers) {
            int64_t c = a;
            a = b;
            b = c;
        }
        b = a >= layers ? a : b;
        t->wrong = t->wrong || a >= layers;
        t->item[i].from[k] = a;
        t->item[i].to[k] = b;
        a -= draw(d, 2) && a < layers ? layers : 0;
        b -= draw(d, 2) && b < layers ? layers : 0;
        lm_buf_addf(text, e, "%s%d", k ? "|" : "", (int)a);
        if (b != a || draw(d, 2))
            lm_buf_addf(text, e, "-%d", (int)b);
    }
    lm_buf_addf(text, e, "=");
    draw_sides(d, t->item[i].side, text, e);
}

/* The name of the method by the rule: the first item that names the layer and sets the side. */
static const char *expected(const drawn *t, int64_t layer, int side, int *item)
{
    for (*item = 0; *item < t->n; ++*item)
        for (int k = 0; k < t->item[*item].n_ranges && t->item[*item].side[side]; k++)
            if (layer >= t->item[*item].from[k] && layer <= t->item[*item].to[k])
                return t->item[*item].side[side];
    return t->all[side] ? t->all[side] : "bf16";
}

static bool all_items_count(const drawn *t, int64_t layers)
{
    int found;
    bool used[MOST_ITEMS][2] = { { false } };
    for (int64_t l = 0; l < layers; l++)
        for (int k = 0; k < 2; k++) {
            expected(t, l, k, &found);
            if (found < t->n)
                used[found][k] = true;
        }
    for (int i = 0; i < t->n; i++)
        for (int k = 0; k < 2; k++)
            if (t->item[i].side[k] && !used[i][k])
                return false;
    return true;
}

static void one_form_for_each_side(void **state)
{
    draws d = { lm_rng_make(11, "kv spec", 0), 0 };
    int bound = 0, refused = 0;
    (void)state;
    for (int trial = 0; trial < 3000; trial++) {
        lm_kv_site site[MOST_LAYERS];
        lm_err e = { 0 };
        lm_buf text = { 0 };
        lm_kv_spec *s;
        lm_kv_plan *p;
        drawn t = { 0 };
        int64_t layers = 1 + draw(&d, MOST_LAYERS), items = draw(&d, MOST_ITEMS + 1);
        int64_t rest =
            draw(&d, items + 1) + draw(&d, 2) * 99; /* its place; beyond: there is no such item */
        make_sites(site, layers);
        for (int64_t i = 0; i <= items; i++) {
            if (i == rest || i < items)
                lm_buf_addf(&text, &e, "%s", text.len ? ";" : "");
            if (i == rest)
                draw_sides(&d, t.all, &text, &e);
            if (i == rest && i < items)
                lm_buf_addf(&text, &e, ";");
            if (i < items)
                draw_item(&d, &t, layers, &text, &e);
        }
        if (!text.len)
            lm_buf_addf(&text, &e, "auto");
        lm_code rc = lm_kv_spec_parse(text.data, &s, &e);
        if (rc) /* a range from -1 to 0 alone is a mistake that depends on no model */
            assert_non_null(strstr(e.what, "the first is above the last"));
        else
            rc = lm_kv_spec_bind(s, site, layers, NULL, &p, &e);
        bool good = !t.wrong && all_items_count(&t, layers);
        if ((rc == LM_OK) != good)
            fail_msg("%s, %d layers: %s", text.data, (int)layers, e.what);
        for (int64_t i = 0; i < 2 * layers && !rc; i++) {
            int item;
            const char *want = expected(&t, i / 2, (int)(i % 2), &item);
            const char *have = p->side[i].format ? p->side[i].format->name : "bf16";
            if (strcmp(want, have))
                fail_msg("%s: layer %d: %s, not %s", text.data, (int)(i / 2), have, want);
            assert_int_equal(p->side[i].plain, LM_DTYPE_BF16);
        }
        bound += rc == LM_OK;
        refused += rc != LM_OK;
        if (!rc)
            lm_kv_plan_free(p);
        lm_kv_spec_free(s);
        lm_buf_fini(&text);
    }
    assert_true(bound > 500 && refused > 300);
}

/* ---- hostile texts ---- */

static void refuses(const char *text)
{
    lm_err e = { 0 };
    lm_kv_spec *s;
    assert_int_equal(lm_kv_spec_parse(text, &s, &e), LM_EUSAGE);
    assert_null(s);
}

/* Repeats a piece up to about `bytes`, and a tail. */
static char *repeat(const char *piece, size_t bytes, const char *tail)
{
    size_t n = strlen(piece), count = bytes / n;
    char *out = malloc(count * n + strlen(tail) + 1);
    for (size_t i = 0; i < count; i++)
        memcpy(out + i * n, piece, n);
    strcpy(out + count * n, tail);
    return out;
}

static void hostile_lengths(void **state)
{
    static const struct {
        const char *piece, *tail;
    } long_ones[] = {
        { "a", "" },       { "int8;", "" },   { "layers.0=int8;", "" },
        { "k=int8,", "" }, { "h2o+", "" },    { "int4:", "" },
        { ":", "" },       { ",", "" },       { "+", "" },
        { "=", "" },       { ";", "" },       { "|", "" },
        { "-", "" },       { "layers.", "" }, { "layers.-", "" },
        { "0", "" },       { "\xff", "" },    { "layers.0|", "0=int8" },
        { "*=", "int8" },  { "v=", "int8" },  { "%s%n", "" },
    };
    (void)state;
    for (size_t i = 0; i < sizeof long_ones / sizeof *long_ones; i++) {
        char *text = repeat(long_ones[i].piece, 1 << 20, long_ones[i].tail);
        refuses(text);
        free(text);
    }
    static const char *const heads[] = { "int4:group=", "int4:", "layers.", "int4:group=1," };
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        char *digits = repeat("1", 1 << 16, ""), *text;
        text = malloc((1 << 16) + 32);
        sprintf(text, "%s%s=1", heads[i], digits);
        refuses(text);
        free(text);
        free(digits);
    }
    char *most = repeat("layers.0=int8;", 256 * 14, ""); /* as many as are possible */
    lm_err e = { 0 };
    lm_kv_spec *s;
    assert_int_equal(lm_kv_spec_parse(most, &s, &e), LM_OK);
    lm_kv_spec_free(s);
    free(most);
}

/* ---- the tables ---- */

static void methods(void **state)
{
    const char *keys, *text;
    (void)state;
    for (int i = 0; lm_kv_method_at(i); i++) {
        const lm_kv_method *m = lm_kv_method_at(i);
        int n = 0;
        assert_ptr_equal(lm_kv_method_find(m->name, &keys), m);
        assert_string_equal(keys, "");
        assert_true(!m->form != !m->policy);
        assert_true(strlen(m->about) > 3);
        for (const lm_hyper *h = m->hyper; h->name; h++, n++) {
            assert_int_equal(lm_hyper_find(m->hyper, h->name), n);
            assert_true(h->value >= h->least && h->value <= h->most);
            assert_non_null(h->help);
            assert_true(strcmp(h->name, "k") && strcmp(h->name, "v")); /* they begin a side */
        }
        assert_true(n <= LM_KV_HYPERS);
        for (int k = 0; k < i; k++)
            assert_true(strcmp(lm_kv_method_at(k)->name, m->name));
    }
    assert_null(lm_kv_method_at(-1));
    /* Each second name is a specification, and no name of a method. */
    for (int i = 0; lm_kv_alias_at(i, &text); i++) {
        lm_err e = { 0 };
        lm_kv_spec *s, *other;
        const char *name = lm_kv_alias_at(i, &text);
        assert_int_equal(lm_kv_spec_parse(name, &s, &e), LM_OK);
        assert_int_equal(lm_kv_spec_parse(text, &other, &e), LM_OK);
        assert_string_equal(lm_kv_spec_text(s), lm_kv_spec_text(other));
        for (int k = 0; lm_kv_method_at(k); k++)
            assert_true(strcmp(lm_kv_method_at(k)->name, name));
        lm_kv_spec_free(s);
        lm_kv_spec_free(other);
    }
}

/* Each method, key and second name is in both lists. */
static void lists(void **state)
{
    lm_buf text = { 0 }, json = { 0 };
    lm_err e = { 0 };
    json_t *all;
    const char *stands_for;
    (void)state;
    assert_int_equal(lm_kv_methods_table(false, &text, &e), LM_OK);
    assert_int_equal(lm_kv_methods_json(false, &json, &e), LM_OK);
    assert_int_equal(lm_json_parse(json.data, json.len, "list", &all, &e), LM_OK);
    const char *at = text.data;
    for (int i = 0; lm_kv_method_at(i); i++) {
        const lm_kv_method *m = lm_kv_method_at(i);
        json_t *own =
            json_object_get(json_object_get(all, m->policy ? "policies" : "methods"), m->name);
        char line[64];
        snprintf(line, sizeof line, "%-16s ", m->name);
        at = strstr(at, line);
        assert_non_null(at);
        assert_string_equal(json_string_value(json_object_get(own, "about")), m->about);
        for (const lm_hyper *h = m->hyper; h->name; h++) {
            snprintf(line, sizeof line, "\n  %-23s ", h->name);
            at = strstr(at, line);
            assert_non_null(at);
            assert_non_null(json_object_get(json_object_get(own, "hyper"), h->name));
            assert_true(strlen(h->help) <= 44); /* the column of ranges */
        }
    }
    for (int i = 0; lm_kv_alias_at(i, &stands_for); i++) {
        const char *name = lm_kv_alias_at(i, &stands_for);
        assert_string_equal(json_string_value(json_object_get(json_object_get(all, "names"), name)),
                            stands_for);
        at = strstr(at, name);
        assert_non_null(at);
    }
    size_t count = 0;
    while (lm_kv_method_at((int)count))
        count++;
    assert_int_equal(json_object_size(json_object_get(all, "methods")) +
                         json_object_size(json_object_get(all, "policies")),
                     count);
    json_decref(all);
    lm_buf_fini(&text);
    lm_buf_fini(&json);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(methods),
        cmocka_unit_test(lists),
        cmocka_unit_test(texts),
        cmocka_unit_test(forms),
        cmocka_unit_test(few_layers_are_left_alone),
        cmocka_unit_test(head_sizes),
        cmocka_unit_test(one_form_for_each_side),
        cmocka_unit_test(hostile_lengths),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
