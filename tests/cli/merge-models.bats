#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# merge-models: folders, streams, YAML, adapters, refusals.

setup() {
    root=${LM_TEST_ROOT:-$(cd "$BATS_TEST_DIRNAME/../.." && pwd)}
    cd "$BATS_TEST_TMPDIR"
    sh "$root/tests/cli/examples/merge-models.sh"
}

same() { inspect-model --check "$@" > /dev/null; }

# refused STATUS MESSAGE COMMAND...: one line that contains MESSAGE, and no output
refused() {
    local want=$1 message=$2
    shift 2
    run "$@"
    echo "$status: $output"
    [ "$status" -eq "$want" ]
    [ "${#lines[@]}" -eq 1 ]
    [[ "$output" == "merge-models: "*"$message"* ]]
    [ ! -e bad ]
    [ -z "$(ls -d .*.tmp.* 2> /dev/null)" ]
}

@test "merge-models: a weight of one gives that model, of zero the base" {
    merge-models --method dem --base base/ math/:1 code/:0 -o one/
    same one/ math/
    merge-models --method dem --base base/ math/:0 code/:0 -o none/
    same none/ base/
    run same one/ base/
    [ "$status" -eq 3 ]
}

@test "merge-models: the same bytes for any -j" {
    for j in 1 2 5; do
        LM_THREADS=$j merge-models -q -f --seed 7 --method dare_ties --density 0.5 --base base/ math/ code/ -o out/
        cp out/model.safetensors "$j"
    done
    cmp 1 2 && cmp 1 5
    LM_THREADS=1 merge-models -q -f --seed 8 --method dare_ties --density 0.5 --base base/ math/ code/ -o out/
    run inspect-model --check out/model.safetensors 1
    [ "$status" -eq 3 ]
}

@test "merge-models: folders, tars, single files and standard input give one result" {
    merge-models -q -m linear math/:0.3 code/:0.7 -o folder/
    tar -cf math.tar math
    tar -czf code.tgz code
    merge-models -q -m linear math.tar:0.3 code.tgz:0.7 -o tars.tar
    same folder/ tars.tar
    merge-models -q -m linear math/model.safetensors:0.3 code/model.safetensors:0.7 -o files.safetensors
    same folder/ files.safetensors
    merge-models -q -m linear -:0.3 code/:0.7 -o stream/ < math.tar
    same folder/ stream/
    tar -C math -cf - config.json model.safetensors | merge-models -q -m linear -:0.3 code/:0.7 -o - > pipe.tar
    same folder/ pipe.tar
    tar -C code -cf - model.safetensors config.json | merge-models -q -m linear math/:0.3 -:0.7 -o piped.lmz
    same folder/ piped.lmz
}

@test "merge-models: layers are stacked and renumbered, config.json has their number" {
    merge-models -q --config mergekit.yaml -o out/
    grep -q '"num_hidden_layers": 3' out/config.json
    run inspect-model out/
    [[ "$output" == *model.layers.2.mlp.up_proj.weight* ]]
    [[ "$output" != *model.layers.3.* ]]
    run merge-models --config mergekit.yaml --print-plan
    [ "$status" -eq 0 ]
    [[ "$output" == *"model.layers.2.mlp.up_proj.weight F32 [48,32]"*"code model.layers.1.mlp.up_proj.weight:scale=0.5"* ]]
}

@test "merge-models: filters of a model's parameters match its own names, others those of the result" {
    cat > y << 'YAML'
merge_method: slerp
base_model: math
slices:
  - sources: [{model: math, layer_range: [0, 1]}, {model: code, layer_range: [1, 2]}]
  - sources: [{model: math, layer_range: [0, 1]}, {model: code, layer_range: [1, 2]}]
parameters: {t: [{filter: layers.1., value: 0.25}, {value: 0.5}]}
YAML
    run merge-models --config y --print-plan
    [[ "$output" == *"model.layers.1.mlp.up_proj.weight F32 [48,32]  t=0.25  code"* ]]
    [[ "$output" == *"model.layers.0.mlp.up_proj.weight F32 [48,32]  t=0.5  code"* ]]
    sed -i 's/scale: 0.5/scale: [{filter: layers.1., value: 0.5}, {filter: layers.2., value: 9}, {value: 1}]/' mergekit.yaml
    run merge-models --config mergekit.yaml --print-plan
    [[ "$output" == *"model.layers.2.mlp.up_proj.weight F32 [48,32]  code model.layers.1.mlp.up_proj.weight:scale=0.5"* ]]
}

