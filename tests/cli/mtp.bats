#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Modules that predict tokens further on (DeepSeek-V3, Qwen3-Next).

bats_require_minimum_version 1.5.0

setup() {
    cd "$BATS_TEST_TMPDIR" || return
    for i in {1..60}; do
        echo "{\"text\":\"the river ran by the old bridge $i and the stones lay in the water\"}"
    done > t.jsonl
    train-tokenizer -q -V 300 -o tokenizer.json t.jsonl
    shard-data -q --tokenizer tokenizer.json -o data t.jsonl
    args=(--batch-size 2 --seq-len 32 --lr 3e-3 --lr-schedule constant --save-every 4)
}

small() { # OUT [KEY=VALUE ...]
    local out=$1 set=()
    shift
    for kv in hidden_size=32 intermediate_size=48 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=4 \
        q_lora_rank=14 kv_lora_rank=20 qk_nope_head_dim=12 qk_rope_head_dim=8 v_head_dim=10 n_routed_experts=8 \
        num_experts_per_tok=2 moe_intermediate_size=16 first_k_dense_replace=1 tie_word_embeddings=false "$@"; do
        set+=(--set "$kv")
    done
    init-model -q -f deepseek-v3-12m -t tokenizer.json "${set[@]}" -o "$out"
}

# Other tensors of a folder: its config with a key changed.
rekey() { # FOLDER KEY VALUE
    sed -i -E "s/(\"$2\": *)[0-9]+/\1$3/" "$1/config.json"
}

last() { # METRICS KEY
    grep '"event":"step"' "$1" | tail -n 1 | sed -E "s/.*\"$2\":\[?([0-9.]+).*/\1/"
}

@test "mtp: modules train with their loss, and resume to the bit" {
    for n in 1 2; do
        small "m$n" num_nextn_predict_layers=$n
        train -q "m$n" data -o "r$n" --steps 8 "${args[@]}" --metrics "$n.jsonl"
        train -q "m$n" data -o "half$n" --steps 4 "${args[@]}"
        train -q --resume "half$n" --steps 8
        inspect-model --check "r$n" "half$n" > /dev/null
        train -q "m$n" data -o "again$n" --steps 8 "${args[@]}" --recompute full
        inspect-model --check "r$n" "again$n" > /dev/null
        train -q "m$n" data -o "parts$n" --steps 1 --batch-size 1 --gradient-accumulation-steps 2 --seq-len 32 --metrics "p$n.jsonl"
        awk -v a="$(grep -m1 '"event":"step"' "$n.jsonl" | sed -E 's/.*"mtp_loss":([0-9.]+).*/\1/')" -v b="$(last "p$n.jsonl" mtp_loss)" \
            'BEGIN { d = a - b; exit !(d < 1e-5 && d > -1e-5) }'
        awk -v a="$(last "p$n.jsonl" mtp_loss)" -v b="$(last "$n.jsonl" mtp_loss)" 'BEGIN { exit !(b < a - 0.3) }'
    done
    # The losses of both modules are there, and checkpoints hold copies of what they share.
    grep -q '"mtp_losses":\[[0-9.]*,[0-9.]*\]' 2.jsonl
    inspect-model --no-list --json r2 | grep -q '"mtp_parameters":43668,"mtp_stored":82068'
    train -q m1 data -o low --steps 4 "${args[@]}" --dtype bf16
    # Sequences too short for targets: a module without them has no loss, which is no fault.
    train -q m2 data -o one --steps 1 --batch-size 2 --seq-len 1 --metrics one.jsonl
    run ! grep -qE 'mtp_loss|nonfinite' one.jsonl
    train -q m2 data -o two --steps 1 --batch-size 2 --seq-len 2 --metrics two.jsonl
    grep -q '"mtp_losses":\[[0-9.]*\]' two.jsonl
    run ! grep -q nonfinite two.jsonl
}

