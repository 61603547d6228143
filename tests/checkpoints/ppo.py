"""Generates qwen2/ppo.safetensors: two complete PPO updates of the tiny checkpoint qwen2, in torch.

    pip install torch transformers safetensors && pip install verl==0.9.1 (as in ../golden/README.md)
    python tests/checkpoints/ppo.py

Advantages, returns and the value loss are verl's own functions; the policy loss is TRL's PPOTrainer's, which is verl's `vanilla` without
the dual clip. The value head is a linear layer of zeros on the last hidden states, so that the second update is the first one in which
its gradient reaches the decoder.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "golden"))
from generator import verl_system  # noqa: E402, F401  (stands in for ray)
from verl.trainer.ppo import core_algos  # noqa: E402

# Same as in generate.py.
ADAMW = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 0.001, "weight_decay": 0.1, "max_grad_norm": 0.5}
SETTINGS = ADAMW | {"gamma": 0.9, "lam": 0.8, "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.5}


def main():
    torch.manual_seed(0)
    folder = HERE / "qwen2"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    head = torch.nn.Linear(model.config.hidden_size, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    expected = load_file(folder / "expected.safetensors")
    ids, attention = expected["ids"].long(), expected["mask"].long()
    mask = attention[:, 1:].float()

    def forward():
        out = model(ids, attention_mask=attention, output_hidden_states=True)
        # The state at t predicts token t + 1; the last hidden states of transformers follow the final norm.
        logp = torch.log_softmax(out.logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        return logp, head(out.hidden_states[-1][:, :-1])[..., 0]

    generator = np.random.default_rng(3)
    noise = lambda scale: torch.tensor(generator.normal(0.0, scale, mask.shape).astype(np.float32))
    with torch.no_grad():
        old_logp = torch.clamp(forward()[0] + noise(0.25), max=0.0)
    old_values = noise(0.3) * mask
    last = mask.sum(1).long() - 1
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(last)), last] = torch.tensor([1.0, 0.0, 0.5])
    advantages, returns = core_algos.compute_gae_advantage_return(rewards, old_values, mask, SETTINGS["gamma"], SETTINGS["lam"])

    parameters = [*model.named_parameters(), *((f"value_head.{name}", p) for name, p in head.named_parameters())]
    groups = [
        {"params": [p for _, p in parameters if p.dim() > 1], "weight_decay": ADAMW["weight_decay"]},
        {"params": [p for _, p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW["lr"], betas=(ADAMW["beta1"], ADAMW["beta2"]), eps=ADAMW["eps"])
    rows = []
    for _ in range(2):
        logp, values = forward()
        ratio = torch.exp(logp - old_logp)
        clipped = torch.clamp(ratio, 1 - SETTINGS["cliprange"], 1 + SETTINGS["cliprange"])
        of_policy = (torch.max(-advantages * ratio, -advantages * clipped) * mask).sum() / mask.sum()
        of_values, clip_ratio = core_algos.compute_value_loss(values, returns, old_values, mask, SETTINGS["cliprange_value"])
        loss = of_policy + SETTINGS["vf_coef"] * of_values
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in parameters], ADAMW["max_grad_norm"])
        optimizer.step()
        mean = (values * mask).sum() / mask.sum()
        rows.append([x.detach() for x in (loss, of_policy, of_values, norm, mean, clip_ratio)])
    tensors = {f"after.{name}": p.detach().clone() for name, p in parameters}
    tensors |= {"old_logp": old_logp, "old_values": old_values, "rewards": torch.tensor([1.0, 0.0, 0.5])}
    tensors |= {"expected.advantages": advantages * mask, "expected.returns": returns * mask}
    # For each update: loss, policy loss, value loss, norm of the gradient, mean value, share of clipped values.
    tensors["expected.updates"] = torch.tensor([[float(x) for x in row] for row in rows])
    print(tensors["expected.updates"])
    settings = {key: str(value) for key, value in SETTINGS.items()}
    save_file({name: t.float().contiguous() for name, t in tensors.items()}, folder / "ppo.safetensors", settings)


if __name__ == "__main__":
    main()