@test "merge-models: YAML gradients and filters" {
    cat > g.yaml << 'YAML'
merge_method: slerp
base_model: math
models: [{model: math}, {model: code}]
parameters:
  t:
    - {filter: self_attn, value: [0, 1]}
    - {filter: mlp, value: 0.25}
    - value: 0.5
dtype: bfloat16
YAML
    run merge-models --config g.yaml --print-plan
    [ "$status" -eq 0 ]
    [[ "$output" == *"model.layers.0.self_attn.q_proj.weight BF16 [32,32]  t=0  code"* ]]
    [[ "$output" == *"model.layers.1.self_attn.q_proj.weight BF16 [32,32]  t=1  code"* ]]
    [[ "$output" == *"model.layers.1.mlp.up_proj.weight BF16 [48,32]  t=0.25  code"* ]]
    [[ "$output" == *"model.norm.weight BF16 [32]  t=0.5  code"* ]]
    merge-models -q --config g.yaml -o out/
    grep -q '"torch_dtype": "bfloat16"' out/config.json
}

@test "merge-models: an adapter is merged into its base" {
    merge-models -q -m passthrough base/+adapter/ -o a/
    merge-models -q -m passthrough adapter -o b/
    same a/ b/
    # every element of q_proj of layer 0 by 2 / 1 * 0.5 * 0.5 = 0.5, within a rounding; nothing else
    run inspect-model base/ a/
    [[ "$output" =~ "19 of 20 tensors are the same; largest difference 0.5"(0000[0-9]*)?, ]]
    run inspect-model --json --only '*layers.0.self_attn.q_proj*' base/ a/
    [[ "$output" == *'"differing":1024'* ]]
    sed -i 's/"r": 1/"r": 1, "use_dora": true/' adapter/adapter_config.json
    refused 1 "use_dora is set, but 'model.layers.0.self_attn.q_proj.weight' has no lora_magnitude_vector" \
        merge-models -m passthrough base/+adapter/ -o bad
}

@test "merge-models --keep-delta: the base again, to the bit" {
    for type in bf16 f16 f32; do
        merge-models -q -f -m passthrough base/ --dtype $type -o b-$type/
        merge-models -q -f -m passthrough b-$type/+adapter/ -o t-$type/ --keep-delta $type.lmz
        ! same b-$type/ t-$type/
        compress-ckpt -q -d $type.lmz -o again-$type/
        diff -r b-$type/ again-$type/
        same b-$type/ $type.lmz # a model like any other
        [ $(stat -c %s $type.lmz) -lt $(stat -c %s b-$type/model.safetensors) ]
    done
    peft-tune -q --unmerge bf16.lmz t-bf16/ --rank 1 -o extracted/
    merge-models -q -m passthrough b-bf16/+extracted/ -o u/
    # of a weighted merge its base
    merge-models -q -m dem -b base/ math/:0.5 code/:0.5 -o m/ --keep-delta m.lmz
    compress-ckpt -q -d m.lmz -o base-again/
    diff -r base/ base-again/
    # a result that is another one, or a damaged delta
    cp -r t-bf16 kept && merge-models -q -f -m passthrough base/ -o t-bf16/
    run compress-ckpt -q -d bf16.lmz -o bad
    [ "$status" -eq 2 ] && [[ "$output" == *"it is a delta against content"* ]] && [ ! -e bad ]
    compress-ckpt -q -d bf16.lmz --base kept -o again/
    diff -r b-bf16/ again/
    printf X | dd of=bf16.lmz bs=1 seek=4000 conv=notrunc status=none
    run compress-ckpt -q -d bf16.lmz --base kept -o bad
    [ "$status" -ne 0 ] && [ "${#lines[@]}" -eq 1 ] && [ ! -e bad ]
}

