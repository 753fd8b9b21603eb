"""Where do a server's activations and the offline emulation's part? One prompt in both, tensor by tensor in the order of computing.

    python tests/perf/trace_server.py CHECKPOINT --python build/vllm/bin/python --profile vllm-cutlass --prompt 12

For every input and output of a linear or norm: the share of values that differ, and their error (root mean square of the
difference over that of the tensor). A tensor is *parted* if its error is above PARTED: bfloat16 neighbours give 0.001 to 0.003
where every value differs, while a flipped 4-bit code gives more. The first tensor whose values differ in more than a few places
names the operation that rounds elsewhere: what feeds it still agrees. --prompt: index in tests/perf/predict_server.py's prompts;
--tokens: a file of ids, for a prompt with an answer's first tokens. --served: tensors that tests/perf/vllm_trace.py stored on
another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from annie_quant.offline.emulation import emulate  # noqa: E402
from annie_quant.offline.engine import Engine  # noqa: E402
from annie_quant.offline.loading import load  # noqa: E402
from annie_quant.offline.profiles import find_profile  # noqa: E402

PARTED = 3e-3
SERVED_AS_ONE = {  # vLLM's module → the checkpoint's, whose outputs it concatenates
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
ORDER = (  # of computing in one layer
    "input_layernorm", "in_proj_qkvz", "in_proj_ba", "linear_attn.norm", "out_proj", "qkv_proj", "q_norm", "k_norm", "o_proj",
    "post_attention_layernorm", "gate_up_proj", "down_proj",
)  # fmt: skip


def offline_tensors(folder: Path, profile: str, tokens: list[int]) -> dict[str, torch.Tensor]:
    """Return the emulation's tensors, by vLLM's names."""
    model: Any = load(folder, cache="float32", dtype=torch.float32)
    engine = Engine(model)
    tensors: dict[str, torch.Tensor] = {}

    def keep(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(_: Any, args: Any) -> None:
            tensors[name + ".in"] = args[0].detach().reshape(len(tokens), -1).clone()

        def after(_: Any, args: Any, output: Any) -> None:
            tensors[name + ".out"] = output.detach().reshape(len(tokens), -1).clone()

        return before, after

    with emulate(model, find_profile(profile)):
        for name, module in model.named_modules():
            if (
                type(module).__name__.endswith(("Linear", "Norm", "NormGated"))
                and name != "lm_head"
            ):
                before, after = keep(name.removeprefix("model."))
                module.register_forward_pre_hook(before)
                module.register_forward_hook(after)
        cache = engine.new_cache()
        hidden = engine.step(torch.tensor([tokens]), cache, len(tokens))
        tensors["logits"] = engine.logits(hidden[:, -1])
    for name in list(tensors):
        parent, _, end = name.rpartition(".")
        for fused, parts in SERVED_AS_ONE.items():
            if parent.endswith(parts[0]):
                names = [f"{parent.removesuffix(parts[0])}{part}.{end}" for part in parts]
                whole = (
                    tensors[names[0]] if end == "in" else torch.cat([tensors[n] for n in names], -1)
                )
                tensors[f"{parent.removesuffix(parts[0])}{fused}.{end}"] = whole
    return tensors


def in_order(names: Iterator[str]) -> list[str]:
    """Return tensor names in the order of computing."""

    def key(name: str) -> tuple[int, int, bool]:
        layer = re.match(r"layers\.(\d+)\.", name)
        place = next((i for i, part in enumerate(ORDER) if part in name), len(ORDER))
        return (
            int(layer[1]) if layer else 10**6 + (name == "logits"),
            place,
            name.endswith(".out"),
        )

    return sorted(names, key=key)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--python", type=Path, help="the python of vLLM's environment")
    parser.add_argument("--served", type=Path)
    parser.add_argument("--profile", default="vllm-cutlass")
    parser.add_argument("--kernel", default="auto", choices=("auto", "emulation", "exact"))
    parser.add_argument("--work", type=Path, default=Path("build/trace"))
    parser.add_argument("--prompts", type=Path, help="of predict_server.py: WORK/prompts.N.json")
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--tokens", type=Path)
    parser.add_argument(
        "--layers", type=int, default=2, help="layers whose tensors are printed one by one"
    )
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    tokens = json.loads((arguments.tokens or arguments.prompts).read_text())
    tokens = tokens if arguments.tokens else tokens[arguments.prompt]["prompt"]
    (work / "tokens.json").write_text(json.dumps(tokens))
    program, output = (
        Path(__file__).with_name("vllm_trace.py"),
        arguments.served or work / "served.safetensors",
    )
    if arguments.served is None:
        command = [
            arguments.python,
            program,
            arguments.checkpoint.resolve(),
            work / "tokens.json",
            output,
        ]
        with (work / "vllm.log").open("w") as log:
            subprocess.run(
                [*command, "--kernel", arguments.kernel], check=True, stdout=log, stderr=log
            )
    from safetensors.torch import load_file

    served = load_file(output)
    own = offline_tensors(arguments.checkpoint, arguments.profile, tokens)
    first = parted = ""
    print(f"{len(tokens)} tokens; tensor, values that differ, error")
    for name in in_order(iter(served)):
        if name not in own or own[name].shape != served[name].shape:
            continue
        a, b = own[name].double(), served[name].double()
        share = float((a != b).double().mean())
        error = float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp_min(1e-30))
        if not first and share > 0.01:
            first = name
        if not parted and error > PARTED:
            parted = name
        if (
            name == "logits"
            or int((re.match(r"layers\.(\d+)\.", name) or [0, 10**6])[1]) < arguments.layers
        ):
            print(f"  {name:45} {100 * share:6.2f} %  {error:.2e}")
    print(f"first with more than 1 % of its values different: {first or 'none'}")
    print(f"first that parts (error above {PARTED}): {parted or 'none'}")


if __name__ == "__main__":
    main()
