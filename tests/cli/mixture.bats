#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Mixtures of experts in every tool that computes.

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    for i in {1..60}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    train-tokenizer -q -V 300 -o tokenizer.json t.jsonl
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
}

small() { # PRESET OUT [KEY=VALUE ...]
    local preset=$1 out=$2 set=()
    shift 2
    for kv in hidden_size=32 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=2 "$@"; do
        set+=(--set "$kv")
    done
    init-model -q -f "$preset" -t tokenizer.json "${set[@]}" -o "$out"
}

loss() {
    eval-model -q "$@" t.jsonl --seq-len 32 --json | sed -E 's/.*"loss":([0-9.]+).*/\1/'
}

moments() { # FILE PATTERN: mean and deviation of a tensor
    inspect-model --stats --json --only "$2" "$1" | grep -o '"mean":[^,]*,"std":[^,]*' | head -n 1
}

@test "mixtures: each architecture trains, and resumes to the bit" {
    small mixtral-8x7b mixtral intermediate_size=24
    small qwen1.5-moe-14b qwen2 num_experts=6 num_experts_per_tok=2 moe_intermediate_size=16 shared_expert_intermediate_size=20
    small qwen3-moe-13m qwen3 head_dim=16 moe_intermediate_size=24
    for m in mixtral qwen2 qwen3; do
        args=(--batch-size 2 --seq-len 32 --lr 3e-3 --lr-schedule constant --save-every 4)
        train -q "$m" data -o "$m-8" --steps 8 "${args[@]}"
        train -q "$m" data -o "$m-4" --steps 4 "${args[@]}"
        train -q --resume "$m-4" --steps 8
        inspect-model --check "$m-8" "$m-4" > /dev/null
        awk -v a="$(loss "$m")" -v b="$(loss "$m-8")" 'BEGIN { exit !(b < a - 0.3) }'
    done
}

@test "mixtures: the same loss in BF16 within its rounding, with recomputation, and for any number of threads" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24
    train -q m data -o run --steps 30 --batch-size 2 --seq-len 32 --lr 3e-3
    one=$(loss run)
    [ "$(loss run -j 1)" = "$one" ]
    awk -v a="$one" -v b="$(loss run --dtype bf16)" 'BEGIN { d = a - b; exit !(d < 0.02 && d > -0.02) }'
    train -q m data -o full --steps 30 --batch-size 2 --seq-len 32 --lr 3e-3 --recompute full
    inspect-model --check run full > /dev/null
}

@test "mixtures: greedy texts are those of one by one, and of an adapter merged" {
    small qwen1.5-moe-14b m num_experts=6 num_experts_per_tok=2 moe_intermediate_size=16 shared_expert_intermediate_size=20
    train -q m data -o run --steps 30 --batch-size 2 --seq-len 32 --lr 3e-3
    generate -q run -p "the river" -n 8 --temperature 0 > a
    generate -q run -p "the old bridge" -n 8 --temperature 0 > b
    generate -q run --serve-batch 2 -p "the river" -p "the old bridge" -n 8 --temperature 0 > both
    cat a b | cmp - both
    peft-tune -q run t.jsonl -o adapter --steps 20 --seq-len 32 --lr 3e-3
    merge-models -q --method passthrough run+adapter -o merged
    awk -v a="$(loss run --adapter adapter)" -v b="$(loss merged)" 'BEGIN { d = a - b; exit !(d < 1e-5 && d > -1e-5) }'
    awk -v a="$(loss run)" -v b="$(loss merged)" 'BEGIN { exit !(b < a) }'
}

@test "mixtures: noise that routers learn trains, resumes to the bit, and is in training alone" {
    small mixtral-8x7b m intermediate_size=64 gate_add_noise=true gate_noise_epsilon=0.01
    args=(--batch-size 2 --seq-len 32 --lr 3e-3 --lr-schedule constant --save-every 4 --moe-aux-loss-type load
        --moe-aux-loss-coeff 0.1)
    train -q m data -o m-8 --steps 8 "${args[@]}"
    train -q -j 1 m data -o m-4 --steps 4 "${args[@]}"
    train -q --resume m-4 --steps 8
    inspect-model --check m-8 m-4 > /dev/null
    awk -v a="$(loss m)" -v b="$(loss m-8)" 'BEGIN { exit !(b < a - 0.3) }'
    [ "$(moments m '*layers.1*gate.weight_noise*')" = '"mean":0,"std":0' ]
    [ "$(moments m-8 '*layers.1*gate.weight_noise*')" != '"mean":0,"std":0' ]
    # evaluation is that of the same weights without noise
    want=$(loss m-8)
    convert-model -q m-8 -o plain
    inspect-model --verify plain > /dev/null
    generate -q plain -p "the river" -n 8 --temperature 0 > noisy.txt
    sed -i 's/"gate_add_noise": true/"gate_add_noise": false/' plain/config.json
    [ "$(loss plain)" = "$want" ]
    generate -q plain -p "the river" -n 8 --temperature 0 | cmp - noisy.txt
    run inspect-model --verify plain
    [[ "$output" == *"is not read: config.json does not ask for noise of the router"* ]]
    # GGUF has no place for it
    run convert-model m-8 -o m.gguf
    [ "$status" -eq 0 ]
    [[ "$output" == *"gate.weight_noise.weight' and 1 more: left out: noise of routers, which serves training alone, is"* ]]
    [ "$(loss m.gguf)" = "$want" ]
    convert-model -q m.gguf -o back
    [ "$(loss back)" = "$want" ]
    grep -q '"gate_add_noise": false' back/config.json
    # without the option the noise is there, too; in bf16, with an adapter, and in a model made of a dense one
    train -q m data -o low --steps 2 --batch-size 2 --seq-len 32 --dtype bf16 --moe-router-dtype bf16 --eval-every 2 --val data/train
    peft-tune -q m-8 t.jsonl -o adapter --steps 2 --seq-len 32 --moe-aux-loss-type importance --moe-aux-loss-coeff 0.1
    small llama-1m dense intermediate_size=48
    init-model -q --upcycle dense --experts 4 --set gate_add_noise=true -o up
    [ "$(moments up '*layers.1*gate.weight_noise*')" = '"mean":0,"std":0' ]
    train -q up data -o up-run --steps 2 "${args[@]}"
}

