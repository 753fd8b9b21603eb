"""Computing a model as a server does: roundings where the server rounds, on a model that is loaded in float32.

The model stays in float32, and values are rounded where a server stores them in a shorter type (profiles.Profile):
  residual stream       in place after each norm: a fused kernel normalizes the unrounded sum and stores the rounded one
  norms, linears, head  their outputs; a linear's input too, which rounds products of gates. An NVFP4 product is rounded before its
                        bias is added, and a normalized value before it is multiplied by a bf16 weight; not by 1 + weight
  activations, gates    their outputs, before they are multiplied
  convolution, DeltaNet their outputs, and what the chunk kernels store between their products (deltanet.py), for the
                        tokens of a prompt; decoded tokens have operands in float32. The recurrent state stays in float32, as
                        servers keep it; beta as the profile names it
  attention             cosines and sines, queries, keys and values, and the output; softmax is computed in float32
So products have exact operands and one rounding, as a GPU kernel's have, and the result is the same on a CPU and a GPU apart from
the order of sums. Servers differ in that order, and in roundings inside fused kernels; the ensemble (ensemble.py) measures what
such differences do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from annie_quant.models import family_or_default
from annie_quant.offline.codec import Round, rounding
from annie_quant.offline.linears import (
    NVFP4Linear,
    nvfp4_linears,
    set_numerics,
    sum_of_parts,
)
from annie_quant.offline.profiles import FLOAT32, Profile
from annie_quant.offline.prompt_positions import PromptPositions


class Removable(Protocol):
    """A hook's handle, or what is undone as one."""

    def remove(self) -> None: ...


SIGMOIDS = (torch.sigmoid, torch.Tensor.sigmoid)


@dataclass(frozen=True)
class SumOrder:
    """The order in which linears sum: the same numbers are multiplied, activations were rounded before.

    permutation: seed of a permutation of the K values of every linear; None: as they are. parts: K is cut into so many parts whose
    sums are added, as kernels for few rows do (split-K), which a server chooses by the size of the batch.
    """

    permutation: int | None = None
    parts: int = 1


USUAL = SumOrder()
PERMUTED = SumOrder(permutation=1)


@contextlib.contextmanager
def emulate(model: nn.Module, profile: Profile, order: SumOrder = USUAL) -> Iterator[None]:
    """Let `model` compute with a profile's arithmetic; the model is unchanged afterwards, its numerics apart."""
    linears = nvfp4_linears(model)
    if linears:
        set_numerics(model, profile.name)
    prompts = PromptPositions()
    for linear in linears.values():
        linear.prompts = prompts
    config: Any = getattr(model, "config", None)
    adds_one = family_or_default(
        config.get_text_config().to_dict() if config is not None else {}
    ).adds_one
    hooks = [
        h
        for name, m in model.named_modules()
        for h in module_hooks(m, profile, adds_one(f"{name}.weight"))
    ]
    with reordered_linears(model, order):
        before = getattr(model, "annie_quant_profile", None)
        prefixes = getattr(model, "annie_quant_prefixes", None)
        model.annie_quant_profile = profile  # type: ignore[assignment]
        model.annie_quant_prompts = prompts  # type: ignore[assignment]
        model.annie_quant_prefixes = {}  # type: ignore[assignment]  # Engine.prefix: caches in this arithmetic
        try:
            yield
        finally:
            model.annie_quant_profile = before  # type: ignore[assignment]
            model.annie_quant_prefixes = prefixes  # type: ignore[assignment]
            for hook in hooks:
                hook.remove()


