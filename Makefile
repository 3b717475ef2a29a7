# SPDX-License-Identifier: Apache-2.0
# lmutils: coreutils for language models.  `make help` lists the targets.
VERSION := 0.1.0
PREFIX  ?= /usr/local
CC      ?= cc
CFLAGS  ?= -O2 -g
B       ?= build

ifeq ($(strip $B),)
$(error B is empty: name the build folder)
endif

# Names of targets have no spaces: a build folder that has some is built through a link of another name.
ifneq ($(words $B),1)
GOALS := $(or $(MAKECMDGOALS),all)
LINK  := .build-$(firstword $(shell printf %s '$(subst ','\'',$B)' | cksum))
export BUILD_FOLDER := $B
.PHONY: $(GOALS) build-folder
$(GOALS): build-folder ;
build-folder:
	@mkdir -p "$$BUILD_FOLDER" && ln -sfn "$$(realpath "$$BUILD_FOLDER")" $(LINK) && $(MAKE) --no-print-directory B=$(LINK) $(GOALS)
else

WARN     := -std=c17 -Wall -Wextra -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes
DEFS     := -I. -Ilib -Icmd -D_GNU_SOURCE -DLM_VERSION='"$(VERSION)"'
COMPILE   = $(CC) $(WARN) $(DEFS) -pthread -fno-math-errno -ffp-contract=off $(CPPFLAGS) $(CFLAGS)
LIBS     := -lz -lzstd -lxxhash -ljansson -lpcre2-8 -lutf8proc -lcairo -lyaml -lm -lpthread
LINK      = $(CC) $(CFLAGS) $(LDFLAGS) -Wl,--as-needed

LIB_SRC := $(sort $(wildcard lib/*/*.c lib/kv/methods/*.c lib/train/optim/*.c lib/tune/*/*.c))
KER_SRC := $(sort $(wildcard kernels/cpu/*.c))
CMN_SRC := $(sort $(wildcard cmd/common/*.c))
# cmd/TOOL.c, and cmd/TOOL/*.c where a tool has parts.
TOOLS   := $(patsubst cmd/%.c,%,$(sort $(wildcard cmd/*.c)))
CMD_SRC := $(sort $(wildcard cmd/*.c $(TOOLS:%=cmd/%/*.c)))

# kernels/cpu/X_simd.c is compiled twice, once for each vector width; every kernel file has its own flags and
# the choice is made at run time (LM_CPU).
SIMD_SRC := $(filter %_simd.c,$(KER_SRC))
FLAGS_avx2   := -O3 -mavx2 -mfma -mf16c -DLM_SIMD=avx2
FLAGS_avx512 := -O3 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512 -DLM_SIMD=avx512
FLAGS_bf16   := $(FLAGS_avx512) -mavx512bf16
FLAGS_amx    := $(FLAGS_bf16) -mavx512vbmi -mamx-tile -mamx-bf16
kernel_flags = $(FLAGS_$(lastword $(subst _, ,$(basename $(notdir $1)))))

KER_OBJ := $(patsubst %.c,$B/%.o,$(filter-out $(SIMD_SRC),$(KER_SRC))) \
           $(patsubst %_simd.c,$B/%_avx2.o,$(SIMD_SRC)) $(patsubst %_simd.c,$B/%_avx512.o,$(SIMD_SRC))
LIB_OBJ := $(patsubst %.c,$B/%.o,$(LIB_SRC))
CMN_OBJ := $(patsubst %.c,$B/%.o,$(CMN_SRC))
CMD_OBJ := $(patsubst %.c,$B/%.o,$(CMD_SRC))
BIN     := $(TOOLS:%=$B/bin/%)

$(if $(V),,.SILENT:)
MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: all help clean FORCE deps check check-unit check-cli check-docs check-fuzz check-asan check-tsan check-interop \
        fuzz lint format bench demo install uninstall dist gen-completions

.PHONY: tools
all: tools ## build every tool into build/bin, the CUDA module where nvcc is, and the module of Open MPI where mpicc is

tools: $(BIN)

help: ## list the targets
	grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 22

$(BIN): $B/bin/%: $B/cmd/%.o $B/libcmd.a $B/libcore.a
	mkdir -p $(@D)
	$(LINK) -o $@ $(filter %.o,$^) $B/libcmd.a $B/libcore.a $(LIBS)
$(foreach t,$(TOOLS),$(eval $B/bin/$t: $(filter $B/cmd/$t/%,$(CMD_OBJ))))

# The last folder that is searched for presets, or the first if the build folder is outside this tree.
$B/cmd/common/modules.o: private DEFS += -DLM_PREFIX='"$(PREFIX)"'
$B/cmd/common/presets.o: private DEFS += -DLM_PREFIX='"$(PREFIX)"' $(if $(filter /%,$B $(BUILD_FOLDER)),-DLM_SHARE='"$(CURDIR)/share"')

# Conversions and sums of whole tensors: loops that -O2 does not vectorise.
$B/lib/numeric/dtype.o $B/lib/comm/tree.o $B/lib/merge/lora.o $B/lib/kv/cachegen_rows.o $B/lib/kv/sensitivity.o: private COMPILE += -O3

# The entropy coder shifts by registers (BMI2) and counts zeros; every processor of these levels can.
FLAGS_bits := -mbmi2 -mlzcnt
$(foreach f,expcode kv_code,$B/kernels/cpu/$f_avx2.o $B/kernels/cpu/$f_avx512.o): private COMPILE += $(FLAGS_bits)

# Tiles of 8-bit integers; every processor with tiles has them.
$B/kernels/cpu/kv_amx.o: private COMPILE += -mamx-int8

# The linker takes only the objects that a tool uses, so only tools that compute contain backends and kernels.
$B/libcmd.a: $(CMN_OBJ)
	rm -f $@ && $(AR) rcs $@ $^

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

# --- the CUDA module -----------------------------------------------------------------------------------------
# Tools open libcore-cuda.so at run time for --device cuda.  The same sources are built
# twice: for GPUs where nvcc is (CUDA=no|auto|folder of the toolkit), and as host code against the emulation in
# tests/emu, for tests.  A module carries its own copies of the few base objects that it calls.
CUDA      ?= auto
# Machine code for these targets, and PTX of the first for all other GPUs.
CUDA_ARCH ?= 80 86 89 90a 100
# CUDA_HOME, NVCC, CUDA_INC, CUDA_LIB, CUDA_TARGETS and CUDA_NCCL (with the header of NCCL), found once by compiling and
# linking; empty without a toolkit.
# A given folder without a toolkit is an error.
EMPTY     :=
CUDA_MK   := $B/cuda-$(subst $(EMPTY) ,-,$(subst /,_,$(strip $(CUDA)))-$(strip $(CUDA_ARCH))).mk
include $(CUDA_MK)
$(CUDA_MK): scripts/probe-cuda
	mkdir -p $(@D)
	scripts/probe-cuda "$(strip $(CUDA))" $(CUDA_ARCH) > $@

CUDA_CU   := $(sort $(wildcard kernels/cuda/*.cu))
CUDA_C    := $(sort $(wildcard kernels/cuda/*.c lib/graph/cuda/*.c))
CUDA_BASE := $(patsubst %,lib/base/%.c,clock err mem memstat cgroup text hash rng) $(patsubst %,lib/numeric/%.c,dtype format_dynamic kv_page portions)

# NVCCFLAGS=-lineinfo lets profilers show source lines, and doubles the module.
NVCCFLAGS    ?=
NVCC_FLAGS    = -std=c++17 -O3 -I. -Ilib -compress-mode=size --Werror all-warnings -Xcompiler -fPIC,-Wall,-Wextra,-fvisibility=hidden $(NVCCFLAGS)
CUDA_MODULE  := $B/lib/lmutils/libcore-cuda.so
CUDA_OBJ      = $(patsubst %,$B/cuda/%.o,$(CUDA_CU) $(CUDA_C) $(CUDA_BASE))

ifneq ($(CUDA_HOME),)
all: $(CUDA_MODULE)
endif

# A module and a program are compatible if both were built from the same contracts.
CONTRACT_H := $(wildcard kernels/*.h) lib/graph/backend.h lib/numeric/tensor.h lib/base/err.h
CONTRACTS  := $(firstword $(shell cat $(CONTRACT_H) | cksum))
KNOW_THEM  := $B/lib/graph/module.o $B/cuda/lib/graph/cuda/backend.c.o $B/emu/lib/graph/cuda/backend.c.o
$(KNOW_THEM): private DEFS += -DLM_CONTRACTS=$(CONTRACTS)
$(KNOW_THEM): $(CONTRACT_H)

.PHONY: cuda emu
cuda: $(if $(CUDA_HOME),$(CUDA_MODULE),no-cuda) ## build the CUDA module alone

.PHONY: no-cuda
no-cuda:
	echo "make: there is no CUDA Toolkit to build the module with: name its folder, CUDA=/usr/local/cuda" >&2
	false

$(CUDA_MODULE): $(CUDA_OBJ)
	mkdir -p $(@D)
	$(CC) -shared -o $@ $(CUDA_OBJ) $(CUDA_LIB)/libcudart_static.a -Wl,--no-undefined -Wl,--exclude-libs,ALL \
	    -Wl,-Bsymbolic -lxxhash -lstdc++ -ldl -lrt -lpthread -lm

$B/cuda/%.cu.o: %.cu $B/.flags-cuda
	mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) $(CUDA_TARGETS) -MD -MP -MF $@.d -c -o $@ $<

$B/cuda/%.c.o: %.c $B/.flags-cuda
	mkdir -p $(@D)
	$(COMPILE) -Werror -fPIC -fvisibility=hidden -isystem $(CUDA_INC) $(CUDA_NCCL) -MMD -MP -MF $@.d -c -o $@ $<

$B/.flags-cuda: export NOW = $(COMPILE) $(CUDA_NCCL) $(NVCC) $(NVCC_FLAGS) $(CUDA_TARGETS)
$B/.flags-cuda: FORCE
	mkdir -p $(@D)
	printf '%s\n' "$$NOW" | cmp -s - $@ || printf '%s\n' "$$NOW" > $@

EMU_MODULE := $B/emu/libcore-cuda.so
EMU_SRC    := $(sort $(wildcard tests/emu/*.c tests/emu/*.cpp))
EMU_OBJ     = $(patsubst %,$B/emu/%.o,$(CUDA_CU) $(CUDA_C) $(CUDA_BASE) $(EMU_SRC))
EMU_FLAGS  := -DLM_EMU -DLM_NCCL -Itests/emu -fPIC -fvisibility=hidden
# fmaf and F16 conversions by instructions of this machine, if it has them; the bits are the same.
EMU_CPU    := $(foreach f,fma f16c,$(if $(shell grep -wm1 $f /proc/cpuinfo 2>/dev/null),-m$f))
EMU_CXX     = $(CXX) -std=c++17 -Wall -Wextra -Wno-unknown-pragmas -I. -Ilib -pthread -ffp-contract=off $(EMU_CPU) $(CPPFLAGS) $(CFLAGS) $(EMU_FLAGS)

emu: $(EMU_MODULE) ## build the CUDA module against the emulation, for tests

$(EMU_MODULE): $(EMU_OBJ)
	mkdir -p $(@D)
	$(CXX) $(CFLAGS) $(LDFLAGS) -shared -o $@ $(EMU_OBJ) -Wl,--no-undefined -Wl,-Bsymbolic -lxxhash -ldl -lpthread -lm

$B/emu/%.cu.o: %.cu $B/.flags
	mkdir -p $(@D)
	$(EMU_CXX) -MMD -MP -MF $@.d -x c++ -c -o $@ $<

$B/emu/%.cpp.o: %.cpp $B/.flags
	mkdir -p $(@D)
	$(EMU_CXX) -MMD -MP -MF $@.d -c -o $@ $<

$B/emu/%.c.o: %.c $B/.flags
	mkdir -p $(@D)
	$(COMPILE) $(EMU_FLAGS) -MMD -MP -MF $@.d -c -o $@ $<

$B/.flags: export NOW = $(COMPILE) $(FLAGS_avx2) $(FLAGS_avx512) $(FLAGS_bf16) $(FLAGS_amx) $(LDFLAGS)
$B/.flags: FORCE
	mkdir -p $(@D)
	printf '%s\n' "$$NOW" | cmp -s - $@ || printf '%s\n' "$$NOW" > $@

# --- the module of Open MPI ------------------------------------------------------------------------------------
# Programs open libcore-mpi.so when a launcher has started several of them (MPI=no|auto|mpicc or another name of it).
MPI     ?= auto
# The file of what was found has the compiler's path in its name, so that one that is installed later is found.
MPICC   := $(if $(filter no,$(MPI)),,$(shell command -v $(if $(filter auto,$(MPI)),mpicc,$(MPI))))
MPI_MK  := $B/mpi-$(subst /,_,$(strip $(MPI))$(MPICC)).mk
include $(MPI_MK)
$(MPI_MK): scripts/probe-mpi
	mkdir -p $(@D)
	scripts/probe-mpi "$(strip $(MPI))" $(CC) > $@

MPI_MODULE := $B/lib/lmutils/libcore-mpi.so
MPI_OBJ    := $(patsubst %,$B/mpi/%.o,$(wildcard lib/comm/mpi/*.c) lib/base/err.c)

WIRE_H     := lib/comm/wire.h lib/base/module.h lib/base/err.h
KNOW_WIRE  := $B/lib/comm/open.o $B/mpi/lib/comm/mpi/mpi.c.o
$(KNOW_WIRE): private DEFS += -DLM_CONTRACTS=$(firstword $(shell cat $(WIRE_H) | cksum))
$(KNOW_WIRE): $(WIRE_H)

ifneq ($(MPI_LIBS),)
all: $(MPI_MODULE)
endif

$(MPI_MODULE): $(MPI_OBJ)
	mkdir -p $(@D)
	$(CC) $(CFLAGS) $(LDFLAGS) -shared -o $@ $(MPI_OBJ) $(MPI_LIBS) -Wl,--no-undefined -Wl,-Bsymbolic

$B/mpi/%.c.o: %.c $B/.flags
	mkdir -p $(@D)
	$(COMPILE) -fPIC -fvisibility=hidden $(MPI_INCLUDE) -MMD -MP -MF $@.d -c -o $@ $<

# --- tests ---------------------------------------------------------------------------------------------------
TEST_SRC := $(sort $(wildcard tests/unit/test_*.c))
TEST_BIN := $(patsubst tests/unit/%.c,$B/tests/unit/%,$(TEST_SRC))
FUZZ_SRC := $(sort $(wildcard tests/fuzz/fuzz_*.c))
FUZZ_BIN := $(patsubst tests/fuzz/%.c,$B/fuzz/%,$(FUZZ_SRC))
FUZZ_SECONDS ?= 5
INJECT   := $B/tests/inject/inject.so
# The tests in tests/interop build these programs themselves, where their other side is installed; all but the one that
# needs another project's headers are linked here too, so that what they call cannot change unseen.
DRIVERS  := $(patsubst %.c,$B/%,$(filter-out %/gguf_peer.c,$(sort $(wildcard tests/interop/*.c))))

# As many jobs as cores, unless the caller chose.
JOBS = $(if $(findstring -j,$(MAKEFLAGS))$(findstring jobserver,$(MAKEFLAGS)),,-j$(shell nproc))

deps: ## install the Debian packages that the build and the tests need (only those that are missing)
	scripts/install-deps build check

check: deps ## install what is missing, build, run every test that this machine can
	$(MAKE) $(JOBS) all tests
	tests/run -b $B unit cli docs fuzz lint

BENCH_CUDA := $B/bench/bench_cuda $B/bench/bench_cuda_decode $B/bench/bench_cuda_predict
.PHONY: tests
tests: $(TEST_BIN) $(DRIVERS) $(INJECT) $(EMU_MODULE) $(BENCH_CUDA) $(if $(MPI_LIBS),$(MPI_MODULE))

check-unit: tests ## unit tests only; T=NAME runs tests/unit/test_NAME*.c
	tests/run -b $B $(if $T,-t $T) unit

check-cli: all tests ## command line tests only; T=NAME runs tests/cli/NAME*.bats
	tests/run -b $B $(if $T,-t $T) cli

check-docs: all ## man pages, completions and the option tables agree; the examples run
	tests/run -b $B $(if $T,-t $T) docs

check-fuzz: ## run every fuzzer for FUZZ_SECONDS on its corpus
	tests/run -b $B $(if $T,-t $T) fuzz

ASAN_FLAGS := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
check-asan: ## unit and command line tests with AddressSanitizer and UBSan
	$(MAKE) $(JOBS) B=$B-asan CUDA=no MPI=no CFLAGS='$(ASAN_FLAGS)' all tests
	tests/run -b $B-asan unit cli

TSAN_FLAGS := -O1 -g -fsanitize=thread
TSAN_TESTS := base_par comm_threads comm_shm comm_messages comm_gather parallel_run model_store train_trainer train_ranks serve_threads
check-tsan: ## the thread pool, ranks and what they exchange, the loading of weights, the trainer and pages that move with ThreadSanitizer
	$(MAKE) $(JOBS) B=$B-tsan CUDA=no MPI=no CFLAGS='$(TSAN_FLAGS)' $(TSAN_TESTS:%=$B-tsan/tests/unit/test_%)
	for t in $(TSAN_TESTS); do tests/run -b $B-tsan -t $$t unit || exit 1; done

lint: ## formatting, includes, man pages, scripts, static analysis
	tests/run -b $B lint

format: ## clang-format every source file
	git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp' | xargs clang-format -i

$(TEST_BIN): $B/tests/unit/%: tests/unit/%.c $B/libcore.a $B/.flags
	mkdir -p $(@D)
	$(COMPILE) -MMD -MP -MF $@.d -o $@ $< $B/libcore.a $(LDFLAGS) $(LIBS) -lcmocka

# They use internals of streams, whose header includes CUDA's.
$B/tests/unit/test_cuda_backend $B/tests/unit/test_cuda_attention_step $B/tests/unit/test_cuda_sample \
$B/tests/unit/test_cuda_norm_linear $B/tests/unit/test_cuda_norm $B/tests/unit/test_cuda_embed: private DEFS += -Itests/emu

$B/tests/unit/test_kv_code_level: private LDFLAGS += -Wl,--wrap=lm_kv_code_at # it sees which level is asked for
$B/tests/unit/test_format_input: private LIBS += -larchive # it writes archives itself

# The emulation alone, with its own test kernels.
EMU_OWN := $(patsubst %,$B/emu/tests/emu/%.o,block.c copy.c cublaslt.c cublaslt_check.c cublaslt_product.c device.c event.c graph.c \
                        launch.c memory.c nccl.c queue.c selftest.cpp)
$B/tests/unit/test_emu: $(EMU_OWN)
$B/tests/unit/test_emu: private DEFS += -Itests/emu
$B/tests/unit/test_emu: private LIBS += $(EMU_OWN) -lstdc++

$(DRIVERS): $B/%: %.c $B/libcore.a $B/.flags
	mkdir -p $(@D)
	$(COMPILE) -MMD -MP -MF $@.d -o $@ $< $B/libcore.a $(LDFLAGS) $(LIBS) -larchive

$(INJECT): tests/inject/inject.c $B/.flags
	mkdir -p $(@D)
	$(CC) $(WARN) -D_GNU_SOURCE -O2 -g -shared -fPIC -o $@ $< -ldl

# Fuzzers: clang's libFuzzer with ASan, against the objects of the parsers compiled the same way.
FUZZ_CC    := clang
FUZZ_FLAGS := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
FUZZ_LIB   := $(patsubst %.c,$B/fuzz/%.o,$(filter lib/base/% lib/numeric/% lib/format/% lib/text/% lib/merge/recipe% lib/merge/yaml.c \
                lib/kv/% lib/parallel/pipeline% lib/comm/comm.c lib/comm/gather.c lib/tune/align/portion.c lib/tune/align/reward% lib/model/config.c lib/model/arch% \
                lib/model/read_% lib/model/rope.c lib/model/tensors.c lib/model/cache_shape.c lib/op/attention_blocks.c lib/convert/names.c lib/convert/gguf_config_% \
                lib/convert/gguf_deepseek.c lib/convert/gguf_encoders.c lib/convert/gguf_keys.c lib/convert/gguf_vocab_get.c lib/convert/gguf_words.c,$(filter-out lib/tune/align/reward_model.c,$(LIB_SRC))))

# The kernels that formats use, at every level.
FUZZ_KER   := $(patsubst %,$B/fuzz/kernels/cpu/%.o,planes_table planes_ref expcode expcode_ref joint_ref rans rans_ref kv_code_ref)
FUZZ_SIMD  := $(foreach f,planes expcode joint rans kv_code,$B/fuzz/kernels/cpu/$(f)_avx2.o $B/fuzz/kernels/cpu/$(f)_avx512.o) \
              $B/fuzz/kernels/cpu/joint_amx.o

# What fuzz_adapter needs beside these: the methods of adaptation, graphs, and the definitions of the operators of their rules.
FUZZ_TUNE  := $(patsubst %.c,$B/fuzz/%.o,$(filter lib/graph/% lib/op/% lib/tune/% lib/model/build% lib/model/decoder.c lib/model/model% \
                lib/model/store% lib/model/fused.c,$(filter-out lib/graph/module.c lib/op/attention_blocks.c lib/tune/align/% lib/tune/ada.c lib/tune/gguf.c lib/tune/join.c \
                lib/tune/partial.c lib/tune/tuning% lib/tune/use.c,$(LIB_SRC)))) \
              $(foreach f,arrange elementwise embed factor map matmul,$B/fuzz/kernels/cpu/$f_ref.o)

fuzz: $(FUZZ_BIN) ## build the fuzzers (clang); run one as build/fuzz/fuzz_NAME tests/fuzz/corpus/NAME

$(FUZZ_LIB) $(FUZZ_KER) $(FUZZ_TUNE): $B/fuzz/%.o: %.c $B/.flags
	mkdir -p $(@D)
	$(FUZZ_CC) $(WARN) $(DEFS) -pthread $(FUZZ_FLAGS) -fsanitize=fuzzer-no-link -MMD -MP -c -o $@ $<

$B/fuzz/%_avx2.o: %_simd.c $B/.flags
	mkdir -p $(@D)
	$(FUZZ_CC) $(WARN) $(DEFS) -pthread $(FLAGS_avx2) $(FLAGS_bits) $(FUZZ_FLAGS) -fsanitize=fuzzer-no-link -MMD -MP -c -o $@ $<

$B/fuzz/%_avx512.o: %_simd.c $B/.flags
	mkdir -p $(@D)
	$(FUZZ_CC) $(WARN) $(DEFS) -pthread $(FLAGS_avx512) $(FLAGS_bits) $(FUZZ_FLAGS) -fsanitize=fuzzer-no-link -MMD -MP -c -o $@ $<

$B/fuzz/%_amx.o: %_amx.c $B/.flags
	mkdir -p $(@D)
	$(FUZZ_CC) $(WARN) $(DEFS) -pthread $(FLAGS_amx) $(FUZZ_FLAGS) -fsanitize=fuzzer-no-link -MMD -MP -c -o $@ $<

$B/fuzz/libparse.a: $(FUZZ_LIB) $(FUZZ_KER) $(FUZZ_SIMD)
	rm -f $@ && $(AR) rcs $@ $^

$B/fuzz/libtune.a: $(FUZZ_TUNE)
	rm -f $@ && $(AR) rcs $@ $^

$B/fuzz/fuzz_adapter: $B/fuzz/libtune.a
$B/fuzz/fuzz_adapter: private FUZZ_MORE := $B/fuzz/libtune.a

$(FUZZ_BIN): $B/fuzz/%: tests/fuzz/%.c $B/fuzz/libparse.a
	$(FUZZ_CC) $(WARN) -Wno-missing-prototypes $(DEFS) -pthread $(FUZZ_FLAGS) -fsanitize=fuzzer -o $@ $< $(FUZZ_MORE) $B/fuzz/libparse.a $(LIBS)

# --- comparison with the Python side -------------------------------------------------------------------------
VENV ?= $B/venv
check-interop: all tests ## compare with transformers and tokenizers (VENV=folder of a virtual environment)
	scripts/make-venv "$(VENV)"
	tests/run -b $B -p "$(VENV)/bin/python" interop

# --- measurements --------------------------------------------------------------------------------------------
BENCH_SRC := $(sort $(wildcard tests/bench/bench_*.c))
BENCH_BIN := $(patsubst tests/bench/%.c,$B/bench/%,$(BENCH_SRC))
BENCH_AID := $(filter-out $(BENCH_SRC),$(sort $(wildcard tests/bench/*.c)))
LLMC ?=
PYTHON ?= python3

# A library is usable if a program of three lines compiles and links.
HASH := \#
probe = $(shell printf '%s\n' '$(HASH)include <$1>' 'int main(void) { return 0; }' | \
                $(CC) -x c - -o /dev/null -Wl,--no-as-needed $2 2>/dev/null && echo yes)

.PHONY: check-cuda bench-cuda bench-cuda-static bench-cuda-predict
check-cuda: ## on a GPU: operators and models against the references, compute-sanitizer; T=NAME as in check-unit
	$(MAKE) $(JOBS) all tests
	scripts/check-cuda -b $B $(if $T,-t $T)

.PHONY: check-nccl
check-nccl: ## on two GPUs or more: exchanges between them, trainings that they share, as threads and as processes
	$(MAKE) $(JOBS) all tests
	scripts/check-nccl -b $B

# --quick, -o FILE, --parts LIST and more: see scripts/bench-cuda.  With --emulated it needs no GPU, and its figures mean nothing.
ARGS ?=
bench-cuda: ## on a GPU: kernels, decoding, training steps, their ceilings and peers; LLMC=, ARGS='--quick -o FILE'
	$(MAKE) $(JOBS) all $(BENCH_CUDA) $(if $(findstring --emulated,$(ARGS)),emu)
	scripts/bench-cuda -b $B --llmc "$(LLMC)" $(if $T,-t $T) $(ARGS)

bench-cuda-static: ## access to memory, registers and spills of the CUDA kernels; T=NAME: of kernels/cuda/NAME*.cu
	scripts/bench-cuda-static -c '$(if $(NVCC),$(NVCC) $(NVCC_FLAGS))' -g '$(CUDA_TARGETS)' $(if $T,-t $T)

bench-cuda-predict: emu $B/bench/bench_cuda_predict ## without a GPU: calls, FLOPs, bytes and least time of a step; T=MODEL
	$B/bench/bench_cuda_predict $B/emu share/models $T

bench: tools ## measure each hot path next to its ceiling; T=NAME: tests/bench/bench_NAME only; PYTHON= one with llama_cpp, torch
	scripts/install-deps build bench
	$(MAKE) $(JOBS) bench-build
	scripts/run-bench -b $B -l "$(LLMC)" -p "$(PYTHON)" $(if $T,-t $T)

.PHONY: bench-build
ifneq ($(filter bench-build,$(MAKECMDGOALS)),)
BENCH_LIBS := $(if $(call probe,dnnl.h,-ldnnl),-DHAVE_DNNL -ldnnl) $(if $(call probe,cblas-openblas.h,-lopenblas),-DHAVE_OPENBLAS -lopenblas)
endif
bench-build: tools $(BENCH_BIN)

$(BENCH_BIN): $B/bench/%: tests/bench/%.c $(BENCH_AID) $(wildcard tests/bench/*.h) $B/libcore.a $B/.flags
	mkdir -p $(@D)
	$(COMPILE) -O3 -o $@ $< $(BENCH_AID) $B/libcore.a $(LDFLAGS) $(BENCH_LIBS) $(LIBS)

# --- the main job --------------------------------------------------------------------------------------------
export CORPUS ?=
demo: ## from raw text to a speaking model on this machine, in minutes; CORPUS='FILE ...' takes your own text
	scripts/install-deps build demo
	$(MAKE) $(JOBS) tools
	PATH="$(abspath $B/bin):$$PATH" $(MAKE) --no-print-directory -f share/recipes/first-light.mk \
	    WORK="$(or $(BUILD_FOLDER),$B)/first-light"

# --- installing ----------------------------------------------------------------------------------------------
TOOLS = $(notdir $(BIN))
install install-built uninstall: export DEST := $(DESTDIR)$(PREFIX)

gen-completions: tools ## write share/completions from the option tables
	mkdir -p share/completions/bash share/completions/zsh share/completions/fish
	for t in $(TOOLS); do \
	    $B/bin/$$t --completion=bash > share/completions/bash/$$t && \
	    $B/bin/$$t --completion=zsh > share/completions/zsh/_$$t && \
	    $B/bin/$$t --completion=fish > share/completions/fish/$$t.fish || exit 1; \
	done

.PHONY: install-built
install: all ## install tools, pages, completions, presets, library and headers under DESTDIR and PREFIX
	$(MAKE) install-built

# Installs existing outputs of the build; paths may contain spaces.  Headers whose comment says "Private to lib/FOLDER" stay here
# (tests/lint/lint); those of kernels are contracts that the others name.
install-built:
	install -d "$$DEST/bin" "$$DEST/lib"
	install -m 755 $(BIN) "$$DEST/bin"
	install -m 644 $B/libcore.a "$$DEST/lib/liblmcore.a"
	$(if $(CUDA_HOME),install -D -m 755 $(CUDA_MODULE) "$$DEST/lib/lmutils/libcore-cuda.so")
	$(if $(MPI_LIBS),install -D -m 755 $(MPI_MODULE) "$$DEST/lib/lmutils/libcore-mpi.so")
	for n in 1 5 7; do \
	    for p in man/man$$n/*.$$n; do \
	        test -f $$p || continue; \
	        install -d "$$DEST/share/man/man$$n" && install -m 644 $$p "$$DEST/share/man/man$$n" || exit 1; \
	    done; \
	done
	for h in $$(grep -LiE 'private to lib/' lib/*/*.h) kernels/*.h; do \
	    d=$$DEST/include/lmcore/$$(basename $$(dirname $$h)); \
	    install -d "$$d" && install -m 644 $$h "$$d" || exit 1; \
	done
	for d in models recipes; do \
	    for p in share/$$d/*; do \
	        test -f $$p || continue; \
	        m=644; test ! -x $$p || m=755; \
	        install -d "$$DEST/share/lmutils/$$d" && install -m $$m $$p "$$DEST/share/lmutils/$$d" || exit 1; \
	    done; \
	done
	d=$$DEST/share; \
	install -d "$$d/bash-completion/completions" "$$d/zsh/site-functions" "$$d/fish/vendor_completions.d" && \
	for t in $(TOOLS); do \
	    install -m 644 share/completions/bash/$$t "$$d/bash-completion/completions" && \
	    install -m 644 share/completions/zsh/_$$t "$$d/zsh/site-functions" && \
	    install -m 644 share/completions/fish/$$t.fish "$$d/fish/vendor_completions.d" || exit 1; \
	done

uninstall: ## remove what install put there
	for t in $(TOOLS); do \
	    rm -f "$$DEST/bin/$$t" "$$DEST/share/bash-completion/completions/$$t" \
	        "$$DEST/share/zsh/site-functions/_$$t" "$$DEST/share/fish/vendor_completions.d/$$t.fish"; \
	done
	for n in 1 5 7; do for p in man/man$$n/*.$$n; do rm -f "$$DEST/share/man/man$$n/$$(basename $$p)"; done; done
	rm -f "$$DEST/lib/liblmcore.a"
	rm -rf "$$DEST/include/lmcore" "$$DEST/share/lmutils" "$$DEST/lib/lmutils"

dist: ## a reproducible source archive of the current commit
	git archive --format=tar --prefix=lmutils-$(VERSION)/ HEAD | gzip -9n > lmutils-$(VERSION).tar.gz

print-%:
	@echo '$($*)'

clean: ## remove the build folder
	rm -rf $B $B-asan $B-tsan
	$(if $(filter .build-%,$B),rm -rf -- "$$BUILD_FOLDER")

-include $(LIB_OBJ:.o=.d) $(KER_OBJ:.o=.d) $(CMN_OBJ:.o=.d) $(CMD_OBJ:.o=.d)
-include $(CUDA_OBJ:=.d) $(EMU_OBJ:=.d) $(MPI_OBJ:=.d)
-include $(TEST_BIN:=.d) $(DRIVERS:=.d) $(FUZZ_LIB:.o=.d) $(FUZZ_KER:.o=.d) $(FUZZ_SIMD:.o=.d) $(FUZZ_TUNE:.o=.d)

endif