@test "mtp: a weight of 0 trains the model alone and keeps the modules" {
    small m
    small alone num_nextn_predict_layers=0
    train -q m data -o r --steps 8 "${args[@]}" --mtp-loss-scaling-factor 0 --metrics r.jsonl
    train -q alone data -o ra --steps 8 "${args[@]}"
    run ! grep -q mtp_loss r.jsonl
    inspect-model r ra | grep -q '^53 of 97 tensors are the same; largest difference 0, '
    run inspect-model --only 'model.layers.2.*' m r
    # all but the two copies
    [[ $output == *"42 of 44 tensors are the same"* ]]
}

@test "mtp: folders, merges, .lmz and conversions keep the modules" {
    small m
    train -q m data -o r --steps 4 "${args[@]}"
    train -q m data -o s --steps 4 "${args[@]}" --seed 1
    compress-ckpt -q r -o r.lmz
    inspect-model --check r r.lmz > /dev/null
    convert-model -q r.lmz -o back
    inspect-model --check r back > /dev/null
    for how in linear slerp; do
        merge-models -q --method "$how" $([[ $how == slerp ]] && echo --t 0.5 --base r || echo r) s -o "$how"
        train -q "$how" data -o "$how-on" --steps 1 "${args[@]}" --metrics "$how.jsonl"
        grep -q mtp_loss "$how.jsonl"
    done
    # Of models with two tokenizers, all copies have the rows of the union.
    mkdir other
    sed 's/river/forest/; s/bridge/pines/' t.jsonl > other/t.jsonl
    train-tokenizer -q -V 305 -o other/tokenizer.json other/t.jsonl
    (cd other && small m)
    merge-models -q --method linear --tokenizer union m other/m -o union
    generate -q union -p "the river" -n 3 --draft mtp > /dev/null
    train --dry-run m | grep -q 'parameters 70966, '
    run convert-model r -o r.gguf
    [[ "$status" -eq 0 && "$output" == *"left out: modules that predict tokens further on are not written to GGUF"* ]]
    convert-model -q r.gguf -o from-gguf
    printf 'merge_method: linear\nslices:\n  - sources: [{model: r, layer_range: [0, 2], parameters: {weight: 1}}]\n' > slices.yaml
    run merge-models --config slices.yaml -o sliced
    [[ "$status" -eq 0 && "$output" == *"left out: modules that predict tokens further on are in no slice"* ]]
    for left in from-gguf sliced; do
        grep -q '"num_nextn_predict_layers": 0' $left/config.json
    done
    for left in r.gguf sliced; do
        run -2 generate $left -p x --draft mtp
        [[ "$output" == *"the model has no modules that predict tokens further on"* ]]
    done
    # What reads the model alone passes over them.
    small alone num_nextn_predict_layers=0
    a=$(eval-model -q m t.jsonl --seq-len 32 --json | sed -E 's/.*"loss":([0-9.]+).*/\1/')
    b=$(eval-model -q alone t.jsonl --seq-len 32 --json | sed -E 's/.*"loss":([0-9.]+).*/\1/')
    [ "$a" = "$b" ]
}

@test "mtp: preference tuning keeps the modules, a reward model has none, an adapter leaves them alone" {
    small m
    for i in {1..8}; do
        echo "{\"prompt\":\"the river\",\"chosen\":\" ran by the old bridge $i\",\"rejected\":\" lay in the water $i\"}"
    done > pairs.jsonl
    align-model -q m pairs.jsonl -o dpo --loss dpo --steps 2 --seq-len 32 --batch-size 2
    run inspect-model --only 'model.layers.2.*' m dpo
    [[ $output == *"42 of 44 tensors are the same"* ]]
    generate -q dpo -p "the river" -n 3 --draft mtp > /dev/null
    align-model -q m pairs.jsonl -o reward --loss reward --steps 2 --seq-len 32 --batch-size 2
    grep -q '"num_nextn_predict_layers": 0' reward/config.json
    run ! grep -q 'model.layers.2' reward/model.safetensors
    run peft-tune m t.jsonl -o adapter --steps 2 --seq-len 32
    [ "$status" -eq 0 ]
    [[ "$output" == *"LORA on 16 modules: q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj, gate_proj, up_proj, down_proj"* ]]
    [[ "$output" != *eh_proj* ]]
    run -2 peft-tune -q m t.jsonl -o none --steps 2 --seq-len 32 --target eh_proj
    [[ "$output" == "peft-tune: adapter: 'model.layers.2.eh_proj' serves the prediction of tokens further on, which is not tuned: "* ]]
    merge-models -q --method passthrough m+adapter -o merged
    run inspect-model --only 'model.layers.2.*' m merged
    [[ $output == *"44 of 44 tensors are the same"* ]]
}

