"""The activations of one prompt in vLLM, for tests/perf/trace_server.py. Needs vLLM alone.

    python tests/perf/vllm_trace.py CHECKPOINT TOKENS.json OUTPUT.safetensors --kernel auto

TOKENS.json: token ids. The model computes them in one forward; stored are the inputs and outputs of every linear and norm of the
layers, by module name and ".in" or ".out", [tokens, values], and the last token's logits. bfloat16 holds all of them exactly.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import vllm_answers


def record(model: Any, length: int, tensors: dict[str, Any], layers: list[str]) -> list[Any]:
    """Hook the linears and norms of these layers ([]: all); a forward over `length` tokens is stored. Returns the handles."""
    import torch

    def keep(name: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        if torch.is_tensor(value) and value.numel() % length == 0 and value.shape[0] % length == 0:
            tensors[name] = value.detach().bfloat16().reshape(length, -1).cpu().clone()

    handles = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        chosen = not layers or any(f"layers.{i}." in name for i in layers)
        if (
            chosen
            and kind.endswith(("Linear", "Norm", "NormGated"))
            and ("layers." in name or name.endswith("model.norm"))
        ):
            short = name.removeprefix("model.").removeprefix("language_model.")

            def before(_: Any, args: Any, short: str = short) -> None:
                keep(short + ".in", args[0])

            def after(_: Any, args: Any, output: Any, short: str = short) -> None:
                keep(short + ".out", output)

            handles += [
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after),
            ]
    return handles


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("tokens", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--kernel", default="auto", choices=("auto", "emulation", "exact"))
    parser.add_argument("--layers", default="", help="for example 0,3; default: all")
    arguments = parser.parse_args()
    import torch
    from safetensors.torch import save_file
    from vllm import SamplingParams

    tokens = json.loads(arguments.tokens.read_text())
    folder = vllm_answers.register_text_only(arguments.checkpoint)
    llm = vllm_answers.start(folder, arguments.kernel, 1, not torch.cuda.is_available())
    model = vllm_answers.model_of(llm)
    tensors: dict[str, Any] = {}
    handles = record(model, len(tokens), tensors, [i for i in arguments.layers.split(",") if i])
    compute_logits = model.compute_logits

    def logits(hidden: Any, *more: Any, **options: Any) -> Any:
        result = compute_logits(hidden, *more, **options)
        tensors["logits"] = result.detach().float()[-1:].cpu().clone()
        return result

    model.compute_logits = logits
    llm.generate(
        [{"prompt_token_ids": tokens}],
        [SamplingParams(temperature=0, max_tokens=1)],
        use_tqdm=False,
    )
    for handle in handles:
        handle.remove()
    save_file(tensors, arguments.output)
    print(len(tensors), vllm_answers.kernel_name(model), flush=True)


if __name__ == "__main__":
    main()