@test "mixtures: losses of loads and noise that are refused" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=16
    small mixtral-8x7b n intermediate_size=24 gate_add_noise=true
    refuses() { # TEXT MODEL ARGUMENT ...
        local text=$1
        shift
        run train "$1" data -o out --steps 1 "${@:2}"
        [ "$status" -eq 2 ]
        [[ "$output" == *"$text"* ]]
        [ ! -e out ]
    }
    refuses "--moe-aux-loss-type: there is no coefficient of such a loss" n --moe-aux-loss-type load
    refuses "load serves routers that learn noise (gate_add_noise); those of m do not" m --moe-aux-loss-type load \
        --moe-aux-loss-coeff 1
    refuses "leave out --moe-random-second" n --moe-aux-loss-type load --moe-aux-loss-coeff 1 --moe-random-second
    refuses "--moe-router-noise: routers of n learn their own" n --moe-router-noise 0.1
    run init-model gpt-oss-12m -t tokenizer.json --set gate_add_noise=true -o out
    [ "$status" -ne 0 ]
    train -q m data -o even --steps 2 --batch-size 2 --seq-len 32 --moe-aux-loss-type importance --moe-aux-loss-coeff 0.1
}

# put FILE KEY BYTE: the lowest byte of the number under KEY in the GGUF file
put() {
    local at
    at=$(grep -abo "$2" "$1" | head -n 1 | cut -d: -f1)
    printf '%b' "\\x$(printf %x "$3")" | dd of="$1" bs=1 seek=$((at + ${#2} + 4)) conv=notrunc status=none
}

# fuse FOLDER OUT [ROW_ORDER]: the experts of a layer as the two tensors that transformers 5 holds
fuse() {
    cp -r "$1" "$2"
    python3 - "$1/model.safetensors" "$2/model.safetensors" "${3:-}" << 'END'
import json, re, struct, sys
data = open(sys.argv[1], "rb").read()
n = struct.unpack("<Q", data[:8])[0]
head, body, out, groups = json.loads(data[8:8 + n]), data[8 + n:], {}, {}
head.pop("__metadata__", None)
for name, t in head.items():
    m = re.match(r"(model\.layers\.\d+)\.(mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight$", name)
    raw = body[t["data_offsets"][0]:t["data_offsets"][1]]
    if m:
        part = {"w1": "gate", "w3": "up", "w2": "down"}.get(m[4], m[4].split("_")[0])
        groups.setdefault((m[1], part == "down"), {})[int(m[3]), part != "gate"] = raw, t["shape"]
    else:
        out[name.replace("block_sparse_moe.gate.", "mlp.gate.")] = raw, t["shape"]
for (layer, down), g in groups.items():
    experts, shape = len({e for e, _ in g}), next(iter(g.values()))[1]
    name = f"{layer}.mlp.experts.{'down' if down else 'gate_up'}_proj"
    out[name] = b"".join(g[k][0] for k in sorted(g)), [experts, shape[0] * (1 if down else 2), shape[1]]
    if sys.argv[3] == "less" and not down:
        out[name] = out[name][0][:-len(out[name][0]) // experts], [experts - 1, *out[name][1][1:]]
    if sys.argv[3] == "turned" and down:
        out[name] = out[name][0], [experts, shape[1], shape[0]]
at, table = 0, {}
for name, (raw, shape) in out.items():
    table[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at := at + len(raw)]}
text = json.dumps(table).encode()
open(sys.argv[2], "wb").write(struct.pack("<Q", len(text)) + text + b"".join(raw for raw, _ in out.values()))
END
}

@test "mixtures: fused tensors of transformers 5 are read by every tool that computes or converts" {
    small mixtral-8x7b mixtral intermediate_size=24
    small qwen1.5-moe-14b qwen2 num_experts=6 num_experts_per_tok=2 moe_intermediate_size=16 shared_expert_intermediate_size=20
    for m in mixtral qwen2; do
        fuse "$m" "$m-fused"
        want=$(loss "$m")
        [ "$(loss "$m-fused")" = "$want" ]
        [ "$(tar -cf - -C "$m-fused" . | loss -)" = "$want" ]
        inspect-model --verify "$m-fused" > /dev/null
        convert-model -q "$m-fused" -o "$m-back"
        inspect-model --check "$m" "$m-back" > /dev/null
        convert-model -q "$m" -o "$m.gguf" --no-originals
        convert-model -q "$m-fused" -o "$m-fused.gguf" --no-originals
        for f in "$m.gguf" "$m-fused.gguf"; do convert-model -q "$f" -o "$f-back"; done
        inspect-model --check "$m.gguf-back" "$m-fused.gguf-back" > /dev/null
        args=(--batch-size 2 --seq-len 32 --lr 3e-3 --steps 2)
        train -q "$m" data -o "$m-run" "${args[@]}"
        train -q "$m-fused" data -o "$m-fused-run" "${args[@]}"
        inspect-model --check "$m-run" "$m-fused-run" > /dev/null
    done
}

@test "mixtures: fused tensors that the config contradicts" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24
    fuse m less less
    fuse m turned turned
    for tool in "eval-model less t.jsonl" "convert-model less -o out.gguf"; do
        run $tool
        [ "$status" -eq 2 ]
        [[ "$output" == *'tensor "model.layers.'*'.mlp.experts.gate_up_proj" has shape [7,48,32], config.json requires [8,48,32]'* ]]
    done
    for tool in "eval-model turned t.jsonl" "convert-model turned -o out.gguf"; do
        run $tool
        [ "$status" -eq 2 ]
        [[ "$output" == *'.mlp.experts.down_proj" has shape [8,24,32], config.json requires [8,32,24]'* ]]
    done
    run inspect-model --verify less
    [ "$status" -eq 3 ]
    [[ "$output" == *"has shape [7,48,32], config.json requires [8,48,32]"* ]]
    [ ! -e out.gguf ]
}

@test "mixtures: GGUF and back, exact; from the metadata alone and in blocks, the same losses" {
    small mixtral-8x7b mixtral intermediate_size=64
    small qwen1.5-moe-14b qwen2 num_experts=6 num_experts_per_tok=2 moe_intermediate_size=32 shared_expert_intermediate_size=64
    small qwen3-moe-13m qwen3 head_dim=16 moe_intermediate_size=32
    for m in mixtral qwen2 qwen3; do
        want=$(loss "$m")
        convert-model -q "$m" -o "$m.gguf"
        convert-model -q "$m.gguf" -o "$m-back"
        inspect-model --check "$m" "$m-back" > /dev/null
        cmp "$m/config.json" "$m-back/config.json"
        [ "$(loss "$m.gguf")" = "$want" ]
        convert-model -q "$m.gguf" -o "$m-bare.gguf" --no-originals
        convert-model -q "$m-bare.gguf" -o "$m-made"
        [ "$(loss "$m-made")" = "$want" ]
        tar -cf - -C "$m" . | convert-model -q - -o "$m-piped.gguf"
        [ "$(loss "$m-piped.gguf")" = "$want" ]
        run convert-model "$m" -o "$m-q8.gguf" --type q8_0
        [ "$output" = "" ]
        awk -v a="$want" -v b="$(loss "$m-q8.gguf")" 'BEGIN { d = a - b; exit !(a != b && d < 1e-2 && d > -1e-2) }'
    done
}

@test "mixtures: GGUF files that contradict themselves" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=32
    convert-model -q m -o m.gguf --no-originals
    cp m.gguf more.gguf
    put more.gguf qwen3moe.expert_count 9
    run convert-model more.gguf -o out
    [ "$status" -eq 2 ]
    [[ "$output" == *"tensor 'blk.0.ffn_gate_inp.weight' does not have the shape that the metadata require"* ]]
    cp m.gguf used.gguf
    put used.gguf qwen3moe.expert_used_count 9
    run convert-model used.gguf -o out
    [ "$status" -eq 2 ]
    [[ "$output" == *"'qwen3moe.expert_used_count' is 9, but 'qwen3moe.expert_count' is 8"* ]]
    cp m.gguf width.gguf
    put width.gguf qwen3moe.expert_feed_forward_length 31
    run convert-model width.gguf -o out
    [ "$status" -eq 2 ]
    [[ "$output" == *"tensor 'blk.0.ffn_"*"_exps.weight' does not have the shape"* ]]
    sed 's/blk\.1\.ffn_up_exps/blk.1.ffn_up_exqs/' m.gguf > gone.gguf
    run convert-model gone.gguf -o out
    [ "$status" -eq 2 ]
    [[ "$output" == *"tensor 'blk.1.ffn_up_exps.weight' is missing"* ]]
    [ ! -e out ]
}

@test "mixtures: what GGUF has no words for" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=32 norm_topk_prob=false
    run convert-model m -o m.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *"GGUF's qwen3moe has no weights of a token's experts as they are (norm_topk_prob false)"* ]]
    small qwen3-moe-13m some head_dim=16 moe_intermediate_size=32 decoder_sparse_step=2
    run convert-model some -o m.gguf
    [ "$status" -eq 2 ]
    [[ "$output" == *"has no layers of different sizes"* ]]
    [ ! -e m.gguf ]
}

