"""Qwen3.5's text model over stacked weights: M models at once, one kernel launch for all of them.

Every linear's weight is [M, N, K]; everything else (norms, convolution, gates' biases, embedding, head) is shared, as it
is among overlays of one base. Hidden states are [M, B, T, H]. tests/assets/test_tiny_annie_training.py compares the forward
with transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 64
Hook = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass
class Cache:
    """Decoding state of M*B rows: keys and values [M*B, heads, T, D] per attention layer, and DeltaNet's two states."""

    length: int
    start: torch.Tensor
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    conv: dict[int, torch.Tensor] = field(default_factory=dict)
    state: dict[int, torch.Tensor] = field(default_factory=dict)


def linear_names(config: Any) -> list[str]:
    names = []
    for i, kind in enumerate(config.layer_types):
        attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
        delta = tuple(f"linear_attn.{p}" for p in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"))
        mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        names += [f"model.layers.{i}.{p}.weight" for p in (delta if kind == "linear_attention" else attention) + mlp]
    return names


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())
    return y.to(x.dtype)


def l2(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def delta_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule over [R, heads, T, D] in chunks (float32), from a zero state: outputs and the last state.

    Within a chunk the rule is a unit lower triangular system; across chunks the state is carried.
    """
    rows, heads, length, dim = q.shape
    pad = -length % CHUNK
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        g, beta = F.pad(g, (0, pad)), F.pad(beta, (0, pad))
    n = (length + pad) // CHUNK
    q, k, v = (x.reshape(rows, heads, n, CHUNK, dim) for x in (q * dim**-0.5, k, v))
    g, beta = g.reshape(rows, heads, n, CHUNK).cumsum(-1), beta.reshape(rows, heads, n, CHUNK, 1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    # Above the diagonal the difference is positive and may overflow; it is masked before and after.
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~lower, 0).exp() * lower
    mix = ((k * beta) @ k.transpose(-1, -2) * decay).tril(-1)
    rhs = torch.cat([v * beta, k * beta * g.exp().unsqueeze(-1)], -1)
    eye = torch.eye(CHUNK, device=q.device)
    u, w = torch.linalg.solve_triangular(mix + eye, rhs, upper=False, unitriangular=True).split(dim, -1)
    within = q @ k.transpose(-1, -2) * decay
    q_in = q * g.exp().unsqueeze(-1)
    k_out = k * (g[..., -1:] - g).exp().unsqueeze(-1)
    keep = g[..., -1].exp()[..., None, None]
    state = q.new_zeros(rows, heads, dim, dim)
    out = []
    for c in range(n):
        new = u[:, :, c] - w[:, :, c] @ state
        out.append(q_in[:, :, c] @ state + within[:, :, c] @ new)
        state = state * keep[:, :, c] + k_out[:, :, c].transpose(-1, -2) @ new
    return torch.stack(out, 2).reshape(rows, heads, length + pad, dim)[:, :, :length], state


class Net:
    """weights: name → tensor; linears [M, N, K], the rest as in the checkpoint. hook(name, x): called for each linear."""

    def __init__(self, config: Any, weights: dict[str, torch.Tensor], hook: Hook | None = None) -> None:
        self.c, self.w, self.hook = config, weights, hook
        dim = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
        device = weights["model.embed_tokens.weight"].device
        steps = torch.arange(0, dim, 2, device=device).float() / dim
        self.inverse = 1.0 / (config.rope_parameters["rope_theta"] ** steps)

    def lin(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """[M, B, T, K] → [M, B, T, N]."""
        if self.hook is not None:
            x = self.hook(name, x)
        w = self.w[name + ".weight"]
        m, b, t, k = x.shape
        return torch.bmm(x.reshape(m, b * t, k), w.transpose(1, 2)).view(m, b, t, -1)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: [R, heads, T, D]; positions: [T] int."""
        angle = positions[:, None].float() * self.inverse[None]
        cos, sin = (torch.cat([f, f], -1).to(x.dtype) for f in (angle.cos(), angle.sin()))
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        a, b = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-b, a], -1) * sin, rest], -1)

    def attention(
        self, i: int, x: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Cache | None
    ) -> torch.Tensor:
        c, p = self.c, f"model.layers.{i}.self_attn."
        m, b, t, _ = x.shape
        q, gate = self.lin(p + "q_proj", x).view(m * b, t, -1, 2 * c.head_dim).chunk(2, -1)
        k = self.lin(p + "k_proj", x).view(m * b, t, -1, c.head_dim)
        v = self.lin(p + "v_proj", x).view(m * b, t, -1, c.head_dim).transpose(1, 2)
        q = self.rotate(rms(q, self.w[p + "q_norm.weight"], c.rms_norm_eps).transpose(1, 2), positions)
        k = self.rotate(rms(k, self.w[p + "k_norm.weight"], c.rms_norm_eps).transpose(1, 2), positions)
        if cache is not None:
            if i not in cache.keys:
                cache.keys[i] = k.new_zeros(m * b, k.shape[1], cache.length, c.head_dim)
                cache.values[i] = torch.zeros_like(cache.keys[i])
            cache.keys[i].index_copy_(2, positions, k)
            cache.values[i].index_copy_(2, positions, v)
            if t == 1:
                k, v = cache.keys[i], cache.values[i]
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        o = o.transpose(1, 2).reshape(m, b, t, -1) * torch.sigmoid(gate.reshape(m, b, t, -1))
        return self.lin(p + "o_proj", o)

    def delta(self, i: int, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        c, p = self.c, f"model.layers.{i}.linear_attn."
        m, b, t, _ = x.shape
        qkv = self.lin(p + "in_proj_qkv", x).view(m * b, t, -1)
        names = ("in_proj_z", "in_proj_b", "in_proj_a")
        z, bb, a = (self.lin(p + n, x).view(m * b, t, c.linear_num_value_heads, -1) for n in names)
        kernel = c.linear_conv_kernel_dim
        decoding = cache is not None and i in cache.state
        past = cache.conv[i] if decoding else qkv.new_zeros(m * b, kernel - 1, qkv.shape[-1])
        window = torch.cat([past, qkv], 1)
        if cache is not None:
            cache.conv.setdefault(i, torch.empty_like(past)).copy_(window[:, -(kernel - 1) :])
        taps = self.w[p + "conv1d.weight"][:, 0].float()
        mixed = sum(window[:, j : j + t].float() * taps[:, j] for j in range(kernel)).to(qkv.dtype)
        mixed = F.silu(mixed)
        key = c.linear_num_key_heads * c.linear_key_head_dim
        q, k, v = mixed.split([key, key, mixed.shape[-1] - 2 * key], -1)
        q, k, v = (s.reshape(m * b, t, -1, c.linear_key_head_dim).transpose(1, 2).float() for s in (q, k, v))
        groups = v.shape[1] // k.shape[1]
        # transformers normalises in the model's dtype before it goes to float32.
        q, k = (l2(s.to(qkv.dtype)).float().repeat_interleave(groups, 1) for s in (q, k))
        beta = bb.squeeze(-1).sigmoid().float().transpose(1, 2)
        rate = -self.w[p + "A_log"].float().exp() * F.softplus(a.squeeze(-1).float() + self.w[p + "dt_bias"].float())
        g = rate.transpose(1, 2)
        if decoding:
            state = cache.state[i] * g[..., None].exp()
            k1, v1, q1 = k[:, :, 0], v[:, :, 0], q[:, :, 0] * c.linear_key_head_dim**-0.5
            change = (v1 - (state * k1.unsqueeze(-1)).sum(-2)) * beta
            state = state + k1.unsqueeze(-1) * change.unsqueeze(-2)
            cache.state[i].copy_(state)
            o = (state * q1.unsqueeze(-1)).sum(-2).unsqueeze(2)
        else:
            o, state = delta_chunks(q, k, v, g, beta)
            if cache is not None:
                cache.state[i] = state.contiguous()
        o = o.transpose(1, 2).to(qkv.dtype).float()
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps)
        o = (self.w[p + "norm.weight"] * o.to(qkv.dtype)).float() * F.silu(z.float())
        return self.lin(p + "out_proj", o.to(qkv.dtype).reshape(m, b, t, -1))

    def hidden(
        self,
        ids: torch.Tensor,
        m: int,
        residual: torch.dtype = torch.bfloat16,
        cache: Cache | None = None,
        positions: torch.Tensor | None = None,
        keep: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Final hidden states [M, B, T, H]. ids: [B, T] (the same for all M) or [M, B, T]. keep: 1 where no padding."""
        ids = ids if ids.dim() == 3 else ids.unsqueeze(0).expand(m, *ids.shape)
        work = self.w[linear_names(self.c)[0]].dtype
        x = F.embedding(ids, self.w["model.embed_tokens.weight"]).to(residual)
        positions = torch.arange(ids.shape[-1], device=ids.device) if positions is None else positions
        eps = self.c.rms_norm_eps
        for i, kind in enumerate(self.c.layer_types):
            p = f"model.layers.{i}."
            h = rms(x, self.w[p + "input_layernorm.weight"], eps).to(work)
            if kind == "linear_attention":
                h = h * keep.unsqueeze(-1).to(work) if keep is not None else h
                x = x + self.delta(i, h, cache)
            else:
                x = x + self.attention(i, h, positions, mask, cache)
            h = rms(x, self.w[p + "post_attention_layernorm.weight"], eps).to(work)
            inner = F.silu(self.lin(p + "mlp.gate_proj", h)) * self.lin(p + "mlp.up_proj", h)
            x = x + self.lin(p + "mlp.down_proj", inner)
        return rms(x, self.w["model.norm.weight"], eps).to(work)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.w["lm_head.weight"].to(hidden.dtype).t()
