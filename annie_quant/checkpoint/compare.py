"""Several forms of one model, tensor by tensor against its bf16 source: NVFP4 beside Q4_K_M beside anything.

A form is a model folder in any dialect, or a GGUF file; GGUF tensors are compared after llama.cpp's own changes
(head order, norms) have been made to the source, so that the error is the format's alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from annie_quant.checkpoint import dialects
from annie_quant.checkpoint.gguf import names
from annie_quant.checkpoint.gguf.reader import open_gguf
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.source_diff import rel_l2, source_name
from annie_quant.errors import CheckpointError, UsageError, need

Weight = tuple[str, str, int, np.ndarray, np.ndarray]  # name, format, bytes on disk, its values, the source's values


@dataclass
class Comparison:
    """`rows`: one a tensor and form: tensor, form, format, weights, bits, rel_l2, cosine. `summary`: one a form."""

    source: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self, worst: int = 5) -> dict[str, Any]:
        """All of it, with the names of each form's worst tensors."""
        names = {form: [r["tensor"] for r in self.worst(form, worst)] for form in self.summary}
        return {"source": self.source, "summary": self.summary, "worst": names, "tensors": self.rows}

    def worst(self, form: str, n: int = 5) -> list[dict[str, Any]]:
        """The tensors with the largest relative error."""
        return sorted((r for r in self.rows if r["form"] == form), key=lambda r: -r["rel_l2"])[:n]

    def plot(self, path: str | os.PathLike) -> None:
        """Relative error of each tensor, a row a kind of tensor and a colour a form, as an image (.svg, .png, .pdf)."""
        need("matplotlib", "plots")
        from matplotlib.figure import Figure

        kinds = list(dict.fromkeys(kind_of(r["tensor"]) for r in self.rows))
        figure = Figure(figsize=(9, 1.2 + 0.32 * len(kinds)), layout="constrained")
        axes = figure.subplots()
        for i, (form, summary) in enumerate(self.summary.items()):
            rows = [r for r in self.rows if r["form"] == form]
            shift = 0.6 * (i / max(1, len(self.summary) - 1) - 0.5) if len(self.summary) > 1 else 0.0
            places = [kinds.index(kind_of(r["tensor"])) + shift for r in rows]
            label = f"{form}: {summary['bits_per_weight']:.2f} bits, rel-L2 {summary['rel_l2']:.4f}"
            axes.plot([r["rel_l2"] for r in rows], places, "o", markersize=4, alpha=0.7, label=label)
        axes.set(
            xlabel="relative L2 error of a tensor", title=f"against {Path(self.source).name}", ylim=(len(kinds), -1)
        )
        axes.set_yticks(range(len(kinds)), kinds)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize="small")
        try:
            figure.savefig(path)
        except ValueError as error:
            raise UsageError(f"{path}: {str(error)[:100]}", "name the plot .svg, .png or .pdf") from None


def kind_of(tensor: str) -> str:
    """A tensor's last two parts, the same in every layer."""
    return ".".join(tensor.removesuffix(".weight").split(".")[-2:])


def labels(paths: Iterable[str | os.PathLike]) -> dict[str, str | os.PathLike]:
    """A short name for each form: its own, with as many of its folders as tell it from the others."""
    given = [Path(p) for p in paths]
    parts = [Path(os.path.abspath(p)).parts for p in given]  # noqa: PTH100 - links keep their names
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return dict(zip(names, given, strict=True))
    raise UsageError("the same form is given twice", "name each once")


def compare(source: str | os.PathLike, forms: dict[str, str | os.PathLike]) -> Comparison:
    """Compare each form (label → folder or GGUF file) with the bf16 source. Only tensors of two dimensions count."""
    origin = ModelFolder(source)
    if dialects.linears(origin):
        raise CheckpointError(f"{source} is quantized itself", "give the bf16 checkpoint as the source")
    result = Comparison(str(source))
    for label, path in forms.items():
        weights = (
            gguf_weights(Path(path), origin) if Path(path).is_file() else folder_weights(ModelFolder(path), origin)
        )
        total = bits = squared = norm = 0.0
        for name, kind, size_bytes, ours, theirs in weights:
            row = measure(ours, theirs) | {"bits": round(8 * size_bytes / theirs.size, 3)}
            result.rows.append({"tensor": name, "form": label, "format": kind, "weights": theirs.size} | row)
            energy = float(np.square(theirs, dtype=np.float64).sum())
            total, bits = total + theirs.size, bits + 8 * size_bytes
            squared, norm = squared + row["rel_l2"] ** 2 * energy, norm + energy
        if not total:
            raise CheckpointError(f"{path}: no tensor of it is in {source}", "are they of one model?")
        result.summary[label] = {
            "bits_per_weight": round(bits / total, 3),
            "rel_l2": (squared / norm) ** 0.5 if norm else 0.0,
            "worst": result.worst(label, 1)[0]["tensor"],
        }
    return result


def measure(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return {"rel_l2": rel_l2(ours, theirs), "cosine": float(a @ b) / length if length else float(not (a - b).any())}


def folder_weights(folder: ModelFolder, origin: ModelFolder) -> Iterator[Weight]:
    linears = dialects.linears(folder)
    for name in origin:
        if len(origin.info(name).shape) != 2:
            continue
        module = name.removesuffix(".weight")
        theirs = origin.tensor(name).astype(np.float32)
        linear = next((linears[n] for n in linears if n == module or source_name(f"{n}.weight", origin) == name), None)
        if linear:
            size = sum(folder.info(t).size_bytes for t in linear.tensors())
            yield name, linear.format, size, linear.dequantize(folder), theirs
        elif here := source_name(name, folder):
            info = folder.info(here)
            yield name, info.dtype, info.size_bytes, folder.tensor(here).astype(np.float32), theirs
        origin.release(name)


def gguf_weights(path: Path, origin: ModelFolder) -> Iterator[Weight]:
    gguf = need("gguf", "serve")
    tensors = open_gguf(path)
    config = origin.text_config
    heads = names.Heads.of(config)
    for name in origin:
        place = names.gguf_name(name, int(config["num_hidden_layers"]))
        if place not in tensors or len(origin.info(name).shape) != 2:
            continue
        tensor = tensors[place]
        ours = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        scale = tensors.get(place.removesuffix(".weight") + ".scale")
        if scale is not None:
            ours = ours * np.float32(scale.data[0])
        theirs = names.transform(name, origin.tensor(name), heads).astype(np.float32)
        yield name, tensor.tensor_type.name, int(tensor.n_bytes) + (4 if scale is not None else 0), ours, theirs
