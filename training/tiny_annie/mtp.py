"""The head for multi-token prediction (MTP) of a trained model, in Qwen3.5's form; the model itself is not changed.

    python training/tiny_annie/mtp.py --data DIR --model FILE --output DIR --seconds 90

The head reads the hidden state at token t and the embedding of token t+1, and drafts token t+2:
norm(layer(fc([norm(embedding), norm(hidden)]))) with the model's own output layer, one layer of full attention. It learns the
model's own distribution of token t+2, of answers fully and of prompts a little. A greedy server accepts a draft that is the most
probable token of the model; accepted() counts those in the answers of held-out rows.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))

from batches import Rows, Words
from forward import DEVICE, PARTS, Forward, Shape, Weights, cosine, plain, rms, rotation, working
from safetensors.torch import load_file, save_file
from sweep import log
from train import Graphs

LAYER = "mtp.layers.0."


def initial_head(c: Shape, w: Weights, seed: int) -> Weights:
    """Return the head's weights, float32: its layer is the model's last one; fc adds embedding and hidden state."""
    g = torch.Generator().manual_seed(seed)
    last = f"model.layers.{len(c.layer_types) - 1}."
    head = {
        LAYER + k.removeprefix(last): v.float().clone() for k, v in w.items() if k.startswith(last)
    }
    half = torch.eye(c.hidden_size).to(DEVICE) / 2
    noise = torch.randn(c.hidden_size, 2 * c.hidden_size, generator=g).to(DEVICE) * 0.02
    head["mtp.fc.weight"] = torch.cat([half, half], 1) + noise
    head |= {
        f"mtp.pre_fc_norm_{k}.weight": torch.zeros(c.hidden_size, device=DEVICE)
        for k in ("embedding", "hidden")
    }
    head["mtp.norm.weight"] = w["model.norm.weight"].float().clone()
    return head


def draft_states(
    c: Shape, w: Weights, head: Weights, hidden: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the head's final states [R, T-1, H]; that of t drafts token t+2.

    hidden: [R, T, H], the model's after its last norm. ids: [R, T].
    """
    eps = c.rms_norm_eps
    embedding = F.embedding(ids[:, 1:], w["model.embed_tokens.weight"]).to(hidden.dtype)
    both = (
        rms(embedding, head["mtp.pre_fc_norm_embedding.weight"], eps),
        rms(hidden[:, :-1], head["mtp.pre_fc_norm_hidden.weight"], eps),
    )
    x = F.linear(torch.cat(both, -1), head["mtp.fc.weight"])
    x = Forward(c, head, plain(head), PARTS).layer(
        LAYER, "full_attention", x, rotation(c, x.shape[1])
    )
    return rms(x, head["mtp.norm.weight"], eps)


def train_head(
    c: Shape, w: Weights, rows: Rows, seconds: float, lr: float, seed: int, steps: int = 0
) -> Weights:
    """Return the head. w: the model's weights as working() gives them. seconds: for the steps, if `steps` is 0."""
    head = {k: v.to(DEVICE).requires_grad_(True) for k, v in initial_head(c, w, seed).items()}
    parameters, rate, on_gpu = list(head.values()), torch.zeros((), device=DEVICE), DEVICE == "cuda"
    optimizer = torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=on_gpu, capturable=on_gpu
    )
    rng, generator = np.random.default_rng(seed), torch.Generator(DEVICE).manual_seed(seed)
    for p in parameters:
        p.grad = torch.zeros_like(p)

    def step(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for p in parameters:
            p.grad.zero_()
        with torch.no_grad():
            hidden = Forward(c, w, plain(w), PARTS).hidden_states(ids)
            target = (hidden[:, 1:-1] @ w["lm_head.weight"].t()).float().softmax(-1)
        states = draft_states(c, w, working(head), hidden, ids)[:, :-1]
        logits = (states @ w["lm_head.weight"].t()).float()
        each = -(target * logits.log_softmax(-1)).sum(-1) * weight[:, 2:]
        loss = each.sum() / weight[:, 2:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        return loss.detach()

    run = Graphs(step, rows, log)
    steps = run.start(generator, optimizer, seconds, steps)
    log(f"head: {steps} steps")
    for i in range(steps):
        rate.fill_(lr * cosine(i, steps, 50))
        k = int(rng.choice(len(rows.share), p=rows.share))
        loss = run(k, *rows.batch(k, generator, 0.05))
        if i % 250 == 0 or i == steps - 1:
            log(f"head step {i} loss {loss.item():.4f}")
    return {k: v.detach() for k, v in head.items()}


@torch.no_grad()
def accepted(
    c: Shape, w: Weights, head: Weights, rows: Rows, tokens: int = 1 << 16
) -> dict[str, tuple[int, int]]:
    """Return per category the drafts of the answers' tokens that are the model's most probable ones, and how many there were."""
    out: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    head = working(head)
    for b in rows.buckets:
        n = max(1, tokens // b.ids.shape[1])
        for j in range(0, len(b.ids), n):
            ids, learned = b.ids[j : j + n].long(), b.learned[j : j + n][:, 2:] == 2
            hidden = Forward(c, w, plain(w), PARTS).hidden_states(ids)
            chosen = (hidden[:, 1:-1] @ w["lm_head.weight"].t()).argmax(-1)
            drafts = (
                draft_states(c, w, head, hidden, ids)[:, :-1] @ w["lm_head.weight"].t()
            ).argmax(-1)
            hits = ((chosen == drafts) & learned).sum(1).tolist()
            for i, (hit, count) in enumerate(zip(hits, learned.sum(1).tolist(), strict=True)):
                counts = out[str(rows.category[b.index[j + i]])]
                counts[0] += hit
                counts[1] += count
    return {k: (a, b) for k, (a, b) in out.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--model", type=Path, required=True, help="the model's weights (safetensors)"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=32768, help="per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    a.output.mkdir(parents=True, exist_ok=True)
    c = Shape()
    w = working({k: v.float().to(DEVICE) for k, v in load_file(a.model).items()})
    rows = Rows(a.data / "tuned.npz", a.tokens, Words(a.data / "words.npz"))
    head = train_head(c, w, rows, a.seconds, a.lr, a.seed, a.steps)
    save_file(
        {k: v.bfloat16().cpu() for k, v in head.items()},
        a.output / "mtp.safetensors",
        metadata={"format": "pt"},
    )
    counts = accepted(c, w, head, Rows(a.data / "gate.npz", 1))
    hits, n = (sum(x[i] for x in counts.values()) for i in (0, 1))
    log(f"accepted {hits} of {n} drafts ({hits / n:.1%})")
    for category, (hit, count) in sorted(counts.items()):
        log(f"  {category}: {hit} of {count} ({hit / count:.1%})")


if __name__ == "__main__":
    main()