# dense PRESET OUT [KEY=VALUE ...]: a small dense model with some training
dense() {
    small "$1" "$2-fresh" intermediate_size=48 "${@:3}"
    train -q "$2-fresh" data -o "$2" --steps 20 --batch-size 2 --seq-len 32 --lr 3e-3
}

# close A B LIMIT: relative
close() {
    awk -v a="$1" -v b="$2" -v l="$3" 'BEGIN { d = a / b - 1; exit !(d < l && d > -l) }'
}

@test "mixtures: upcycled models compute what the dense one does" {
    dense llama-1m llama rope_theta=20000
    dense mistral-7b mistral sliding_window=9
    dense qwen2-0.5b qwen2 use_sliding_window=true sliding_window=7 max_window_layers=1
    dense qwen3-0.6b qwen3 head_dim=16
    for m in llama mistral qwen2 qwen3; do
        want=$(loss "$m")
        init-model -q --upcycle "$m" --experts 5 --experts-per-token 3 -o "$m-5"
        close "$(loss "$m-5")" "$want" 1e-7
        init-model -q --upcycle "$m-fresh" --experts 5 -o "$m-whole"
        tar -cf - -C "$m-fresh" . | init-model -q --upcycle - --experts 5 -j 1 -o "$m-piped"
        inspect-model --check "$m-whole" "$m-piped" > /dev/null
        inspect-model --verify "$m-5" > /dev/null
        cmp "$m/tokenizer.json" "$m-5/tokenizer.json"
        train -q "$m-5" data -o "$m-run" --steps 4 --batch-size 2 --seq-len 32 --lr 3e-3
        awk -v a="$want" -v b="$(loss "$m-run")" 'BEGIN { exit !(b < a) }'
    done
    grep -q '"model_type": "mixtral"' mistral-5/config.json
    grep -q '"sliding_attention"' qwen2-5/config.json
    init-model -q --upcycle qwen3 --experts 1 --experts-per-token 1 -o one
    close "$(loss one)" "$(loss qwen3)" 1e-7
}

@test "mixtures: upcycled experts differ by noise and by columns that are drawn again" {
    dense llama-1m m
    of() { inspect-model --stats --json --only "*layers.0.*$2" "$1" | grep -o '"std":[0-9.e-]*' | head -n 1 | cut -d: -f2; }
    same() { [ "$(inspect-model --json --stats --only "*experts.$2.w1*" "$1" | grep -o '"mean":[^,]*' | head -n 1)" = \
        "$(inspect-model --json --stats --only "*experts.$3.w1*" "$1" | grep -o '"mean":[^,]*' | head -n 1)" ]; }
    init-model -q --upcycle m --experts 4 -o copy
    same copy 0 3
    for how in "--expert-noise 0.5" "--expert-drop 0.5"; do
        out=${how#--expert-}
        out=${out% *}
        # shellcheck disable=SC2086
        init-model -q --upcycle m --experts 4 $how --seed 3 -o "$out"
        # shellcheck disable=SC2086
        init-model -q --upcycle m --experts 4 $how --seed 3 -j 1 -o "$out-1"
        inspect-model --check "$out" "$out-1" > /dev/null
        run same "$out" 0 3
        [ "$status" -eq 1 ]
    done
    # the noise adds its variance; columns that are drawn again have that of what they replace
    close "$(of noise '*experts.1.w1*')" "$(of m '*gate_proj*' | awk '{ print $1 * sqrt(1.25) }')" 0.05
    close "$(of drop '*experts.1.w1*')" "$(of m '*gate_proj*')" 0.05
    run init-model --upcycle m --experts 4 --dtype bf16 --dry-run --json
    [[ "$output" == *'"model_type":"mixtral"'*'"dtype":"bf16"'* ]]
}

@test "mixtures: upcycled models whose first layer has no experts, and those with large matrices" {
    small qwen3-0.6b m head_dim=16 intermediate_size=48
    init-model -q --upcycle m --experts 4 --set decoder_sparse_step=2 -o sparse
    close "$(loss sparse)" "$(loss m)" 1e-7
    small llama-1m wide hidden_size=2080 intermediate_size=2080 num_hidden_layers=1
    init-model -q --upcycle wide --experts 2 --expert-noise 0.1 --dtype bf16 -o wide-2
    inspect-model --verify wide-2 > /dev/null
}

@test "mixtures: more experts than can be listed are refused" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=16
    sed -i 's/"num_hidden_layers": 2/"num_hidden_layers": 65536/; s/"num_experts": 8/"num_experts": 4096/' m/config.json
    run eval-model m t.jsonl --seq-len 32
    [ "$status" -eq 2 ]
    [[ "$output" == *'"num_experts" is 4096 in 65536 layers, but 262144 experts in all are supported'* ]]
}