@test "mtp: contradictions of config and tensors are named" {
    small m
    cp -r m none
    small alone num_nextn_predict_layers=0
    cp alone/model.safetensors none
    # transformers saves the key without the tensors
    train none data -o left --steps 1 "${args[@]}" 2>&1 | grep -q '"num_nextn_predict_layers" is 1, but no tensor of these layers'
    grep -q '"num_nextn_predict_layers": 0' left/config.json
    run -2 train -q none data -o x --steps 1 "${args[@]}" --mtp-loss-scaling-factor 0.3
    [ "$output" = 'train: none: "num_nextn_predict_layers" is 1, but no tensor of these layers is there: give it no weight' ]
    run -2 train -q alone data -o x --steps 1 "${args[@]}" --mtp-loss-scaling-factor 0.3
    [[ $output == *"serves models with modules that predict tokens further on; alone has none" ]] || [[ $output == *"alone has none: leave it out" ]]
    cp -r m more
    rekey more num_nextn_predict_layers 2
    run -2 train -q more data -o x --steps 1 "${args[@]}"
    [[ $output == *'tensor "model.layers.3.'*'" is missing' ]]
    cp -r m fewer
    rekey fewer num_nextn_predict_layers 0
    # The check of a folder knows the modules: copies are all that is not read.
    run inspect-model --verify m
    [[ "$status" -eq 0 && "$output" == *"model.layers.2.embed_tokens.weight"*"is a copy of the embedding"* ]]
    [[ "$output" == *"model.layers.2.shared_head.head.weight"*"is a copy of the head"* ]]
    run ! grep -q 'is not read' <<< "$output"
    inspect-model --verify none > /dev/null
    cp -r m wrong
    sed -i 's/eh_proj/eh_prob/' wrong/model.safetensors
    run -3 inspect-model --verify wrong
    [[ "$output" == *"eh_prob.weight"*"is read by no part"* && "$output" == *"eh_proj.weight"*"is missing"* ]]
    for tool in "train -q fewer data -o x --steps 1" "eval-model -q fewer t.jsonl"; do
        run -2 $tool
        [[ $output == *'tensor "model.layers.2.'*'" does not belong to a deepseek_v3 model' ]]
    done
    [ ! -e x ]
}