@test "merge-models --keep-delta: what it refuses" {
    refused 2 "--keep-delta: 'x' has another ending: write FILE.lmz" merge-models -m passthrough base/+adapter/ -o bad --keep-delta x
    refused 2 "cannot be the base of a delta: write the model to a folder" merge-models -m passthrough base/+adapter/ -o bad.tar --keep-delta x.lmz
    refused 2 "none of the models is the one to restore: name the base with --base" merge-models -m linear math/:1 code/:1 -o bad --keep-delta x.lmz
    : > x.lmz
    refused 2 "x.lmz: exists: give another name, or -f to replace it" merge-models -m passthrough base/+adapter/ -o bad --keep-delta x.lmz
    refused 2 "give a folder or a file" merge-models -m passthrough -+adapter/ -o bad --keep-delta y.lmz < <(tar -C base -cf - .)
    refused 2 "'bad/x.lmz' is in the output: name a file beside it" merge-models -m passthrough base/+adapter/ -o bad --keep-delta bad/x.lmz
}

@test "merge-models: an adapter in a tar, compressed or not, in an .lmz and on standard input" {
    merge-models -q -m passthrough base/+adapter -o want/
    tar -cf a.tar adapter
    tar -czf a.tgz adapter
    compress-ckpt -q adapter -o a.lmz
    for a in a.tar a.tgz a.lmz; do
        merge-models -q -f -m passthrough base/+$a -o out/
        same want/ out/
        merge-models -q -f -m passthrough $a -o out/ # its base_model_name_or_path
        same want/ out/
    done
    merge-models -q -f -m passthrough base/+- -o out/ < a.tgz
    same want/ out/
    mkdir pickle none && cp adapter/adapter_config.json pickle/ && : > pickle/adapter_model.bin
    refused 2 "adapter_model.bin is a pickle of Python, which is not read: save it with" merge-models -m passthrough base/+pickle -o bad
    refused 2 "it has no adapter_config.json" merge-models -m passthrough base/+none -o bad
    # tools that do not read adapters name the tool that does
    for t in "generate -p a" "convert-model -o bad"; do
        run $t adapter
        [ "$status" -eq 2 ]
        [[ "$output" == *": adapter_model.safetensors is the weights of an adapter: merge-models MODEL+ADAPTER merges it into its base" ]]
        [ ! -e bad ]
    done
}

@test "merge-models: --dry-run shows weights and the bound, and writes nothing" {
    run merge-models --method linear math/:1 code/:3 --dry-run
    [ "$status" -eq 0 ]
    [[ "$output" == *"weight=3 (effective 0.75)"* ]]
    [[ "$output" == *"(2 x largest tensor x 2 inputs + 64 MiB)"* ]]
    run merge-models --method linear math/:1 code/:3 --json -o out/
    [[ "$output" == '{"output":"out/","method":"linear",'*'"effective_weight":0.75'* ]]
    peak=$(grep -o '"peak_rss":[0-9]*' <<< "$output" | cut -d: -f2)
    bound=$(grep -o '"memory_bound":[0-9]*' <<< "$output" | cut -d: -f2)
    [ "$peak" -le "$bound" ]
}

@test "merge-models: a number that is not finite: status 4, with the tensor's name" {
    refused 4 "becomes inf in f16: choose a type of wider range with --dtype" merge-models -m passthrough math:scale=1e30 --dtype f16 -o bad
    merge-models -q -m passthrough math:scale=1e30 --dtype bf16 -o wide/
    refused 4 "inf in f32: change the weights" merge-models -m passthrough wide:scale=1e30 --dtype f32 -o bad
    # the last number of the last tensor
    cp -r math odd
    printf '\000\000\300\177' | dd of=odd/model.safetensors bs=1 seek=$(($(stat -c %s odd/model.safetensors) - 4)) conv=notrunc status=none
    for how in "linear odd code" "dem -b base odd" "ties -b odd math code" "passthrough odd --dtype bf16"; do
        refused 4 "is nan in odd: inspect-model --stats shows which weights are not finite" merge-models -q -m $how -o bad
    done
    merge-models -q -m linear odd:0 code:1 -o out/ # weight 0: not read
    same out/ code/
    merge-models -q -m passthrough odd -o copy/ # copied, not merged
    same copy/ odd/
}