@test "mixtures: what is not upcycled" {
    small llama-1m biased intermediate_size=48 mlp_bias=true
    init-model -q gpt2-124m --set n_layer=1 --set n_embd=16 --set n_head=2 -t tokenizer.json -o gpt2
    small llama-1m m intermediate_size=48
    refuses() { # STATUS TEXT ARGUMENT ...
        local want=$1 text=$2
        shift 2
        run init-model "$@" -o out
        [ "$status" -eq "$want" ]
        [[ "$output" == *"$text"* ]]
        [ ! -e out ]
    }
    refuses 2 "a mixtral cannot have biases of its MLP" --upcycle biased
    refuses 2 "a gpt2 does not become a mixture of experts" --upcycle gpt2
    refuses 2 "a token cannot go to 3 of 2 experts" --upcycle m --experts 2 --experts-per-token 3
    refuses 2 "--upcycle keeps the vocabulary of the model" --upcycle m -t tokenizer.json
    refuses 2 "there is no dense model whose MLP is copied" llama-1m --expert-noise 1
    refuses 2 "--experts: there is no dense model whose MLP is copied" qwen3-moe-13m --experts 4
    sed -i 's/layers\.1\.mlp\.up_proj/layers.1.mlp.uq_proj/' m/model.safetensors
    refuses 2 'tensor "model.layers.1.mlp.up_proj.weight" is missing' --upcycle m
}

@test "mixtures: compressed, encoded, merged by the methods of dense models, and trained beside encoded weights" {
    small qwen3-moe-13m a head_dim=16 moe_intermediate_size=32
    small qwen3-moe-13m b head_dim=16 moe_intermediate_size=32 initializer_range=0.03
    train -q b data -o c --steps 10 --batch-size 2 --seq-len 32 --lr 3e-3
    want=$(loss a)
    compress-ckpt -q a -o a.lmz
    [ "$(loss a.lmz)" = "$want" ]
    for codec in bf16 fp8_e4m3 nf4; do
        compress-ckpt -q a --weights "$codec" -o "$codec.lmz"
        close "$(loss "$codec.lmz")" "$want" 0.02
    done
    merge-models -q -m linear a:0.25 a:0.75 -o same
    close "$(loss same)" "$want" 1e-6
    merge-models -q -m slerp --base b --t 0 c -o slerp
    close "$(loss slerp)" "$(loss b)" 1e-6
    for method in ties dare_ties dem task_arithmetic; do
        merge-models -q -m "$method" --base b c:1 -o "$method"
        awk -v a="$(loss "$method")" -v b="$(loss b)" 'BEGIN { exit !(a < b) }'
    done
    run inspect-model a
    [[ "$output" == *"  active     "*" in a token"* ]]
    peft-tune -q a t.jsonl -o adapter --steps 5 --seq-len 32 --lr 3e-3 --base-format nf4
    awk -v a="$(loss a --adapter adapter)" -v b="$want" 'BEGIN { exit !(a < b) }'
    # each expert stays in the codes of its file, with the results of its numbers
    convert-model -q a -o a.gguf --type q8_0
    run generate -v a.gguf -p "the river" -n 1 --temperature 0
    [ "$status" -eq 0 ]
    [[ "$output" == *"weights: q8_0"* ]]
    [[ "$output" != *"decoded when loaded"* ]]
    convert-model -q a.gguf -o numbers
    for dtype in f32 bf16; do
        [ "$(loss a.gguf --dtype "$dtype")" = "$(loss numbers --dtype "$dtype")" ]
    done
}

# recipe MODE LINE ...: moe.yaml of two experts, and further lines
recipe() {
    cat > moe.yaml << END
base_model: base
gate_mode: $1
experts:
  - source_model: one
    positive_prompts: ["the river ran by"]
    residual_scale: 0.5
  - source_model: two
    positive_prompts: ["the old bridge", "stones"]
    negative_prompts: ["water"]
END
    printf '%s\n' "${@:2}" >> moe.yaml
}