def module_hooks(module: nn.Module, profile: Profile, adds_one: bool = True) -> Iterator[Removable]:
    """Register the hooks that round a module's inputs and outputs, and yield their handles. adds_one: of a norm's weight."""
    stream = rounding(profile.stream)
    in_place = rounding(profile.stream, in_place=True)
    kind = type(module).__name__
    if isinstance(module, nn.Linear):
        if profile.rounds:
            dtype = profile.stream if isinstance(module, NVFP4Linear) else profile.plain_input
            yield module.register_forward_pre_hook(partial(round_input, dtype))
        if profile.stream != "float32":
            if isinstance(module, NVFP4Linear) and module.bias is not None:
                yield BiasOfRounded(module, stream)
            yield module.register_forward_hook(lambda _, args, output: in_place(output))
    elif profile.stream == "float32":
        return
    elif kind.endswith(("RMSNorm", "RMSNormGated", "LayerNorm")):
        normalizes = kind.endswith("RMSNorm") and not adds_one
        yield module.register_forward_hook(
            lambda m, args, output: round_norm(
                args[0],
                stream(normalized(args[0], m.variance_epsilon)) * m.weight
                if normalizes
                else output,
                profile.stream,
            )
        )
    elif kind.endswith("RotaryEmbedding"):
        yield module.register_forward_hook(lambda _, args, output: tuple(stream(t) for t in output))
    elif isinstance(module, nn.SiLU) or kind.endswith("Activation"):
        yield module.register_forward_hook(lambda _, args, output: in_place(output))
    elif kind.endswith("Attention"):
        yield RoundedSigmoid(module, lambda gate: stream(gate.sigmoid()))
    elif kind.endswith("GatedDeltaNet") and profile.beta != FLOAT32:
        yield RoundedSigmoid(module, sigmoid_in_bfloat16)


def sigmoid_in_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid rounded to bfloat16 once, in x's dtype."""
    return x.sigmoid().bfloat16().to(x.dtype)


class RoundedSigmoid(TorchFunctionMode):
    """Replaces the sigmoid in one module's forward: gates of attention and DeltaNet's beta are computed by functions."""

    def __init__(self, module: nn.Module, sigmoid: Round) -> None:
        super().__init__()
        self.module = module
        self.sigmoid = sigmoid
        forward = module.forward

        def gated(*args: object, **options: object) -> object:
            with self:
                return forward(*args, **options)

        module.forward = gated

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.sigmoid(args[0]) if func in SIGMOIDS else func(*args, **(kwargs or {}))

    def remove(self) -> None:
        """Undo it, as a hook's handle does."""
        del self.module.forward


class BiasOfRounded:
    """Adds a linear's bias to the rounded product, as vLLM's NVFP4 kernels do (model_executor/kernels/linear/nvfp4)."""

    def __init__(self, module: Any, stream: Round) -> None:
        self.module = module
        self.bias = module.bias
        module.bias = None
        self.hook = module.register_forward_hook(lambda _, args, output: stream(output) + self.bias)

    def remove(self) -> None:
        """Undo it, as a hook's handle does."""
        self.module.bias = self.bias
        self.hook.remove()


def normalized(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return what an RMS norm multiplies by its weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def round_norm(x: torch.Tensor, output: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a norm's rounded output, and round its input in place: it is also the residual that later layers add to.

    Several linears read the output, and none of them has to round it again.
    """
    in_place = rounding(dtype, in_place=True)
    in_place(x)
    output = in_place(output)
    output.annie_quant_rounded = dtype  # type: ignore[attr-defined]
    return output


def round_input(dtype: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Round a linear's input, unless a norm has rounded it; a pre-hook."""
    x = args[0]
    if getattr(x, "annie_quant_rounded", "") == dtype:
        return args
    return (rounding(dtype)(x), *args[1:])


@contextlib.contextmanager
def reordered_linears(model: nn.Module, order: SumOrder) -> Iterator[None]:
    """Let every linear of the model sum its products in another order."""
    if order == USUAL:
        yield
        return
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linears = [m for m in model.modules() if isinstance(m, NVFP4Linear) or type(m) is nn.Linear]
    generator = torch.Generator().manual_seed(order.permutation or 0)
    try:
        for linear in linears:
            permutation = None
            if order.permutation is not None:
                permutation = torch.randperm(linear.in_features, generator=generator).to(
                    next(linear.parameters()).device
                )
            if isinstance(linear, NVFP4Linear):
                linear.reorder(permutation, order.parts)
            # A second copy of a tied head may not fit.
            elif permutation is None or id(linear.weight) not in embeddings:
                weight = linear.weight if permutation is None else linear.weight[:, permutation]
                product = partial(plain_product, weight, linear.bias, permutation, order.parts)
                linear.forward = product  # type: ignore[method-assign]
        yield
    finally:
        for linear in linears:
            if isinstance(linear, NVFP4Linear):
                linear.reorder(None, 1)
            else:
                linear.__dict__.pop("forward", None)


def plain_product(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    permutation: torch.Tensor | None,
    parts: int,
    x: torch.Tensor,
) -> torch.Tensor:
    """Return x W^T + b of a plain linear, summed in another order. weight: permuted already."""
    y = sum_of_parts(x if permutation is None else x[..., permutation], weight, parts)
    return y if bias is None else y + bias
