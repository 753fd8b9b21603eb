"""A plug-in for vLLM on a CPU that plants a fault which a server cannot be asked for. ANNIE_QUANT_FAULT names it.

dropped      the loader leaves layer 3's o_proj of an NVFP4 checkpoint at zero
scales       the loader swaps the tensor scale and the input scale of layer 3's o_proj
activations  the W4A4 kernel rounds its inputs with scales 64 times too small, so that they saturate
kv           an FP8 cache divides values by 4096
prefix       with the prefix cache, the first tokens of all requests but the first are another conversation's
kv_prefix    the same, and only with an FP8 cache
batch        with several sequences in a step, each gets the next one's logits

Each is active only in a server that has the value to blame: an NVFP4 checkpoint, W4A4, an FP8 cache, a prefix cache, a batch.
vLLM finds it by the entry point that `install` writes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SWITCH = "ANNIE_QUANT_FAULT"
O_PROJ = "model.layers.3.self_attn.o_proj."
FIRST_TOKENS = 384  # one block of the prefix cache with FP8 keys and values


def install(folder: Path) -> dict[str, str]:
    """Write the distribution that has the entry point into a folder, and return the environment of a server that loads it."""
    metadata = folder / "annie_quant_faults-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: annie_quant_faults\nVersion: 1\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nannie_quant_faults = vllm_faults:register\n"
    )
    path = [str(folder), str(Path(__file__).parent), str(Path(__file__).parents[2])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


def register() -> None:
    """Plant the fault, and let vLLM fork its processes instead of importing everything again: a start takes half the time."""
    import multiprocessing

    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for module in (utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    if fault := os.environ.get(SWITCH):
        FAULTS[fault]()


def change_loaded(change: Callable[[dict[str, Any]], None]) -> None:
    """Change the tensors of an NVFP4 checkpoint while they are loaded."""
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

    load = Qwen3_5ForCausalLM.load_weights

    def load_changed(self: Any, weights: Iterable[tuple[str, Any]]) -> set[str]:
        tensors = dict(weights)
        if O_PROJ + "weight_scale_2" in tensors:
            change(tensors)
        return load(self, iter(tensors.items()))

    Qwen3_5ForCausalLM.load_weights = load_changed


def dropped() -> None:
    def drop(tensors: dict[str, Any]) -> None:
        tensors[O_PROJ + "weight"] = tensors[O_PROJ + "weight"] * 0

    change_loaded(drop)


def scales() -> None:
    def swap(tensors: dict[str, Any]) -> None:
        names = [O_PROJ + "weight_scale_2", O_PROJ + "input_scale"]
        first, second = (tensors[name].clone() for name in names)
        tensors.update(zip(names, (second, first), strict=True))

    change_loaded(swap)


def activations() -> None:
    from annie_quant.ops import vllm_plugin

    multiply = vllm_plugin.multiply

    def saturated(
        x: Any, codes: Any, block_scale: Any, tensor_scale: float, input_scale: float
    ) -> Any:
        return multiply(x, codes, block_scale, tensor_scale, input_scale / 64)

    vllm_plugin.multiply = saturated


def kv() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    forward = CPUAttentionBackendImpl.forward

    def scaled(self: Any, layer: Any, *arguments: Any, **named: Any) -> Any:
        if self.kv_cache_dtype.startswith("fp8"):
            layer._v_scale_float = 4096.0
        return forward(self, layer, *arguments, **named)

    CPUAttentionBackendImpl.forward = scaled


def prefix() -> None:
    from vllm.v1.request import Request

    create = Request.from_engine_core_request.__func__
    first: list[int] = []

    def with_another_prefix(cls: type, request: Any, block_hasher: Any) -> Any:
        if block_hasher is not None:
            tokens = request.prompt_token_ids
            count = min(FIRST_TOKENS, len(tokens) - 16)
            if first:
                wrong = first * (FIRST_TOKENS // len(first) + 1)
                request.prompt_token_ids = [*wrong[:count], *tokens[count:]]
            else:
                first.extend(tokens)
        return create(cls, request, block_hasher)

    Request.from_engine_core_request = classmethod(with_another_prefix)


def kv_prefix() -> None:
    if "fp8" in sys.argv:
        prefix()


def batch() -> None:
    from vllm.v1.sample.sampler import Sampler

    forward = Sampler.forward

    def mixed(self: Any, logits: Any, *arguments: Any, **named: Any) -> Any:
        return forward(self, logits.roll(1, 0), *arguments, **named)

    Sampler.forward = mixed


FAULTS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (dropped, scales, activations, kv, prefix, kv_prefix, batch)
}