@test "mtp: drafts give the texts of the model, and accepted ones save steps" {
    small m
    train -q m data -o r --steps 60 --batch-size 4 --seq-len 32 --lr 5e-3
    ask=(-p "the river" -p "the old bridge" -p "water" -p "stones lay in the" --dtype f32)
    generate -q r "${ask[@]}" -n 21 --temperature 0 --ignore-eos > plain
    for n in 1 2 5; do
        generate r "${ask[@]}" -n 21 --temperature 0 --ignore-eos --draft mtp --draft-tokens $n > drafted 2> said
        cmp plain drafted
        grep -qE 'drafts: [0-9]+ of [0-9]+ tokens accepted \([0-9.]+ %\), [0-9.]+ tokens a step' said
        awk -v x="$(sed -E -n 's/.* ([0-9.]+) tokens a step/\1/p' said)" 'BEGIN { exit !(x > 1.5) }'
    done
    # In the numbers that matrix units take, which are not chosen everywhere; sums of other rows may differ in them.
    generate r "${ask[@]}" --dtype bf16 -n 21 --temperature 0 --ignore-eos --draft mtp > /dev/null 2> said
    awk -v x="$(sed -E -n 's/.* ([0-9.]+) tokens a step/\1/p' said)" 'BEGIN { exit !(x > 1.5) }'
    # Of several modules, as many as there are drafts, or all of them.
    small m3 num_nextn_predict_layers=3
    train -q m3 data -o r3 --steps 60 --batch-size 4 --seq-len 32 --lr 5e-3
    generate -q r3 "${ask[@]}" -n 21 --temperature 0 --ignore-eos > plain3
    for n in 1 2 5; do
        generate -q r3 "${ask[@]}" -n 21 --temperature 0 --ignore-eos --draft mtp --draft-tokens $n | cmp plain3 -
    done
    # One at a time, and the end of a context.
    generate -q r "${ask[@]}" -n 21 --temperature 0 --ignore-eos -b 1 --draft mtp | cmp plain -
    generate -q r -p "the river" --dtype f32 --context 9 -n 30 --temperature 0 --ignore-eos > short
    generate -q r -p "the river" --dtype f32 --context 9 -n 30 --temperature 0 --ignore-eos --draft mtp --draft-tokens 4 | cmp short -
    # Sampling: the same again by the same seed; log-probabilities are the model's own.
    how=(--dtype f32 -n 12 --temperature 0.8 --top-p 0.9 --top-k 30 --repetition-penalty 1.1 --json --logprobs --n 3)
    generate -q r -p "the river" "${how[@]}" --draft mtp --draft-tokens 3 > one
    generate -q r -p "the river" "${how[@]}" --draft mtp --draft-tokens 3 -b 2 > two
    cut -d'"' -f1-20 one | cmp - <(cut -d'"' -f1-20 two)
    grep -q '"drafted_tokens":[0-9]*,"accepted_tokens":[0-9]*' one
    # Of drafts, those behind the end of a text do not count.
    generate -q r -p "the river" -n 30 --temperature 0 --stop bridge --json --draft mtp --draft-tokens 8 > stopped
    awk -v t="$(jq .tokens stopped)" -v a="$(jq .accepted_tokens stopped)" -v d="$(jq .drafted_tokens stopped)" \
        'BEGIN { exit !(a > 0 && a < t && a <= d) }'
    logs() { generate -q r -p "the river" --dtype f32 -n 12 --temperature 0 --json --logprobs "$@" | sed -E 's/.*"logprobs":\[(.*)\].*/\1/' | tr , '\n'; }
    paste <(logs) <(logs --draft mtp --draft-tokens 2) | awk '{ d = $1 - $2; if (d > 1e-4 || d < -1e-4) exit 1 } END { exit NR != 12 }'
    # The file of a folder without modules, and what else cannot be.
    small alone num_nextn_predict_layers=0
    run -2 generate alone -p x --draft mtp
    [[ $output == *"--draft: drafts: the model has no modules that predict tokens further on: leave them out" ]]
    cp -r m none
    cp alone/model.safetensors none
    run -2 generate none -p x --draft mtp
    [[ $output == *'tensor "model.layers.2.'*'" is missing' ]]
    for more in "--serve-batch 2" "--kv int8" "--states int8" "--chat" "--save-cache c"; do
        run -2 generate r -p x --draft mtp $more
        [[ $output == *"--draft: cannot be combined with ${more%% *}: leave one of them out" ]]
    done
    run -2 generate r -p x --draft-tokens 2
    [[ $output == *"--draft-tokens: has no effect without it: give --draft mtp, too" ]]
}

