#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare rewards and advantages of align-model(1), which its log of completions has, with TRL's: think_format_reward,
the repetition penalty and the soft overlong punishment on the same completions, and the advantages of GRPO, Dr. GRPO and
RLOO from the same rewards; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with the tools."""
import json
import os
import subprocess
import sys
import tempfile

import torch
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward
from trl.trainer.utils import nanstd

BIN = os.path.join(os.path.abspath(os.environ["LM_TEST_BUILD"]), "bin")
GROUP, NEW = 6, 20
failed = number = 0


def say(ok, name):
    global failed, number
    number += 1
    failed += not ok
    print(f"{'ok' if ok else 'not ok'} {number} - {name}", flush=True)


def run(tool, *args):
    subprocess.run([os.path.join(BIN, tool), *args], check=True)


def make_model():
    """A tiny model whose tokens are bytes, which has read some text, and prompts."""
    with open("text.jsonl", "w") as f:
        for i in range(400):
            f.write(json.dumps({"text": f"{i % 8}<think>{'ab' * (i % 3)}</think>{'abcd' * (i % 2)}"}) + "\n")
    run("train-tokenizer", "-q", "-V", "257", "-o", "tok.json", "text.jsonl")
    with open("c.json", "w") as f:
        json.dump({"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                   "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
                   "initializer_range": 0.3, "tie_word_embeddings": True}, f)
    run("init-model", "-q", "-t", "tok.json", "-o", "m0", "c.json")
    run("shard-data", "-q", "-t", "tok.json", "-o", "data", "text.jsonl")
    run("train", "-q", "m0", "data", "-o", "m", "--steps", "60", "--batch-size", "8", "--seq-len", "32", "--lr", "1e-2")
    with open("p.jsonl", "w") as f:
        for i in range(8):
            f.write(json.dumps({"prompt": f"{i}", "answer": i}) + "\n")


def completions(name, *args):
    """The completions of one rollout, in groups."""
    run("align-model", "-q", "m", "p.jsonl", "-o", name, "--steps", "1", "--batch-size", "8", "--group", str(GROUP),
        "--max-new-tokens", str(NEW), "--log-completions", "100", *args)
    with open(f"{name}/completions.jsonl") as f:
        return [json.loads(line) for line in f]


def close(ours, theirs):
    """TRL's deviations have a factor in F32."""
    return torch.allclose(torch.tensor(ours, dtype=torch.float64), torch.as_tensor(theirs, dtype=torch.float64), rtol=0,
                          atol=1e-6)


def check_rewards():
    x = completions("rewards", "--loss", "grpo", "--reward", "repetition:ngram=1,penalty=-0.5", "--reward",
                    "overlong:most=19,soft=6", "--reward", "think", "--reward-weights", "1,2,0.5")
    texts = [c["completion"] for c in x]
    # Tokens are bytes; only texts that are whole characters have the same number of them.
    plain = [i for i, c in enumerate(x) if "\ufffd" not in c["completion"] and
             len(c["completion"].encode()) == c["tokens"] - (not c["truncated"])]
    ids = [list(x[i]["completion"].encode()) + ([] if x[i]["truncated"] else [256]) for i in plain]
    say(len(plain) > 5, f"{len(plain)} of {len(x)} completions can be compared by tokens")
    repeated = get_repetition_penalty_reward(1, -0.5)(ids)
    say(close([x[i]["rewards/repetition/mean"] for i in plain], repeated), "the repetition penalty")
    lengths = [[0] * c["tokens"] for c in x]
    say(close([c["rewards/overlong/mean"] for c in x], get_soft_overlong_punishment(19, 6)(lengths)),
        "the soft overlong punishment")
    say(close([c["rewards/think/mean"] for c in x], think_format_reward([[{"content": t}] for t in texts])),
        "the format of thoughts")
    total = [c["rewards/repetition/mean"] + 2 * c["rewards/overlong/mean"] + 0.5 * c["rewards/think/mean"] for c in x]
    say(close([c["reward"] for c in x], total), "the weighted sum")


def check_advantages():
    """As grpo_trainer.py and rloo_trainer.py compute them."""
    for name, args in [("group", ["--loss", "grpo"]), ("none", ["--loss", "dr_grpo"]),
                       ("batch", ["--loss", "grpo", "--scale-rewards", "batch"]), ("rloo", ["--loss", "rloo"]),
                       ("normalised", ["--loss", "rloo", "--normalize-advantages"])]:
        x = completions("adv-" + name, "--reward", "repetition:ngram=1", "--reward", "regex:abcd$", *args)
        r = torch.tensor([c["reward"] for c in x], dtype=torch.float64)
        g = r.view(-1, GROUP)
        if name in ("rloo", "normalised"):
            want = g - (g.sum(1, keepdim=True) - g) / (GROUP - 1)
            if name == "normalised":
                want = (want - want.mean()) / (nanstd(want.flatten()) + 1e-4)
        else:
            want = g - g.mean(1, keepdim=True)
            if name == "group":
                want = want / (nanstd(g, dim=1).unsqueeze(1) + 1e-4)
            elif name == "batch":
                want = want / (nanstd(r) + 1e-4)
        say(close([c["advantage"] for c in x], want.flatten()), f"advantages: {name}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_model()
        check_rewards()
        check_advantages()
        os.chdir("/")
    print(f"1..{number}")
    sys.exit(failed > 0)


main()