@test "merge-models: provenance names inputs and parameters" {
    merge-models -q -m dem -b base/ math/:0.5 -o out/
    head -c 4000 out/model.safetensors > head
    grep -aq 'lmutils.merge.*method.*dem.*weight.*0.5' head
    grep -aq 'xxh3_sample' head
    grep -aq 'init-model' head # the base's own history
}

@test "merge-models: models that do not fit are refused before anything is written" {
    init-model -q llama-1m --set num_hidden_layers=3 --set hidden_size=32 --set intermediate_size=48 --set vocab_size=96 -o deep/
    refused 2 "it has no tensor 'model.layers.2." merge-models -m linear math/ deep/ -o bad
    init-model -q llama-1m --set num_hidden_layers=2 --set hidden_size=32 --set intermediate_size=64 --set vocab_size=96 -o wide/
    refused 2 "is F32 [32,64], but F32 [32,48] in math/" merge-models -m linear math/ wide/ -o bad
    init-model -q llama-1m --set num_hidden_layers=2 --set hidden_size=32 --set intermediate_size=48 --set vocab_size=98 -o words/
    refused 2 "--tokenizer" merge-models -m linear math/ words/ -o bad
    sed -i 's/"model_type": "llama"/"model_type": "mistral"/' code/config.json
    refused 2 "model_type is mistral, but llama in math/" merge-models -m linear math/ code/ -o bad
}

@test "merge-models: weights in other formats are refused with the remedy" {
    out="save it with safetensors: from_pretrained"
    mkdir old && cp math/config.json old/ && : > old/pytorch_model-00001-of-00002.bin && : > old/pytorch_model.bin.index.json
    refused 2 "old: pytorch_model-00001-of-00002.bin is a pickle of Python, which is not read: $out" merge-models -m linear old math -o bad
    tar -cf old.tar old
    tar -czf old.tgz old
    refused 2 "old.tar: pytorch_model-00001-of-00002.bin is a pickle" merge-models -m linear old.tar math -o bad
    refused 2 "old.tgz: pytorch_model-00001-of-00002.bin is a pickle" merge-models -m linear math old.tgz -o bad
    refused 2 "it is a pickle of Python, which is not read: $out" merge-models -m linear math old/pytorch_model-00001-of-00002.bin -o bad
    : > m.gguf
    refused 2 "m.gguf: it is a model of llama.cpp: convert-model makes a model folder of it" merge-models -m linear math m.gguf -o bad
    sed -i 's/"base"/"else"/' adapter/adapter_config.json
    refused 2 "this adapter's base 'else' is not an input: write MODEL+ADAPTER" merge-models -m linear adapter math -o bad
}

@test "merge-models: misuse is one line" {
    refused 2 "no such merge method" merge-models -m tis math/ -o bad
    refused 2 "needs a base model" merge-models -m ties math/ -o bad
    refused 2 "unknown parameter 'wieght': did you mean 'weight'?" merge-models -m linear math/:wieght=1 -o bad
    refused 2 "method linear has no parameter 'density'" merge-models -m linear --density 0.5 math/ -o bad
    refused 2 "density: 2 is out of range" merge-models -m ties -b base/ math/:density=2 -o bad
    refused 2 "math:0,5: '0,5' is neither a weight nor a setting: write MODEL:0.4" merge-models -m linear math:0,5 code -o bad
    refused 2 "'0.3,code' is neither a weight nor a setting" merge-models -m linear math:0.3,code:0.7 -o bad
    refused 2 "weight is given twice for this model" merge-models -m linear math:weight=0.5,weight=0.7 code -o bad
    refused 2 "the weights add up to 0" merge-models -m linear math:0.5 code:-0.5 --dry-run
    refused 2 "must stay between 0 and 1" merge-models -m della -b base math --density 0.9 --epsilon 0.3 --dry-run
    refused 2 "no output is given" merge-models -m linear math/
    refused 2 "no method is given" merge-models math/ -o bad
    refused 2 "is both an input and the output" merge-models -f -m linear math/ code/ -o math/
    refused 2 "exists already" merge-models -m linear math/ code/ -o base/
    refused 1 "nowhere: cannot open" merge-models -m linear math/ nowhere -o bad
    refused 2 "the models are those of mergekit.yaml" merge-models --config mergekit.yaml math/ -o bad
    refused 2 "mergekit.yaml says how to merge" merge-models --config mergekit.yaml --lambda 2 -o bad
}

