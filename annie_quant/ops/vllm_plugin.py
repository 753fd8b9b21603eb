"""The plug-in for vLLM, which loads it itself (entry point vllm.general_plugins): linears and experts in NVFP4 on CPUs.

On GPUs it replaces Marlin by our kernels, where a switch is set (vllm_cuda). With ANNIE_QUANT_VLLM_REPORT=FILE it writes which
tensors were loaded and which kernel each layer got (vllm_report).

vLLM's table of NVFP4 kernels has no entry for CPUs, and it has no class for a mixture's experts there. This plug-in adds W4A4
(activations rounded to NVFP4 by the C codec, exact weights) and W4A16. Up to linears.FEW_ROWS rows are multiplied with the
packed weights; for more, weights are dequantized part by part, so that a checkpoint stays 4-bit in memory. Experts are computed
one after the other, and their weighted outputs are added in float32.

    vllm serve CHECKPOINT --quantization modelopt
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from annie_quant.ops import vllm_layers
from annie_quant.ops.vllm_layers import VllmObject

if TYPE_CHECKING:
    from torch import Tensor

_GROUP = 16
REPORT_SWITCH = "ANNIE_QUANT_VLLM_REPORT"
_LOGGER = "vllm.annie_quant"


def multiply(
    x: Tensor, codes: Tensor, block_scale: Tensor, tensor_scale: float, input_scale: float
) -> Tensor:
    """Multiply x [..., K] by the transpose of packed weights [N, K]. Returns [..., N] in x's dtype.

    Both sides are exact, sums are float32, and each sum is rounded once, for any number of rows: the arithmetic of CUTLASS's and
    Marlin's kernels. (Rounding dequantized values to bfloat16 first would make an answer depend on the batch that it is in.)

    input_scale: tensor scale that x is rounded with; 0: x is not rounded
    """
    import torch

    from annie_quant.offline import codec, linears

    rows = x.reshape(-1, x.shape[-1]).float().contiguous()
    if input_scale:
        rows = codec.fake_quant_eager(rows, input_scale, _GROUP)
    n = codes.shape[0]
    k = rows.shape[1]
    if rows.shape[0] <= linears.FEW_ROWS:
        y = codec.packed_matmul(rows, codes, block_scale, tensor_scale, _GROUP, divides=False)
    else:
        step = max(1, linears.BLOCK_BYTES // (k * rows.element_size()))
        spans = [slice(i, i + step) for i in range(0, n, step)]
        parts = (
            codec.dequantize(codes[s], block_scale[s], tensor_scale, _GROUP, rows.dtype)
            for s in spans
        )
        y = torch.cat([rows @ part.t() for part in parts], -1)
    return y.reshape(*x.shape[:-1], n).to(x.dtype)


def register() -> None:
    """Add the kernels to vLLM's CPU or CUDA platform. Does nothing on other platforms and when called again."""
    from vllm.platforms import current_platform

    if vllm_layers.switched_on(REPORT_SWITCH):
        report_loads(Path(os.environ[REPORT_SWITCH]))
    if current_platform.is_cuda():
        from annie_quant.ops import vllm_cuda

        vllm_cuda.register()
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    w4a4, w4a16 = kernels()
    table = linear._POSSIBLE_NVFP4_KERNELS
    if w4a4.__name__ not in [kernel.__name__ for kernel in table.get(PlatformEnum.CPU, [])]:
        table[PlatformEnum.CPU] = [w4a4, w4a16, *table.get(PlatformEnum.CPU, [])]
        # For weight-only checkpoints vLLM uses Marlin by name, which exists for GPUs only; --linear-backend takes its names from
        # the map, and a kernel that is not in it is replaced by the first of the table.
        linear.MarlinNvFp4LinearKernel = w4a16
        linear._LINEAR_BACKEND_KERNEL_MAP["marlin"].add(w4a16)
    try:
        install_experts()
    except (
        ImportError,
        AttributeError,
    ) as error:  # a vLLM with other names serves dense models all the same
        line = f"vLLM's experts have other interfaces here, so mixtures in NVFP4 are not served: {error}"
        vllm_layers.log_once(_LOGGER, logging.WARNING, line)