@test "mixtures: made of dense models by a YAML file of mergekit-moe" {
    dense llama-1m base
    for m in one two; do
        train -q base data -o "$m" --steps "$([ "$m" = one ] && echo 3 || echo 9)" --batch-size 2 --seq-len 32 --lr 1e-3
    done
    for mode in hidden hidden_avg cheap_embed random uniform_random; do
        recipe "$mode"
        merge-models -q --config moe.yaml -o "$mode"
        merge-models -q --config - -j 1 -o "$mode-1" < moe.yaml
        inspect-model --check "$mode" "$mode-1" > /dev/null
        close "$(loss "$mode")" "$(loss base)" 0.1
    done
    for part in w1:gate_proj w3:up_proj; do
        [ "$(moments hidden "*layers.1*experts.0.${part%:*}*")" = "$(moments one "*layers.1*${part#*:}*")" ]
        [ "$(moments hidden "*layers.1*experts.1.${part%:*}*")" = "$(moments two "*layers.1*${part#*:}*")" ]
    done
    [ "$(moments hidden "*layers.1*q_proj*")" = "$(moments base "*layers.1*q_proj*")" ]
    run inspect-model --check hidden cheap_embed
    [ "$status" -eq 3 ]
    # residual_scale
    spread() { moments "$1" "$2" | grep -o '"std":.*' | cut -d: -f2; }
    close "$(spread hidden "*layers.1*experts.0.w2*")" "$(spread one "*layers.1*down_proj*" | awk '{ printf "%.12g", $1 / 2 }')" 1e-6
    run merge-models --config moe.yaml --dry-run --json
    [[ "$output" == '{"model_type":"mixtral","experts":2,"experts_per_token":2,'* ]]
}

@test "mixtures: a shared expert of its own, and recipes that are refused" {
    small qwen2-0.5b base intermediate_size=48
    small qwen2-0.5b one intermediate_size=48 initializer_range=0.03
    small qwen2-0.5b two intermediate_size=48 initializer_range=0.04
    recipe hidden "shared_experts:" "  - source_model: base" '    positive_prompts: ["by the"]' "    residual_scale: 0.1"
    merge-models -q --config moe.yaml -o shared
    [ "$(moments shared '*layers.0*shared_expert.up_proj*')" = "$(moments base '*layers.0*mlp.up_proj*')" ]
    inspect-model --verify shared > /dev/null
    refuses() { # TEXT
        run merge-models --config moe.yaml -o out
        [ "$status" -eq 2 ]
        [[ "$output" == *"$1"* ]]
        [ ! -e out ]
    }
    recipe hidden
    refuses "a qwen2_moe needs a shared expert: add it under shared_experts"
    recipe hidden "experts_per_token: 3"
    refuses "experts_per_token is 3, of 2 experts"
    recipe hiden
    refuses "gate_mode: hidden, hidden_avg, hidden_last, cheap_embed, random or uniform_random is needed"
    recipe hidden "gate_mod: random"
    refuses "unknown key 'gate_mod' in the file: did you mean 'gate_mode'?"
    recipe hidden "  - source_model: two"
    refuses "expert 2 has no positive_prompts"
    recipe hidden
    sed -i 's/source_model: two/source_model: one/' moe.yaml
    refuses "all experts have the same source_model"
    small qwen3-0.6b two intermediate_size=48 head_dim=16
    recipe random "shared_experts:" "  - source_model: base"
    refuses "two: is a qwen3 of 2 layers, width 32 and MLPs of 48, base a qwen2 of 2, 32 and 48"
    recipe random "architecture: mixtral"
    refuses "a qwen2 becomes a qwen2_moe, not 'mixtral'"
}

@test "mixtures: LoRA of the experts trains, resumes, is attached, and merges" {
    small qwen3-moe-13m base head_dim=16 moe_intermediate_size=24
    small mixtral-8x7b mixtral intermediate_size=24
    for m in base mixtral; do
        train -q "$m" data -o "$m-run" --steps 10 --batch-size 2 --seq-len 32 --lr 3e-3
        args=(--seq-len 32 --lr 5e-3 --rank 3 --target "q_proj,experts.gate_up_proj,mlp.experts.down_proj")
        peft-tune -q "$m-run" t.jsonl -o "$m-a" --steps 12 "${args[@]}"
        grep -A 3 '"target_parameters": \[' "$m-a/adapter_config.json" | grep -q '"mlp.experts.down_proj"'
        peft-tune -q "$m-run" t.jsonl -o "$m-b" --steps 6 --lr-schedule constant "${args[@]}" -j 1
        peft-tune -q --resume "$m-b" --steps 12
        peft-tune -q "$m-run" t.jsonl -o "$m-c" --steps 12 --lr-schedule constant "${args[@]}"
        [ "$(loss "$m-run" --adapter "$m-b")" = "$(loss "$m-run" --adapter "$m-c")" ]
        merge-models -q --method passthrough "$m-run+$m-a" -o "$m-merged"
        with=$(loss "$m-run" --adapter "$m-a")
        awk -v a="$with" -v b="$(loss "$m-run")" 'BEGIN { exit !(a < b - 0.005) }'
        close "$with" "$(loss "$m-merged")" 1e-6
        close "$(loss "$m-run" --adapter "$m-a" --dtype bf16)" "$with" 0.01
        generate -q "$m-run" --adapter "$m-a" -p "the river" -n 8 --temperature 0 > a
        generate -q "$m-merged" -p "the river" -n 8 --temperature 0 | cmp - a
        peft-tune -q "$m-run" t.jsonl -o "$m-only" --steps 3 --seq-len 32 --target experts.down_proj --base-format nf4
        close "$(loss "$m-run" --adapter "$m-only")" "$(loss "$m-run")" 0.02
    done
}

@test "mixtures: LoRA of experts that is refused" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24
    small llama-1m dense intermediate_size=48
    refuses() { # TEXT ARGUMENT ...
        run peft-tune "${@:2}" t.jsonl -o a --steps 1 --seq-len 32
        [ "$status" -eq 2 ]
        [[ "$output" == *"$1"* ]]
        [ ! -e a ]
    }
    refuses "lora_dropout is set, which target_parameters do not have in PEFT" m --target experts.down_proj --adapter-dropout 0.1
    refuses "'experts.down_proj' is no parameter of the experts of this model" dense --target experts.down_proj
    refuses "init_lora_weights 'pissa' changes the base" m --method pissa --target q_proj,experts.down_proj
    refuses "target_parameters is of LoRA alone, not of " m --method loha --target experts.down_proj
}

@test "mixtures: what is refused" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24
    for target in gate_proj gate; do
        run peft-tune m t.jsonl -o a --steps 1 --seq-len 32 --target "$target"
        [ "$status" -eq 2 ]
        [[ "$output" == *"belongs to the experts of a mixture"* ]]
        [ ! -e a ]
    done
    sed -i 's/"num_experts_per_tok": 2/"num_experts_per_tok": 9/' m/config.json
    run eval-model m t.jsonl
    [ "$status" -eq 2 ]
    [[ "$output" == *'"num_experts_per_tok" is 9, but "num_experts" is 8'* ]]
}

@test "mixtures: an expert that is missing is named" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24
    sed -i 's/experts\.7\.up_proj/experts.8.up_proj/' m/model.safetensors
    run eval-model m t.jsonl
    [ "$status" -eq 2 ]
    [[ "$output" == *"experts."*".up_proj.weight"* ]]
}

@test "mixtures: losses of routers: their records, micro-batches, recomputation, and balance" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24
    args=(--seq-len 32 --lr 1e-2 --lr-schedule constant --log-every 1)
    aux() { sed -n 's/.*"event":"step".*"moe_aux_loss":\([0-9.e+-]*\).*/\1/p' "$1"; }
    first() { aux "$1" | head -1; }
    # What is not asked for is not there.
    train -q m data -o none --steps 1 --batch-size 2 "${args[@]}" --metrics none.jsonl
    [ -z "$(aux none.jsonl)" ]
    # The config asks by its keys; a coefficient of 2 doubles the loss.
    jq '.output_router_logits = true | .router_aux_loss_coef = 0.5' m/config.json > c && cp -r m asks && cp c asks/config.json
    train -q asks data -o asked --steps 1 --batch-size 2 "${args[@]}" --metrics asked.jsonl
    train -q m data -o given --steps 1 --batch-size 2 "${args[@]}" --moe-aux-loss-coeff 0.5 --metrics given.jsonl
    train -q asks data -o off --steps 1 --batch-size 2 "${args[@]}" --router-aux-loss-coef 0 --metrics off.jsonl
    [ "$(first asked.jsonl)" = "$(first given.jsonl)" ]
    [ -z "$(aux off.jsonl)" ]
    inspect-model --check asked given > /dev/null
    run inspect-model --check none given
    [ "$status" -ne 0 ]
    # Losses of each layer and sequence do not depend on how sequences are divided; recomputation changes no bit.
    for type in sequence layer; do
        all=(--moe-aux-loss-type "$type" --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01)
        train -q m data -o "$type-4" --steps 3 --batch-size 4 "${args[@]}" "${all[@]}" --metrics "$type-4.jsonl"
        train -q m data -o "$type-r" --steps 3 --batch-size 4 "${args[@]}" "${all[@]}" --recompute full
        inspect-model --check "$type-4" "$type-r" > /dev/null
    done
    train -q m data -o sequence-1 --steps 3 --batch-size 1 --gradient-accumulation-steps 4 "${args[@]}" \
        --moe-aux-loss-type sequence --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --metrics sequence-1.jsonl
    paste <(aux sequence-4.jsonl) <(aux sequence-1.jsonl) |
        awk '{ d = $1 / $2 - 1; if (d > 1e-4 || d < -1e-4) bad = 1 } END { exit bad || NR != 3 }'
    # The loss pulls towards balance: 1 a layer.
    train -q m data -o even --steps 40 --batch-size 4 "${args[@]}" --moe-aux-loss-type layer --moe-aux-loss-coeff 1 \
        --metrics even.jsonl
    awk -v a="$(aux even.jsonl | tail -1)" 'BEGIN { exit !(a >= 1.99 && a < 2.15) }'
    # Adapters and preferences.
    peft-tune -q asks t.jsonl -o adapter --steps 2 --seq-len 32 --metrics adapter.jsonl
    [ -n "$(first adapter.jsonl)" ]
    for i in {1..8}; do
        echo '{"prompt":"the river","chosen":" ran by the bridge","rejected":" and the stones"}'
    done > pairs.jsonl
    align-model -q m pairs.jsonl -o aligned --loss dpo --steps 2 --seq-len 32 --moe-z-loss-coeff 0.1 --metrics aligned.jsonl
    [ -n "$(first aligned.jsonl)" ]
}

