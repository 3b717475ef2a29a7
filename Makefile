# lmutils: coreutils for language models.  `make help` lists the targets.
VERSION := 0.1.0
PREFIX  ?= /usr/local
CC      ?= cc
CFLAGS  ?= -O2 -g
B       ?= build

WARN     := -std=c17 -Wall -Wextra -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes
DEFS     := -I. -Ilib -Icmd -D_GNU_SOURCE -DLM_VERSION='"$(VERSION)"'
COMPILE   = $(CC) $(WARN) $(DEFS) -pthread -fno-math-errno -ffp-contract=off $(CPPFLAGS) $(CFLAGS)
LIBS     := -larchive -lzstd -lxxhash -ljansson -lpcre2-8 -lutf8proc -lcairo -lm -lpthread
LINK      = $(CC) $(CFLAGS) $(LDFLAGS) -Wl,--as-needed

LIB_SRC := $(sort $(wildcard lib/*/*.c))
KER_SRC := $(sort $(wildcard kernels/cpu/*.c))
CMN_SRC := $(sort $(wildcard cmd/common/*.c))
CMD_SRC := $(sort $(wildcard cmd/*.c))

# kernels/cpu/X_simd.c is compiled twice, once for each vector width; every kernel file has its own flags and
# the choice is made at run time (LM_CPU).
SIMD_SRC := $(filter %_simd.c,$(KER_SRC))
FLAGS_avx2   := -O3 -mavx2 -mfma -mf16c -DLM_SIMD=avx2
FLAGS_avx512 := -O3 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512 -DLM_SIMD=avx512
FLAGS_amx    := $(FLAGS_avx512) -mavx512bf16 -mamx-tile -mamx-bf16
kernel_flags = $(FLAGS_$(lastword $(subst _, ,$(basename $(notdir $1)))))

KER_OBJ := $(patsubst %.c,$B/%.o,$(filter-out $(SIMD_SRC),$(KER_SRC))) \
           $(patsubst %_simd.c,$B/%_avx2.o,$(SIMD_SRC)) $(patsubst %_simd.c,$B/%_avx512.o,$(SIMD_SRC))
LIB_OBJ := $(patsubst %.c,$B/%.o,$(LIB_SRC))
CMN_OBJ := $(patsubst %.c,$B/%.o,$(CMN_SRC))
CMD_OBJ := $(patsubst %.c,$B/%.o,$(CMD_SRC))
BIN     := $(patsubst cmd/%.c,$B/bin/%,$(CMD_SRC))

$(if $(V),,.SILENT:)
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: all help clean FORCE

all: $(BIN) ## build every tool into build/bin

help: ## list the targets
	grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 20

$(BIN): $B/bin/%: $B/cmd/%.o $(CMN_OBJ) $B/libcore.a
	mkdir -p $(@D)
	$(LINK) -o $@ $< $(CMN_OBJ) $B/libcore.a $(LIBS)

$B/libcore.a: $(LIB_OBJ) $(KER_OBJ)
	rm -f $@ && $(AR) rcs $@ $^

$(LIB_OBJ) $(CMN_OBJ) $(CMD_OBJ): $B/%.o: %.c $B/.flags
	mkdir -p $(@D)
	$(COMPILE) -MMD -MP -c -o $@ $<

$(filter %_ref.o,$(KER_OBJ)) $(filter %table.o,$(KER_OBJ)): $B/%.o: %.c $B/.flags
	mkdir -p $(@D)
	$(COMPILE) -MMD -MP -c -o $@ $<

$B/%_avx2.o: %_simd.c $B/.flags
	mkdir -p $(@D)
	$(COMPILE) $(FLAGS_avx2) -MMD -MP -c -o $@ $<

$B/%_avx512.o: %_simd.c $B/.flags
	mkdir -p $(@D)
	$(COMPILE) $(FLAGS_avx512) -MMD -MP -c -o $@ $<

$B/kernels/cpu/%.o: kernels/cpu/%.c $B/.flags
	mkdir -p $(@D)
	$(COMPILE) $(call kernel_flags,$<) -MMD -MP -c -o $@ $<

$B/.flags: export NOW = $(COMPILE) $(FLAGS_avx2) $(FLAGS_avx512) $(FLAGS_amx) $(LDFLAGS)
$B/.flags: FORCE
	mkdir -p $(@D)
	printf '%s\n' "$$NOW" | cmp -s - $@ || printf '%s\n' "$$NOW" > $@

clean: ## remove the build folder
	rm -rf $B

-include $(LIB_OBJ:.o=.d) $(KER_OBJ:.o=.d) $(CMN_OBJ:.o=.d) $(CMD_OBJ:.o=.d)