def report_loads(path: Path) -> None:
    """Let vLLM write its loads into a file; a vLLM with other names starts all the same."""
    from annie_quant.ops import vllm_report

    try:
        vllm_report.install(path.resolve())
    except (ImportError, AttributeError) as error:
        line = f"{REPORT_SWITCH} is set, and nothing is reported: this vLLM has other interfaces ({error})"
        vllm_layers.log_once(_LOGGER, logging.WARNING, line)


def kernels() -> tuple[type, type]:
    """Return the two kernel classes (W4A4, W4A16). They derive from vLLM's base class, so this needs vLLM."""
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel

    class AnnieNvFp4LinearKernel(NvFp4LinearKernel):
        """Activations rounded to NVFP4 with the checkpoint's input scale, as CUTLASS does."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            from vllm.platforms import current_platform

            return (
                (True, None)
                if current_platform.is_cpu()
                else (False, "annie_quant's kernel is for CPUs")
            )

        @classmethod
        def can_implement(cls, config: object) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: VllmObject) -> None:
            _linear_operator()  # must be defined before torch.compile traces the model
            layer.annie_scale = float(layer.weight_global_scale)
            layer.annie_input_scale = self.input_scale(layer)

        @staticmethod
        def input_scale(layer: VllmObject) -> float:
            return float(layer.input_global_scale)

        def apply_weights(self, layer: VllmObject, x: Tensor, bias: Tensor | None = None) -> Tensor:
            import torch

            y = torch.ops.annie_quant.vllm_nvfp4_linear(
                x, layer.weight, layer.weight_scale, layer.annie_scale, layer.annie_input_scale
            )
            return y if bias is None else y + bias

    class AnnieNvFp4W4A16LinearKernel(AnnieNvFp4LinearKernel):
        """Unrounded activations, as Marlin does."""

        @staticmethod
        def input_scale(layer: VllmObject) -> float:
            return 0.0

    return AnnieNvFp4LinearKernel, AnnieNvFp4W4A16LinearKernel


def _linear_operator() -> None:
    """Define torch.ops.annie_quant.vllm_nvfp4_linear once, so that torch.compile sees one opaque call."""
    schema = "(Tensor x, Tensor codes, Tensor block_scale, float tensor_scale, float input_scale) -> Tensor"
    fake = lambda x, codes, *_: x.new_empty((*x.shape[:-1], codes.shape[0]))  # noqa: E731
    _define("vllm_nvfp4_linear", multiply, schema, fake)


def _define(
    name: str,
    function: Callable[..., object],
    schema: str,
    fake: Callable[..., object],
    writes: tuple[str, ...] = (),
) -> None:
    """Define torch.ops.annie_quant.NAME unless it is there."""
    import torch

    if not hasattr(torch.ops.annie_quant, name):
        operator = torch.library.custom_op(
            f"annie_quant::{name}", function, mutates_args=writes, schema=schema
        )
        operator.register_fake(fake)


# ---- experts


def install_experts() -> None:
    """Let vLLM take our classes on a CPU. Raises what a vLLM with other names gives."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts

    ours = experts_classes()

    def converter(convert: VllmObject) -> VllmObject:
        def convert_or_keep(
            nvfp4_backend: VllmObject, layer: VllmObject, **tensors: VllmObject
        ) -> VllmObject:
            if getattr(getattr(layer, "quant_method", None), "experts_cls", None) not in ours:
                return convert(nvfp4_backend=nvfp4_backend, layer=layer, **tensors)
            return vllm_layers.Converted(*(tensors[name] for name in vllm_layers.Converted._fields))

        return convert_or_keep

    vllm_layers.stand_for(MarlinExperts, ours, converter)