@test "mixtures: a loss that keeps tokens on few nodes" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24
    args=(--steps 30 --batch-size 2 --seq-len 32 --lr 1e-2 --lr-schedule constant --moe-affinity-nodes 4)
    train -q m data -o run "${args[@]}" --moe-affinity-loss-coeff 0.5 --metrics run.jsonl
    # Two layers: at first nearly 2 * 0.5 * 3/4 by the even probabilities of fresh routers; then tokens settle.
    jq -se '[.[] | select(.event == "step") | .moe_aux_loss] | (.[0] - 0.75 | fabs) < 0.02 and .[-1] < 0.6 * .[0]' run.jsonl
    train -q m data -o again "${args[@]}" --moe-affinity-loss-coeff 0.5 --recompute full --threads 1
    inspect-model --check run again > /dev/null
    refused() {
        run train m data -o a --steps 1 --seq-len 32 "${@:2}"
        [ "$status" -eq 2 ]
        [[ "$output" == *"$1"* ]]
    }
    refused '--moe-affinity-loss-coeff: there are no nodes: give --moe-affinity-nodes too' --moe-affinity-loss-coeff 0.1
    refused '--moe-affinity-nodes: there is no loss of nodes' --moe-affinity-nodes 2
    refused '--moe-affinity-nodes: 3 nodes do not divide the 8 experts of m' --moe-affinity-nodes 3 --moe-affinity-loss-coeff 0.1
}

@test "mixtures: losses of routers: what is refused" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24
    run train m data -o a --steps 1 --seq-len 32 --moe-aux-loss-type layer
    [ "$status" -eq 2 ]
    [[ "$output" == *"--moe-aux-loss-type: there is no coefficient of such a loss: give --moe-aux-loss-coeff too"* ]]
    run train m data -o a --steps 1 --moe-router-load-balancing-type aux_loss
    [ "$status" -eq 2 ]
    [[ "$output" == *"give --moe-aux-loss-type layer for aux_loss"* ]]
    init-model -q -f llama-5m -t tokenizer.json --set hidden_size=32 --set num_hidden_layers=1 --set num_attention_heads=4 \
        --set num_key_value_heads=2 -o dense
    run train dense data -o a --steps 1 --seq-len 32 --moe-z-loss-coeff 0.1
    [ "$status" -eq 2 ]
    [[ "$output" == *"--moe-z-loss-coeff: serves mixtures of experts"* ]]
    sed -i 's/"router_aux_loss_coef": [0-9.]*/"router_aux_loss_coef": -1/' m/config.json
    run train m data -o a --steps 1 --seq-len 32
    [ "$status" -eq 2 ]
    [[ "$output" == *'"router_aux_loss_coef": is negative'* ]]
}

@test "mixtures: records of the experts, and their map" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24 mlp_only_layers='[0]' num_hidden_layers=3
    train -v m data -o run --steps 6 --batch-size 2 --seq-len 32 --gradient-accumulation-steps 3 --log-every 2 \
        --metrics r.jsonl 2> log
    grep -q "step 2: .*, fullest expert [0-9.]* x the mean (layer [12])" log
    # 192 tokens of 2 experts each, in records of steps 2, 4, 6 and layers 1, 2.
    jq -s -e '[.[] | select(.event == "experts")] | length == 6 and all(.[]; (.load | length == 8 and add == 384)
        and .dropped == 0 and .dead == ([.load[] | select(. == 0)] | length) and ((.max_over_mean - (.load | max / 48)) | fabs) < 1e-6
        and .entropy > 1 and .entropy < 2.0795) and map(.layer) == [1, 2, 1, 2, 1, 2] and map(.step) == [2, 2, 4, 4, 6, 6]' r.jsonl
    plot-run --experts --width 60 r.jsonl > map
    grep -qx "expert: load over the mean load, scale 0 to 2" map
    [ "$(grep -c '^layer' map)" = 2 ]
    [ "$(grep -cE '^ +[0-7] ' map)" -ge 16 ]
    plot-run --experts -o map.svg r.jsonl
    grep -q "layer 2" map.svg
    run plot-run --experts r.jsonl r.jsonl
    [ "$status" -eq 2 ]
    echo '{"event":"step","step":1,"loss":2}' > dense.jsonl
    run plot-run --experts dense.jsonl
    [ "$status" -eq 1 ]
    [[ "$output" == *"dense.jsonl: has no records of experts"* ]]
}

@test "mixtures: a router that is not finite ends a training with status 4, naming layer and expert" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24
    # Weight [3,5] of the router of layer 1 [8,32].
    cp -rL m bad
    begin=$(od -An -tu8 -N8 bad/model.safetensors | tr -d ' ')
    head -c $((begin + 8)) bad/model.safetensors | tail -c "$begin" > header
    at=$(jq '."model.layers.1.mlp.gate.weight".data_offsets[0]' header)
    poke() { printf "%b" "$1" | dd of=bad/model.safetensors bs=1 seek=$((begin + 8 + at + 4 * (3 * 32 + 5))) conv=notrunc status=none; }
    poke '\0\0\300\177'
    run train -q bad data -o run --steps 2 --seq-len 32
    [ "$status" -eq 4 ]
    [[ "$output" == 'train: bad: tensor "model.layers.1.mlp.gate.weight" holds a NaN of expert 3 in the router of layer 1: '* ]]
    # Finite weights whose logits are not: 3e38 in all of the row.
    for ((i = 0; i < 32; i++)); do printf '\0\0\177\177'; done |
        dd of=bad/model.safetensors bs=1 seek=$((begin + 8 + at + 4 * 3 * 32)) conv=notrunc status=none
    run train -q bad data -o run --steps 2 --seq-len 32
    [ "$status" -eq 4 ]
    [[ "$output" == *", first for expert 3 in the router of layer 1: "* ]]
}

