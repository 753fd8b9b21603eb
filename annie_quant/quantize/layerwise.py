"""Calibration text through a model one decoder layer at a time: one layer's weights in memory, and the hidden states.

    for layer in Walk(folder, batches, report):
        layer.run(see={"mlp.down_proj": f})     # f(x [n, K], marks [n]) hears the inputs; the layer's outputs are dropped
        layer.linears["mlp.down_proj"].weight   # may be changed: what follows then reads the changed layer's outputs
        layer.advance(see)                      # hears the inputs and hands the outputs to the next layer

Padding never reaches `see`. Outputs equal the whole model's (tests/quantize/test_layerwise.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from annie_quant.checkpoint.remote_code import refused
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import CheckpointError, need
from annie_quant.quantize.calibration_samples import PADDING, Batch
from annie_quant.quantize.job import Report

See = Callable[[Any, Any], None]
# Linears of one layer that read the same tensor: the inputs of the first are those of all.
SAME_INPUT = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("self_attn.o_proj",),
    ("linear_attn.out_proj",),
    ("mlp.down_proj",),
)

LAYERS = re.compile(r"^model\.(language_model\.)?layers\.")


def device_and_dtype(folder: ModelFolder) -> tuple[str, Any]:
    """This process's GPU where there is one, else the CPU; float32 for models of up to a gigabyte, bfloat16 above."""
    torch = need("torch", "quantize")
    dtype = torch.float32 if folder.weight_bytes < 1 << 30 else torch.bfloat16
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu", dtype


def trunk_of(folder: ModelFolder) -> str:
    """What stands before `layers.0.` in tensor names: "model." or "model.language_model."."""
    tail = "layers.0.input_layernorm.weight"
    found = [n.removesuffix(tail) for n in folder if n.endswith(tail) and not n.startswith("mtp.")]
    if not found:
        raise CheckpointError(f"{folder.path}: no decoder layers in it (…{tail})", f"annie-quant audit {folder.path}")
    return found[0]


class Layer:
    """One decoder layer with its weights. name: "model.layers.3"; linears: by their name inside the layer."""

    def __init__(self, walk: Walk, index: int, module: Any) -> None:
        torch = need("torch", "quantize")
        self.walk, self.index, self.module = walk, index, module
        self.name = f"{walk.trunk}layers.{index}"
        self.linears = {n: m for n, m in module.named_modules() if isinstance(m, torch.nn.Linear)}

    def groups(self) -> list[list[str]]:
        """The layer's linears, those that read the same input together."""
        return [g for g in ([n for n in group if n in self.linears] for group in SAME_INPUT) if g]

    def run(self, see: Mapping[str, See]) -> None:
        for _ in self.outputs(see):
            pass

    def advance(self, see: Mapping[str, See] | None = None) -> None:
        for i, out in enumerate(self.outputs(see or {})):
            self.walk.states[i] = out

    def outputs(self, see: Mapping[str, See]) -> Iterator[Any]:
        torch = need("torch", "quantize")
        kept: list[Any] = [None]

        def hook(hear: See) -> Callable[..., None]:
            def before(module: Any, args: tuple[Any, ...]) -> None:
                x, marks = args[0], kept[0]
                real = marks.reshape(-1) != PADDING
                hear(x.reshape(-1, x.shape[-1])[real], marks.reshape(-1)[real])

            return before

        handles = [self.linears[name].register_forward_pre_hook(hook(f)) for name, f in see.items()]
        try:
            for state, batch in zip(self.walk.states, self.walk.batches, strict=True):
                kept[0] = torch.from_numpy(batch.marks).to(self.walk.device)
                with torch.inference_mode():
                    out = self.walk.through(self.module, state)
                yield out
        finally:
            for handle in handles:
                handle.remove()


class Walk:
    """Iterates over the decoder layers of a checkpoint, keeping the hidden states of every batch between them."""

    def __init__(self, folder: ModelFolder, batches: Sequence[Batch], report: Report, what: str = "reading") -> None:
        torch, transformers = need("torch", "quantize"), need("transformers", "quantize")
        self.folder, self.batches, self.report, self.what = folder, batches, report, what
        self.device, self.dtype = device_and_dtype(folder)
        self.trunk = trunk_of(folder)
        with refused(folder.path), torch.device("meta"):
            config = transformers.AutoConfig.from_pretrained(folder.path, trust_remote_code=False).get_text_config()
            config.use_cache = False
            self.model = transformers.AutoModel.from_config(config, dtype=self.dtype, trust_remote_code=False)
        self.rotary = type(self.model.rotary_emb)(config).to(self.device)
        table = folder.tensor(f"{self.trunk}embed_tokens.weight")
        self.states = [self.tensor(np.ascontiguousarray(table[b.ids])) for b in batches]
        folder.release(f"{self.trunk}embed_tokens.weight")

    def tensor(self, array: np.ndarray) -> Any:
        from annie_quant.hf.codec import to_torch

        return to_torch(np.array(array)).to(self.device, self.dtype)

    def through(self, module: Any, state: Any) -> Any:
        torch = need("torch", "quantize")
        places = torch.arange(state.shape[1], device=self.device).view(1, 1, -1).expand(3, state.shape[0], -1)
        angles = self.rotary(state, places)
        out = module(state, position_embeddings=angles, attention_mask=None, position_ids=places[0], use_cache=False)
        return out[0] if isinstance(out, tuple) else out

    def __iter__(self) -> Iterator[Layer]:
        count = len(self.model.layers)
        for index in range(count):
            self.report(f"{self.what}: layer {index + 1} of {count}")
            module = self.model.layers[index]
            names = list(module.state_dict())
            stored = {n: f"{self.trunk}layers.{index}.{n}" for n in names}
            module.load_state_dict({n: self.tensor(self.folder.tensor(t)) for n, t in stored.items()}, assign=True)
            yield Layer(self, index, module.eval())
            module.to("meta")
            for tensor in stored.values():
                self.folder.release(tensor)
