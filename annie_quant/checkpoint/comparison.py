"""Compare several forms of one model with its bf16 source, tensor by tensor.

A form is a model folder in any dialect, or a GGUF file (NVFP4, Q4_K_M or any other). For a GGUF
file, llama.cpp's changes (order of heads, norms) are applied to the source first, so that the error
is that of the format alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from annie_quant.checkpoint import dialects
from annie_quant.checkpoint.checks.source import rel_l2
from annie_quant.checkpoint.gguf.layout import Layout, read_settings
from annie_quant.checkpoint.gguf.reader import open_gguf
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import folder_size, gguf_size
from annie_quant.core.errors import CheckpointError, UsageError, need
from annie_quant.core.untrusted import JsonObject

if TYPE_CHECKING:
    from gguf import ReaderTensor

COMPUTED = ("rope_freqs.weight",)  # by llama.cpp's converter, from config.json
SAME = 1e-4  # relative L2: products of scales in another order, and bf16 in float16
REQUANTIZED = {"Q8_0": 0.02}  # formats that hold FP8 and 16-bit numbers nearly: their own rounding


class ComparedTensor(msgspec.Struct):
    """One tensor of one form.

    weights: number of elements.
    rel_l2, cosine: against the source.
    bits: per weight.
    """

    tensor: str
    form: str
    format: str
    weights: int
    rel_l2: float
    cosine: float
    bits: float


class FormSummary(msgspec.Struct):
    """One form of a model.

    bits_per_weight: of all its tensors (annie_quant.checkpoint.size).
    rel_l2: over its matrices.
    worst: the tensor with the largest relative error.
    """

    bits_per_weight: float
    rel_l2: float
    worst: str


class ComparedWeight(NamedTuple):
    """One tensor of a form, with its values and those of the source (arrays of equal shape)."""

    name: str
    format: str
    size_bytes: int
    values: np.ndarray
    source: np.ndarray

    def compare(self, form: str) -> ComparedTensor:
        weights = self.source.size
        return ComparedTensor(
            self.name,
            form,
            self.format,
            weights,
            rel_l2(self.values, self.source),
            cosine(self.values, self.source),
            round(8 * self.size_bytes / weights, 3),
        )


class FormComparison(msgspec.Struct):
    """Several forms of one model.

    source: path of the bf16 source.
    rows: one per tensor and form.
    summary: form → FormSummary.
    """

    source: str
    rows: list[ComparedTensor] = msgspec.field(default_factory=list)
    summary: dict[str, FormSummary] = msgspec.field(default_factory=dict)

    def to_dict(self, worst: int = 5) -> JsonObject:
        """Return the comparison as JSON values, with the names of each form's `worst` tensors."""
        fields: JsonObject = msgspec.to_builtins(self)
        fields["tensors"] = fields.pop("rows")
        fields["worst"] = {}
        for form in self.summary:
            fields["worst"][form] = [row.tensor for row in self.worst(form, worst)]
        return fields

    def worst(self, form: str, n: int = 5) -> list[ComparedTensor]:
        """Return the `n` tensors with the largest relative error."""
        rows = [row for row in self.rows if row.form == form]
        return sorted(rows, key=lambda row: -row.rel_l2)[:n]


def labels(paths: Iterable[str | os.PathLike]) -> dict[str, str | os.PathLike]:
    """Return label → path.

    A label is the path's name, with as many parent folders as it takes to make all labels
    different.
    """
    forms = [Path(path) for path in paths]
    parts = [Path(os.path.abspath(p)).parts for p in forms]  # noqa: PTH100 - links keep their names
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return dict(zip(names, forms, strict=True))
    raise UsageError("the same form is given twice", "name each once")


def compare(source: str | os.PathLike, forms: dict[str, str | os.PathLike]) -> FormComparison:
    """Compare each form with the bf16 source, matrix by matrix.

    An expert's linear is one matrix, also where its source stores all experts in one tensor.

    forms: label → folder or GGUF file.
    """
    original = ModelFolder(source)
    if dialects.linears(original):
        hint = "give the bf16 checkpoint as the source"
        raise CheckpointError(f"{source} is quantized itself", hint)
    result = FormComparison(str(source))
    for label, path in forms.items():
        path = Path(path)
        if path.is_file():
            weights = gguf_weights(path, original)
            size = gguf_size(path)
        else:
            folder = ModelFolder(path)
            weights = folder_weights(folder, original)
            size = folder_size(folder)
        squared_error = 0.0
        squared_norm = 0.0
        first_row = len(result.rows)
        for weight in weights:
            shape = weight.source.shape
            if weight.values.shape != shape:
                message = f"{weight.name}: {list(weight.values.shape)} in {path}, {list(shape)} in {source}"
                raise CheckpointError(message, "are they of one model?")
            row = weight.compare(label)
            result.rows.append(row)
            energy = float(np.square(weight.source, dtype=np.float64).sum())
            squared_error += row.rel_l2**2 * energy
            squared_norm += energy
        if len(result.rows) == first_row:
            message = f"{path}: none of its tensors is in {source}"
            raise CheckpointError(message, "are they of one model?")
        error = (squared_error / squared_norm) ** 0.5 if squared_norm else 0.0
        (worst,) = result.worst(label, 1)
        result.summary[label] = FormSummary(size.bits_per_weight, error, worst.tensor)
    return result


