#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The losses of align-model(1) and their derivatives against those of TRL's trainers, which are called on the same
log-probabilities in float64; and reward models in transformers; speaks TAP.

Environment: LM_TEST_BUILD, a build folder with the tools and libcore.a."""
import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
from types import SimpleNamespace as Bag

import torch
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.experimental.orpo import ORPOTrainer
import tap
from tap import BUILD, check, driver

B, T = 6, 9  # sequences, tokens that are predicted


def draw(seed):
    """Log-probabilities of B sequences with prompts and different lengths; the mask is that of completions."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64)
    lp = -3 * rand(B, T) - 0.05
    mask = torch.zeros(B, T, dtype=torch.int64)
    for i in range(B):
        mask[i, 1 + i % 3:5 + (i * 5 + seed) % 5] = 1
    return Bag(lp=lp, mask=mask, ref=lp + rand(B, T) - 0.5, old=lp + 0.8 * (rand(B, T) - 0.5),
               correct=0.5 + rand(B, T), advantage=2 * rand(B) - 1, margin=rand(B // 2), score=4 * rand(B) - 2,
               entropy=(4 * rand(B, T)).float().double(),  # TRL's quantiles are float32
               collision=4 * rand(B, T))


def ours(run, loss, d, **columns):
    seq = []
    for i in range(B):
        s = {"logp": d.lp[i].tolist(), "ref": d.ref[i].tolist(), "old": d.old[i].tolist(), "mask": d.mask[i].tolist(),
             "advantage": float(d.advantage[i]), "score": float(d.score[i]), "margin": float(d.margin[i // 2])}
        for key, values in columns.items():
            if values is None:
                s.pop(key, None)
            else:
                s[key] = values[i].tolist() if hasattr(values[i], "tolist") else values[i]
        seq.append(s)
    r = subprocess.run([run], input=json.dumps({"loss": loss, "seq": seq}), capture_output=True, text=True)
    if r.returncode:
        raise RuntimeError(r.stderr)
    return json.loads(r.stdout)


def compare(name, got, want, lp, room=1e-9):
    """want: a scalar of autograd over lp."""
    want.backward()
    a, b = torch.tensor(got["dlogp"], dtype=torch.float64), lp.grad
    off = (a - b).abs().max().item()
    loss = abs(got["loss"] - want.item())
    check(loss <= room * max(1, abs(want.item())) and off <= room, name,
          f"loss {got['loss']} and {want.item()}, derivatives differ by {off}")


def accelerator():
    same = lambda x, *a, **k: x
    return Bag(device=torch.device("cpu"), gather=same, gather_for_metrics=same, pad_across_processes=same, reduce=same,
               num_processes=1, sync_gradients=True)


def common(**more):
    metrics = {"train": collections.defaultdict(list), "eval": collections.defaultdict(list)}
    return Bag(model=Bag(training=True), accelerator=accelerator(), _metrics=metrics, _total_train_tokens=0, _tp_size=1,
               aux_loss_enabled=False, **more)


# ---- pairs ----

def chunked(x):
    """TRL's order: all chosen ones, then all rejected ones; ours are side by side."""
    return torch.cat([x[0::2], x[1::2]])


def dpo(run, seed, kind, ours_name, **more):
    d = draw(seed)
    lp = d.lp.clone().requires_grad_()
    both, mask = chunked(lp), chunked(d.mask)
    full = torch.cat([torch.zeros(B, 1, dtype=torch.int64), mask], 1)
    options = dict(beta=0.3, label_smoothing=0.0, f_divergence_type="reverse_kl", f_alpha_divergence_coef=0.5, ld_alpha=None,
                   use_weighting=False)
    options.update(more)
    ld = options["ld_alpha"]
    ref = chunked(d.ref)
    sums = (ref * mask).sum(1)
    if ld is not None:
        at, n = mask.cumsum(1), mask.sum(1)
        least = torch.minimum(n[:B // 2], n[B // 2:]).repeat(2).unsqueeze(1)
        sums = (ref * mask * (at <= least)).sum(1) + ld * (ref * mask * (at > least)).sum(1)
    me = common(loss_types=[kind], loss_weights=[1.0], precompute_ref_logps=True,
                args=Bag(discopop_tau=0.05), **options)
    out = Bag(log_probs=both * mask, entropy=torch.zeros(B, T), mean_logits=torch.zeros(B, T),
              is_top1=torch.zeros(B, T, dtype=torch.bool), log_sum_sq_probs=-chunked(d.collision))
    inputs = {"input_ids": torch.zeros(B, T + 1, dtype=torch.int64), "attention_mask": torch.ones(B, T + 1),
              "completion_mask": full, "ref_chosen_logps": sums[:B // 2], "ref_rejected_logps": sums[B // 2:]}
    want = DPOTrainer._compute_loss(me, lambda **k: out, inputs, False)
    keys = {"beta": options["beta"], "label_smoothing": options["label_smoothing"],
            "f_divergence_type": options["f_divergence_type"], "ld_alpha": 1 if ld is None else ld,
            "use_weighting": "on" if options["use_weighting"] else "off"}
    known = subprocess.run([run], input=json.dumps({"loss": ours_name + ":x=1", "seq": []}), capture_output=True,
                           text=True).stderr
    text = ",".join(f"{k}={v}" for k, v in keys.items() if f" {k}" in known)
    got = ours(run, f"{ours_name}:{text}" if text else ours_name, d, collision=d.collision)
    compare(f"{ours_name} ({kind}) {more} seed {seed}", got, want, lp, 1e-6 if kind == "exo_pair" else 1e-9)
    if kind == "sigmoid" and ld is None:
        for key in ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen"):
            theirs = me._metrics["train"][key][-1]
            check(abs(got["metrics"][key] - theirs) < 1e-6, f"metric {key} seed {seed}", got["metrics"][key], theirs)


def pairs(run):
    names = {k: k for k in "hinge ipo nca_pair bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop sft "
             "sigmoid_norm".split()}
    names["sigmoid"] = "dpo"
    for seed in range(3):
        for kind, name in names.items():
            dpo(run, seed, kind, name)
        dpo(run, seed, "sigmoid", "dpo", ld_alpha=0.4)
        for f in ("forward_kl", "js_divergence"):
            dpo(run, seed, "sigmoid", "dpo", f_divergence_type=f)
            dpo(run, seed, "ipo", "ipo", f_divergence_type=f)
        dpo(run, seed, "robust", "robust", label_smoothing=0.2)
        dpo(run, seed, "exo_pair", "exo_pair", label_smoothing=0.01)
        dpo(run, seed, "aot", "aot", label_smoothing=0.1)
        # not hinge, whose weights TRL multiplies in place, so that torch has no gradient of it
        for kind in "sigmoid ipo nca_pair bco_pair sppo_hard apo_zero apo_down discopop sigmoid_norm".split():
            dpo(run, seed, kind, names[kind], use_weighting=True)
        dpo(run, seed, "exo_pair", "exo_pair", label_smoothing=0.01, use_weighting=True)
        dpo(run, seed, "sigmoid", "dpo", ld_alpha=0.4, use_weighting=True)


def cpo(run, seed, kind, name, text, **more):
    d = draw(seed)
    lp = d.lp.clone().requires_grad_()
    m = d.mask.double()
    s = (lp * m).sum(1)
    if kind in ("ipo", "simpo"):
        s = s / m.sum(1)
    options = dict(alpha=0.0, beta=0.4, simpo_gamma=0.5, label_smoothing=0.0)
    options.update(more)
    losses, _, _ = CPOTrainer.cpo_loss(common(loss_type=kind, **options), s[0::2], s[1::2])
    nll = -(lp[0::2] * m[0::2]).sum() / m[0::2].sum()
    got = ours(run, f"{name}:beta=0.4,cpo_alpha=0.7{text}", d, ref=None)
    compare(f"{name} ({kind}) {more} seed {seed}", got, losses.mean() + 0.7 * nll, lp)


def orpo(run, seed):
    d = draw(seed)
    lp = d.lp.clone().requires_grad_()
    m = d.mask.double()
    a = (lp * m).sum(1) / m.sum(1)
    losses, _, _, ratio, odds = ORPOTrainer.odds_ratio_loss(common(beta=0.2), a[0::2], a[1::2])
    got = ours(run, "orpo:beta=0.2", d, ref=None)
    compare(f"orpo seed {seed}", got, -lp[0::2].mean() - losses.mean(), lp, 1e-5)
    check(abs(got["metrics"]["log_odds_chosen"] - odds.item()) < 1e-5, f"orpo's log odds seed {seed}")


def plain(run):
    for seed in range(3):
        cpo(run, seed, "sigmoid", "cpo", "")
        cpo(run, seed, "hinge", "cpo_hinge", "")
        cpo(run, seed, "ipo", "cpo_ipo", "")
        cpo(run, seed, "simpo", "simpo", "")
        cpo(run, seed, "simpo", "simpo", ",alpha=0.3,label_smoothing=0.1", alpha=0.3, label_smoothing=0.1)
        orpo(run, seed)


# ---- judged answers, scores ----

def kto(run, seed, kind):
    d = draw(seed)
    lp = d.lp.clone().requires_grad_()
    real, other = [0, 1, 3, 4], [2, 5]
    good = [True, False, True, False, False, True]
    m = d.mask.double()
    sums, refs = (lp * m).sum(1), (d.ref * m).sum(1)
    n = len(real)
    full = torch.cat([torch.zeros(B, 1, dtype=torch.int64), d.mask], 1)
    mixed = kind == "kto"
    me = common(calculate_KL=mixed, precompute_ref_logps=True, loss_type=kind, beta=0.3, desirable_weight=1.3,
                undesirable_weight=0.8, _compute_kl_logps=lambda model, batch: sums[other].detach())
    out = Bag(log_probs=(lp * m)[real], entropy=torch.zeros(n, T), mean_logits=torch.zeros(n, T))
    inputs = {"input_ids": torch.zeros(n, T + 1, dtype=torch.int64), "attention_mask": torch.ones(n, T + 1),
              "completion_mask": full[real], "label": torch.tensor([good[i] for i in real]), "ref_logps": refs[real],
              "ref_KL_logps": refs[other]}
    want = KTOTrainer._compute_loss(me, lambda **k: out, inputs, False)
    got = ours(run, f"{kind}:beta=0.3,desirable_weight=1.3,undesirable_weight=0.8", d, good=good,
               mismatched=[i in other for i in range(B)])
    compare(f"{kind} seed {seed}", got, want, lp)


def reward(run, seed, center):
    d = draw(seed)
    score = d.score.clone().requires_grad_()
    me = common(args=Bag(center_rewards_coefficient=center or None))
    out = Bag(logits=chunked(score).unsqueeze(1))
    inputs = {"attention_mask": torch.ones(B, T), "margin": d.margin}
    want = RewardTrainer.compute_loss(me, lambda **k: out, inputs)
    got = ours(run, f"reward:center_rewards_coefficient={center}", d)
    want.backward()
    off = (torch.tensor(got["dscore"], dtype=torch.float64) - score.grad).abs().max().item()
    check(abs(got["loss"] - want.item()) < 1e-9 and off < 1e-9, f"reward {center} seed {seed}", got["loss"], want.item(), off)
    for key in ("min_reward", "mean_reward", "max_reward", "accuracy", "margin"):
        check(abs(got["metrics"][key] - me._metrics["train"][key][-1]) < 1e-6, f"metric {key} {center} seed {seed}")


# ---- policies ----

def policy(run, seed, kind, text="", trainer=GRPOTrainer, name=None, correct=False, **more):
    d = draw(seed)
    lp = d.lp.clone().requires_grad_()
    options = dict(beta=0.0, epsilon_low=0.2, epsilon_high=0.2, importance_sampling_level="token",
                   off_policy_mask_threshold=None, top_entropy_quantile=1.0, entropy_coef=0.0)
    args = dict(use_bias_correction_kl=True, delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
                vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, steps_per_generation=1)
    for k, v in more.items():
        (args if k in args else options)[k] = v
    entropy = d.entropy.clone().requires_grad_()
    me = common(loss_type=kind, use_vllm=correct, get_high_entropy_mask=lambda *a: GRPOTrainer.get_high_entropy_mask(me, *a), vllm_importance_sampling_correction=correct,
                current_gradient_accumulation_steps=1, max_completion_length=64, _entropy_bonus_enabled=options["entropy_coef"] != 0,
                use_adaptive_entropy=False,
                get_off_policy_mask=GRPOTrainer.get_off_policy_mask, get_gamma_weights=GRPOTrainer.get_gamma_weights,
                _get_per_token_logps_and_entropies=lambda *a, **k: (lp, entropy, None),
                args=Bag(**args), **options)
    m = d.mask.double()
    inputs = {"prompt_ids": torch.zeros(B, 1), "prompt_mask": torch.ones(B, 1), "completion_ids": torch.zeros(B, T),
              "completion_mask": m, "advantages": d.advantage, "old_per_token_logps": d.old, "ref_per_token_logps": d.ref,
              "old_logps": (d.old * m).sum(1), "num_items_in_batch": m.sum()}
    if correct:
        inputs["importance_sampling_ratio"] = torch.where(m > 0, d.correct, 1)
    want = trainer._compute_loss(me, None, inputs)
    name = name or kind
    if name == "grpo":  # as published; TRL's default, and ours, is dapo's mean
        text = "mean=sequences" + ("," + text if text else "")
    got = ours(run, name + (":" + text if text else ""), d, correct=d.correct if correct else None, entropy=d.entropy)
    room = 1e-6 if kind in ("sapo", "vespo") else 1e-9  # TRL's temperatures and powers are float32
    compare(f"{name}:{text} correct {correct} seed {seed}", got, want, lp, room)
    if options["entropy_coef"]:
        off = (torch.tensor(got["dentropy"], dtype=torch.float64) - entropy.grad).abs().max().item()
        check(off < room, f"{name}:{text}, derivatives by entropies, seed {seed}", off)
    for key in ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio"):
        if key in got["metrics"] and me._metrics["train"].get(key) and options["importance_sampling_level"] == "token":
            theirs = me._metrics["train"][key][-1]
            check(abs(got["metrics"][key] - float(theirs)) < 1e-6, f"metric {key} of {name}:{text} seed {seed}",
                  got["metrics"][key], theirs)


def ppo(run, seed, coef, clip, clip_value):
    """PPO's clipped loss of policy and values by autograd: current TRL has no trainer for it."""
    d = draw(seed)
    g = torch.Generator().manual_seed(seed + 100)
    old_value, returns, advantages = (2 * torch.rand(B, T, generator=g, dtype=torch.float64) - 1 for _ in range(3))
    value = (old_value + torch.rand(B, T, generator=g, dtype=torch.float64) - 0.5).requires_grad_()
    lp = d.lp.clone().requires_grad_()
    m = d.mask.bool()
    bounded = torch.clamp(value, old_value - clip_value, old_value + clip_value)
    of_values = torch.max((value - returns) ** 2, (bounded - returns) ** 2)
    ratio = torch.exp(lp - d.old)
    of_policy = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - clip, 1 + clip))
    want = of_policy[m].mean() + coef * 0.5 * of_values[m].mean()
    got = ours(run, f"ppo:epsilon={clip},vf_coef={coef},cliprange_value={clip_value}", d, value=value, old_value=old_value,
               returns=returns, advantages=advantages)
    compare(f"ppo seed {seed}", got, want, lp)
    off = (torch.tensor(got["dvalue"], dtype=torch.float64) - value.grad).abs().max().item()
    check(off < 1e-9, f"ppo, derivatives by values, seed {seed}", off)


def policies(run):
    for seed in range(3):
        for kind in ("grpo", "bnpo", "dapo"):
            policy(run, seed, kind)
            policy(run, seed, kind, "beta=0.1,epsilon=0.1,epsilon_high=0.28", beta=0.1, epsilon_low=0.1, epsilon_high=0.28)
        policy(run, seed, "dr_grpo", "max_completion_length=64")
        policy(run, seed, "grpo", "beta=0.1,use_bias_correction_kl=off", beta=0.1, use_bias_correction_kl=False)
        policy(run, seed, "grpo", "delta=1.15,epsilon=0.05", delta=1.15, epsilon_low=0.05, epsilon_high=0.05)
        policy(run, seed, "grpo", "importance_sampling_level=sequence,beta=0.1", importance_sampling_level="sequence", beta=0.1)
        policy(run, seed, "grpo", "importance_sampling_level=sequence,epsilon=3e-4,epsilon_high=4e-4",
               importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4)
        policy(run, seed, "grpo", "off_policy_mask_threshold=0.01", off_policy_mask_threshold=0.01)
        policy(run, seed, "grpo", "top_entropy_quantile=0.2,beta=0.1", top_entropy_quantile=0.2, beta=0.1)
        policy(run, seed, "cispo", "top_entropy_quantile=0.55,epsilon_high=1.1", top_entropy_quantile=0.55, epsilon_high=1.1)
        policy(run, seed, "luspo", "top_entropy_quantile=0.8", importance_sampling_level="sequence", top_entropy_quantile=0.8)
        for kind in ("grpo", "bnpo", "dapo", "cispo"):
            text = "epsilon_high=1.1," if kind == "cispo" else ""
            policy(run, seed, kind, text + "entropy_coef=0.3", entropy_coef=0.3, epsilon_high=1.1 if text else 0.2)
        policy(run, seed, "dr_grpo", "max_completion_length=64,entropy_coef=0.1", entropy_coef=0.1)
        policy(run, seed, "sapo", "entropy_coef=0.1", entropy_coef=0.1)
        policy(run, seed, "vespo", "entropy_coef=-0.1", entropy_coef=-0.1)
        policy(run, seed, "luspo", "entropy_coef=0.1", importance_sampling_level="sequence", entropy_coef=0.1)
        policy(run, seed, "grpo", "top_entropy_quantile=0.3,entropy_coef=0.2", top_entropy_quantile=0.3, entropy_coef=0.2)
        policy(run, seed, "dapo", correct=True)
        policy(run, seed, "luspo", "beta=0.1", importance_sampling_level="sequence", beta=0.1)
        policy(run, seed, "cispo", "epsilon_high=1.1", epsilon_high=1.1)
        policy(run, seed, "cispo", "epsilon_high=1.1", correct=True, epsilon_high=1.1)
        policy(run, seed, "sapo", "beta=0.05", beta=0.05)
        policy(run, seed, "vespo")
        policy(run, seed, "vespo", correct=True)
        policy(run, seed, "rloo", "epsilon=0.1", trainer=RLOOTrainer, epsilon_low=0.1, epsilon_high=0.1)
        ppo(run, seed, 0.1, 0.2, 0.2)
        ppo(run, seed, 0.7, 0.05, 0.1)
        policy(run, seed, "gmpo", "epsilon=0.2,beta=0.1", trainer=GMPOTrainer, beta=0.1)
        policy(run, seed, "gmpo", "epsilon=0.2,top_entropy_quantile=0.5", trainer=GMPOTrainer, top_entropy_quantile=0.5)


# ---- a reward model in transformers ----

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 384, "hidden_size": 64,
          "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "hidden_act": "silu", "max_position_embeddings": 256, "initializer_range": 0.1, "rms_norm_eps": 1e-05,
          "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 0, "bos_token_id": 0}


def tool(name, *args, **more):
    return subprocess.run([os.path.join(BUILD, "bin", name), *args], check=True, capture_output=True, text=True, **more)


def make_base(tmp):
    """A model m0/ and three records of pairs."""
    records = [{"prompt": f"the {a} met the {b}. ", "chosen": f"it was good to the {b}", "rejected": f"it was {a} and {a}"}
               for a, b in [("cat", "dog"), ("bird", "fish"), ("cow", "sheep")]]
    with open(tmp + "/text.jsonl", "w") as f:
        for r in records * 40:
            f.write(json.dumps({"text": r["prompt"] + r["chosen"] + r["rejected"]}) + "\n")
    with open(tmp + "/pairs.jsonl", "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in records)
    with open(tmp + "/config.json", "w") as f:
        json.dump(CONFIG, f)
    tool("train-tokenizer", "-q", "-V", "300", "-o", tmp + "/tok/tokenizer.json", tmp + "/text.jsonl")
    tool("init-model", "-q", tmp + "/config.json", "--tokenizer", tmp + "/tok/tokenizer.json", "-o", tmp + "/m0")
    return records


def trained(tmp, records, weighted=False, reference=None):
    """Five steps of DPO, or WPO, from one model by both, beside a reference: losses and margins of each step, and the weights."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig
    words = AutoTokenizer.from_pretrained(tmp + "/m0")
    words.pad_token = words.eos_token
    model = AutoModelForCausalLM.from_pretrained(tmp + "/m0", dtype=torch.float32)
    options = DPOConfig(output_dir=tmp + "/trl", per_device_train_batch_size=3, max_steps=5, learning_rate=1e-3,
                        lr_scheduler_type="constant", report_to="none", use_cpu=True, logging_steps=1, max_grad_norm=0.0,
                        optim="adamw_torch", weight_decay=0.0, beta=0.1, gradient_checkpointing=False, bf16=False,
                        save_strategy="no", disable_tqdm=True, use_weighting=weighted, eval_strategy="steps",
                        eval_steps=2, per_device_eval_batch_size=len(records))
    other = reference and AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    trainer = DPOTrainer(model=model, ref_model=other, args=options, train_dataset=Dataset.from_list(records),
                         eval_dataset=Dataset.from_list(records), processing_class=words)
    trainer.train()
    theirs = [h for h in trainer.state.log_history if "loss" in h]
    tool("align-model", "-q", tmp + "/m0", tmp + "/pairs.jsonl", "-f", "-o", tmp + "/dpo", "--loss", "dpo", "--steps", "5", "--lr",
         "1e-3", "--lr-schedule", "constant", "--beta2", "0.999", "--weight-decay", "0", "--max-grad-norm", "0",
         "--batch-size", "3", "--metrics", tmp + "/dpo.jsonl", "--val", tmp + "/pairs.jsonl", "--eval-every", "2",
         "--use-weighting", "on" if weighted else "off",
         *(["--reference", reference] if reference else []))
    name = ("WPO" if weighted else "DPO") + (" beside another reference" if reference else "")
    with open(tmp + "/dpo.jsonl") as f:
        events = [r for r in map(json.loads, f)]
    ours = [r for r in events if r["event"] == "step"]
    mine = {r["step"]: r["loss"] for r in events if r["event"] == "eval"}
    evals = {h["step"]: h["eval_loss"] for h in trainer.state.log_history if "eval_loss" in h}
    for step, loss in evals.items():
        check(abs(mine.get(step, 0) - loss) < 1e-4, f"evaluation at step {step} of {name}", mine, evals)
    check(len(evals) >= 2, f"evaluations of {name}", evals)
    for i, (a, b) in enumerate(zip(ours, theirs)):
        for key in ("loss", "rewards/margins", "rewards/chosen"):
            check(abs(a[key] - b[key]) < 1e-4, f"step {i + 1} of {name}: {key}", a[key], b[key])
    check(len(ours) == len(theirs) == 5, f"five steps of {name}")
    end = AutoModelForCausalLM.from_pretrained(tmp + "/dpo", dtype=torch.float32).state_dict()
    off = max(((end[k] - v).norm() / v.norm()).item() for k, v in trainer.model.state_dict().items())
    check(off < 1e-3, f"weights after five steps of {name}", off)


def reward_model(tmp, records):
    """The first step's loss at rate 0 is that of transformers' scores of the same folder."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    tool("align-model", "-q", tmp + "/m0", tmp + "/pairs.jsonl", "-o", tmp + "/r", "--loss", "reward", "--steps", "5",
         "--lr", "1e-2")
    tool("align-model", "-q", tmp + "/r", tmp + "/pairs.jsonl", "-o", tmp + "/r2", "--loss", "reward", "--steps", "1",
         "--lr", "0", "--batch-size", "3", "--metrics", tmp + "/metrics.jsonl")
    with open(tmp + "/metrics.jsonl") as f:
        step = next(r for r in map(json.loads, f) if r["event"] == "step")
    model = AutoModelForSequenceClassification.from_pretrained(tmp + "/r", dtype=torch.float32)
    check(type(model).__name__ == "LlamaForSequenceClassification" and model.config.num_labels == 1, "the class is transformers'")
    words = AutoTokenizer.from_pretrained(tmp + "/r")
    scores = {}
    for key in ("chosen", "rejected"):
        ids = [words(r["prompt"] + r[key], add_special_tokens=False).input_ids + [0] for r in records]
        scores[key] = torch.stack([model(torch.tensor([i])).logits[0, 0] for i in ids])
    want = -torch.nn.functional.logsigmoid(scores["chosen"] - scores["rejected"]).mean().item()
    check(abs(step["loss"] - want) < 1e-5, "transformers gives the same scores", step["loss"], want)
    margin = (scores["chosen"] - scores["rejected"]).mean().item()
    check(abs(step["margin"] - margin) < 1e-5 and margin > 0.1, "the margin has grown", step["margin"], margin)


def reward_adapter(tmp, records):
    """An adapter of a reward model gives the same scores in PEFT, with its head."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    tool("align-model", "-q", tmp + "/m0", tmp + "/pairs.jsonl", "-o", tmp + "/ra", "--loss", "reward", "--method", "lora",
         "--rank", "4", "--steps", "5", "--lr", "1e-2")
    tool("align-model", "-q", tmp + "/m0", tmp + "/pairs.jsonl", "-o", tmp + "/ra2", "--loss", "reward", "--method", "lora",
         "--init-adapter", tmp + "/ra/latest", "--steps", "1", "--lr", "0", "--batch-size", "3", "--metrics", tmp + "/ra.jsonl")
    with open(tmp + "/ra.jsonl") as f:
        step = next(r for r in map(json.loads, f) if r["event"] == "step")
    base = AutoModelForSequenceClassification.from_pretrained(tmp + "/m0", dtype=torch.float32, num_labels=1)
    base.config.pad_token_id = 0  # a model without padding is padded with its end of text
    model = PeftModel.from_pretrained(base, tmp + "/ra/latest")
    words = AutoTokenizer.from_pretrained(tmp + "/m0")
    scores = [torch.stack([model(torch.tensor([words(r["prompt"] + r[key]).input_ids + [0]])).logits[0, 0] for r in records])
              for key in ("chosen", "rejected")]
    margin = (scores[0] - scores[1]).mean().item()
    check(abs(step["margin"] - margin) < 1e-4 and margin > 0.1, "PEFT gives the same margin", step["margin"], margin)


def distilled(tmp, records):
    """One step of SGD at rate 1 on given answers: the loss of TRL's definition, and its gradient by autograd."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.gkd import GKDTrainer
    big = dict(CONFIG, hidden_size=96, tie_word_embeddings=True)
    with open(tmp + "/big.json", "w") as f:
        json.dump(big, f)
    tool("init-model", "-q", tmp + "/big.json", "--tokenizer", tmp + "/tok/tokenizer.json", "--seed", "9", "-o", tmp + "/big")
    with open(tmp + "/given.jsonl", "w") as f:
        records = [{"prompt": r["prompt"].rstrip(), "chosen": " " + r["chosen"]} for r in records]
        f.writelines(json.dumps({"prompt": r["prompt"], "completion": r["chosen"]}) + "\n" for r in records)
    words = AutoTokenizer.from_pretrained(tmp + "/m0")
    teacher = AutoModelForCausalLM.from_pretrained(tmp + "/big", dtype=torch.float64)
    for beta, temperature in ((0, 1), (0.5, 1), (0.1, 2), (1, 1)):
        out = f"{tmp}/gkd-{beta}"
        tool("align-model", "-q", tmp + "/m0", tmp + "/given.jsonl", "-o", out, "--loss", "gkd", "--teacher", tmp + "/big",
             "--beta", str(beta), "--distill-temperature", str(temperature), "--lambda", "0", "--steps", "1", "--lr", "1",
             "--lr-schedule", "constant", "--optimizer", "sgd", "--weight-decay", "0", "--max-grad-norm", "0",
             "--batch-size", "3", "--metrics", out + ".jsonl")
        with open(out + ".jsonl") as f:
            step = next(r for r in map(json.loads, f) if r["event"] == "step")
        student = AutoModelForCausalLM.from_pretrained(tmp + "/m0", dtype=torch.float64)
        total = 0
        tokens = sum(len(words(r["chosen"]).input_ids) + 1 for r in records)
        for r in records:
            start = words(r["prompt"]).input_ids
            ids = torch.tensor([start + words(r["chosen"]).input_ids + [0]])
            labels = ids.clone()
            labels[:, :len(start)] = -100
            with torch.no_grad():
                theirs = teacher(ids).logits
            total = total + GKDTrainer.generalized_jsd_loss(
                student(ids).logits[:, :-1], theirs[:, :-1], labels[:, 1:], beta=beta, temperature=temperature,
                num_items_in_batch=tokens)
        total.backward()
        check(abs(step["loss"] - total.item()) < 1e-5 * total.item(), f"GKD's loss, beta {beta}", step["loss"], total.item())
        end = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64).state_dict()
        off = 0
        for key, p in student.named_parameters():
            moved = p.detach() - end[key]
            off = max(off, ((moved - p.grad).norm() / (p.grad.norm() + 1e-12)).item())
        check(off < 1e-3, f"GKD's gradient, beta {beta}", off)


def main():
    with tempfile.TemporaryDirectory() as tmp:
        run = driver("align_driver.c", tmp)
        pairs(run)
        plain(run)
        for seed in range(3):
            kto(run, seed, "kto")
            kto(run, seed, "apo_zero_unpaired")
            reward(run, seed, 0)
            reward(run, seed, 0.1)
        policies(run)
        records = make_base(tmp)
        trained(tmp, records)
        shutil.copytree(tmp + "/dpo", tmp + "/tuned")
        trained(tmp, records, weighted=True)
        trained(tmp, records, reference=tmp + "/tuned")
        reward_model(tmp, records)
        reward_adapter(tmp, records)
        distilled(tmp, records)
    sys.exit(tap.finish())


if __name__ == "__main__":
    main()