scored() { # OUT: sigmoid scores with a bias, groups, a shared expert, a dense first layer
    echo '{"model_type":"dots1","hidden_size":32,"intermediate_size":48,"moe_intermediate_size":16,"num_hidden_layers":3,
        "num_attention_heads":4,"num_key_value_heads":2,"n_routed_experts":8,"n_shared_experts":1,"num_experts_per_tok":2,
        "n_group":4,"topk_group":2,"first_k_dense_replace":1,"norm_topk_prob":true,"routed_scaling_factor":2.5,
        "sliding_window":null,"max_position_embeddings":64,"vocab_size":300}' > scored.json
    init-model -q -f scored.json -t tokenizer.json -o "$1"
}

numbers() { # FOLDER TENSOR: the numbers of an F32 tensor, one a line
    local begin offsets
    begin=$(od -An -tu8 -N8 "$1/model.safetensors" | tr -d ' ')
    head -c $((begin + 8)) "$1/model.safetensors" | tail -c "$begin" > header
    mapfile -t offsets < <(jq ".\"$2\".data_offsets[]" header)
    od -An -v -tf4 -w4 -j $((begin + 8 + offsets[0])) -N $((offsets[1] - offsets[0])) "$1/model.safetensors"
}

@test "mixtures: biases of routers follow the loads of the whole step, and resume to the bit" {
    scored m
    args=(--batch-size 2 --seq-len 32 --lr 3e-3 --lr-schedule constant --gradient-accumulation-steps 3)
    train -q m data -o one --steps 1 "${args[@]}" --moe-router-bias-update-rate 0.25 --metrics one.jsonl
    for l in 1 2; do
        jq "select(.event == \"experts\" and .layer == $l) | .load[] | 0.25 * (if . < 48 then 1 elif . > 48 then -1 else 0 end)" \
            one.jsonl > want
        [ "$(wc -l < want)" = 8 ]
        numbers one "model.layers.$l.mlp.gate.e_score_correction_bias" | tr -d ' ' | cmp - want
        jq -s -e "[.[] | select(.event == \"experts\" and .layer == $l)][-1] | .bias_min == -0.25 and .bias_max == 0.25" one.jsonl
    done
    # They are tensors of the model, which other steps, recomputation and a resumed run treat alike.
    train -q m data -o eight --steps 8 "${args[@]}"
    train -q m data -o again --steps 8 "${args[@]}" --recompute full
    train -q m data -o four --steps 4 "${args[@]}"
    train -q --resume four --steps 8
    inspect-model --check eight again > /dev/null
    inspect-model --check eight four > /dev/null
    numbers eight model.layers.1.mlp.gate.e_score_correction_bias |
        awk '{ m = $1 / 0.001; if (m < -8.01 || m > 8.01) bad = 1; s += m * m } END { exit bad || s < 1 }'
    train -q m data -o kept --steps 2 "${args[@]}" --moe-router-bias-update-rate 0
    [ "$(numbers kept model.layers.1.mlp.gate.e_score_correction_bias | tr -d ' ' | sort -u)" = 0 ]
    # Balance comes from them: the fullest expert of a long run is less full than without.
    train -q m data -o even --steps 60 "${args[@]}" --moe-router-bias-update-rate 0.02 --metrics even.jsonl
    train -q m data -o free --steps 60 "${args[@]}" --moe-router-bias-update-rate 0 --metrics free.jsonl
    last() { jq -s '[.[] | select(.event == "experts" and .step > 50) | .max_over_mean] | add' "$1"; }
    awk -v a="$(last even.jsonl)" -v b="$(last free.jsonl)" 'BEGIN { exit !(a < b - 2) }'
    # Other tools read them.
    generate -q even -p "the river" -n 4 --temperature 0 > text
    awk -v a="$(loss m)" -v b="$(loss even)" 'BEGIN { exit !(b < a - 0.3) }'
    peft-tune -q even t.jsonl -o adapter --steps 2 --seq-len 32
}

@test "mixtures: keys of scored experts that contradict each other" {
    scored m
    refused() { # KEY VALUE TEXT
        cp -rL m bad && jq ".$1 = $2" m/config.json > c && cp c bad/config.json
        run train -q bad data -o run --steps 1 --seq-len 32
        rm -r bad
        [ "$status" -eq 2 ]
        [[ "$output" == *"$3"* ]] || { echo "$output"; false; }
    }
    refused n_group 3 '"n_group" is 3, but "n_routed_experts" is 8'
    refused topk_group 5 '"topk_group" is 5, but "n_group" is 4'
    refused num_experts_per_tok 5 '"num_experts_per_tok" is 5, but "topk_group" groups have 4 experts'
    refused num_experts_per_tok 9 'num_experts_per_tok'
    refused routed_scaling_factor 0 '"routed_scaling_factor": is not positive'
    run train bad data -o a --steps 1 --moe-router-bias-update-rate 2
    [ "$status" -eq 2 ]
}

