"""Compare several forms of one model with its bf16 source, tensor by tensor: NVFP4, Q4_K_M, or any other.

A form is a model folder in any dialect, or a GGUF file. For a GGUF file, llama.cpp's changes (order of heads, norms) are applied
to the source first, so that the error is that of the format alone.
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
from annie_quant.checkpoint.linears import label_of
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
        names = {form: [r.tensor for r in self.worst(form, worst)] for form in self.summary}
        fields: JsonObject = msgspec.to_builtins(self)
        return {
            "source": self.source,
            "summary": fields["summary"],
            "worst": names,
            "tensors": fields["rows"],
        }

    def worst(self, form: str, n: int = 5) -> list[ComparedTensor]:
        """Return the `n` tensors with the largest relative error."""
        return sorted((r for r in self.rows if r.form == form), key=lambda r: -r.rel_l2)[:n]

    def plot(self, path: str | os.PathLike) -> None:
        """Write a plot of each tensor's relative error (.svg, .png, .pdf): one row per kind of tensor, one colour per form."""
        need("matplotlib", "plots")
        from matplotlib.figure import Figure

        labels = {r.tensor: label_of(r.tensor.removesuffix(".weight")) for r in self.rows}
        kinds = list(dict.fromkeys(labels.values()))
        figure = Figure(figsize=(9, 1.2 + 0.32 * len(kinds)), layout="constrained")
        axes = figure.subplots()
        for i, (form, summary) in enumerate(self.summary.items()):
            rows = [r for r in self.rows if r.form == form]
            shift = (
                0.6 * (i / max(1, len(self.summary) - 1) - 0.5) if len(self.summary) > 1 else 0.0
            )
            heights = [kinds.index(labels[r.tensor]) + shift for r in rows]
            label = f"{form}: {summary.bits_per_weight:.2f} bits, rel-L2 {summary.rel_l2:.4f}"
            axes.plot([r.rel_l2 for r in rows], heights, "o", markersize=4, alpha=0.7, label=label)
        title = f"against {Path(self.source).name}"
        axes.set(
            xlabel="relative L2 error of a tensor",
            title=title,
            ylim=(len(kinds), -1),
            xlim=(0, None),
        )
        axes.set_yticks(range(len(kinds)), kinds)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize="small")
        try:
            figure.savefig(path)
        except ValueError as error:
            raise UsageError(
                f"{path}: {str(error)[:100]}", "name the plot .svg, .png or .pdf"
            ) from None


def labels(paths: Iterable[str | os.PathLike]) -> dict[str, str | os.PathLike]:
    """Return label → path. A label is the path's name, with as many parent folders as it takes to make all labels different."""
    forms = [Path(p) for p in paths]
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
        raise CheckpointError(
            f"{source} is quantized itself", "give the bf16 checkpoint as the source"
        )
    result = FormComparison(str(source))
    for label, path in forms.items():
        if Path(path).is_file():
            weights = gguf_weights(Path(path), original)
            size = gguf_size(Path(path))
        else:
            folder = ModelFolder(path)
            weights = folder_weights(folder, original)
            size = folder_size(folder)
        total = 0
        squared = 0.0
        norm = 0.0
        for weight in weights:
            if weight.values.shape != weight.source.shape:
                shapes = f"{list(weight.values.shape)} in {path}, {list(weight.source.shape)} in {source}"
                raise CheckpointError(f"{weight.name}: {shapes}", "are they of one model?")
            error = rel_l2(weight.values, weight.source)
            elements = weight.source.size
            angle = cosine(weight.values, weight.source)
            bits = round(8 * weight.size_bytes / elements, 3)
            result.rows.append(
                ComparedTensor(weight.name, label, weight.format, elements, error, angle, bits)
            )
            energy = float(np.square(weight.source, dtype=np.float64).sum())
            total, squared, norm = total + elements, squared + error**2 * energy, norm + energy
        if not total:
            raise CheckpointError(
                f"{path}: none of its tensors is in {source}", "are they of one model?"
            )
        whole = (squared / norm) ** 0.5 if norm else 0.0
        worst = result.worst(label, 1)[0].tensor
        result.summary[label] = FormSummary(size.bits_per_weight, whole, worst)
    return result


