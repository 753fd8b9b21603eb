"""Linear layers on a checkpoint's own tensors: NVFP4Linear, with the arithmetic of each family of kernels, and FP8Linear.

NVFP4Linear: y = x W^T + b, with W = value * f32(block scale * tensor scale) and x in the activation format of a numerics profile
(profiles.py):
  w4a4   x is first rounded to NVFP4 and back with the checkpoint's input_scale and one E4M3 scale per block of values,
         computed from x: what CUTLASS's and vLLM's NVFP4 kernels do to activations.
  w4a16  x is used unchanged: what Marlin does.
  llama.cpp-cpu, llama.cpp-blackwell   x is rounded to llama.cpp's 8-bit or 4-bit blocks (codec.py).
Where weights are dequantized first (many rows of x), W is rounded once to x's dtype: in bfloat16 this is ModelOpt's own
dequantize, in float32 it is exact. Kernels on packed weights (few rows on a CPU, any number on a GPU with _gemm) multiply by
exact weights in float32 and round the sum once. Tensor names are the checkpoint's own, so state dicts load and save unchanged.

FP8Linear: W = value * weight_scale. If the checkpoint has an input_scale, x is rounded to E4M3 and back with it; if its settings
ask for scales per token (compressed-tensors' FP8_DYNAMIC), with each token's own. Both apply under all numerics of the NVFP4
linears: kernels for FP8 linears multiply FP8 by FP8 on every GPU that supports it. Weights stay 8 bits in memory and are
dequantized in each forward.

BlockFP8Linear has a scale per block of the weight, as Qwen and DeepSeek publish it, and rounds each token's activations with a
scale per block of columns (transformers, integrations/finegrained_fp8.py; vLLM, per_token_group_quant_fp8).

SingleExperts has a mixture's routed experts as one linear per matrix, under the names of checkpoints that store every expert on its
own. transformers keeps all experts of a layer in two three-dimensional parameters. As linears they can be quantized, be rounded
alone, and be observed in calibration. Tokens are grouped by expert: each expert's weights are read once per forward, for the tokens
that the router sends to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from annie_quant.core.errors import UsageError
from annie_quant.gemm import torch_op
from annie_quant.models import Experts, Family
from annie_quant.offline import codec, profiles
from annie_quant.offline.codec import MAX_E4M3, fake_quant_fp8
from annie_quant.offline.prompt_positions import PromptPositions

BLOCK_BYTES = 8 << 20  # dequantized weights in memory at one time, on a CPU
BLOCK_BYTES_GPU = 1 << 28
FEW_ROWS = 4  # of x: up to here a product on packed weights is faster than dequantizing them (tests/perf/runtime.md)
CACHES = ("packed", "bf16", "float32")
CACHE_DTYPE = {"bf16": torch.bfloat16, "float32": torch.float32}
SMALLEST_TOKEN_SCALE = 1 / (MAX_E4M3 * 512)
SMALLEST_AMAX = 1e-10  # of a token's activations in a block of columns: vLLM's lower bound


class FixedDtypeLinear(nn.Linear):
    """A linear layer with parameters whose dtype is part of a storage format.

    .to() and .half() move the parameters named in FIXED_DTYPE (some may be None) to another device and cast only the
    others, such as the bias.
    """

    FIXED_DTYPE: ClassVar[tuple[str, ...]] = ()

    def __init__(self, in_features: int, out_features: int) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would create a float weight
        self.in_features = in_features
        self.out_features = out_features

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        """Register an uninitialized parameter without gradient; None for shape None."""
        empty = None if shape is None else torch.empty(shape, dtype=dtype, device=device)
        self.register_parameter(
            name, None if empty is None else nn.Parameter(empty, requires_grad=False)
        )

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> FixedDtypeLinear:
        before = {
            name: p.data for name in self.FIXED_DTYPE if (p := getattr(self, name)) is not None
        }
        super()._apply(fn, recurse)
        for name, data in before.items():
            parameter = getattr(self, name)
            if parameter.dtype != data.dtype:
                setattr(self, name, nn.Parameter(data.to(parameter.device), requires_grad=False))
        return self


class Names(NamedTuple):
    """A dialect's names for the tensors of a linear."""

    codes: str
    block_scale: str
    tensor_scale: str
    input_scale: str


