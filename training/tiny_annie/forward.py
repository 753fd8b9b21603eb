"""Qwen3.5's text forward over M models at once, in functions that torch.compile fuses.

bf16 on a GPU, float32 on a CPU. The chunked delta rule inverts its triangular matrix in 4x4 blocks that are joined in pairs:
repeated squaring overflows where keys repeat. tests/assets/test_tiny_annie_training.py compares it with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORK = torch.bfloat16 if DEVICE == "cuda" else torch.float32
CHUNK = 64
Weights = dict[str, torch.Tensor]
Linear = Callable[[str, torch.Tensor], torch.Tensor]


class Shape:
    """tiny-annie's shape; the same numbers as config.configuration(), for machines without transformers."""

    vocab_size = 1536
    hidden_size = 256
    intermediate_size = 768
    layer_types = (["linear_attention"] * 3 + ["full_attention"]) * 2
    num_attention_heads = 4
    num_key_value_heads = 2
    head_dim = 64
    linear_num_key_heads = 2
    linear_num_value_heads = 4
    linear_key_head_dim = 64
    linear_value_head_dim = 64
    linear_conv_kernel_dim = 4
    rms_norm_eps = 1e-6
    rope_theta = 10000.0
    partial_rotary_factor = 0.25


class Mixture(Shape):
    """tiny-moe's shape. Its experts are parts of tiny-annie's MLP: a shared expert, then the routed ones (mixture.py)."""

    num_experts = 8
    num_experts_per_tok = 2
    moe_intermediate_size = 64
    shared_expert_intermediate_size = 256


def linear_shapes(c: Any) -> dict[str, tuple[int, int]]:
    """Return every linear of the layers and its shape [outputs, inputs]."""
    h, i = c.hidden_size, c.intermediate_size
    key, value = (
        c.linear_num_key_heads * c.linear_key_head_dim,
        c.linear_num_value_heads * c.linear_value_head_dim,
    )
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    out = {}
    for n, kind in enumerate(c.layer_types):
        p = f"model.layers.{n}."
        if kind == "linear_attention":
            a = p + "linear_attn."
            out |= {
                a + "in_proj_qkv": (2 * key + value, h),
                a + "in_proj_z": (value, h),
                a + "out_proj": (h, value),
            }
            out |= {a + g: (c.linear_num_value_heads, h) for g in ("in_proj_b", "in_proj_a")}
        else:
            a = p + "self_attn."
            out |= {
                a + "q_proj": (2 * q, h),
                a + "k_proj": (kv, h),
                a + "v_proj": (kv, h),
                a + "o_proj": (h, q),
            }
        out |= {p + "mlp.gate_proj": (i, h), p + "mlp.up_proj": (i, h), p + "mlp.down_proj": (h, i)}
        if isinstance(c, Mixture):
            out |= {p + "mlp.gate": (c.num_experts, h), p + "mlp.shared_expert_gate": (1, h)}
    return out


