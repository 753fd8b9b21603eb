"""One quantization recipe on given text, in the environment that has its library; started by quantize_peers.py.

    PYTHON tests/perf/peer_recipes.py ROW MODEL OUTPUT --text FILE --conversations FILE --samples 128 --seed 0

--text: one token sequence per line, for ModelOpt. --conversations, --samples: the same text for all strategies of this package, by
which llm-compressor and AutoRound run too: their environments also need what this package imports. The last line of the output is
the seconds and CPU seconds of the recipe: after imports, with loading the model and writing the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What no run quantizes: the head, and DeltaNet's two projections with one row per head.
UNQUANTIZED = ("lm_head", r"re:.*in_proj_a$", r"re:.*in_proj_b$")


def batches(file: Path, rows: int) -> list[list[list[int]]]:
    """Return batches of sequences of similar length. Shorter ones are extended by repeating their own tokens.

    Causal models compute the sequence itself as without the extension, which gives the recipe natural inputs only: of DeltaNet's
    layers transformers takes no padding on the right. At 8 rows 3 % of the tokens are repeated.
    """
    sequences = sorted((json.loads(line) for line in file.read_text().splitlines()), key=len)
    padded = []
    for i in range(0, len(sequences), rows):
        part = sequences[i : i + rows]
        width = max(map(len, part))
        padded.append([(row * (width // len(row) + 1))[:width] for row in part])
    return padded


def use_faster_deltanet() -> None:
    """Let transformers' DeltaNet layers compute the same rule in fewer operations (annie_quant/offline/deltanet.py).

    Half of a peer's time on a CPU is transformers' form of the rule. Without this the times are the peer's own.
    """
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    from annie_quant.offline import deltanet

    theirs = modeling.torch_chunk_gated_delta_rule

    def rule(query: Any, key: Any, value: Any, **options: Any) -> Any:
        if options.get("initial_state") is not None or options.get("output_final_state"):
            return theirs(query, key, value, **options)
        repeats = value.shape[2] // key.shape[2]
        query, key = (x.repeat_interleave(repeats, 2) for x in (query, key))
        with torch.autocast(
            query.device.type, enabled=False
        ):  # AutoRound's; the rule chooses each product's precision
            return deltanet.gated_delta_rule(query, key, value, **options)

    modeling.torch_chunk_gated_delta_rule = rule


# Each recipe imports its libraries and returns the work that is timed.
Work = Callable[[], Any]


def ours(arguments: argparse.Namespace, strategy: str, **settings: Any) -> Work:
    from annie_quant import quantize
    from annie_quant.quantize import calibration_samples, input_stats, rounding  # noqa: F401, so that they are not timed

    def work() -> None:
        quantize.run(
            strategy,
            arguments.model,
            arguments.output,
            calib_data=arguments.conversations,
            calib_samples=arguments.samples,
            seed=arguments.seed,
            **settings,
        )

    return work


def use_rounding_without_triton() -> None:
    """Let ModelOpt 0.47 round weights with given block scales, and inputs, on a CPU, where it asks for Triton and CUDA.

    The rule of its kernel: E2M1 to nearest under amax / 6, which is first rounded to E4M3 in units of the tensor's amax / 6 / 448.
    Of inputs amax is the block's own, as codec.fake_quant rounds them.
    """
    import types

    import torch
    from modelopt.torch.quantization import tensor_quant

    from annie_quant.models.formats import LARGEST_NVFP4
    from annie_quant.offline.codec import fake_quant, to_e2m1

    def rounded(
        x: Any,
        amax: Any,
        global_amax: Any,
        quantize: bool = True,
        largest: float = 448.0,
        dtype: Any = None,
    ) -> Any:
        unit = global_amax.float() / 6 / largest
        scale = (
            (amax.float() / 6 / unit).to(torch.float8_e4m3fn).float() * unit
            if quantize
            else amax.float() / 6
        )
        blocks = x.float().reshape(amax.numel(), -1)
        scale = scale.reshape(-1, 1)
        values = to_e2m1(blocks / scale.clamp_min(1e-30)) * scale
        return values.reshape(x.shape).to(dtype or x.dtype)

    def rounded_inputs(_: Any, inputs: Any, block_size: int, amax: Any, *options: Any) -> Any:
        return fake_quant(inputs, float(amax.max()) / LARGEST_NVFP4, block_size)

    tensor_quant.triton_kernel = types.SimpleNamespace(
        IS_AVAILABLE=True, static_blockwise_fp4_fake_quant=rounded
    )
    tensor_quant._dynamic_block_quantize_forward = rounded_inputs


def model_opt(arguments: argparse.Namespace, preset: str) -> Work:
    """Return one of ModelOpt's presets, with its maximum calibration of the inputs on the text."""
    import modelopt.torch.quantization as mtq
    import torch
    import transformers
    from modelopt.torch.export import export_hf_checkpoint

    if arguments.device == "cpu":
        use_rounding_without_triton()
    config = getattr(mtq, preset)
    config["quant_cfg"] += [
        {"quantizer_name": f"*{part}*", "enable": False}
        for part in ("lm_head", "in_proj_a.", "in_proj_b.")
    ]

    def work() -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=arguments.dtype
        ).to(arguments.device)

        def forward_loop(model: Any) -> None:
            with torch.inference_mode():
                for batch in batches(arguments.text, arguments.batch):
                    model(torch.tensor(batch, device=arguments.device), use_cache=False)

        mtq.quantize(model, config, forward_loop)
        export_hf_checkpoint(model, export_dir=str(arguments.output))

    return work


