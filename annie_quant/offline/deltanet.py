"""Gated DeltaNet over rows of unequal length, for the linear-attention layers of Qwen3.5 and its relatives.

transformers 5.14 supports a batch of unequal rows only if it is padded on the left and starts without a cache. Evaluation
computes a shared prefix once and then tails of unequal length together, padded on the right, and needs each row's state after
its own last token:
  the rule         a padded step gets decay exp(0) = 1 and beta 0, so the state does not change. Under a profile that rounds, the
                   steps of an answer are computed as a server decodes them: one by one, with operands in float32;
  the convolution  each row's cache holds the last columns before its own end, not before the end of the batch.
Without flash-linear-attention the rule is computed here: the recurrence of transformers' torch_chunk_gated_delta_rule, with
one triangular solve per chunk. Source of the rule: Yang et al., Gated Delta Networks (arXiv 2412.06464), section 3.3.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import transformers
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from annie_quant.core.errors import EnvironmentFault
from annie_quant.offline.codec import Round, rounding
from annie_quant.offline.profiles import Profile

CHUNK = 32  # steps are padded to a multiple of this; the usual 64 wastes half of the work on a CPU
CHUNK_GPU = 64  # half as many launches
SERVED_CHUNK = 64  # steps, in flash-linear-attention
CPU_CHUNK = 20  # about this many steps in calibration; chunks of equal length need little padding


class RaggedBatch:
    """The running batch, for the DeltaNet layers.

    lengths: int64 [B], real steps of each row; None when all `steps` are real. cache: receives the states. prompts: int64 [B],
    first steps of each row that belong to its prompt, the others to its answer; None when all do. span: their least and most.
    """

    def __init__(self) -> None:
        self.set(None, 0, None)

    def set(
        self,
        lengths: torch.Tensor | None,
        steps: int,
        cache: DynamicCache | None,
        prompts: torch.Tensor | None = None,
    ) -> None:
        self.lengths = lengths
        self.steps = steps
        self.cache = cache
        self.prompts = prompts
        # Read here, once per forward: on a GPU's tensor it would wait for the device in every layer.
        self.span = (0, 0) if prompts is None else (int(prompts.min()), int(prompts.max()))


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    to_operand: Round | None = None,
    chunk: int | None = None,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (outputs [B, T, H, Dv], final state [B, H, Dk, Dv] or None).

    query, key: [B, T, H, Dk]. value: [B, T, H, Dv]. g: log decay [B, T, H]. beta: [B, T, H].
    Computed in float32, chunk by chunk: U and W solve (I + A) [U W] = beta [v, k e^G], where A is the strictly lower part
    of beta k k^T e^(G_i - G_j) and G is the running sum of g.

    chunk: its steps; SERVED_CHUNK with to_operand; None: CHUNK, on a GPU CHUNK_GPU.
    to_operand: rounds what servers' kernels store in bfloat16 between their products: normalized q and k, the inverse of I + A, U
    and W, the inner attention, new values, and the copy of the state that is multiplied. Sums and the state stay float32.
    (Source: the order of roundings in flash-linear-attention's chunk kernels, chunk_delta_h, chunk_o, wy_fast and solve_tril.)
    """
    r = to_operand or (lambda x: x)
    kind = query.dtype
    batch, steps, heads, dk = key.shape
    dv = value.shape[-1]
    if use_qk_l2norm_in_kernel:
        query = r(query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6))
        key = r(key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6))
    usual = CHUNK if query.device.type == "cpu" else CHUNK_GPU
    size = min(SERVED_CHUNK if to_operand else chunk or usual, steps)
    q, k, v, log_decay, b = (in_chunks(x, size) for x in (query, key, value, g, beta))
    q, log_decay, b = q * dk**-0.5, log_decay.cumsum(-1), b.unsqueeze(-1)
    between = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).tril_().exp_().tril_()
    lower = (r(k * b) @ k.transpose(-1, -2)).mul_(between)
    right = r(torch.cat((v, k * log_decay.exp().unsqueeze(-1)), -1) * b)
    u, w = r(r(unit_lower_inverse(lower)) @ right).split((dv, dk), -1)
    within = r((q @ k.transpose(-1, -2)).mul_(between))
    growth = log_decay.exp().unsqueeze(-1)
    last = log_decay[..., -1:]
    to_end = (last - log_decay).exp().unsqueeze(-1)
    k_t = k.transpose(-1, -2)
    decay = last.exp().unsqueeze(-1)
    state = q.new_zeros(batch, heads, dk, dv) if initial_state is None else initial_state.float()
    state = state.reshape(-1, dk, dv).clone()
    out = torch.empty_like(v)
    for c in range(v.shape[2]):
        parts = (q, growth, w, u, within, k_t, to_end, decay)
        q_c, growth_c, w_c, u_c, within_c, k_c, to_end_c, decay_c = (
            x[:, :, c].flatten(0, 1) for x in parts
        )
        copy = r(state)
        new = torch.baddbmm(u_c, w_c, copy, alpha=-1)
        out[:, :, c] = torch.baddbmm((q_c @ copy) * growth_c, within_c, r(new)).unflatten(
            0, (batch, heads)
        )
        state = torch.baddbmm(state.mul_(decay_c), k_c, r(new * to_end_c))
    out = out.reshape(batch, heads, -1, dv)[:, :, :steps].transpose(1, 2).to(kind)
    return out, state.unflatten(0, (batch, heads)) if output_final_state else None