@test "mtp: the module of Qwen3-Next under its published names, beside layers with states" {
    set=()
    for kv in hidden_size=32 intermediate_size=48 num_hidden_layers=3 num_attention_heads=4 num_key_value_heads=2 head_dim=8 \
        num_experts=4 num_experts_per_tok=2 moe_intermediate_size=16 shared_expert_intermediate_size=16 \
        full_attention_interval=2 linear_num_key_heads=2 linear_num_value_heads=4 linear_key_head_dim=6 \
        linear_value_head_dim=6 num_nextn_predict_layers=1; do
        set+=(--set "$kv")
    done
    init-model -q -f qwen3-next-12m -t tokenizer.json "${set[@]}" -o m
    inspect-model --json m | grep -o '"name":"mtp[^"]*"' | sort > names
    for name in mtp.fc mtp.norm mtp.pre_fc_norm_embedding mtp.pre_fc_norm_hidden mtp.layers.0.self_attn.q_proj \
        mtp.layers.0.mlp.experts.3.down_proj mtp.layers.0.mlp.shared_expert_gate mtp.layers.0.input_layernorm; do
        grep -qx "\"name\":\"$name.weight\"" names
    done
    train -q m data -o r --steps 150 --batch-size 4 --seq-len 32 --lr 5e-3 --metrics r.jsonl
    awk -v a="$(grep -m1 '"event":"step"' r.jsonl | sed -E 's/.*"mtp_loss":([0-9.]+).*/\1/')" -v b="$(last r.jsonl mtp_loss)" \
        'BEGIN { exit !(b < a - 0.5) }'
    train -q m data -o r8 --steps 8 "${args[@]}"
    train -q m data -o r4 --steps 4 "${args[@]}"
    train -q --resume r4 --steps 8
    inspect-model --check r8 r4 > /dev/null
    ask=(-p "the river" -p "the old bridge" -p "water" -p "stones lay in the" --dtype f32)
    generate -q r "${ask[@]}" -n 21 --temperature 0 --ignore-eos > plain
    # Published folders have the tensors without the key.
    convert-model -q r -o bare
    jq 'del(.num_nextn_predict_layers)' m/config.json > bare/config.json
    inspect-model --verify bare > /dev/null
    for model in r bare; do
        for n in 1 3; do
            generate $model "${ask[@]}" -n 21 --temperature 0 --ignore-eos --draft mtp --draft-tokens $n > drafted 2> said
            cmp plain drafted
            awk -v x="$(sed -E -n 's/.* ([0-9.]+) tokens a step/\1/p' said)" 'BEGIN { exit !(x > 1.7) }'
        done
    done
    generate -q r "${ask[@]}" -n 21 --temperature 0 --ignore-eos -b 1 --draft mtp | cmp plain -
    convert-model -q bare -o copied
    inspect-model --check bare copied > /dev/null
    train -q bare data -o on --steps 1 "${args[@]}" --metrics on.jsonl
    grep -q mtp_loss on.jsonl
    run convert-model bare -o m.gguf
    [[ "$status" -eq 0 && "$output" == *"'mtp."*"left out: modules that predict tokens further on are not written to GGUF"* ]]
    # Slices are of the layers of the model, whose first one is not the module's, with the key and without.
    for left in r bare; do
        printf 'merge_method: passthrough\nslices:\n  - sources: [{model: %s, layer_range: [0, 2]}]\n  - sources: [{model: %s, layer_range: [0, 2]}]\n' \
            $left $left > slices.yaml
        run merge-models --config slices.yaml -f -o sliced
        [[ "$status" -eq 0 && "$output" == *"'mtp."*"left out: modules that predict tokens further on are in no slice"* ]]
        inspect-model --verify sliced > /dev/null
        run ! grep -q '"name":"mtp' <(inspect-model --json sliced)
        run ! grep -q '"num_nextn_predict_layers": [1-9]' sliced/config.json
        run -2 generate sliced -p x --draft mtp
        [[ "$output" == *"the model has no modules that predict tokens further on"* ]]
    done
    # Said to have none, it is passed over.
    jq '.num_nextn_predict_layers = 0' m/config.json > bare/config.json
    run -2 generate bare -p x --draft mtp
    [[ $output == *"the model has no modules that predict tokens further on"* ]]
    run -2 init-model -f qwen3-next-12m -t tokenizer.json "${set[@]}" --set num_nextn_predict_layers=2 -o x
    [[ $output == *num_nextn_predict_layers* ]]
}

@test "mtp: a device trains with the losses of the cpu, and drafts its texts" {
    small m
    load cuda
    use_module
    train -q m data -o a --steps 3 "${args[@]}" --metrics a.jsonl
    train -q m data -o b --steps 3 "${args[@]}" --metrics b.jsonl --device cuda
    for key in loss mtp_loss grad_norm; do
        awk -v a="$(last a.jsonl $key)" -v b="$(last b.jsonl $key)" 'BEGIN { d = a - b; exit !(a > 0 && d < 1e-4 && d > -1e-4) }'
    done
    how=(--dtype f32 -p "the river" -p water -n 9 --temperature 0 --ignore-eos)
    generate -q a "${how[@]}" > plain
    generate -q a "${how[@]}" --device cuda --draft mtp --draft-tokens 2 | cmp plain -
}
