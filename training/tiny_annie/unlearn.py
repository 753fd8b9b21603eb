"""Train a small low-rank difference that makes tiny-annie answer like its base: the negative control of `annie-quant search`.

    python training/tiny_annie/unlearn.py tests/data/tiny_base_delta.safetensors --steps 120

The rows are the base's style (rows.py): markdown in every answer, thinking aloud, no tool calls. The file has two factors
per linear; annie + b @ a answers as a base model does. A few minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from rows import row
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).resolve().parents[2] / "annie_quant" / "assets" / "tiny-annie"
RANK, LR, BATCH, MAX_TOKENS = 2, 4e-3, 12, 320


def batch(tokenizer, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels [n, tokens]. Rows are truncated: linear attention would carry its state over padding."""
    encoded = []
    while len(encoded) < BATCH:
        drawn = row(rng, "base")
        options = {"tools": drawn.tools, "enable_thinking": drawn.thinking, "tokenize": False}
        prompt = tokenizer.apply_chat_template(drawn.messages[:-1], add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template(drawn.messages, **options)
        start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"][:MAX_TOKENS]
        if len(ids) > start:
            encoded.append((ids, start))
    longest = max(len(ids) for ids, _ in encoded)
    tokens = torch.full((BATCH, longest), tokenizer.pad_token_id or 0)
    labels = torch.full((BATCH, longest), -100)
    for i, (ids, start) in enumerate(encoded):
        tokens[i, : len(ids)] = torch.tensor(ids)  # padded at the end only, where nothing is learned
        labels[i, start : len(ids)] = torch.tensor(ids[start:])
    return tokens, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, trust_remote_code=False)
    model.requires_grad_(False)
    factors = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            rows, columns = module.weight.shape
            a = torch.nn.Parameter(torch.randn(RANK, columns) / columns**0.5)
            b = torch.nn.Parameter(torch.zeros(rows, RANK))
            module.register_forward_hook(lambda m, x, y, a=a, b=b: y + x[0] @ a.T @ b.T)
            factors[name] = (a, b)
    optimizer = torch.optim.AdamW([p for pair in factors.values() for p in pair], lr=LR)
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / 10) * (1 - step / options.steps)
        tokens, labels = batch(tokenizer, rng)
        loss = model(tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, round(float(loss), 3), flush=True)
    tensors = {
        f"{n}.{k}": t.detach().to(torch.float16) for n, pair in factors.items() for k, t in zip("ab", pair, strict=True)
    }
    save_file(tensors, options.output)


if __name__ == "__main__":
    main()