class Scalars(NamedTuple):
    """A linear's scales as Python floats. divisor: the stored tensor scale, where the dialect stores its reciprocal."""

    tensor_scale: float
    divisor: float | None
    input_scale: float | None


class NVFP4Linear(FixedDtypeLinear):
    """A linear with ModelOpt's tensor names.

    Parameters: weight uint8 [N, K/2]; weight_scale float8_e4m3fn [N, K/group]; weight_scale_2 float32 []; input_scale float32
    [] or None; pre_quant_scale [K] or None (NVFP4_AWQ: x is multiplied by it first).
    """

    NAMES: ClassVar[Names] = Names("weight", "weight_scale", "weight_scale_2", "input_scale")
    FIXED_DTYPE = NAMES
    SCALAR_SHAPE: ClassVar[tuple[int, ...]] = ()
    RECIPROCAL: ClassVar[bool] = False  # whether the scalar scales are stored as divisors

    pre_quant_scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: int = 16,
        bias: bool = False,
        activations: bool = True,
        pre_quant: bool = False,
        dtype: torch.dtype | None = None,
        device=None,
    ) -> None:
        super().__init__(in_features, out_features)
        if in_features % group:
            raise UsageError(
                f"NVFP4 needs rows of a multiple of {group} values, this linear has {in_features}"
            )
        self.group = group
        dtype = dtype or torch.bfloat16
        names = self.NAMES
        scalar = self.SCALAR_SHAPE
        self.register_parameter("weight", None)
        self.add_parameter(
            names.input_scale, scalar if activations else None, torch.float32, device
        )
        self.add_parameter("pre_quant_scale", (in_features,) if pre_quant else None, dtype, device)
        self.add_parameter("bias", (out_features,) if bias else None, dtype, device)
        self.add_parameter(names.codes, (out_features, in_features // 2), torch.uint8, device)
        self.add_parameter(
            names.block_scale, (out_features, in_features // group), torch.float8_e4m3fn, device
        )
        self.add_parameter(names.tensor_scale, scalar, torch.float32, device)
        self.numerics = "w4a4" if activations else "w4a16"
        self.prompts = PromptPositions()  # one for the whole model, of emulation.emulate
        self.cache = "packed"
        self.dense: torch.Tensor | None = (
            None  # the dequantized weights, unless the cache is "packed"
        )
        self.permutation: torch.Tensor | None = (
            None  # of K, for another order of the sums (emulation.SumOrder)
        )
        self.parts = 1  # of K, whose sums are added
        self.prepared: torch_op.Prepared | None = None  # the weights as our CUDA kernels read them
        self._scalars: Scalars | None = None

    @property
    def codes(self) -> torch.Tensor:
        return getattr(self, self.NAMES.codes)

    @property
    def block_scale(self) -> torch.Tensor:
        return getattr(self, self.NAMES.block_scale)

    @property
    def has_input_scale(self) -> bool:
        """Whether the checkpoint defines how activations are rounded."""
        return getattr(self, self.NAMES.input_scale) is not None

    def _apply(self, fn, recurse: bool = True):
        """Also drop what was derived from the tensors, and move the dequantized weights."""
        super()._apply(fn, recurse)
        self._scalars = self.prepared = None
        if self.dense is not None:
            self.dense = self.dense.to(self.codes.device)
        return self

    def scalars(self) -> Scalars:
        """Return the scales, read from the device once."""
        if self._scalars is None:
            stored = getattr(self, self.NAMES.tensor_scale).item()
            input_scale = (
                getattr(self, self.NAMES.input_scale).item() if self.has_input_scale else None
            )
            if self.RECIPROCAL:
                input_scale = None if input_scale is None else reciprocal(input_scale)
                self._scalars = Scalars(reciprocal(stored), stored, input_scale)
            else:
                self._scalars = Scalars(stored, None, input_scale)
        return self._scalars

    def prepare(self) -> None:
        """Read the scales and, on a GPU with kernels, repack the weights for them.

        The first forward does this too; torch.compile needs it before.
        """
        self.scalars()
        if self.prepared is None and self.dense is None and can_use_kernels(self):
            torch_op.register()
            self.prepared = torch_op.prepare(
                self.codes, self.block_scale, self.scalars().tensor_scale
            )

    def set_numerics(self, numerics: str) -> None:
        """Set a numerics profile's activation format. Raises UsageError where the checkpoint or the shape does not define it."""
        profile = profiles.find_profile(numerics)
        if profile.needs_input_scale and not self.has_input_scale:
            raise UsageError(
                f"{numerics} needs an input_scale, and this checkpoint quantizes weights only",
                "use w4a16 or vllm-marlin",
            )
        if (
            profiles.Q8_0 in (profile.activations, profile.answers)
            and self.in_features % codec.QK8_0
        ):
            raise UsageError(
                f"{numerics} needs rows of a multiple of 32 values, this linear has {self.in_features}"
            )
        self.numerics = numerics

    def set_cache(self, cache: str) -> None:
        """Set "packed" (4 bits per weight in memory) or "bf16" or "float32" (also store the dequantized weights)."""
        if cache not in CACHES:
            raise UsageError(f"unknown cache {cache!r}", f"choose one of: {', '.join(CACHES)}")
        self.cache = cache
        self.dense = (
            None if cache == "packed" else self.rows(0, self.out_features, CACHE_DTYPE[cache])
        )

    def reorder(self, permutation: torch.Tensor | None, parts: int) -> None:
        """Sum in another order from now on (emulation.SumOrder). Dequantized weights are stored in that order, in place."""
        undo = None if self.permutation is None else self.permutation.argsort()
        for order in (undo, permutation):
            self.dense = self.dense if self.dense is None or order is None else self.dense[:, order]
        self.permutation = permutation
        self.parts = parts

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of output rows start to stop, [stop - start, K] in `dtype`."""
        tensor_scale, divisor, _ = self.scalars()
        codes = self.codes[start:stop]
        scales = self.block_scale[start:stop]
        return codec.dequantize(codes, scales, tensor_scale, self.group, dtype, divisor)

    def rounded_input(self, x: torch.Tensor) -> torch.Tensor:
        """Return x in the activation format of the layer's numerics, in x's dtype."""
        profile = profiles.find_profile(self.numerics)
        if not profile.answers:
            return self.rounded(x, profile.activations)
        prompts = self.prompts.of(x)
        if isinstance(prompts, torch.Tensor):
            of_prompt = self.rounded(x, profile.activations)
            return torch.where(prompts.unsqueeze(-1), of_prompt, self.rounded(x, profile.answers))
        return self.rounded(x, profile.activations if prompts else profile.answers)

    def rounded(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """Return x in a format of activations."""
        if kind == profiles.NVFP4:
            input_scale = self.scalars().input_scale
            assert input_scale is not None  # set_numerics checks it
            rounded = codec.fake_quant(x, input_scale, self.group)
            return rounded if self.operands is None else rounded.to(self.operands).to(x.dtype)
        if kind == profiles.Q8_0:
            return codec.q8_0(x)
        return codec.nvfp4_searched(x) if kind == profiles.NVFP4_SEARCHED else x

    @property
    def operands(self) -> torch.dtype | None:
        """The dtype to which the profile rounds the dequantized values of both sides of a product; None: exact values."""
        name = profiles.find_profile(self.numerics).operands
        return None if name == profiles.EXACT else getattr(torch, name)

    def weights(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all weights [N, K] in `dtype`, as the profile multiplies them."""
        if self.dense is None:
            return self.rows(0, self.out_features, self.operands or dtype).to(dtype)
        return (
            self.dense.to(dtype)
            if self.operands is None
            else self.dense.to(self.operands).to(dtype)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale.to(x.dtype)
        x = self.rounded_input(x)
        if self.permutation is not None or self.parts > 1:
            return self.reordered(x)
        has_gradient = (
            torch.is_grad_enabled() and x.requires_grad
        )  # which the products on packed weights have not
        if has_gradient or self.dense is not None or self.operands is not None:
            return nn.functional.linear(x, self.weights(x.dtype), self.bias)
        if not torch.compiler.is_compiling():
            self.prepare()
        return self.packed_product(x, self.bias)

    def packed_product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + bias from the packed weights, without a gradient.

        By our CUDA kernels, for few rows of x on a CPU by a product on packed weights, else block by block of rows of W that are
        dequantized, multiplied and freed.
        """
        if self.prepared is not None and x.dtype in (torch.bfloat16, torch.float16):
            y = torch.ops.annie_quant.nvfp4_linear(x, *self.prepared)
            return y if bias is None else y + bias
        if (
            x.device.type == "cpu"
            and x.numel() <= FEW_ROWS * self.in_features
            and not torch.compiler.is_compiling()
        ):
            tensor_scale, divisor, _ = self.scalars()
            scale = tensor_scale if divisor is None else divisor
            y = codec.packed_matmul(
                x, self.codes, self.block_scale, scale, self.group, divisor is not None
            )
            return y if bias is None else y + bias
        spans = self.row_spans(x)
        if len(spans) == 1:
            return nn.functional.linear(x, self.rows(*spans[0], x.dtype), bias)
        y = torch.cat([nn.functional.linear(x, self.rows(*span, x.dtype)) for span in spans], -1)
        return y if bias is None else y + bias

    def reordered(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product summed in the order of `reorder`: the same numbers, another order."""
        order = self.permutation
        x = x if order is None else x[..., order]
        order = None if self.dense is not None else order  # dense weights are in that order already
        whole = self.dense is not None or self.operands is not None
        spans = [] if whole else self.row_spans(x)
        blocks = [self.weights(x.dtype)] if whole else (self.rows(*span, x.dtype) for span in spans)
        products = [
            sum_of_parts(x, w if order is None else w[:, order], self.parts) for w in blocks
        ]
        y = products[0] if len(products) == 1 else torch.cat(products, -1)
        return y if self.bias is None else y + self.bias

    def row_spans(self, x: torch.Tensor) -> list[tuple[int, int]]:
        """Return spans (start, stop) of output rows whose dequantized weights fit into BLOCK_BYTES."""
        limit = BLOCK_BYTES if x.device.type == "cpu" else BLOCK_BYTES_GPU
        step = max(1, limit // (self.in_features * x.element_size()))
        return [(i, min(i + step, self.out_features)) for i in range(0, self.out_features, step)]


class PackedNVFP4Linear(NVFP4Linear):
    """A linear with compressed-tensors' names (nvfp4-pack-quantized); both global scales, float32 [1], are divisors."""

    NAMES = Names("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    FIXED_DTYPE = NAMES
    SCALAR_SHAPE = (1,)
    RECIPROCAL = True


def sum_of_parts(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """Return x W^T [..., N] as the sum of the products of `parts` parts of K."""
    if parts == 1:
        return nn.functional.linear(x, weight)
    total, *rest = map(
        nn.functional.linear, x.tensor_split(parts, -1), weight.tensor_split(parts, -1)
    )
    for product in rest:
        total += product
    return total


def can_use_kernels(layer: NVFP4Linear) -> bool:
    """Return whether our CUDA kernels can compute this layer."""
    return layer.codes.device.type == "cuda" and layer.group == 16 and codec.has_kernels()


def reciprocal(value: float) -> float:
    """Return float32(1 / value); infinity for 0."""
    return (1 / torch.tensor(value, dtype=torch.float32)).item()


def nvfp4_linears(model: nn.Module) -> dict[str, NVFP4Linear]:
    """Return the model's NVFP4 linears by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, NVFP4Linear)}


def set_numerics(model: nn.Module, numerics: str) -> None:
    """Set a numerics profile, such as w4a4 or w4a16, for every NVFP4Linear of the model.

    In a model where some linears have an input scale, one without it stays w4a16, as its format defines. Raises UsageError for
    w4a4 where no linear has one.
    """
    needs_scale = profiles.find_profile(numerics).needs_input_scale
    linears = nvfp4_linears(model).values()
    mixed = any(m.has_input_scale for m in linears)
    for linear in linears:
        linear.set_numerics(
            "w4a16" if mixed and needs_scale and not linear.has_input_scale else numerics
        )


def set_cache(model: nn.Module, cache: str) -> None:
    """Set packed, bf16 or float32 for every NVFP4Linear of the model."""
    for linear in nvfp4_linears(model).values():
        linear.set_cache(cache)


# ---- FP8


class FP8Linear(FixedDtypeLinear):
    """Parameters: weight float8_e4m3fn [N, K]; weight_scale float32, one value or one per row; input_scale float32 or None."""

    SCALE: ClassVar[str] = "weight_scale"
    FIXED_DTYPE: ClassVar[tuple[str, ...]] = ("weight", SCALE, "input_scale")

    input_scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        scale_shape: tuple[int, ...] = (),
        input_shape: tuple[int, ...] | None = None,
        per_token: bool = False,
        scale_dtype: torch.dtype = torch.float32,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        self.per_token = per_token
        self.add_parameter("weight", (out_features, in_features), torch.float8_e4m3fn, device)
        self.add_parameter(self.SCALE, scale_shape, scale_dtype, device)
        self.add_parameter("input_scale", input_shape, torch.float32, device)
        self.add_parameter(
            "bias", (out_features,) if bias else None, dtype or torch.bfloat16, device
        )

    def scales(self) -> list[nn.Parameter]:
        """Return the stored scales."""
        return [s for s in (getattr(self, self.SCALE), self.input_scale) if s is not None]

    def weight_scales(self) -> torch.Tensor:
        """Return the multipliers of the weight, float32, of a shape that broadcasts to [N, K]."""
        scale = self.scales()[0].float()
        return scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [N, K] in `dtype`."""
        return (self.weight.float() * self.weight_scales()).to(dtype)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return inputs as the checkpoint defines them."""
        scale = token_scales(x) if self.per_token else self.input_scale
        return x if scale is None else fake_quant_fp8(x, scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = self.rounded(x.detach())
        x = x + (rounded - x).detach() if x.requires_grad else rounded
        return nn.functional.linear(x, self.dequantized(x.dtype), self.bias)


class BlockFP8Linear(FP8Linear):
    """Parameters: weight float8_e4m3fn [N, K]; weight_scale_inv [ceil(N / rows), ceil(K / columns)], a multiplier."""

    METHOD = "annie_quant_fp8"  # the quant_method that loads it in transformers (quantizer.py)
    SCALE = "weight_scale_inv"
    FIXED_DTYPE = ("weight", SCALE)

    def __init__(
        self, in_features: int, out_features: int, *, block: tuple[int, int], **options: Any
    ) -> None:
        size_of_block = (min(block[0], out_features), min(block[1], in_features))
        grid = (-(-out_features // size_of_block[0]), -(-in_features // size_of_block[1]))
        super().__init__(in_features, out_features, scale_shape=grid, **options)
        self.block = size_of_block

    def weight_scales(self) -> torch.Tensor:
        scale = self.scales()[0].float()
        for axis, size in enumerate(self.block):
            scale = scale.repeat_interleave(size, axis)
        return scale[: self.out_features, : self.in_features]

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        columns = self.block[1]
        values = nn.functional.pad(x, (0, -x.shape[-1] % columns)).unflatten(-1, (-1, columns))
        scale = values.float().abs().amax(-1, keepdim=True).clamp_min(SMALLEST_AMAX) / MAX_E4M3
        return fake_quant_fp8(values, scale).flatten(-2)[..., : x.shape[-1]]


class NamedBlockFP8Linear(BlockFP8Linear):
    """The same with compressed-tensors' name of the scales (llm-compressor's FP8_BLOCK)."""

    METHOD = "annie_quant_fp8_block"
    SCALE = "weight_scale"
    FIXED_DTYPE = ("weight", SCALE)


def token_scales(x: torch.Tensor) -> torch.Tensor:
    """Return amax / 448 of each token [..., 1], with the lower bound of vLLM's kernel (csrc/quantization, per-token FP8)."""
    return (x.float().abs().amax(-1, keepdim=True) / MAX_E4M3).clamp_min(SMALLEST_TOKEN_SCALE)


# ---- experts


class Expert(nn.Module):
    """One expert: down(act(gate(x)) * up(x)). Its linears have the names of the family's description."""

    def __init__(
        self, linears: dict[str, nn.Linear], act_fn: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)
        self.names = tuple(linears)
        self.act_fn = act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


class SingleExperts(nn.Module):
    """All experts of a layer, called "0", "1" and so on; called as transformers calls its merged experts.

    rows: in a forward pass, the indices of the tokens that the current expert computes; observers read it.
    """

    def __init__(self, merged: Any, experts: Experts) -> None:
        super().__init__()
        self.rows: torch.Tensor | None = None
        self.count = 0
        tensors = {name: getattr(merged, name) for name in experts.merged}
        for i in range(next(iter(tensors.values())).shape[0]):
            linears: dict[str, nn.Linear] = {}
            for name, members in experts.merged.items():
                weights = tensors[name].detach()[i].chunk(len(members))
                linears |= {m: linear_of(w) for m, w in zip(members, weights, strict=True)}
            self.add_module(str(i), Expert(linears, merged.act_fn))
            self.count += 1

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of the experts' outputs [n, hidden].

        hidden_states: [n, hidden].  top_k_index: the experts of each token [n, k].  top_k_weights: of their outputs [n, k].
        """
        out = torch.zeros_like(hidden_states)
        for i in top_k_index.unique().tolist():
            rows, position = torch.where(top_k_index == i)
            self.rows = rows
            y = self.get_submodule(str(i))(hidden_states[rows])
            out.index_add_(0, rows, (y * top_k_weights[rows, position, None]).to(out.dtype))
        self.rows = None
        return out


def linear_of(weight: torch.Tensor) -> nn.Linear:
    """Return a linear without bias over the memory of `weight` [out, in]."""
    linear = nn.Linear(
        weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype
    )
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def separate(
    model: nn.Module, family: Family, only: Callable[[str], bool] = lambda name: True
) -> None:
    """Replace the merged experts of a model by single ones over the same memory.

    only: whether to replace the module of this name. Does nothing to a dense model.
    """
    experts = family.experts
    if experts is None:
        return
    for name, module in list(model.named_modules()):
        if f".{name}".endswith(f".{experts.module}") and is_merged(module, experts) and only(name):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, SingleExperts(module, experts))


def is_merged(module: nn.Module, experts: Experts) -> bool:
    """Return whether a module holds merged experts. Modules whose weights a device map moves are not."""
    own = dict(module.named_parameters(recurse=False))
    return own.keys() == set(experts.merged) and not hasattr(module, "_hf_hook")
