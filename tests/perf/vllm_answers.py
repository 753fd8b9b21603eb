"""Greedy answers of a checkpoint in vLLM, on a CPU or a GPU, to prompts given as token ids. Imports vLLM alone, not this package.

    python tests/perf/vllm_answers.py CHECKPOINT PROMPTS.json ANSWERS.jsonl --cuts 64,1 --kernel emulation

PROMPTS.json: a list of {"prompt": token ids, "max_tokens": n, "ends": token ids}. ANSWERS.jsonl (tests/helpers/answer_log.py) gets
each answer when it is complete, [token ids, ended, logprobs], and a run that was cut off continues; logprobs: the five best tokens
[[id, log-probability], ...] of each of the first TRACED tokens. A cut is the number of sequences at a time; each cut after the
first takes the prompts (--again: the first ones) in reverse order. A line per start has vLLM's version, the device and the kernel
of the first NVFP4 linear, one per cut its seconds. The engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), without
torch.compile and CUDA graphs, and starts fast.

Kernels of NVFP4 linears (--kernel):
  auto       what vLLM chooses: Marlin (W4A16) on GPUs without FP4 units, this package's plug-in on a CPU
  emulation  vLLM's own W4A4 for GPUs without FP4 units: weights and activations are rounded to bfloat16 before they are multiplied
  exact      the same W4A4 with exact products: weights and activations stay float32, and the sum is rounded once, as CUTLASS does
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

from answer_log import AnswerLog, missing
from serve_9b import GPU_OPTIONS

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault(
    "TORCHDYNAMO_DISABLE", "1"
)  # vLLM compiles some functions in eager mode too, which needs a compiler
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

TRACED = 10  # tokens of an answer whose log-probabilities are stored
TEXT_ONLY = {
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
}


def register_text_only(folder: str) -> str:
    """Register Qwen3.5 without vision where vLLM's registry has only the model with vision (0.26; 0.32 has both).

    Returns the folder to load: a copy whose configuration has one position per token (which is what M-RoPE computes for text).
    """
    from vllm import ModelRegistry

    (architecture,) = json.loads(Path(folder, "config.json").read_text())["architectures"]
    if architecture in ModelRegistry.get_supported_archs():
        return folder
    from vllm.model_executor.models import config, qwen3_5
    from vllm.model_executor.models.interfaces import IsHybrid

    with_vision = getattr(qwen3_5, TEXT_ONLY[architecture])
    without_state: Any = getattr(qwen3_5, architecture)

    class TextOnly(without_state, IsHybrid):
        get_mamba_state_dtype_from_config = classmethod(
            with_vision.get_mamba_state_dtype_from_config.__func__
        )
        get_mamba_state_shape_from_config = classmethod(
            with_vision.get_mamba_state_shape_from_config.__func__
        )
        get_mamba_state_copy_func = classmethod(with_vision.get_mamba_state_copy_func.__func__)

    config.MODELS_CONFIG_MAP[architecture] = config.MODELS_CONFIG_MAP[TEXT_ONLY[architecture]]
    ModelRegistry.register_model(architecture, TextOnly)
    copy = Path(tempfile.mkdtemp()) / Path(folder).name
    copy.mkdir()
    for file in Path(folder).resolve().iterdir():
        (copy / file.name).symlink_to(file)
    document = json.loads((copy / "config.json").read_text())
    for key in ("mrope_section", "mrope_interleaved"):
        document.get("rope_parameters", {}).pop(key, None)
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(document))
    return str(copy)


def exact_products() -> None:
    """Let vLLM's emulation of NVFP4 multiply exact values: float32 operands, one rounding of the sum."""
    import torch
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as utils

    def apply_weights(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        rows = utils.ref_nvfp4_quant_dequant(
            x.reshape(-1, x.shape[-1]).float(), layer.input_global_scale_inv, 16
        )
        if not hasattr(layer, "exact_weight"):
            layer.exact_weight = utils.dequantize_to_dtype(
                layer.weight.data.view(torch.uint8), layer.weight_scale.data, layer.weight_global_scale,
                torch.float32, 16, swizzle=False,
            )  # fmt: skip
        y = (rows @ layer.exact_weight.t()).to(x.dtype).reshape(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    torch.backends.cuda.matmul.allow_tf32 = False
    EmulationNvFp4LinearKernel.apply_weights = apply_weights


def start(folder: str, kernel: str, sequences: int, on_cpu: bool, dtype: str = "bfloat16") -> Any:
    """Return vLLM's LLM of a checkpoint."""
    from vllm import LLM

    options: dict[str, Any] = {}
    if not on_cpu:
        options = {"gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 2 << 30, **GPU_OPTIONS}
    if kernel == "exact":
        exact_products()
    if kernel != "auto":
        options["linear_backend"] = "emulation"
    return LLM(
        folder, dtype=dtype, enforce_eager=True, max_model_len=2048, max_num_seqs=sequences,
        enable_prefix_caching=False, disable_log_stats=True, **options,
    )  # fmt: skip


def model_of(llm: Any) -> Any:
    """Return the model in this process."""
    worker = llm.llm_engine.model_executor.driver_worker
    return worker.get_model() if hasattr(worker, "get_model") else worker.worker.get_model()


def kernel_name(model: Any) -> str:
    """Return the class that multiplies the first NVFP4 linear, "" for a model without one."""
    for module in model.modules():
        for owner in (getattr(module, name, None) for name in ("quant_method", "scheme")):
            kernel = type(getattr(owner, "kernel", None)).__name__
            if "NvFp4" in kernel:
                return kernel
    return ""


def answers(
    llm: Any, rows: Sequence[dict[str, Any]], cut: int, indices: Sequence[int] | None = None
) -> Iterator[tuple[int, list[Any]]]:
    """Yield (index, [token ids, ended, logprobs]) of each prompt when it is answered.

    cut: sequences at a time, at most. indices: of the prompts to answer, in this order; None: all.
    """
    from vllm import SamplingParams

    waiting = list(reversed(range(len(rows)) if indices is None else indices))
    running = 0
    while waiting or running:
        while waiting and running < cut:
            index = waiting.pop()
            row = rows[index]
            sampling = SamplingParams(
                temperature=0, max_tokens=row["max_tokens"], stop_token_ids=row["ends"], logprobs=5
            )
            llm.llm_engine.add_request(str(index), {"prompt_token_ids": row["prompt"]}, sampling)
            running += 1
        for output in llm.llm_engine.step():
            if not output.finished:
                continue
            running -= 1
            first = output.outputs[0]
            best = [
                [[int(token), round(entry.logprob, 5)] for token, entry in position.items()]
                for position in (first.logprobs or [])[:TRACED]
            ]
            yield (
                int(output.request_id),
                [list(first.token_ids), first.finish_reason == "stop", best],
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--cuts", default="16,1")
    parser.add_argument(
        "--again", type=int, help="prompts of the cuts after the first; default: all"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of everything that is not packed")
    parser.add_argument("--kernel", default="auto", choices=("auto", "emulation", "exact"))
    arguments = parser.parse_args()
    begin = time.monotonic()
    import torch
    import vllm

    on_cpu = not torch.cuda.is_available()
    folder = register_text_only(arguments.checkpoint)
    cuts = [int(c) for c in arguments.cuts.split(",")]
    seconds = {"import": round(time.monotonic() - begin, 1)}
    begin = time.monotonic()
    llm = start(folder, arguments.kernel, max(cuts), on_cpu, arguments.dtype)
    seconds["load"] = round(time.monotonic() - begin, 1)
    rows = json.loads(arguments.prompts.read_text())
    log = AnswerLog(arguments.output)
    kernel, device = kernel_name(model_of(llm)), "cpu" if on_cpu else torch.cuda.get_device_name(0)
    log.write(
        vllm=vllm.__version__,
        device=device,
        kernel=kernel,
        threads=torch.get_num_threads(),
        seconds=seconds,
    )
    for cut, indices in missing(
        arguments.output, arguments.cuts, len(rows), arguments.again
    ).items():
        begin = time.monotonic()
        for index, answer in answers(llm, rows, int(cut), indices):
            log.add(cut, index, answer)
        seconds[f"cut {cut}"] = round(time.monotonic() - begin, 1)
        log.write(cut=cut, answered=len(indices), seconds=seconds[f"cut {cut}"])
    print(arguments.output.name, device, kernel, seconds, flush=True)


if __name__ == "__main__":
    main()
