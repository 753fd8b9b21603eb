"""Another thin model: a low-rank overlay on tiny-annie's base, trained and merged, on a CPU in minutes.

    python tests/perf/make_thin.py build/thin1 --seed 1 --rank 2 --steps 100

The base answers with markdown, thinks aloud and calls no tools (tests/helpers/tiny_variants.py). The overlay is on all the
linears of the layers and learns Annie's manners on the answers' tokens of the training split (`annie-quant data`; its draw and
the order of rows by --seed). It starts with the largest --rank singular directions of what tiny-annie differs from the base in,
which takes a tenth of the steps of a start from nothing (--from-nothing). Prints the loss. It checks nothing: evaluate the folder
(`annie-quant eval FOLDER --reference FOLDER` shows bf16's gates)."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

import torch  # noqa: E402
from calibration_texts import padded  # noqa: E402
from paths import TINY_ANNIE  # noqa: E402
from tiny_variants import save_variant  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from annie_quant import data  # noqa: E402
from annie_quant.data.rows import read_conversations  # noqa: E402
from annie_quant.quantize.calibration_samples import (  # noqa: E402
    PADDING,
    PROMPT,
    CalibrationSample,
)
from annie_quant.quantize.calibration_text import samples_of_rows  # noqa: E402

CHUNK = 64
WARM_UP = 10


class Overlay(nn.Module):
    """A frozen linear plus B A: only A and B are trained."""

    def __init__(self, linear: nn.Linear, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.linear, self.a, self.b = linear, nn.Parameter(a), nn.Parameter(b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + (x @ self.a.t()) @ self.b.t()


def delta_rule(
    query: Any, key: Any, value: Any, g: Any, beta: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Return the gated delta rule's outputs [B, T, H, Dv] in a form with a gradient (offline/deltanet.py has the definition)."""
    query, key = (functional.normalize(x, dim=-1, eps=1e-6) for x in (query, key))
    batch, steps, heads, dk = key.shape
    pad = -steps % CHUNK

    def chunks(x: torch.Tensor) -> torch.Tensor:
        x = functional.pad(x.transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, pad))
        return x.reshape(batch, heads, -1, CHUNK, *x.shape[3:])

    q, k, v, decay, b = (
        chunks(query) * dk**-0.5,
        chunks(key),
        chunks(value),
        chunks(g).cumsum(-1),
        chunks(beta),
    )
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    k_beta = k * b.unsqueeze(-1)
    lower = ((k_beta @ k.transpose(-1, -2)) * between).tril(-1) + torch.eye(CHUNK)
    right = torch.cat((v * b.unsqueeze(-1), k_beta * decay.exp().unsqueeze(-1)), -1)
    u, w = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True).split(
        (v.shape[-1], dk), -1
    )
    within = (q @ k.transpose(-1, -2)) * between
    state, outputs = q.new_zeros(batch, heads, dk, v.shape[-1]), []
    for c in range(v.shape[2]):
        new = u[:, :, c] - w[:, :, c] @ state
        outputs.append((q[:, :, c] * decay[:, :, c, :, None].exp()) @ state + within[:, :, c] @ new)
        last = decay[:, :, c, -1:]
        to_end = (last - decay[:, :, c]).exp().unsqueeze(-1)
        state = state * last.unsqueeze(-1).exp() + (k[:, :, c] * to_end).transpose(-1, -2) @ new
    return torch.stack(outputs, 2).reshape(batch, heads, -1, v.shape[-1])[:, :, :steps].transpose(
        1, 2
    ), None


def add_overlays(
    model: Any, rank: int, seed: int, target: Mapping[str, torch.Tensor]
) -> list[nn.Parameter]:
    """Put an overlay on every linear of the layers, and return the trained parameters.

    target: weights of the model towards which the overlays start, by name; without them they start with B = 0.
    """
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for layer in model.modules():
        if hasattr(layer, "chunk_gated_delta_rule"):
            layer.chunk_gated_delta_rule = delta_rule
    linears = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and "layers." in n]
    for name, linear in linears:
        parent, _, leaf = name.rpartition(".")
        a = torch.randn(rank, linear.in_features, generator=generator) / math.sqrt(
            linear.in_features
        )
        b = torch.zeros(linear.out_features, rank)
        if target:
            u, s, vh = torch.linalg.svd(
                target[f"{name}.weight"].float() - linear.weight, full_matrices=False
            )
            a, b = s[:rank, None].sqrt() * vh[:rank], u[:, :rank] * s[:rank].sqrt()
        setattr(model.get_submodule(parent), leaf, Overlay(linear, a.contiguous(), b.contiguous()))
    return [p for p in model.parameters() if p.requires_grad]


def loss_of(model: Any, samples: list[CalibrationSample]) -> torch.Tensor:
    """Return the mean cross entropy over the answers' tokens."""
    batch = padded(samples)
    ids, kinds = torch.from_numpy(batch.ids), torch.from_numpy(batch.kinds)
    used = (kinds != PROMPT) & (kinds != PADDING)
    targets = torch.cat((ids[:, 1:], ids[:, :1]), 1)
    for row, sample in enumerate(samples):
        targets[row, len(sample.ids) - 1] = sample.answer[-1]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[used]
    return functional.cross_entropy(model.lm_head(hidden), targets[used])


def train(
    model: Any,
    samples: list[CalibrationSample],
    parameters: list[nn.Parameter],
    steps: int,
    rate: float,
    rows: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    begin = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = (
                rate * min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
            )
        start = int(torch.randint(0, len(samples) - rows + 1, (), generator=generator))
        loss = loss_of(model, samples[start : start + rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(
                f"step {step} of {steps}, loss {float(loss.detach()):.4f}, {time.monotonic() - begin:.0f} s",
                flush=True,
            )


def merged(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of the overlaid linears with the overlay added, by their names in the checkpoint."""
    return {
        f"{name}.weight": m.linear.weight + m.b.detach() @ m.a.detach()
        for name, m in model.named_modules()
        if isinstance(m, Overlay)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--rows", type=int, default=6, help="answers per step, of similar length")
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--from-nothing", action="store_true")
    arguments = parser.parse_args()
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(arguments.seed)
    folder = save_variant("base", arguments.output)
    with tempfile.TemporaryDirectory() as temporary:
        rows = Path(temporary) / "rows.jsonl"
        data.generate(
            "annie", n=arguments.conversations, output=rows, seed=arguments.seed, split="train"
        )
        samples = sorted(
            samples_of_rows(folder, read_conversations(rows)), key=lambda s: len(s.ids)
        )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target = {} if arguments.from_nothing else load_file(TINY_ANNIE / "model.safetensors")
    parameters = add_overlays(model, arguments.rank, arguments.seed, target)
    train(
        model, samples, parameters, arguments.steps, arguments.rate, arguments.rows, arguments.seed
    )
    weights = load_file(folder / "model.safetensors")
    for name, weight in merged(model).items():
        weights[name] = weight.to(weights[name].dtype).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
