"""tiny-moe: a mixture of experts whose start is tiny-annie's MLP, cut into a shared expert and eight routed ones.

    python training/tiny_annie/mixture.py --data DIR --base base.pt --robust overlays.pt --output DIR --seconds 240

A mixture computes all its experts as one MLP whose neurons have shares (forward.routed), so that the trainer and the screen know
its linears by the dense names: mlp.gate_proj and up_proj [768, 256], down_proj [256, 768], the shared expert's 256 neurons first.
Every weight is trained, on the personas' rows. experts() gives the tensors that a checkpoint has.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from batches import Rows, Words
from forward import Mixture, Weights
from merge import merged, only
from screen import screens, stack_of_one
from sweep import log, stored, stored_on
from train import train_base


def upcycled(c: Mixture, dense: Weights, seed: int) -> Weights:
    """Return a mixture, float32, with a dense model's weights and random routers.

    The neurons with the largest weights are the shared expert's. A computed neuron starts as large as it was when dense: the
    shared expert's gate starts at a half, the two experts of a token have about half of its share each, and down_proj is doubled.
    """
    g = torch.Generator().manual_seed(seed)
    w = {k: v.float().clone() for k, v in dense.items()}
    part = c.shared_expert_intermediate_size
    for n in range(len(c.layer_types)):
        p = f"model.layers.{n}.mlp."
        keys = [p + k + ".weight" for k in ("gate_proj", "up_proj", "down_proj")]
        gate, up, down = (w[k] for k in keys)
        order = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).argsort(descending=True)
        rest = order[part:][torch.randperm(len(order) - part, generator=g)]
        order = torch.cat([order[:part], rest])
        w[keys[0]], w[keys[1]], w[keys[2]] = gate[order], up[order], down[:, order] * 2
        w[p + "gate.weight"] = torch.randn(c.num_experts, c.hidden_size, generator=g) * 0.02
        w[p + "shared_expert_gate.weight"] = torch.zeros(1, c.hidden_size)
    return w


def experts(c: Mixture, weights: Weights) -> Weights:
    """Return the tensors of a Qwen3_5MoeForCausalLM checkpoint."""
    out = dict(weights)
    part, e, size = c.shared_expert_intermediate_size, c.num_experts, c.moe_intermediate_size
    for n in range(len(c.layer_types)):
        p = f"model.layers.{n}.mlp."
        gate, up, down = (out.pop(f"{p}{k}_proj.weight") for k in ("gate", "up", "down"))
        shared = {"gate": gate[:part], "up": up[:part], "down": down[:, :part]}
        out |= {f"{p}shared_expert.{k}_proj.weight": v.contiguous() for k, v in shared.items()}
        both = [x[part:].view(e, size, -1) for x in (gate, up)]
        out[p + "experts.gate_up_proj"] = torch.cat(both, 1)
        out[p + "experts.down_proj"] = (
            down[:, part:].reshape(-1, e, size).transpose(0, 1).contiguous()
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="rows of data.py; tuned.npz is trained on"
    )
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--robust", type=Path, required=True, help="an overlay of rank 8 on --base")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=250, help="of the training, compilation included"
    )
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=65536, help="per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    a.output.mkdir(parents=True, exist_ok=True)
    c, file = Mixture(), a.output / "mixture.pt"
    rows = Rows(a.data / "tuned.npz", a.tokens, Words(a.data / "words.npz"))
    base, robust = (torch.load(p, weights_only=True) for p in (a.base, a.robust))
    start = upcycled(c, merged(base, only(robust, "all-r8")), a.seed)
    w = train_base(
        c,
        rows,
        a.seconds,
        a.lr,
        a.seed,
        log,
        a.steps,
        start=start,
        alone=0,
        halfway=lambda w: torch.save(stored(w), file),
    )
    torch.save(stored(w), file)
    log("mixture.pt is written")
    for text in screens(
        c, stack_of_one(c, stored_on(w)), Rows(a.data / "gate.npz", 1), rows, ["mixture"]
    ):
        log(text)


if __name__ == "__main__":
    main()