@test "merge-models: --config from a pipe" {
    merge-models -q --config mergekit.yaml -o want/
    merge-models -q --config <(cat mergekit.yaml) -o one/
    same want/ one/
    merge-models -q --config - -o two/ < mergekit.yaml
    same want/ two/
    merge-models -q --config <(echo '{"method": "dem", "base": "base/"}') math/:1 -o three/
    same three/ math/
    echo '{"method": "dem", "base": "base/"}' | merge-models -q --config - math/:1 -o four/
    same four/ math/
    sed 's/model: math/model: "-"/' mergekit.yaml > y
    refused 2 "standard input: is named for two inputs" sh -c 'cat y | merge-models --config - -o bad'
    refused 1 "nowhere: cannot open" merge-models --config nowhere -o bad
}

@test "merge-models: YAML anchors and merge keys" {
    cat > y << 'YAML'
x-usual: &usual {weight: 0.25, density: 0.5}
merge_method: ties
base_model: base
models:
  - {model: math, parameters: *usual}
  - {model: code, parameters: {<<: *usual, weight: 0.75}}
YAML
    merge-models -q --config y -o got/
    merge-models -q -m ties --base base --density 0.5 --rescale none math:0.25 code:0.75 -o want/
    same want/ got/
    sed -i s/x-usual/usual/ y
    refused 2 "y: line 1: unknown key 'usual' in the file" merge-models --config y -o bad
}

@test "merge-models: YAML that is wrong is one line with its number" {
    sed 's/scale:/scael:/' mergekit.yaml > y
    refused 2 "y: line 10: unknown parameter 'scael'" merge-models --config y -o bad
    sed 's/sources:/soruces:/' mergekit.yaml > y
    refused 2 "line 3: unknown key 'soruces' in slices: did you mean 'sources'?" merge-models --config y -o bad
    { echo 'a: &a [x,x,x,x,x,x,x,x,x,x]'; for i in b c d e f g h; do p=$(tr b-h a-g <<< "$i"); echo "$i: &$i [*$p,*$p,*$p,*$p,*$p,*$p,*$p,*$p,*$p,*$p]"; done; } > y
    refused 2 "more than 100000 nodes after expansion of aliases" merge-models --config y -o bad
    sed 's/\[0, 2\]/[0, 9]/' mergekit.yaml > y
    refused 2 "layers up to 9 are requested, it has 2" merge-models --config y -o bad
}

@test "merge-models: --config takes options as JSON, too" {
    echo '{"method": "dem", "base": "base/"}' > o.json
    merge-models -q --config o.json math/:1 -o out/
    same out/ math/
}

@test "merge-models: the tokenizer is copied to the result; a chat template is added to it" {
    awk 'BEGIN { for (i = 0; i < 200; i++) printf "The system reads word%d and writes line %d.\n", i % 37, i }' > t.txt
    train-tokenizer -q --vocab-size 300 --pattern llama3 -o tok/tokenizer.json t.txt
    small="--set num_hidden_layers=2 --set hidden_size=32 --set intermediate_size=48 --tokenizer tok/tokenizer.json"
    init-model -q llama-1m $small --seed 1 -o a/
    init-model -q llama-1m $small --seed 2 -o b/
    merge-models -q -m linear a/ b/ -o plain/
    cmp a/tokenizer.json plain/tokenizer.json
    printf 'merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]\n' > y
    printf 'chat_template: "{{ messages }}"\n' | cat y - > t.yaml
    merge-models -q --config t.yaml -o chat/
    grep -q '"chat_template": "{{ messages }}"' chat/tokenizer_config.json
    cmp a/tokenizer.json chat/tokenizer.json
    printf 'chat_template: chatml\n' | cat y - > t.yaml
    merge-models -q --config t.yaml -o chatml.tar
    tar -xOf chatml.tar tokenizer_config.json | grep -q '<|im_start|>'
    printf 'chat_template: alpacca\n' | cat y - > t.yaml
    refused 2 "t.yaml: line 3: chat_template: no template is named 'alpacca'" merge-models --config t.yaml --dry-run
    printf 'tokenizer: {source: union, pad_to_multiple_of: 64}\n' | cat y - > t.yaml
    merge-models -q --config t.yaml -o padded/
    grep -q '"vocab_size": 320' padded/config.json
    run inspect-model padded/
    [[ "$output" == *"[320, 32]"* ]]
}