def initial(c: Any, seed: int) -> Weights:
    """Return random weights, float32, initialised as transformers does."""
    g = torch.Generator().manual_seed(seed)
    w = {n + ".weight": torch.randn(s, generator=g) * 0.02 for n, s in linear_shapes(c).items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        w[name] = torch.randn(c.vocab_size, c.hidden_size, generator=g) * 0.02
    key, value = (
        c.linear_num_key_heads * c.linear_key_head_dim,
        c.linear_num_value_heads * c.linear_value_head_dim,
    )
    for n, kind in enumerate(c.layer_types):
        p = f"model.layers.{n}."
        w |= {
            p + k: torch.zeros(c.hidden_size)
            for k in ("input_layernorm.weight", "post_attention_layernorm.weight")
        }
        if kind == "linear_attention":
            a, heads = p + "linear_attn.", c.linear_num_value_heads
            w[a + "conv1d.weight"] = (
                torch.rand(2 * key + value, 1, c.linear_conv_kernel_dim, generator=g) - 0.5
            )
            w[a + "A_log"] = torch.log(torch.rand(heads, generator=g) * 15 + 1)
            w[a + "dt_bias"], w[a + "norm.weight"] = (
                torch.ones(heads),
                torch.ones(c.linear_value_head_dim),
            )
        else:
            w |= {
                p + f"self_attn.{k}.weight": torch.zeros(c.head_dim) for k in ("q_norm", "k_norm")
            }
    w["model.norm.weight"] = torch.zeros(c.hidden_size)
    return {k: v.to(DEVICE) for k, v in w.items()}


def rms(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * (1 + w.float())).to(x.dtype)


def l2(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def inverse_of_unit_lower(low: torch.Tensor) -> torch.Tensor:
    """Return (I + L)^-1 for strictly lower L [..., n, n], n a power of two."""
    n, lead, size = low.shape[-1], low.shape[:-2], 4

    def blocks(size: int, off: int) -> torch.Tensor:
        cut = low.reshape(*lead, n // size, size, n // size, size).diagonal(off, -4, -2)
        return cut.permute(*range(len(lead)), -1, -3, -2)

    d = blocks(4, 0)
    eye = torch.eye(4, device=low.device, dtype=low.dtype)
    inverse = (eye - d) @ (eye + d @ d)
    while size < n:
        a, c = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        b = blocks(size, -1)[..., 0::2, :, :]
        top = torch.cat([a, torch.zeros_like(a)], -1)
        inverse = torch.cat([top, torch.cat([-(c @ b @ a), c], -1)], -2)
        size *= 2
    return inverse.squeeze(-3)


def delta_chunks(q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[torch.Tensor, ...]:
    """Return what the loop over chunks needs; q, k, v [R, H, T, D] float32, g and beta [R, H, T]."""
    r, h, t, d = q.shape

    def cut(s: torch.Tensor) -> torch.Tensor:
        return s.reshape(r, h, t // CHUNK, CHUNK, *s.shape[3:])

    q, k, v, g, b = cut(q * d**-0.5), cut(k), cut(v), cut(g).cumsum(-1), cut(beta).unsqueeze(-1)
    low = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = ((g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~low, float("-inf"))).exp()
    inverse = inverse_of_unit_lower(((k * b) @ k.transpose(-1, -2) * decay).tril(-1))
    e = g.exp().unsqueeze(-1)
    out = (k * (g[..., -1:] - g).exp().unsqueeze(-1)).transpose(-1, -2)
    last = g[..., -1].exp()[..., None, None]
    return (
        inverse @ (v * b),
        inverse @ (k * b * e),
        q @ k.transpose(-1, -2) * decay,
        q * e,
        out,
        last,
    )


def delta(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the output [R, H, T, D] of the gated delta rule, one chunk after another."""
    r, h, n, _, d = parts[0].shape
    state, outs = parts[0].new_zeros(r * h, d, d), []
    for u, w, within, q, k, keep in zip(*(p.flatten(0, 1).unbind(1) for p in parts), strict=True):
        new = torch.baddbmm(u, w, state, alpha=-1)
        outs.append(torch.baddbmm(torch.bmm(q, state), within, new))
        state = torch.baddbmm(state * keep, k, new)
    return torch.stack(outs, 1).reshape(r, h, n * CHUNK, d)


def delta_inputs(
    c: Any, mixed: Any, b: Any, a: Any, log_rate: Any, bias: Any
) -> tuple[torch.Tensor, ...]:
    rows, t, _ = mixed.shape
    key = c.linear_num_key_heads * c.linear_key_head_dim
    q, k, v = F.silu(mixed).split([key, key, mixed.shape[-1] - 2 * key], -1)
    q, k, v = (s.reshape(rows, t, -1, c.linear_key_head_dim) for s in (q, k, v))
    groups = v.shape[2] // k.shape[2]
    q, k = (l2(s.repeat_interleave(groups, 2).transpose(1, 2).float()) for s in (q, k))
    g = -log_rate.float().exp() * F.softplus(a.float() + bias.float())
    return q, k, v.transpose(1, 2).float(), g.transpose(1, 2), b.float().sigmoid().transpose(1, 2)


def delta_output(c: Any, o: torch.Tensor, z: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    rows, t = z.shape[:2]
    o = o.transpose(1, 2)
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps) * norm.float()
    gate = F.silu(z.reshape(rows, t, c.linear_num_value_heads, -1).float())
    return (o * gate).to(z.dtype).reshape(rows, t, -1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    d = cos.shape[-1]
    turned, rest = x[..., :d], x[..., d:]
    a, b = turned.chunk(2, -1)
    return torch.cat(
        [turned * cos.to(x.dtype) + torch.cat([-b, a], -1) * sin.to(x.dtype), rest], -1
    )


def attention(
    c: Any, q: Any, k: Any, v: Any, q_norm: Any, k_norm: Any, cos: Any, sin: Any
) -> torch.Tensor:
    rows, t, _ = q.shape
    q, gate = q.view(rows, t, -1, 2 * c.head_dim).chunk(2, -1)
    k = k.view(rows, t, -1, c.head_dim)
    v = v.view(rows, t, -1, c.head_dim).transpose(1, 2)
    q = rotated(rms(q, q_norm, c.rms_norm_eps).transpose(1, 2), cos, sin)
    k = rotated(rms(k, k_norm, c.rms_norm_eps).transpose(1, 2), cos, sin)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2).reshape(rows, t, -1) * torch.sigmoid(gate.reshape(rows, t, -1))


def convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    taps = w.shape[-1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    return sum(padded[:, j : j + x.shape[1]] * w[:, 0, j] for j in range(taps))


def gated(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return F.silu(g) * u


def routed(
    c: Any, g: torch.Tensor, u: torch.Tensor, router: torch.Tensor, shared: torch.Tensor
) -> torch.Tensor:
    """Return the gated neurons [R, T, I], each times the share of its expert: all experts are computed.

    router: logits [R, T, E]. shared: the logit [R, T, 1] of the shared expert, whose neurons come first.
    """
    share = router.float().softmax(-1)
    top, chosen = share.topk(c.num_experts_per_tok, -1)
    share = torch.zeros_like(share).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
    first = shared.float().sigmoid().expand(-1, -1, c.shared_expert_intermediate_size)
    return gated(g, u) * torch.cat(
        [first, share.repeat_interleave(c.moe_intermediate_size, -1)], -1
    ).to(g.dtype)


def imbalance(c: Any, routers: list[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    """Return transformers' load-balancing loss (at least num_experts_per_tok) over tokens with a weight, of all layers together.

    routers: logits [R, T, E] per layer. weight: [R, T].
    """
    share = torch.stack(routers).float().softmax(-1)
    here = (weight > 0).float()[None, ..., None] / (len(routers) * (weight > 0).sum())
    chosen = torch.zeros_like(share).scatter(-1, share.topk(c.num_experts_per_tok, -1).indices, 1.0)
    return c.num_experts * ((chosen * here).sum((0, 1, 2)) * (share * here).sum((0, 1, 2))).sum()


def cross_entropy(
    hidden: Any, head: Any, ids: Any, weight: Any, m: int, least: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted loss and the weights, summed for each of m models.

    weight: [R, T] of the token at its place. least: [m]; a token whose loss is smaller adds nothing.
    """
    logits = (hidden[:, :-1] @ head.t()).float()
    target, w = ids[:, 1:], weight[:, 1:]
    each = (
        F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), target.reshape(-1), reduction="none"
        ).view(target.shape)
        * w
    )
    each = each.reshape(m, -1)
    each = torch.where(each.detach() > least[:, None], each, torch.zeros_like(each))
    return each.sum(-1), w.reshape(m, -1).sum(-1)


FUNCTIONS = (
    rms,
    delta_chunks,
    delta_inputs,
    delta_output,
    attention,
    convolution,
    gated,
    routed,
    imbalance,
)
PARTS = {f.__name__: f for f in (*FUNCTIONS, cross_entropy)}
COMPILED = (
    {n: torch.compile(f, dynamic=False) for n, f in PARTS.items()} if DEVICE == "cuda" else PARTS
)


def rotation(c: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines [T, d] of the rotary embedding."""
    dim = int(c.head_dim * c.partial_rotary_factor)
    angle = torch.arange(tokens, device=DEVICE).float()[:, None] / (
        c.rope_theta ** (torch.arange(0, dim, 2, device=DEVICE).float() / dim)
    )
    return torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)


class Forward:
    """The forward of one or more models (stacked): layers, and hidden states. lin: the linears.

    routers: the logits of every router that ran, in order.
    """

    def __init__(self, c: Any, w: Weights, lin: Linear, parts: dict[str, Any] = COMPILED) -> None:
        self.c, self.w, self.lin, self.parts = c, w, lin, parts
        self.routers: list[torch.Tensor] = []

    def mlp(self, p: str, h: torch.Tensor) -> torch.Tensor:
        both = self.lin(p + "gate_proj", h), self.lin(p + "up_proj", h)
        if not isinstance(self.c, Mixture):
            return self.lin(p + "down_proj", self.parts["gated"](*both))
        self.routers.append(self.lin(p + "gate", h))
        shared = self.lin(p + "shared_expert_gate", h)
        return self.lin(
            p + "down_proj", self.parts["routed"](self.c, *both, self.routers[-1], shared)
        )

    def linear_attention(self, a: str, h: torch.Tensor) -> torch.Tensor:
        c, w, lin, parts = self.c, self.w, self.lin, self.parts
        mixed = parts["convolution"](lin(a + "in_proj_qkv", h), w[a + "conv1d.weight"].to(h.dtype))
        gates = (lin(a + "in_proj_b", h), lin(a + "in_proj_a", h), w[a + "A_log"], w[a + "dt_bias"])
        o = delta(parts["delta_chunks"](*parts["delta_inputs"](c, mixed, *gates)))
        return lin(
            a + "out_proj",
            parts["delta_output"](c, o, lin(a + "in_proj_z", h), w[a + "norm.weight"]),
        )

    def full_attention(
        self, a: str, h: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        qkv = (self.lin(a + k, h) for k in ("q_proj", "k_proj", "v_proj"))
        norms = (self.w[a + "q_norm.weight"], self.w[a + "k_norm.weight"])
        return self.lin(a + "o_proj", self.parts["attention"](self.c, *qkv, *norms, *turn))

    def layer(
        self, p: str, kind: str, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        eps = self.c.rms_norm_eps
        h = self.parts["rms"](x, self.w[p + "input_layernorm.weight"], eps)
        if kind == "linear_attention":
            x = x + self.linear_attention(p + "linear_attn.", h)
        else:
            x = x + self.full_attention(p + "self_attn.", h, turn)
        return x + self.mlp(
            p + "mlp.", self.parts["rms"](x, self.w[p + "post_attention_layernorm.weight"], eps)
        )

    def hidden_states(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [R, T, H] of R rows (m models after another, R/m rows each). T: a multiple of CHUNK."""
        x = F.embedding(ids, self.w["model.embed_tokens.weight"]).to(WORK)
        turn = rotation(self.c, ids.shape[1])
        for n, kind in enumerate(self.c.layer_types):
            x = self.layer(f"model.layers.{n}.", kind, x, turn)
        return self.parts["rms"](x, self.w["model.norm.weight"], self.c.rms_norm_eps)


def hidden_states(
    c: Any, w: Weights, ids: torch.Tensor, lin: Linear, parts: dict[str, Any] = COMPILED
) -> torch.Tensor:
    return Forward(c, w, lin, parts).hidden_states(ids)


def working(w: Weights) -> Weights:
    """Return the weights that the forward multiplies with: matrices in WORK, the rest as it is."""
    return {k: v.to(WORK) if v.dim() >= 2 else v for k, v in w.items()}


def plain(w: Weights) -> Linear:
    """Return the linears of one model."""
    return lambda name, x: F.linear(x, w[name + ".weight"])


def stacked(w: Weights, m: int) -> Linear:
    """Return the linears of m models whose weights are [m, outputs, inputs]."""

    def lin(name: str, x: torch.Tensor) -> torch.Tensor:
        rows, t, inputs = x.shape
        y = torch.bmm(x.reshape(m, rows // m * t, inputs), w[name + ".weight"].transpose(1, 2))
        return y.view(rows, t, -1)

    return lin


def cosine(step: int, total: int, warm: int) -> float:
    """Return the share of the learning rate: a linear start, then a cosine to zero."""
    return (
        min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / total))
        if step < total
        else 0.0
    )
