"""Qwen3.5's tensors as llama.cpp wants them: name, kind of change, order of the DeltaNet value heads.

Source of the conventions: ggml-org/llama.cpp, conversion/qwen.py (Qwen3NextModel, _LinearAttentionVReorderBase,
_Qwen35MtpMixin) and src/models/qwen35.cpp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from annie_quant.errors import CheckpointError

TOP = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
BLOCK = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
MTP = {
    "fc.weight": "nextn.eh_proj.weight",
    "pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def gguf_name(name: str, layers: int) -> str | None:
    """llama.cpp's name for a tensor, or None for one that a text model's file leaves out (vision, KV scales)."""
    if "visual." in name or name.endswith((".k_scale", ".v_scale", ".rotary_emb.inv_freq")):
        return None
    if name == "lm_head.weight":
        return "output.weight"
    short = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
    offset, table = 0, TOP
    if short.startswith("mtp."):
        short, offset, table = short.removeprefix("mtp."), layers, MTP
    if match := _LAYER.fullmatch(short):
        if match[2] in BLOCK:
            return f"blk.{int(match[1]) + offset}.{BLOCK[match[2]]}"
    elif short in table:
        return table[short] if table is TOP else f"blk.{layers}.{table[short]}"
    raise CheckpointError(
        f"{name}: no such tensor in a Qwen3.5 text model", "GGUF is written for Qwen3.5 (qwen3_5) checkpoints only"
    )


@dataclass(frozen=True)
class Heads:
    """DeltaNet's heads. On disk the value heads are grouped by key head; ggml repeats key heads in turn (tiled)."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Heads:
        try:
            return cls(
                *(
                    int(config[f"linear_{k}"])
                    for k in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
                )
            )
        except KeyError as error:
            raise CheckpointError(f"config.json: {error.args[0]} is missing", "is this a Qwen3.5 checkpoint?") from None

    def order(self, width: int) -> np.ndarray:
        """Indices that bring values*width entries from grouped to tiled order."""
        index = np.arange(self.values * width).reshape(self.keys, self.values // self.keys, width)
        return index.transpose(1, 0, 2).reshape(-1)

    def rows(self, name: str) -> np.ndarray | None:
        """The order of the rows (first axis) of a DeltaNet tensor, or None where they stay."""
        if self.keys == self.values:
            return None
        if name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
            first = 2 * self.keys * self.key_dim  # queries and keys stay
            return np.concatenate([np.arange(first), first + self.order(self.value_dim)])
        if name.endswith(".in_proj_z.weight"):
            return self.order(self.value_dim)
        if name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
            return self.order(1)
        return None

    def columns(self, name: str) -> np.ndarray | None:
        """The order of the columns of out_proj, or None where they stay."""
        if self.keys == self.values or not name.endswith(".linear_attn.out_proj.weight"):
            return None
        return self.order(self.value_dim)


def transform(name: str, array: np.ndarray, heads: Heads) -> np.ndarray:
    """A plain tensor with llama.cpp's conventions: A = −exp(A_log), norms as (1 + w), heads tiled.

    float32 where the values change; else the dtype stays.
    """
    if name.endswith(".conv1d.weight"):
        array = array.reshape(array.shape[0], -1)
    rows, columns = heads.rows(name), heads.columns(name)
    if rows is not None:
        array = array[rows]
    if columns is not None:
        array = array[:, columns]
    if name.endswith(".A_log"):
        return -np.exp(array.astype(np.float64)).astype(np.float32)
    return array.astype(np.float32) + np.float32(1) if plus_one(name) else array


def undo(name: str, array: np.ndarray, heads: Heads) -> np.ndarray:
    """The inverse of `transform`, in float32."""
    array = np.asarray(array, np.float32)
    if name.endswith(".A_log"):
        array = np.log(-array.astype(np.float64)).astype(np.float32)
    elif plus_one(name):
        array = array - np.float32(1)
    rows, columns = heads.rows(name), heads.columns(name)
    if rows is not None:
        array = array[np.argsort(rows)]
    return array if columns is None else array[:, np.argsort(columns)]


def plus_one(name: str) -> bool:
    """Norms that compute (1 + w): all of them but DeltaNet's gated one."""
    if name.endswith((".pre_fc_norm_embedding.weight", ".pre_fc_norm_hidden.weight")):
        return True
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def keeps_float32(gguf: str, dimensions: int) -> bool:
    """Tensors that llama.cpp takes in float32 only."""
    return dimensions < 2 or not gguf.endswith(".weight") or gguf.endswith(("_norm.weight", "ssm_conv1d.weight"))
