"""Moving an activation scale s into what produces the activation, exactly, for Qwen3.5.

A linear computes W x. With x' = x / s made by its producer and W' = W diag(s) the function is the same, and both may
be easier to round. Producers here:
  input_layernorm, post_attention_layernorm   (1 + w) norms: w' = (1 + w) / s - 1   (ModelOpt 0.47 writes w / s: wrong)
  linear_attn.norm                            an ordinary norm, shared by all value heads: w' = w / s
  mlp.up_proj                                 its rows / s, for down_proj reads silu(gate) * up
  self_attn.o_proj                            left alone: its input passes a gate and grouped value heads
A norm's weight is stored in 16 bits, so w' is rounded first and s is then what w' really divides by: the fold is exact
in what is stored, too. Linears that read the same activation and are not quantized take s as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from annie_quant.errors import need

TRUST = 1.25  # a rounded norm whose real divisor is further than this from s takes no scale there


@dataclass(frozen=True)
class Site:
    """An activation that can be scaled. kind: "plus_one" or "plain" norm, or "rows" of a linear."""

    producer: str
    kind: str
    readers: tuple[str, ...]


SITES = (
    Site("input_layernorm.weight", "plus_one", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Site(
        "input_layernorm.weight",
        "plus_one",
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    ),
    Site("linear_attn.norm.weight", "plain", ("linear_attn.out_proj",)),
    Site("post_attention_layernorm.weight", "plus_one", ("mlp.gate_proj", "mlp.up_proj")),
    Site("mlp.up_proj.weight", "rows", ("mlp.down_proj",)),
)


def shape_of_scale(site: Site, s: Any, producer: Any) -> Any:
    """s as it can be folded: one value a norm's weight; heads that share a norm's weight get their geometric mean."""
    if site.kind != "plain":
        return s
    return s.reshape(-1, producer.numel()).log().mean(0).exp()


def fold(weights: dict[str, Any], site: Site, s: Any, stored: Any) -> Any:
    """Fold s (float32, of shape_of_scale) into `weights`, the layer's tensors in float32, in place.

    stored: the dtype that the producer is written in (a norm's), or None where it is not rounded. Returns the scale
    that was really folded, [K] of the readers.
    """
    torch = need("torch", "quantize")
    producer = weights[site.producer]
    if site.kind == "rows":
        weights[site.producer] = producer / s[:, None]
    else:
        gain = producer + 1 if site.kind == "plus_one" else producer
        offset = 1.0 if site.kind == "plus_one" else 0.0
        new = gain / s - offset
        new = new if stored is None else new.to(stored).float()
        real = gain / (new + offset)
        sound = torch.isfinite(real) & (real > s / TRUST) & (real < s * TRUST)
        weights[site.producer] = torch.where(sound, new, producer)
        s = torch.where(sound, real, torch.ones_like(s))
    for reader in site.readers:
        columns = weights[f"{reader}.weight"].shape[1]
        weights[f"{reader}.weight"] = weights[f"{reader}.weight"] * s.repeat(columns // len(s))
    return s.repeat(weights[f"{site.readers[0]}.weight"].shape[1] // len(s))
