"""Whether a GGUF file holds a checkpoint's numbers: every tensor of one compared with its values in the other."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from annie_quant.checkpoint import dialects
from annie_quant.checkpoint.checks.source import rel_l2
from annie_quant.checkpoint.comparison import gguf_values
from annie_quant.checkpoint.gguf.layout import Layout, read_settings
from annie_quant.checkpoint.gguf.reader import open_gguf
from annie_quant.checkpoint.shards import ModelFolder

COMPUTED = ("rope_freqs.weight",)  # by the converter, from config.json
SAME = 1e-4  # relative L2: products of scales in another order, and bf16 in float16
REQUANTIZED = {"Q8_0": 0.02}  # formats that hold FP8 and 16-bit numbers nearly: their own rounding


class StoredTensor(NamedTuple):
    """A tensor that a file and a checkpoint have. format: ggml's name; error: relative L2."""

    name: str
    format: str
    error: float

    @property
    def is_same(self) -> bool:
        return self.error <= SAME

    @property
    def is_near(self) -> bool:
        return self.error <= REQUANTIZED.get(self.format, SAME)


class FileContent(NamedTuple):
    """tensors: those that both have. missing: of the checkpoint. unknown: of the file."""

    tensors: list[StoredTensor]
    missing: list[str]
    unknown: list[str]


def compare_file(checkpoint: Path, path: Path) -> FileContent:
    """Compare a GGUF file with the checkpoint that it was made from. Raises CheckpointError where one cannot be read."""
    model = dialects.read(ModelFolder(checkpoint))
    folder, stored = model.folder, open_gguf(path)
    layout = Layout.of(folder.family, read_settings(folder))
    weights = {f"{name}.weight": linear for name, linear in model.linears.items()}
    names = [*weights, *(part for name in model.unowned for part in folder.parts_of(name) or [name])]
    names = [n for n in names if layout.name(n) is not None]

    def read(name: str) -> np.ndarray:
        return weights[name].dequantize(folder) if name in weights else folder.tensor(name)

    tensors = []
    for weight in gguf_values(stored, folder, names, read):
        same_shape = weight.values.shape == weight.source.shape
        error = rel_l2(weight.values, weight.source) if same_shape else float("inf")
        tensors.append(StoredTensor(weight.name, weight.format, error))
    found = {t.name for t in tensors}
    known = {layout.name(n) for n in names}
    scales = {f"{str(n).removesuffix('.weight')}{end}" for n in known for end in (".scale", ".input_scale")}
    unknown = sorted(n for n in stored if n not in known and n not in scales and n not in COMPUTED)
    return FileContent(tensors, [n for n in names if n not in found], unknown)