def model_opt_formats(arguments: argparse.Namespace, bits: float = 0.0) -> Work:
    """Return ModelOpt with several formats: NVIDIA's published recipe, or AutoQuantize's choice at `bits` per weight.

    bits: 0 for attention in FP8, MLPs in NVFP4 W4A4 and the head in NVFP4 W4A16; else AutoQuantize chooses NVFP4, FP8 or bf16 per
    linear of the decoder by its gradients of the loss on the text, and the head stays bf16.
    """
    import modelopt.torch.quantization as mtq
    import torch
    import transformers
    from modelopt.torch.export import export_hf_checkpoint

    if arguments.device == "cpu":
        use_rounding_without_triton()
    nvfp4, fp8 = (
        mtq.NVFP4_DEFAULT_CFG["quant_cfg"][1]["cfg"],
        mtq.FP8_DEFAULT_CFG["quant_cfg"][1]["cfg"],
    )
    formats = [("*mlp.*", nvfp4, nvfp4), ("*attn.*", fp8, fp8), ("*lm_head*", nvfp4, None)]
    published: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for part, weight, inputs in formats:
        published.append({"quantizer_name": f"{part}weight_quantizer", "cfg": weight})
        published += [{"quantizer_name": f"{part}input_quantizer", "cfg": inputs}] if inputs else []
    published += [
        {"quantizer_name": f"*{part}*", "enable": False}
        for part in ("in_proj_a.", "in_proj_b.", "conv1d", "bmm_quantizer")
    ]

    def work() -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=arguments.dtype
        ).to(arguments.device)
        ids = [
            torch.tensor(batch, device=arguments.device)
            for batch in batches(arguments.text, arguments.batch)
        ]

        def forward_loop(model: Any) -> None:
            with torch.inference_mode():
                for batch in ids:
                    model(batch, use_cache=False)

        if bits:
            model, _ = mtq.auto_quantize(
                model,
                constraints={
                    "effective_bits": bits,
                    "cost": {"excluded_module_name_patterns": ["*lm_head*"]},
                },
                quantization_formats=[mtq.NVFP4_DEFAULT_CFG, mtq.FP8_DEFAULT_CFG],
                data_loader=ids,
                forward_step=lambda model, batch: model(batch, labels=batch, use_cache=False),
                loss_func=lambda output, batch: output.loss,
                disabled_layers=["*lm_head*", "*in_proj_a", "*in_proj_b"],
                num_calib_steps=len(ids),
                num_score_steps=len(ids),
            )
        else:
            mtq.quantize(model, {"quant_cfg": published, "algorithm": "max"}, forward_loop)
        export_hf_checkpoint(model, export_dir=str(arguments.output))

    return work


# llm-compressor's AWQ takes a CUDA device. GPTQ has the library's own damping here.
RECIPES: dict[str, Callable[[argparse.Namespace], Work]] = {
    "naive": lambda a: ours(a, "naive"),
    "gptq": lambda a: ours(a, "gptq"),
    "best": lambda a: ours(a, "best"),
    "best, all W4A4": lambda a: ours(a, "best", activations=4),
    "ModelOpt max": lambda a: model_opt(a, "NVFP4_DEFAULT_CFG"),
    "ModelOpt MSE": lambda a: model_opt(a, "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG"),
    "ModelOpt local Hessian": lambda a: model_opt(a, "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG"),
    "ModelOpt AWQ": lambda a: model_opt(a, "NVFP4_AWQ_LITE_CFG"),
    "ModelOpt published": lambda a: model_opt_formats(a),
    "ModelOpt AutoQuantize 5": lambda a: model_opt_formats(a, 5),
    "ModelOpt AutoQuantize 6": lambda a: model_opt_formats(a, 6),
    "ModelOpt AutoQuantize 7": lambda a: model_opt_formats(a, 7),
    "llm-compressor GPTQ": lambda a: ours(a, "llmcompressor", damping=0.01),
    "llm-compressor AWQ + GPTQ": lambda a: ours(a, "llmcompressor", recipe="awq_gptq"),
    "AutoRound light": lambda a: ours(a, "autoround", recipe="light"),
    "AutoRound": lambda a: ours(a, "autoround", recipe="default"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", choices=RECIPES)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--batch", type=int, default=8, help="sequences per forward pass of the peers"
    )
    parser.add_argument(
        "--faster-deltanet",
        action="store_true",
        help="in the peers' model: the same rule in fewer operations",
    )
    parser.add_argument(
        "--dtype", default="auto", help="of the peers' model; ours computes small models in float32"
    )
    parser.add_argument(
        "--device", default="cpu", help="of the peers' model; ours takes a GPU where there is one"
    )
    arguments = parser.parse_args()
    work = RECIPES[arguments.row](arguments)
    if arguments.faster_deltanet:
        use_faster_deltanet()
    start, cpu = time.monotonic(), time.process_time()
    work()
    seconds = {"seconds": time.monotonic() - start, "cpu_s": time.process_time() - cpu}
    sys.stdout.flush()
    print("\n" + json.dumps({key: round(value, 1) for key, value in seconds.items()}))


if __name__ == "__main__":
    main()
