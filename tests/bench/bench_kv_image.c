/* SPDX-License-Identifier: Apache-2.0 */
/* bench_kv_image -- whole caches outside of a model on one core: from plain rows to codes in the order of files
 * (quantize-kv), back (quantize-kv -d), and between this order and the pages of kernels (--save-cache, --load-cache).
 *
 * usage: bench_kv_image [--quick] [FORM]
 *
 * 4 layers of 8 heads of 128 (64) numbers of 4,096 tokens in BF16.  Rates are of bytes of the plain rows; the best of
 * several rounds counts. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/rng.h"
#include "kv/part.h"
#include "kv/spec.h"

enum { LAYERS = 4, HEADS = 8, PARTS = 2 * LAYERS };

static const char *const forms[] = {
    "int8:first=0,last=0",
    "int4:first=0,last=0",
    "int4:first=0,last=0,rotate=off",
    "int4:first=0,last=0,group=32",
    "int2:first=0,last=0",
    "int4:first=0,last=0,axis=channel",
    "kivi:bits=2,first=0,last=0",
    "kivi:bits=4,first=0,last=0",
    "fp8:first=0,last=0",
    "q8_0:first=0,last=0",
    "q4_0:first=0,last=0",
    "iq4_nl:first=0,last=0",
    "k4v4:first=0,last=0",
    "kvarn:first=0,last=0",
};

static int rounds = 5;
static int64_t tokens = 4096;

static void must(lm_code rc, const lm_err *e)
{
    if (!rc)
        return;
    fprintf(stderr, "bench_kv_image: %s: %s\n", e->where, e->what);
    exit(1);
}

static void *room(size_t bytes)
{
    lm_err e = { 0 };
    void *p = NULL;
    must(lm_alloc_n(&p, bytes, 1, "a cache", &e), &e);
    return p;
}

/* Best seconds of one part each way, added up. */
typedef struct {
    double encode, decode, get, put, coded;
} figures;

static void best(double *of, double from)
{
    *of = fmin(*of, lm_now() - from);
}

static void measure_part(const lm_kv_shape *s, const void *rows, void *back, figures *all)
{
    figures f = { INFINITY, INFINITY, INFINITY, INFINITY, 0 };
    size_t page = s->form->format ? lm_kv_page_bytes(s->form->format, s->page, s->head_dim)
                                  : (size_t)(s->page * s->head_dim) * 2;
    int64_t pages = (s->n + s->page - 1) / s->page * s->kv_heads;
    size_t row = (size_t)s->head_dim * 2, bytes;
    lm_kv_memory m = { .pages = room((size_t)pages * page) };
    lm_err e = { 0 };
    lm_kv_part p;
    m.tail = room((size_t)(s->kv_heads * (s->form->sinks + s->form->residual)) * row + 1);
    must(lm_kv_part_init(s, &p, &e), &e);
    must(lm_kv_part_bytes(s, &bytes, &e), &e);
    for (int i = 0; i < rounds; i++) {
        double t = lm_now();
        must(lm_kv_part_encode(s, rows, &p, lm_cpu_detect(), NULL, &e), &e);
        best(&f.encode, t);
        t = lm_now();
        must(lm_kv_part_decode(s, &p, back, lm_cpu_detect(), NULL, &e), &e);
        best(&f.decode, t);
        t = lm_now();
        must(lm_kv_part_put(s, &p, &m, lm_cpu_detect(), NULL, &e), &e);
        best(&f.put, t);
        t = lm_now();
        must(lm_kv_part_get(s, &m, &p, lm_cpu_detect(), NULL, &e), &e);
        best(&f.get, t);
    }
    all->encode += f.encode, all->decode += f.decode, all->get += f.get, all->put += f.put;
    all->coded += (double)bytes;
    lm_kv_part_fini(&p);
    lm_free(m.pages);
    lm_free(m.tail);
}

static void measure(const char *form, int64_t D, const void *rows, void *back)
{
    lm_kv_site site[LAYERS];
    lm_kv_spec *spec;
    lm_kv_plan *plan;
    lm_err e = { 0 };
    figures f = { 0 };
    double bytes = 2e-9 * (double)(PARTS * HEADS * tokens * D);
    for (int64_t i = 0; i < LAYERS; i++)
        site[i] = (lm_kv_site){ i, LAYERS, HEADS, D, 0, tokens, LM_DTYPE_BF16, true, 0 };
    must(lm_kv_spec_parse(form, &spec, &e), &e);
    must(lm_kv_spec_bind(spec, site, LAYERS, NULL, &plan, &e), &e);
    for (int i = 0; i < PARTS; i++) {
        const lm_kv_shape s = { &plan->side[i], LM_DTYPE_BF16, plan->page, HEADS, D, tokens };
        measure_part(&s, rows, back, &f);
    }
    printf("%-34s %4d  %6.2f  %7.2f  %7.2f  %9.2f  %9.2f\n", form, (int)D,
           8 * f.coded / (double)(PARTS * HEADS * tokens * D), bytes / f.encode, bytes / f.decode,
           bytes / f.get, bytes / f.put);
    fflush(stdout);
    lm_kv_plan_free(plan);
    lm_kv_spec_free(spec);
}

int main(int argc, char **argv)
{
    const char *only = "";
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick"))
            rounds = 2, tokens = 1024;
        else
            only = argv[i];
    }
    size_t n = (size_t)(HEADS * tokens * 128);
    uint16_t *rows = room(2 * n), *back = room(2 * n);
    lm_rng r = lm_rng_make(3, "bench image", 0);
    for (size_t i = 0; i < n; i++)
        rows[i] = lm_f32_to_bf16((float)lm_rng_normal(r, i));
    printf("GB/s of BF16 on one core                   D    bits   encode   decode  to files  to "
           "pages\n");
    for (int64_t D = 128; D >= 64; D -= 64)
        for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
            if (!strncmp(forms[i], only, strlen(only)))
                measure(forms[i], D, rows, back);
    lm_free(rows);
    lm_free(back);
    return 0;
}