def gated_delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what gated_delta_rule does for one step, T = 1; a state in float32 is updated in place.

    The operations, and so the bits, are those of transformers' torch_recurrent_gated_delta_rule, which writes three states.
    """
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    q, k, v, decay, b = (x.squeeze(1).float() for x in (query, key, value, g, beta))
    q = q * (1 / q.shape[-1] ** 0.5)
    state = initial_state.float().mul_(decay.exp()[..., None, None])
    new = (v - (state * k.unsqueeze(-1)).sum(-2)) * b.unsqueeze(-1)
    state += k.unsqueeze(-1) * new.unsqueeze(-2)
    out = (state * q.unsqueeze(-1)).sum(-2).unsqueeze(1).to(query.dtype)
    return out, state if output_final_state else None


def in_chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return x [B, T, H, ...] as float32 [B, H, ceil(T / size), size, ...], padded with zeros."""
    x = functional.pad(x.float().transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, -x.shape[1] % size))
    return x.reshape(*x.shape[:2], -1, size, *x.shape[3:])


def unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """Return (I + A)^-1 for A the strictly lower part of [..., n, n], by forward substitution on all matrices at once.

    On a GPU that is one launch of cuBLAS. On a CPU torch's triangular solve calls LAPACK once per matrix, which takes twice as
    long at n = 32. A product of powers of A would be faster, but loses all digits where keys repeat.
    """
    if lower.device.type == "cuda":
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(
            lower
        )
        return torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
    inverse = -lower.tril(-1)
    for i in range(2, inverse.shape[-1]):
        row = inverse[..., i, None, :i]
        inverse[..., i, :i] += (row @ inverse[..., :i, :i]).squeeze(-2)
    inverse.diagonal(dim1=-2, dim2=-1).fill_(1)
    return inverse


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    **_: object,
) -> torch.Tensor:
    """Return the depthwise causal convolution [B, C, T] of x [B, C, T] with weight [C, K]; activation: "silu" or None."""
    x = functional.pad(x, (weight.shape[-1] - 1, 0))
    y = functional.conv1d(x, weight.unsqueeze(1), bias, groups=weight.shape[0])
    return functional.silu(y) if activation in ("silu", "swish") else y


