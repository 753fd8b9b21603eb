"""Which faults of a served checkpoint `doctor --server` finds: its distance from the right one, in units of the noise.

    python tests/perf/known_answers.py CHECKPOINT --profile llama.cpp-cpu --served

CHECKPOINT is NVFP4 of tiny-annie or a variant, in ModelOpt's dialect. With --served the real llama.cpp serves a GGUF file of each
changed checkpoint; else the changed checkpoint is scored under the profile with sums in another order.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from annie_quant import checkpoint, nvfp4
from annie_quant.offline import fingerprint
from annie_quant.offline.emulation import USUAL, SumOrder, emulate
from annie_quant.offline.engine import Engine, Row
from annie_quant.offline.profiles import Profile, find_profile
from annie_quant.ops import serving
from annie_quant.ops.server_checks import N_BEST, N_PROMPTS, N_TOKENS, served_answers

Tensors = dict[str, Any]
DOWN, OUT = "model.layers.4.mlp.down_proj", "model.layers.4.linear_attn.out_proj"
ENDS = (".weight", ".weight_scale", ".weight_scale_2", ".input_scale")
SERVER_ORDER = SumOrder(permutation=9)


def scaled(name: str, factor: float, end: str = ".weight_scale_2") -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name + end] *= factor

    return change


def swapped(tensors: Tensors) -> None:
    for end in ENDS:
        a, b = (f"model.layers.{i}.mlp.up_proj{end}" for i in (1, 2))
        tensors[a], tensors[b] = tensors[b].clone(), tensors[a].clone()


def four_bit_head(tensors: Tensors) -> None:
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = torch.from_numpy(nvfp4.fake_quant(head.float().numpy())).to(
        head.dtype
    )


FAULTS: dict[str, Callable[[Tensors], object]] = {
    "none": lambda tensors: None,
    **{f"down_proj x {f}": scaled(DOWN, f) for f in (1.02, 1.05, 1.1, 1.25, 2)},
    **{f"out_proj x {f}": scaled(OUT, f) for f in (1.1, 1.5)},
    "input scale x .5": scaled(DOWN, 0.5, ".input_scale"),
    "up_proj swapped": swapped,
    "4-bit head": four_bit_head,
}


def logprobs(
    engine: Engine, rows: list[Row], profile: Profile, order: SumOrder = USUAL
) -> list[torch.Tensor]:
    with emulate(engine.model, profile, order):
        scored = {i: torch.log_softmax(logits.double(), -1) for i, logits in engine.scores(rows)}
    return [scored[i] for i in range(len(rows))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--profile", default="llama.cpp-cpu")
    parser.add_argument("--served", action="store_true")
    arguments = parser.parse_args()
    right, profile = arguments.checkpoint, find_profile(arguments.profile)
    prompts, engine = fingerprint.prompts(right, N_PROMPTS), fingerprint.loaded(right, None)
    stored, answers = load_file(right / "model.safetensors"), None
    for name, change in FAULTS.items():
        with tempfile.TemporaryDirectory() as home:
            folder, file = Path(home) / "changed", Path(home) / "changed.gguf"
            shutil.copytree(right, folder)
            tensors = {key: tensor.clone() for key, tensor in stored.items()}
            change(tensors)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            if arguments.served or answers is None:
                checkpoint.convert(folder, "gguf", file)
                with serving.start(file) as server:
                    answers = served_answers(server.url, prompts, N_TOKENS, N_BEST).answers
            rows = [Row(p, a.tokens) for p, a in zip(prompts, answers, strict=True)]
            steps = [a.logprobs for a in answers]
            if not arguments.served:
                best = [
                    x.topk(N_BEST)
                    for x in logprobs(fingerprint.loaded(folder, None), rows, profile, SERVER_ORDER)
                ]
                steps = [
                    [
                        dict(zip(i.tolist(), v.tolist(), strict=True))
                        for i, v in zip(t.indices, t.values, strict=True)
                    ]
                    for t in best
                ]
        near = [[fingerprint.near_the_best(step) for step in answer] for answer in steps]
        own, other = (
            np.concatenate([
                x[p, list(step)].numpy() for x, answer in zip(scores, near, strict=True) for p, step in enumerate(answer)
            ])
            for scores in (
                logprobs(engine, rows, profile), logprobs(engine, rows, *fingerprint.noise_arithmetic(profile))
            )
        )  # fmt: skip
        served = np.array([v for answer in near for step in answer for v in step.values()])
        difference, noise = (
            np.abs(served - own).mean(),
            max(fingerprint.FLOOR, np.abs(other - own).mean()),
        )
        print(
            f"{name:18s} {difference:.4f} nats, noise {noise:.4f}, ratio {difference / noise:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
