"""Layers of a server on this package's W4A16 kernels: repacked once, after a check on this device. For the plug-ins.

Linears, and a mixture's experts on the grouped kernel (vllm_cuda installs both, instead of Marlin).

vLLM calls a class for the experts of a layer, between its router and its sum over ranks; shared experts are apart. Where it takes
its class for Marlin with NVFP4 weights, it takes one derived from it. The layer's two weights (gate and up; down) are then
repacked for our kernel instead, after a check of the first layer of each shape against its dequantized products; a layer that
does not agree, or that our kernel cannot take, stays on Marlin. In a forward pass: vLLM's alignment of the pairs of a token and
an expert, our product, vLLM's activation, our product, vLLM's weighted sum. All is launched on torch's stream, in vLLM's
workspace. vLLM's opaque operator around a mixture keeps this out of compiled graphs.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VllmObject = Any  # a layer, a class or a setting of vLLM, whose types cannot be imported here

_checked: dict[
    tuple[object, ...], str
] = {}  # by device, shape and dtype: why the kernel is not used, "" if it is
_logged: set[str] = set()


class LoadedLinear(Protocol):
    """A linear layer of vLLM with an NVFP4 weight, under vLLM's names.

    weight: uint8 [N, K/2]; repacked: uint8 [bytes].
    weight_scale: float8_e4m3fn [N, K/16]; gone once it is repacked.
    annie_scale: tensor scale of the repacked weight; None: the weight is as vLLM loaded it.
    """

    weight: torch.nn.Parameter
    weight_scale: torch.nn.Parameter
    weight_global_scale: torch.nn.Parameter
    params_dtype: torch.dtype
    output_size_per_partition: int
    annie_scale: Tensor | None


def switched_on(switch: str) -> bool:
    """Return whether an environment variable is set to anything but 0."""
    return os.environ.get(switch, "") not in ("", "0")


def log_once(logger: str, level: int, line: str, kind: str = "") -> None:
    """Log a line, unless this process has logged one of this kind before (numbers aside), by default the line itself."""
    kind = re.sub(r"\d+", "", kind or line)
    if kind not in _logged:
        _logged.add(kind)
        logging.getLogger(logger).log(level, "annie_quant: %s", line)


def refused(key: tuple[object, ...], dtype: torch.dtype) -> str:
    """Return why a layer like this one is left as it is without another check, "" if nothing is known against it."""
    from annie_quant.gemm import oracle

    if str(dtype) not in oracle.MANTISSA:
        return f"activations are {dtype}; the kernel has bfloat16 and float16"
    return _checked.get(key, "")


def checked(
    key: tuple[object, ...],
    worst: Callable[[], float],
    what: str,
    device: torch.device,
    logger: str,
) -> str:
    """Return why a kernel is not used for layers of this key: "" if its product is right. Checks the first layer of a key.

    worst: compute the largest error in units of its bound.  what: the layers, for the log
    """
    import torch

    if key not in _checked:
        error = worst()
        agrees = error <= 1
        _checked[key] = (
            ""
            if agrees
            else f"its product is wrong on this device, {error:.3g} times the error bound"
        )
        if agrees:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
            line = f"{what} run on this package's W4A16 kernel, which was checked on {name}"
            log_once(logger, logging.INFO, line)
    return _checked[key]


def in_one_line(error: Exception) -> str:
    """Return the class of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def take_linear(layer: LoadedLinear, logger: str) -> str:
    """Repack a layer's weight for our kernel. Returns why it stays as it is, "" if it was repacked.

    logger: whose handlers the server prints
    """
    import torch

    from annie_quant.gemm import oracle, torch_op

    codes = layer.weight.data
    block_scale = layer.weight_scale.data
    dtype = layer.params_dtype
    key = (str(codes.device), tuple(codes.shape), str(dtype))
    reason = refused(key, dtype)
    if reason:
        return reason
    try:
        torch_op.register()
        scale = float(layer.weight_global_scale)
        weight = torch_op.prepare(codes, block_scale, scale)
        worst = partial(oracle.worst_error, weight, codes, block_scale, scale, dtype)
        reason = checked(key, worst, "NVFP4 linears", codes.device, logger)
    except Exception as error:
        return in_one_line(error)
    if not reason:
        layer.weight = torch.nn.Parameter(weight.packed, requires_grad=False)
        layer.annie_scale = weight.tensor_scale
        del layer.weight_scale
    return reason