def causal_conv_step(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Return one output column [B, C, 1] of causal_conv for x [B, C, 1]; state [B, C, K] is updated in place.

    One column is a weighted sum, for which torch's conv1d takes many times longer on a CPU.
    """
    state.copy_(torch.cat((state[:, :, 1:], x.to(state.dtype)), -1))
    y = (state * weight).sum(-1, keepdim=True)
    y = y if bias is None else y + bias.unsqueeze(-1)
    return (functional.silu(y) if activation in ("silu", "swish") else y).to(x.dtype)


def conv_on_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    **_: object,
) -> torch.Tensor:
    """Return causal_conv as shifted sums, for calibration, which take a fraction of the time of torch's conv1d."""
    total = x * weight[:, -1:]
    for i in range(1, min(weight.shape[-1], x.shape[-1])):
        total[..., i:].addcmul_(x[..., :-i], weight[:, -1 - i, None])
    total = total if bias is None else total.add_(bias[:, None])
    return functional.silu(total, inplace=True) if activation in ("silu", "swish") else total


def rule_on_cpu(
    query: torch.Tensor, *inputs: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return gated_delta_rule in chunks of about CPU_CHUNK steps."""
    steps = query.shape[1]
    chunk = math.ceil(steps / math.ceil(steps / CPU_CHUNK))
    return gated_delta_rule(query, *inputs, **options, chunk=chunk)


def ragged_rule(rule: Callable, batch: RaggedBatch, decoding: Callable | None = None) -> Callable:
    """Wrap `rule` so that steps after each row's length do not change the state.

    decoding: the rule for the steps of answers, which begins with the state after the prompt; None: `rule`.
    """

    def masked(query, key, value, g, beta, *, initial_state=None, **more):
        def run(
            rule: Callable, span: slice, mask: torch.Tensor, state: torch.Tensor | None
        ) -> tuple:
            q, k, v, decay, b = (x[:, span] for x in (query, key, value, g * mask, beta * mask))
            return rule(q, k, v, g=decay, beta=b, initial_state=state, **more)

        steps = torch.arange(g.shape[1], device=g.device)
        if batch.lengths is not None:
            real = (steps < batch.lengths.unsqueeze(1)).unsqueeze(-1)
            g = g * real
            beta = beta * real
        if batch.prompts is None or decoding is None:
            return rule(query, key, value, g=g, beta=beta, initial_state=initial_state, **more)
        more["output_final_state"] = True
        inside = (steps < batch.prompts.to(g.device).unsqueeze(1)).unsqueeze(-1)
        start, end = batch.span
        head, state = run(rule, slice(0, end), inside, initial_state)
        tail, state = run(decoding, slice(start, None), ~inside, state)
        middle = torch.where(
            inside[:, start:end].unsqueeze(-1), head[:, start:], tail[:, : end - start]
        )
        return torch.cat((head[:, :start], middle, tail[:, end - start :]), 1), state

    return masked


def ragged_conv(conv: Callable, batch: RaggedBatch, layer: int) -> Callable:
    """Wrap `conv` so that the cache receives the columns before each row's own end."""

    def convolve(x, weight, bias, activation, **more):
        if batch.lengths is not None and batch.cache is not None:
            state = batch.cache.layers[layer].conv_states[0]
            size = state.shape[-1]
            # x ends with the batch's steps; a short row starts in the zeros.
            columns = functional.pad(x, (size, 0))
            starts = columns.shape[-1] - batch.steps + batch.lengths - size
            index = starts.view(-1, 1, 1) + torch.arange(size, device=x.device)
            state.copy_(columns.gather(-1, index.expand(-1, x.shape[1], -1)))
        return conv(x, weight, bias, activation, **more)

    return convolve


def rounded(function: Callable, to_stream: Round) -> Callable:
    """Wrap a function whose result, or whose result's first element, is stored in the stream's dtype."""

    def call(*args, **options):
        # emulation.RoundedSigmoid is for the module around the function, not for the hundreds of operations in it.
        with torch._C.DisableTorchFunction():
            result = function(*args, **options)
        return (
            (to_stream(result[0]), *result[1:]) if isinstance(result, tuple) else to_stream(result)
        )

    return call


class DeltaLayer(Protocol):
    """transformers' DeltaNet layer: its functions, which can be replaced."""

    layer_idx: int
    chunk_gated_delta_rule: Callable[..., Any]
    recurrent_gated_delta_rule: Callable[..., Any]
    causal_conv1d_fn: Callable[..., Any] | None
    causal_conv1d_update: Callable[..., Any]


FUNCTIONS = (
    "chunk_gated_delta_rule",
    "recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


def delta_layers(model: torch.nn.Module) -> list[DeltaLayer]:
    """Return the DeltaNet layers of `model`, whose functions can be replaced.

    Raises EnvironmentFault if they have none: transformers 5.15 and later keep them elsewhere, and replacing them would do nothing.
    """
    layers: list[Any] = [m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")]
    lacking = [layer for layer in layers if not {*FUNCTIONS} <= {*dir(layer)}]
    if lacking:
        raise EnvironmentFault(
            f"transformers {transformers.__version__}: its DeltaNet layers cannot be computed by this package",
            "pip install 'transformers>=5.2,<5.15'",
        )
    return layers


def functions_of(layer: DeltaLayer) -> list[Callable[..., Any]]:
    return [getattr(layer, name) for name in FUNCTIONS]


@contextlib.contextmanager
def ragged_layers(
    layers: Sequence[DeltaLayer], profile: Profile, batch: RaggedBatch
) -> Iterator[None]:
    """Let DeltaNet layers compute `batch` as a ragged one, with the roundings of a profile."""
    before = [functions_of(layer) for layer in layers]
    try:
        for layer, (rule, recurrent, conv, step) in zip(layers, before, strict=True):
            own = gated_delta_rule if rule.__name__ == "torch_chunk_gated_delta_rule" else rule
            decoding = None
            conv = causal_conv if conv is None else conv
            step = causal_conv_step if step.__name__ == "torch_causal_conv1d_update" else step
            if recurrent.__name__ == "torch_recurrent_gated_delta_rule":
                layer.recurrent_gated_delta_rule = gated_delta_step
            if own is gated_delta_rule and profile.stream != "float32":
                decoding = own
                own = functools.partial(own, to_operand=rounding(profile.stream))
            layer.chunk_gated_delta_rule = ragged_rule(own, batch, decoding)
            layer.causal_conv1d_fn = ragged_conv(conv, batch, layer.layer_idx)
            layer.causal_conv1d_update = step
            if profile.stream != "float32":
                for name in FUNCTIONS:
                    setattr(layer, name, rounded(getattr(layer, name), rounding(profile.stream)))
        yield
    finally:
        for layer, functions in zip(layers, before, strict=True):
            for name, function in zip(FUNCTIONS, functions, strict=True):
                setattr(layer, name, function)
