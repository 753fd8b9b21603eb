"""Our W4A16 kernel in vLLM on CUDA GPUs, instead of Marlin. vLLM loads it through vllm_plugin.

    ANNIE_QUANT_VLLM_KERNEL=1 vllm serve CHECKPOINT

Opt-in. Wherever vLLM would run an NVFP4 linear on Marlin (weight-only checkpoints, W4A4 checkpoints on GPUs without FP4 units, and
--linear-backend marlin), the layer is repacked for our kernel instead. The first layer of each shape and dtype is compared with its
dequantized product on this device; a layer that does not agree, or that our kernel cannot take, stays on Marlin, with one
line of log. Biases, merged linears, tensor-parallel shards and LoRA are handled by vLLM around the product. Experts
(vllm_layers) need ANNIE_QUANT_VLLM_EXPERTS=1 in addition.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import annie_quant
from annie_quant.core.errors import EnvironmentFault
from annie_quant.gemm import grouped, torch_op
from annie_quant.ops import vllm_layers
from annie_quant.ops.vllm_layers import LoadedLinear, VllmObject

if TYPE_CHECKING:
    from torch import Tensor

SWITCH = "ANNIE_QUANT_VLLM_KERNEL"
EXPERTS_SWITCH = "ANNIE_QUANT_VLLM_EXPERTS"
NAME = "AnnieQuantNvFp4LinearKernel"
MARLIN = "MarlinNvFp4LinearKernel"
LEAST_CAPABILITY = 90
LOGGER = "vllm.annie_quant"  # below "vllm", whose handlers print it

_on_marlin: dict[str, str] = {}  # the reason of each layer that stays on Marlin


def register() -> None:
    """Let vLLM take our kernel where it takes Marlin. Without the switch, or where it cannot work, vLLM is not changed."""
    if not vllm_layers.switched_on(SWITCH):
        return
    try:
        reason = missing()
        if not reason:
            _replace_marlin()
    except Exception as error:  # a vLLM with other names must start all the same
        reason = f"this vLLM has other interfaces ({type(error).__name__}: {error})"
    if reason:
        line = f"{SWITCH} is set, and NVFP4 linears stay on vLLM's own kernels: {reason}"
        vllm_layers.log_once(LOGGER, logging.WARNING, line)
        return
    if not vllm_layers.switched_on(
        EXPERTS_SWITCH
    ):  # until a trained mixture's answers and TPOT are measured
        return
    try:
        vllm_layers.install(LOGGER)
    except Exception as error:
        line = f"{EXPERTS_SWITCH} is set, and NVFP4 experts stay on vLLM's own kernels: this vLLM has other interfaces"
        vllm_layers.log_once(LOGGER, logging.WARNING, f"{line} ({type(error).__name__}: {error})")


def missing() -> str:
    """Return why the kernel cannot run here, "" if it can. Does not initialise CUDA, so that vLLM can still fork."""
    from vllm.platforms import current_platform

    from annie_quant.gemm.arrays import native

    if not current_platform.has_device_capability(LEAST_CAPABILITY):
        return "it needs compute capability 9.0 or newer"
    try:
        native()
    except EnvironmentFault as fault:
        return str(fault)
    return ""


def _replace_marlin() -> None:
    from vllm.config import VllmConfig
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization import modelopt  # noqa: F401 - it holds the name, too
    from vllm.platforms import PlatformEnum

    marlin = getattr(linear, MARLIN)
    if marlin.__name__ == NAME:
        return
    ours = kernel(marlin)
    # All names are read before the first change, so that a vLLM with others is not half changed.
    table = linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]
    by_backend = linear._LINEAR_BACKEND_KERNEL_MAP["marlin"]
    place = table.index(marlin)
    extend_compile_key(VllmConfig, compile_key)
    table.insert(place, ours)
    by_backend.add(ours)
    vllm_layers.replace_everywhere(
        MARLIN, marlin, ours, but=marlin.__module__
    )  # formats pin Marlin by name


def compile_key() -> str:
    """Return what a graph compiled in this process depends on: the code here, and the layers that stay on Marlin."""
    files = [Path(__file__), *(Path(str(m.__file__)) for m in (vllm_layers, torch_op, grouped))]
    source = hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]
    return f"annie_quant {annie_quant.__version__} {source} {sorted([*_on_marlin, *vllm_layers.on_marlin])}"


def kernel(marlin: type[VllmObject]) -> type[VllmObject]:
    """Return the class that vLLM instantiates, derived from its class for Marlin."""

    class AnnieQuantNvFp4LinearKernel(marlin):
        """NVFP4 weights times bf16 or fp16 activations by annie_quant's kernels; Marlin for layers that they do not take."""

        def process_weights_after_loading(self, layer: LoadedLinear) -> None:
            name = (
                getattr(layer, "prefix", "") or f"{type(layer).__name__} {list(layer.weight.shape)}"
            )
            _on_marlin.pop(name, None)
            layer.annie_scale = None
            reason = vllm_layers.take_linear(layer, LOGGER)
            if reason:
                _on_marlin[name] = reason
                vllm_layers.log_once(
                    LOGGER,
                    logging.WARNING,
                    f"linears stay on Marlin, the first is {name}: {reason}",
                    reason,
                )
                marlin.process_weights_after_loading(self, layer)

        def apply_weights(
            self, layer: LoadedLinear, x: Tensor, bias: Tensor | None = None
        ) -> Tensor:
            if layer.annie_scale is None:
                return marlin.apply_weights(self, layer, x, bias)
            return vllm_layers.product(layer, x, bias)

    AnnieQuantNvFp4LinearKernel.__name__ = AnnieQuantNvFp4LinearKernel.__qualname__ = NAME
    return AnnieQuantNvFp4LinearKernel


KEY_LENGTH = 10  # as vLLM's own hash


def extend_compile_key(config_class: type[VllmObject], part: Callable[[], str]) -> None:
    """Make config_class.compute_hash depend on part(), which is called each time. Does nothing when called again.

    vLLM keeps compiled graphs by a hash of its configuration, which does not know what a plug-in does: a graph with Marlin's calls
    was reused with our kernel, and the other way round. The folders of both its caches (torch.compile's and ahead-of-time
    compilation's) follow from compute_hash.
    """
    original = config_class.compute_hash
    if hasattr(original, "annie_quant_part"):
        return

    def compute_hash(self: object) -> str:
        return hashlib.sha256(f"{original(self)} {part()}".encode()).hexdigest()[:KEY_LENGTH]

    compute_hash.annie_quant_part = part  # type: ignore[attr-defined]
    config_class.compute_hash = compute_hash