def product(layer: LoadedLinear, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product of x with a layer that `take` repacked, plus the bias. Its output_size_per_partition is N."""
    import torch

    y = torch.ops.annie_quant.nvfp4_linear(
        x, layer.weight, layer.annie_scale, layer.output_size_per_partition
    )
    return y if bias is None else y + bias


# ---- experts

EXPERTS_NAME = "AnnieQuantNvFp4Experts"
CONVERT = "convert_to_nvfp4_moe_kernel_format"

on_marlin: dict[str, str] = {}  # the reason of each layer whose experts stay on Marlin


class Converted(NamedTuple):
    """What vLLM's conversion returns: of both weights the data, the block scales, the tensor scales, the input scales."""

    w13: Tensor
    w13_scale: Tensor
    w13_scale_2: Tensor
    a13_scale: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_scale_2: Tensor
    a2_scale: Tensor | None


def install(logger: str) -> None:
    """Let vLLM take our class where it takes Marlin's for NVFP4 experts. Raises what a vLLM with other names gives."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4

    ours = experts_class(MarlinExperts)
    stand_for(MarlinExperts, [ours], lambda convert: converter(convert, ours, logger))
    if hasattr(
        nvfp4, "prioritize_humming"
    ):  # from 0.32 on, Humming is before Marlin, and so before ours, on Hopper
        nvfp4.prioritize_humming = list


def stand_for(
    marlin: type[VllmObject],
    ours: list[type[VllmObject]],
    converter: Callable[[VllmObject], VllmObject],
) -> None:
    """Replace Marlin's classes and its conversion of loaded weights by ours, made from vLLM's. Later calls do nothing."""
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4

    classes = nvfp4.backend_to_kernel_cls
    convert = getattr(nvfp4, CONVERT)
    if hasattr(classes, "annie_quant"):
        return

    def with_ours(backend: VllmObject) -> list[VllmObject]:
        of_backend = classes(backend)
        return ours if of_backend == [marlin] else of_backend

    with_ours.annie_quant = True  # type: ignore[attr-defined]
    nvfp4.backend_to_kernel_cls = with_ours
    replace_everywhere(CONVERT, convert, converter(convert))


def replace_everywhere(name: str, old: object, new: object, *, but: str = "") -> None:
    """Replace a name in those of vLLM's modules that imported it, and in the one that defines it unless it is `but`."""
    for module_name, module in list(sys.modules.items()):
        if (
            module_name.startswith("vllm.model_executor.")
            and vars(module).get(name) is old
            and module_name != but
        ):
            setattr(module, name, new)


def converter(
    convert: Callable[..., VllmObject], ours: type[VllmObject], logger: str
) -> Callable[..., VllmObject]:
    """Return vLLM's conversion of a layer's loaded weights, which repacks for our class where that was chosen."""

    def convert_or_take(
        nvfp4_backend: VllmObject, layer: VllmObject, **tensors: VllmObject
    ) -> VllmObject:
        layer.annie_width = None
        if getattr(getattr(layer, "quant_method", None), "experts_cls", None) is ours:
            name = getattr(layer, "layer_name", "") or f"experts {list(tensors['w13'].shape)}"
            on_marlin.pop(name, None)
            taken = take_experts(layer, tensors, logger)
            if isinstance(taken, Converted):
                return taken
            on_marlin[name] = taken
            line = f"experts stay on Marlin, the first are {name}: {taken}"
            log_once(logger, logging.WARNING, line, f"experts: {taken}")
        return convert(nvfp4_backend=nvfp4_backend, layer=layer, **tensors)

    return convert_or_take


def unsupported(layer: VllmObject, is_act_and_mul: bool) -> str:
    """Return why our class cannot compute a layer, "" if it can."""
    config = layer.moe_config
    if (
        not is_act_and_mul
        or layer.activation.name != "SILU"
        or getattr(layer, "swiglu_limit", None) is not None
    ):
        return "its activation is not SiLU times up"
    if layer.apply_router_weight_on_input:
        return "the router's weights are applied to the input"
    if getattr(config, "is_lora_enabled", False):
        return "LoRA is enabled"
    return "experts are moved between GPUs (EPLB)" if config.moe_parallel_config.enable_eplb else ""


def take_experts(
    layer: VllmObject, tensors: Mapping[str, VllmObject], logger: str
) -> Converted | str:
    """Repack both weights of a layer for our kernel. Returns them, or why they stay as they are.

    tensors: as loaded, with the names of Converted: w13 uint8 [experts, 2 width, K/2], w2 uint8 [experts, K, width/2], block scales
    float8_e4m3fn, tensor scales float32 [experts]
    """
    from annie_quant.gemm import grouped, oracle

    w13 = tensors["w13"].data
    w2 = tensors["w2"].data
    dtype = layer.params_dtype
    key = ("experts", str(w13.device), tuple(w13.shape), tuple(w2.shape), str(dtype))
    reason = unsupported(layer, tensors["is_act_and_mul"]) or refused(key, dtype)
    if reason:
        return reason
    try:
        grouped.register()
        # codes, block scales, tensor scales, and the pairs that read a row
        loaded = [
            (w, tensors[f"{n}_scale"].data, tensors[f"{n}_scale_2"].data)
            for n, w in (("w13", w13), ("w2", w2))
        ]
        first, second = (grouped.prepare_experts(*parts) for parts in loaded)
        several = min(len(w13), int(layer.top_k))
        check = partial(
            oracle.worst_experts_error, dtype=dtype, align=partial(align, experts=len(w13))
        )
        errors = lambda: max(  # noqa: E731
            check(first, *loaded[0], top_k=several), check(second, *loaded[1], top_k=1)
        )
        reason = checked(key, errors, "NVFP4 experts", w13.device, logger)
        if reason:
            return reason
    except Exception as error:
        return in_one_line(error)
    layer.annie_width = w2.shape[2] * 2
    nothing = loaded[0][1].new_empty(len(w13), 0)  # block scales are part of the repacked weights
    return Converted(
        first.packed,
        nothing,
        first.scales,
        None,
        second.packed,
        nothing.clone(),
        second.scales,
        None,
    )


def align(
    chosen: Tensor, tile_tokens: int, *, experts: int, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert with vLLM's kernel. chosen: int [tokens, top_k]; experts: of all ranks; expert_map: which are here."""
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    sorted_pairs, tile_experts, padded = moe_align_block_size(
        chosen, tile_tokens, experts, expert_map, pad_sorted_ids=True, ignore_invalid_experts=True
    )
    return sorted_pairs, tile_experts, padded


def experts_class(marlin: type[VllmObject]) -> type[VllmObject]:
    """Return the class that vLLM instantiates per layer, derived from its class for Marlin."""

    class AnnieQuantNvFp4Experts(marlin):
        """NVFP4 experts times bf16 or fp16 activations by annie_quant's kernel; Marlin for layers that it does not take."""

        annie_width: int | None = None  # the experts' intermediate size; None: on Marlin

        def process_weights_after_loading(self, layer: VllmObject) -> None:
            super().process_weights_after_loading(layer)
            self.annie_width = layer.annie_width

        def moe_problem_size(
            self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor
        ) -> tuple[int, int, int, int, int]:
            if self.annie_width is None:
                return super().moe_problem_size(a1, w1, w2, topk_ids)
            return w1.shape[0], a1.shape[0], self.annie_width, a1.shape[1], topk_ids.shape[1]

        def apply(self, **arguments: VllmObject) -> None:
            if self.annie_width is None:
                return super().apply(**arguments)
            if getattr(self, "post_gemm2_hook", None) is not None:  # vLLM 0.33
                raise NotImplementedError(
                    "this model adds its experts' outputs itself, which annie_quant's kernel for experts does not do: "
                    "start vLLM without ANNIE_QUANT_VLLM_EXPERTS"
                )
            return compute_experts(self, self.annie_width, **arguments)

    AnnieQuantNvFp4Experts.__name__ = AnnieQuantNvFp4Experts.__qualname__ = EXPERTS_NAME
    return AnnieQuantNvFp4Experts


def compute_experts(
    experts: VllmObject,
    width: int,
    *,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: VllmObject,
    global_num_experts: int,
    expert_map: Tensor | None,
    workspace13: Tensor,
    workspace2: Tensor,
    **unused: object,
) -> None:
    """Write the weighted sums of the experts' outputs into `output` [tokens, hidden]; the other names are vLLM's.

    experts: an instance of our class, whose g1_alphas and g2_alphas are the tensor scales.  width: the intermediate size
    """
    import torch
    from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

    from annie_quant.gemm import grouped

    tokens, hidden = hidden_states.shape
    top_k = topk_ids.shape[1]
    pairs = tokens * top_k
    tile = grouped.plan_tokens(
        pairs, w1.shape[0], top_k, 2 * width, hidden, hidden_states.device.index
    )
    aligned = align(topk_ids, tile, experts=global_num_experts, expert_map=expert_map)
    # The workspaces that vLLM's class for Marlin requests. The output may share workspace13, which the last step does not read.
    gate_up, of_experts = (
        workspace2.flatten()[: pairs * n].view(pairs, n) for n in (2 * width, hidden)
    )
    inner = workspace13.flatten()[: pairs * width].view(pairs, width)
    multiply = torch.ops.annie_quant.nvfp4_experts_out
    multiply(gate_up, hidden_states, w1, experts.g1_alphas, *aligned, top_k, tile)
    experts.activation(activation, inner, gate_up)
    multiply(of_experts, inner, w2, experts.g2_alphas, *aligned, 1, tile)
    moe_fused_mul_sum(
        of_experts.view(tokens, top_k, hidden), topk_weights, output, topk_ids, expert_map
    )