def cosine(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the cosine of the angle between two tensors; for zero tensors 1 where they are equal, else 0."""
    a = ours.astype(np.float64).ravel()
    b = theirs.astype(np.float64).ravel()
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length else float(not (a - b).any())


def matrices(source: ModelFolder) -> Iterator[str]:
    """Yield the names of the source's matrices, including those of single experts inside merged tensors."""
    for name in source:
        yield from (n for n in source.parts_of(name) or [name] if len(source.info(n).shape) == 2)


def folder_weights(folder: ModelFolder, source: ModelFolder) -> Iterator[ComparedWeight]:
    """Yield the matrices that both a model folder and the source have."""
    linears = {source.find(f"{n}.weight"): x for n, x in dialects.linears(folder).items()}
    for name in matrices(source):
        values = source.tensor(name).astype(np.float32)
        linear = linears.get(name)
        if linear:
            size = sum(folder.info(t).size_bytes for t in linear.tensors())
            yield ComparedWeight(name, linear.format, size, linear.dequantize(folder), values)
        elif plain := folder.find(name):
            info = folder.info(plain)
            yield ComparedWeight(
                name, info.dtype, info.size_bytes, folder.tensor(plain).astype(np.float32), values
            )
        source.release(name)


def gguf_weights(path: Path, source: ModelFolder) -> Iterator[ComparedWeight]:
    """Yield the matrices that both a GGUF file and the source have; the source's are as llama.cpp would store them."""
    tensors = open_gguf(path)
    for weight in gguf_values(tensors, source, matrices(source), source.tensor):
        yield weight
        source.release(weight.name)


def gguf_values(
    tensors: Mapping[str, ReaderTensor],
    source: ModelFolder,
    names: Iterable[str],
    read: Callable[[str], np.ndarray],
) -> Iterator[ComparedWeight]:
    """Yield those of a folder's tensors that a GGUF file has. read: returns the values of one of the names."""
    gguf = need("gguf", "serve")
    layout = Layout.of(source.family, read_settings(source))
    experts = source.family.experts
    for name in names:
        stored = layout.name(name) or ""
        if stored not in tensors:
            continue
        tensor = tensors[stored]
        expert = (
            experts.split(name) if experts else None
        )  # the file has all experts of a layer in one tensor
        number, count = (expert[1], len(tensor.data)) if expert else (0, 1)
        values = gguf.quants.dequantize(
            tensor.data[number] if expert else tensor.data, tensor.tensor_type
        )
        scale = tensors.get(stored.removesuffix(".weight") + ".scale")
        if scale is not None:
            values = values * np.float32(scale.data[number])
        expected = layout.transform(name, read(name)).astype(np.float32)
        size = int(tensor.n_bytes) // count + (4 if scale is not None else 0)
        yield ComparedWeight(name, tensor.tensor_type.name, size, values, expected)


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
    """Compare a GGUF file with the checkpoint that it was made from. Raises CheckpointError where one cannot be read."""
    model = dialects.read(ModelFolder(checkpoint))
    folder = model.folder
    stored = open_gguf(path)
    layout = Layout.of(folder.family, read_settings(folder))
    weights = {f"{name}.weight": linear for name, linear in model.linears.items()}
    names = [n for n in model.weights if layout.name(n) is not None]

    def read(name: str) -> np.ndarray:
        return weights[name].dequantize(folder) if name in weights else folder.tensor(name)

    tensors = []
    for weight in gguf_values(stored, folder, names, read):
        same_shape = weight.values.shape == weight.source.shape
        error = rel_l2(weight.values, weight.source) if same_shape else float("inf")
        tensors.append(StoredTensor(weight.name, weight.format, error))
    found = {t.name for t in tensors}
    known = {layout.name(n) for n in names}
    scales = {
        f"{str(n).removesuffix('.weight')}{end}"
        for n in known
        for end in (".scale", ".input_scale")
    }
    unknown = sorted(n for n in stored if n not in known and n not in scales and n not in COMPUTED)
    return FileContent(tensors, [n for n in names if n not in found], unknown)