@test "mixtures: capacity with each policy, padding, and a random second expert" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24
    args=(--steps 4 --batch-size 4 --seq-len 32 --lr 1e-2 --lr-schedule constant)
    of() { jq -s "[.[] | select(.event == \"experts\" and .step == 4)] | $2" "$1.jsonl"; }
    train -q m data -o free "${args[@]}" --metrics free.jsonl
    # 128 tokens of 2 choices among 8 experts: 32 each on average, 40 at a factor of 1.25.
    for policy in probs position reroute; do
        train -q m data -o $policy "${args[@]}" --moe-token-drop-policy $policy --moe-expert-capacity-factor 1.25 --metrics $policy.jsonl
        # loads are those before the capacity, dropped is what is above it; rerouted tokens count where they go
        [ "$(of $policy 'map((.dropped * 256 - ([.load[] - 40 | select(. > 0)] | add // 0) | fabs) < 1e-4 and (.load | add) == 256) | all')" = true ]
        train -q m data -o $policy-pad "${args[@]}" --moe-token-drop-policy $policy --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity
        inspect-model --check --atol 1e-5 $policy $policy-pad > /dev/null
        run inspect-model --check free $policy
        [ "$status" -ne 0 ]
    done
    [ "$(of free 'map(.dropped) | max')" = 0 ]
    [ "$(of free 'map(.load | max) | max')" -gt 40 ]
    [ "$(of reroute 'map(.dropped) | max')" = 0 ]
    [ "$(of reroute 'map(.load | max) | max')" = 40 ]
    for policy in probs position; do
        [ "$(of $policy 'map(.dropped > 0) | all')" = true ]
    done
    run inspect-model --check probs position
    [ "$status" -ne 0 ]
    # With room for all nothing changes.
    train -q m data -o room "${args[@]}" --moe-token-drop-policy probs --moe-expert-capacity-factor 8
    inspect-model --check free room > /dev/null
    # A second expert that is drawn: the same by the same seed, also with recomputation; another one by another.
    train -q m data -o drawn "${args[@]}" --moe-random-second
    train -q m data -o again "${args[@]}" --moe-random-second --recompute full
    train -q m data -o other "${args[@]}" --moe-random-second --seed 5
    inspect-model --check drawn again > /dev/null
    for o in free other; do
        run inspect-model --check drawn $o
        [ "$status" -ne 0 ]
    done
    small qwen3-moe-13m three head_dim=16 num_experts_per_tok=3
    run train three data -o a --steps 1 --seq-len 32 --moe-random-second
    [ "$status" -eq 2 ]
    [[ "$output" == *"--moe-random-second: serves models that choose 2 experts, and three chooses 3"* ]]
    run train m data -o a --steps 1 --seq-len 32 --moe-pad-expert-input-to-capacity
    [ "$status" -eq 2 ]
    [[ "$output" == *"there is no capacity: give --moe-expert-capacity-factor too"* ]]
    run train m data -o a --steps 1 --seq-len 32 --moe-token-drop-policy position
    [ "$status" -eq 2 ]
    [ "$output" = "train: --moe-token-drop-policy: there is no capacity: give --moe-expert-capacity-factor too" ]
    run train m data -o a --steps 1 --seq-len 32 --moe-token-drop-policy position --moe-expert-choice
    [ "$status" -eq 2 ]
    [ "$output" = "train: --moe-token-drop-policy: serves tokens that choose experts: leave it out" ]
}

@test "mixtures: experts choose tokens, routers with noise, and their type" {
    small qwen3-moe-13m m head_dim=16 moe_intermediate_size=24 norm_topk_prob=false
    args=(--steps 4 --batch-size 4 --seq-len 32 --lr 1e-2 --lr-schedule constant)
    of() { jq -s "[.[] | select(.event == \"experts\" and .step == 4)] | $2" "$1.jsonl"; }
    train -q m data -o free "${args[@]}" --metrics free.jsonl
    # 128 tokens, 2 of 8 experts each: an expert takes 32, or 48.
    train -q m data -o choose "${args[@]}" --moe-expert-choice --metrics choose.jsonl
    [ "$(of choose 'map(.load | unique) | unique')" = "$(jq -n '[[32]]')" ]
    train -q m data -o more "${args[@]}" --moe-expert-choice --moe-expert-capacity-factor 1.5 --metrics more.jsonl
    [ "$(of more 'map(.load | unique) | unique')" = "$(jq -n '[[48]]')" ]
    [ "$(of free 'map(.load | unique | length) | min')" -gt 1 ]
    train -q m data -o again "${args[@]}" --moe-expert-choice --recompute full --threads 1
    inspect-model --check choose again > /dev/null
    # Each kind of noise is drawn from the seed, the same when layers are computed again; 0 changes nothing.
    for noise in input-jitter-eps router-noise; do
        train -q m data -o "$noise" "${args[@]}" --moe-$noise 0.3
        train -q m data -o "$noise-again" "${args[@]}" --moe-$noise 0.3 --recompute full --threads 1
        train -q m data -o "$noise-other" "${args[@]}" --moe-$noise 0.3 --seed 5
        train -q m data -o "$noise-none" "${args[@]}" --moe-$noise 0
        inspect-model --check "$noise" "$noise-again" > /dev/null
        inspect-model --check free "$noise-none" > /dev/null
        for o in free "$noise-other"; do
            run inspect-model --check "$noise" "$o"
            [ "$status" -ne 0 ]
        done
    done
    # Without the option the config's jitter counts.
    small mixtral-8x7b jitter head_dim=16 intermediate_size=24 router_jitter_noise=0.3
    train -q jitter data -o of-config "${args[@]}"
    train -q jitter data -o given "${args[@]}" --moe-input-jitter-eps 0.3
    train -q jitter data -o without "${args[@]}" --router-jitter-noise 0
    inspect-model --check of-config given > /dev/null
    run inspect-model --check of-config without
    [ "$status" -ne 0 ]
    train -q m data -o low "${args[@]}" --dtype bf16 --moe-router-dtype bf16
    train -q m data -o wide "${args[@]}" --dtype bf16
    run inspect-model --check low wide
    [ "$status" -ne 0 ]
}

@test "mixtures: experts that choose, noise and types that are refused" {
    refused() {
        run train "$1" data -o a --steps 1 --seq-len 32 "${@:3}"
        [ "$status" -eq 2 ]
        [[ "$output" == *"$2"* ]]
        [ ! -e a ]
    }
    small qwen3-moe-13m normal head_dim=16 norm_topk_prob=true
    refused normal 'serves routers without norm_topk_prob, bias and groups; those of normal have norm_topk_prob' --moe-expert-choice
    small qwen3-moe-13m plain head_dim=16 norm_topk_prob=false
    refused plain 'loads are equal already' --moe-expert-choice --moe-aux-loss-coeff 0.1
    refused plain 'serves computation in bf16: give --dtype bf16 too' --moe-router-dtype bf16 --dtype f32
    refused plain '--moe-input-jitter-eps' --moe-input-jitter-eps 1
    small llama-5m dense
    none='serves mixtures of experts; dense has no experts'
    refused dense "--moe-expert-choice: $none" --moe-expert-choice
    refused dense '--moe-router-bias-update-rate: serves routers with biases; those of dense have none: leave it out' --moe-router-bias-update-rate 0.01
    refused dense "--moe-router-noise: $none" --moe-router-noise 0.1
    refused dense "--moe-input-jitter-eps: $none" --moe-input-jitter-eps 0.1
    refused dense "--moe-router-dtype: $none" --moe-router-dtype bf16 --dtype bf16
    small mixtral-8x7b a head_dim=16 intermediate_size=24
    jq '.router_jitter_noise = 1' a/config.json > a/new && mv a/new a/config.json
    run train -q a data -o b --steps 1 --seq-len 32
    [ "$status" -eq 2 ]
    [[ "$output" == *'"router_jitter_noise": is not in [0, 1)'* ]]
}