def cosine(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the cosine of the angle between two tensors.

    For zero tensors it is 1 where they are equal, else 0.
    """
    a = ours.astype(np.float64).ravel()
    b = theirs.astype(np.float64).ravel()
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length else float(not (a - b).any())


def matrices(source: ModelFolder) -> Iterator[str]:
    """Yield the names of the source's matrices, also those of experts inside merged tensors."""
    for name in source:
        for part in source.parts_of(name) or [name]:
            if len(source.info(part).shape) == 2:
                yield part


def folder_weights(folder: ModelFolder, source: ModelFolder) -> Iterator[ComparedWeight]:
    """Yield the matrices that both a model folder and the source have."""
    linears = {source.find(f"{n}.weight"): x for n, x in dialects.linears(folder).items()}
    for name in matrices(source):
        linear = linears.get(name)
        plain = folder.find(name)
        expected = source.tensor(name).astype(np.float32)
        if linear:
            size_bytes = sum(folder.info(t).size_bytes for t in linear.tensors())
            values = linear.dequantize(folder)
            yield ComparedWeight(name, linear.format, size_bytes, values, expected)
        elif plain:
            info = folder.info(plain)
            values = folder.tensor(plain).astype(np.float32)
            yield ComparedWeight(name, info.dtype, info.size_bytes, values, expected)
        source.release(name)


def gguf_weights(path: Path, source: ModelFolder) -> Iterator[ComparedWeight]:
    """Yield the matrices that both a GGUF file and the source have, as llama.cpp stores them."""
    for weight in gguf_values(open_gguf(path), source, matrices(source), source.tensor):
        yield weight
        source.release(weight.name)


def gguf_values(
    tensors: Mapping[str, ReaderTensor],
    source: ModelFolder,
    names: Iterable[str],
    read: Callable[[str], np.ndarray],
) -> Iterator[ComparedWeight]:
    """Yield those of a folder's tensors that a GGUF file has.

    read: returns the values of one of the names.
    """
    gguf = need("gguf", "serve")
    layout = Layout.of(source.family, read_settings(source))
    experts = source.family.experts
    for name in names:
        stored = layout.name(name) or ""
        tensor = tensors.get(stored)
        if tensor is None:
            continue
        data = tensor.data
        size_bytes = int(tensor.n_bytes)
        number = 0
        expert = experts.split(name) if experts else None
        if expert:  # the file has all experts of a layer in one tensor
            number = expert[1]
            size_bytes //= len(data)
            data = data[number]
        values = gguf.quants.dequantize(data, tensor.tensor_type)
        scale = tensors.get(stored.removesuffix(".weight") + ".scale")
        if scale is not None:
            values = values * np.float32(scale.data[number])
            size_bytes += 4
        expected = layout.transform(name, read(name)).astype(np.float32)
        yield ComparedWeight(name, tensor.tensor_type.name, size_bytes, values, expected)


# ---- whether a GGUF file holds a checkpoint's numbers


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
    """Compare a GGUF file with the checkpoint that it was made from.

    Raises CheckpointError where one cannot be read.
    """
    model = dialects.read(ModelFolder(checkpoint))
    folder = model.folder
    stored = open_gguf(path)
    layout = Layout.of(folder.family, read_settings(folder))
    expected = {}  # name in the checkpoint → name in the file
    for name in model.weights:
        file_name = layout.name(name)
        if file_name is not None:
            expected[name] = file_name

    def read(name: str) -> np.ndarray:
        linear = model.linears.get(name.removesuffix(".weight"))
        return linear.dequantize(folder) if linear else folder.tensor(name)

    tensors = []
    for weight in gguf_values(stored, folder, expected, read):
        same_shape = weight.values.shape == weight.source.shape
        error = rel_l2(weight.values, weight.source) if same_shape else float("inf")
        tensors.append(StoredTensor(weight.name, weight.format, error))
    compared = {tensor.name for tensor in tensors}
    known = {*COMPUTED, *expected.values()}
    for name in expected.values():
        module = name.removesuffix(".weight")
        known |= {f"{module}.scale", f"{module}.input_scale"}
    missing = [name for name in expected if name not in compared]
    return FileContent(tensors, missing, sorted(stored.keys() - known))