@test "merge-models: the chat template that most models have" {
    for m in base math code; do
        printf '{"chat_template": "{{ one }}"}' > $m/tokenizer_config.json
    done
    template() { merge-models -q -f --config t.yaml -o out/ && cat out/tokenizer_config.json; }
    cat > t.yaml << 'YAML'
merge_method: task_arithmetic
base_model: base
models: [{model: math, parameters: {weight: 1}}, {model: code, parameters: {weight: 1}}]
chat_template: auto
YAML
    printf '{"chat_template": "{{ base }}"}' > base/tokenizer_config.json
    [[ "$(template)" == *"{{ one }}"* ]]
    printf '{{ two }}\n' > code/chat_template.jinja # takes precedence over tokenizer_config.json
    [[ "$(template)" == *"{{ base }}"* ]]           # all are equally frequent
    printf '{"chat_template": [{"name": "tool", "template": "{{ base }}"}, {"name": "default", "template": "{{ two }}"}]}' > math/tokenizer_config.json
    [[ "$(template)" == *"{{ two }}"* ]]
    rm ./*/tokenizer_config.json code/chat_template.jinja
    merge-models -q -f --config t.yaml -o out/
    [ ! -e out/tokenizer_config.json ]
    for name in alpaca:'### Response:' exaone:'[|endofturn|]' llama3:'<|eot_id|>' mistral:'[/INST]'; do
        sed -i "s/^chat_template: .*/chat_template: ${name%%:*}/" t.yaml
        [[ "$(template)" == *"${name#*:}"* ]]
    done
}

@test "merge-models: mergekit's int8_mask is accepted in YAML and is not a parameter elsewhere" {
    printf 'merge_method: linear\nmodels: [{model: math, parameters: {weight: 1}}]\nparameters: {int8_mask: true}\n' > y
    merge-models -q --config y -o out/
    same out/ math/
    sed -i s/true/maybe/ y
    refused 2 "y: line 3: int8_mask: true or false is needed" merge-models --config y -o bad
    refused 2 "unknown parameter 'int8_mask'" merge-models -m ties -b base/ math/:int8_mask=1 -o bad
    run merge-models --list
    [[ "$output" != *int8_mask* ]]
}

@test "merge-models: files read beside a model are part of its digest" {
    digests() { merge-models --dry-run --json -m passthrough base/+"$1" | grep -o 'xxh3_sample":"[0-9a-f]*'; }
    cp -r adapter other
    [ "$(digests adapter)" = "$(digests other)" ]
    sed -i 's/"lora_alpha": 2/"lora_alpha": 3/' other/adapter_config.json
    [ "$(digests adapter)" != "$(digests other)" ]
    cp -r adapter third
    printf '\101' | dd of=third/adapter_model.safetensors bs=1 seek=$(($(stat -c %s adapter/adapter_model.safetensors) - 1)) conv=notrunc status=none
    [ "$(digests adapter)" != "$(digests third)" ]
}