def experts_classes() -> list[type[VllmObject]]:
    """Return the classes for W4A4 and W4A16, of which vLLM takes the one that fits a checkpoint."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kNvfp4Dynamic,
        kNvfp4Static,
    )
    from vllm.platforms import current_platform

    class AnnieNvFp4Experts(modular_kernel.FusedMoEExpertsModular):
        """Activations rounded to NVFP4 with the checkpoint's input scales."""

        activation_key: VllmObject = kNvfp4Dynamic

        @staticmethod
        def activation_format() -> VllmObject:
            return modular_kernel.FusedMoEActivationFormat.Standard

        @staticmethod
        def _supports_current_device() -> bool:
            return bool(current_platform.is_cpu())

        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return False

        @classmethod
        def _supports_quant_scheme(cls, weight_key: object, activation_key: object) -> bool:
            return bool(weight_key == kNvfp4Static and activation_key == cls.activation_key)

        @staticmethod
        def _supports_activation(activation: VllmObject) -> bool:
            return bool(activation.name == "SILU")

        @staticmethod
        def _supports_parallel_config(config: object) -> bool:
            return True

        @property
        def expects_unquantized_inputs(self) -> bool:
            return True

        def process_weights_after_loading(self, layer: VllmObject) -> None:
            _experts_operator()  # must be defined before torch.compile traces the model
            import torch

            one = torch.zeros(len(layer.w2_weight))
            rounds = self.activation_key is not None
            self.input_scales = [
                scale.data.float().view(len(one), -1).amax(1) if rounds else one
                for scale in (layer.w13_input_scale, layer.w2_input_scale)
            ]

        def workspace_shapes(
            self, M: int, N: int, K: int, *unused: object
        ) -> tuple[Sequence[int], ...]:  # vLLM's names
            return (0,), (0,), (M, K)

        def finalize_weight_and_reduce_impl(self) -> VllmObject:
            return TopKWeightAndReduceNoOP()

        def apply(
            self,
            *,
            output: Tensor,
            hidden_states: Tensor,
            w1: Tensor,
            w2: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            expert_map: Tensor | None,
            **unused: object,
        ) -> None:
            import torch

            chosen = topk_ids if expert_map is None else expert_map[topk_ids.long()]
            torch.ops.annie_quant.vllm_nvfp4_experts(
                output,
                hidden_states,
                topk_weights,
                chosen,
                w1,
                self.w1_scale,
                self.g1_alphas,
                self.input_scales[0],
                w2,
                self.w2_scale,
                self.g2_alphas,
                self.input_scales[1],
            )

    class AnnieNvFp4W4A16Experts(AnnieNvFp4Experts):
        """Unrounded activations, as Marlin does."""

        activation_key = None

    return [AnnieNvFp4Experts, AnnieNvFp4W4A16Experts]


def compute(
    out: Tensor,
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    codes: Tensor,
    block_scale: Tensor,
    tensor_scales: Tensor,
    input_scales: Tensor,
    down_codes: Tensor,
    down_block_scale: Tensor,
    down_tensor_scales: Tensor,
    down_input_scales: Tensor,
) -> None:
    """Write the weighted sums of the experts' outputs into out [tokens, hidden].

    x: [tokens, hidden].  weights and chosen: of a token's experts [tokens, top_k]; -1: an expert of another rank.
    The rest has a row per expert: of gate and up [2 width, hidden], then of down. An input scale of 0: x is not rounded.
    """
    import torch

    total = torch.zeros(x.shape, dtype=torch.float32)
    for e in chosen.unique().tolist():
        if e < 0:
            continue
        rows, place = torch.where(chosen == e)
        both = multiply(
            x[rows], codes[e], block_scale[e], float(tensor_scales[e]), float(input_scales[e])
        )
        gate, up = both.chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        scales = float(down_tensor_scales[e]), float(down_input_scales[e])
        y = multiply(inner, down_codes[e], down_block_scale[e], *scales)
        total.index_add_(0, rows, y.float() * weights[rows, place, None].float())
    out.copy_(total)


def _experts_operator() -> None:
    """Define torch.ops.annie_quant.vllm_nvfp4_experts once, so that torch.compile sees one opaque call."""
    names = "weights chosen codes block_scale tensor_scales input_scales down_codes down_block_scale down_tensor_scales"
    tensors = ", ".join(f"Tensor {name}" for name in f"x {names} down_input_scales".split())
    schema = f"(Tensor(a!) out, {tensors}) -> ()"
    _define("vllm_nvfp4_experts", compute, schema, lambda *arguments: None, ("out",))