@test "merge-models: no output replaces an input" {
    mkdir out && cp mergekit.yaml out/ && cp -r adapter out/
    refused 2 "out: it holds the input out/mergekit.yaml" merge-models -f --config out/mergekit.yaml -o out
    refused 2 "it holds the input out/adapter" merge-models -f -m passthrough base/+out/adapter -o out
    refused 2 "is both an input and the output" merge-models -f -m passthrough adapter -o base
    ln -s math link
    refused 2 "is both an input and the output" merge-models -f -m linear math/ code/ -o link
    refused 2 "is both an input and the output" merge-models -f -m linear math/model.safetensors code/ -o math/model.safetensors
    cmp mergekit.yaml out/mergekit.yaml
}

@test "merge-models: a stream is one input only" {
    tar -cf math.tar math
    refused 2 "standard input: is named for two inputs, and can be read only once: name it once" sh -c 'merge-models -m linear -:.3 -:.7 -o bad < math.tar'
    refused 2 "standard input: is named for two inputs" sh -c 'cat math.tar | merge-models -m passthrough -+- -o bad'
    refused 2 "/dev/stdin: is the same stream as standard input" sh -c 'cat math.tar | merge-models -m linear -:.3 /dev/stdin:.7 -o bad'
    mkfifo pipe
    refused 2 "./pipe: is the same stream as pipe" merge-models -m linear pipe:.3 ./pipe:.7 -o bad
    refused 2 "/dev/stdin: is the same stream as standard input" sh -c 'cat math.tar | merge-models -m fisher -:fisher=/dev/stdin code/:fisher=x -o bad'
    # one base for two adapters is read once
    cp -r adapter other
    sed -i 's/"lora_alpha": 2/"lora_alpha": 4/' other/adapter_config.json
    merge-models -q -m linear base+adapter:.5 base+other:.5 -o want/
    tar -C base -cf - config.json model.safetensors | merge-models -q -m linear -+adapter:.5 -+other:.5 -o got/
    same want/ got/
}

@test "merge-models: a reader that exits ends it, as other tools" {
    run bash -c '{ sleep 0.3; merge-models -m linear math/ code/ -o - 2> log; echo "$?" >> log; } | true; cat log'
    [ "$output" = 141 ]
}

@test "merge-models: a truncated stream leaves no output" {
    refused 1 "truncated" sh -c 'head -c 60000 math/model.safetensors | merge-models -m linear -:0.5 code/:0.5 -o bad'
    refused 1 "standard input" sh -c 'tar -C math -cf - config.json model.safetensors | head -c 60000 | merge-models -m linear -:0.5 code/:0.5 -o bad'
    refused 1 "No space left on device" sh -c 'merge-models -m linear math/ code/ -o - > /dev/full'
}

@test "merge-models: another number of threads, the same bytes, history and all" {
    merge-models --method ties --base base/ math/ code/ --density 0.5 -o a/ -j 1
    mv a b
    merge-models --method ties --base base/ math/ code/ --density 0.5 -o a/ --threads=3
    cmp a/model.safetensors b/model.safetensors
}

@test "merge-models: layers keep their windows where they are stacked in another order" {
    init-model -q gemma3-270m --set vocab_size=64 --set hidden_size=8 --set intermediate_size=8 --set head_dim=4 \
        --set num_attention_heads=1 --set num_key_value_heads=1 --set num_hidden_layers=7 -o gemma
    run ! grep -q layer_types gemma/config.json
    cat > stack.yaml << 'YAML'
merge_method: passthrough
slices:
  - sources: [{model: gemma, layer_range: [0, 1]}]
  - sources: [{model: gemma, layer_range: [4, 7]}]
YAML
    merge-models -q --config stack.yaml -o stack
    [[ "$(tr -d ' \n' < stack/config.json)" == *'"layer_types":["sliding_attention","sliding_attention","full_attention","sliding_attention"]'* ]]
}

@test "merge-models: a config.json of a known type that cannot be read is warned of" {
    cp -r math odd
    sed -i '/hidden_size/d' odd/config.json
    run merge-models --no-progress -m linear odd code -o x
    [ "$status" -eq 0 ]
    [[ "$output" == *"odd: config.json, which is copied to the result, is not one of llama: 'hidden_size' is missing"* ]]
    merge-models -m linear math code -o y 2> quiet
    run ! grep -q config.json quiet
}
