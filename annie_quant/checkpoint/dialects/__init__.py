"""The dialects of quantized linears in a safetensors folder, one module per dialect.

A module implements the protocol Dialect, or WritableDialect where the dialect is also written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from annie_quant.checkpoint.dialects import compressed_tensors, fp8, modelopt
from annie_quant.checkpoint.linears import Linear, QuantConfig, owned_tensors
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned, QuantSettings
from annie_quant.models.formats import Format


class Dialect(Protocol):
    """A layout of quantized weights that is read."""

    NAME: str

    def matches(self, folder: ModelFolder) -> bool:
        """Return whether a folder is written in this dialect."""

    def linears(self, folder: ModelFolder) -> dict[str, Linear]:
        """Return module name → quantized linear, from the tensors on disk, whatever the settings list."""

    def config(self, folder: ModelFolder) -> QuantConfig:
        """Return the folder's quantization settings."""


class WritableDialect(Dialect, Protocol):
    """A layout of quantized weights that is read and written."""

    def tensors(self, linear: Linear, folder: ModelFolder) -> list[Planned]:
        """Plan the tensors of one linear in this layout."""

    def settings(
        self,
        formats: Mapping[str, Format],
        excluded: list[str],
        group: int,
        kv_cache: str | None = None,
    ) -> QuantSettings:
        """Return the settings to write.

        formats: quantized module → its format.
        excluded: the other linears.
        group: columns per block scale.
        kv_cache: "FP8", or None for a cache in 16 bits.
        """

    def kv_scale(self, layer: str, end: str, value: np.ndarray) -> Planned:
        """Plan a layer's scale of the KV cache. end: "k_scale" or "v_scale"."""


WRITTEN: dict[str, WritableDialect] = {
    modelopt.NAME: modelopt,
    compressed_tensors.NAME: compressed_tensors,
}
DIALECTS: dict[str, Dialect] = {
    compressed_tensors.NAME: compressed_tensors,
    fp8.NAME: fp8,
    modelopt.NAME: modelopt,
}


@dataclass(frozen=True)
class QuantizedFolder:
    """A model folder as its dialect reads it.

    dialect: None for plain weights.
    linears: the quantized linears by module name; empty for plain weights.
    config: the quantization settings; empty ones for plain weights.
    """

    folder: ModelFolder
    dialect: Dialect | None
    linears: dict[str, Linear]
    config: QuantConfig

    @cached_property
    def owned(self) -> set[str]:
        """The names of all tensors of the quantized linears."""
        return owned_tensors(self.linears.values())

    @property
    def nvfp4(self) -> list[Linear]:
        """The linears in NVFP4."""
        return [x for x in self.linears.values() if x.format == "nvfp4"]

    @cached_property
    def unowned(self) -> list[str]:
        """The names of all other tensors, in file order."""
        return [name for name in self.folder if name not in self.owned]

    @property
    def weights(self) -> list[str]:
        """The names "MODULE.weight" of the quantized linears, then those of `unowned`.

        Merged experts are listed one by one.
        """
        plain = [part for name in self.unowned for part in self.folder.parts_of(name) or [name]]
        return [*(f"{module}.weight" for module in self.linears), *plain]

    def shape(self, weight: str) -> tuple[int, ...]:
        """Return the shape of one of `weights`."""
        linear = self.linears.get(weight.removesuffix(".weight"))
        return linear.shape(self.folder) if linear else self.folder.info(weight).shape


def read(folder: ModelFolder) -> QuantizedFolder:
    """Read the quantized linears and the settings of a folder."""
    dialect = of(folder)
    if dialect is None:
        return QuantizedFolder(folder, None, {}, QuantConfig("", "", None, []))
    return QuantizedFolder(folder, dialect, dialect.linears(folder), dialect.config(folder))


def of(folder: ModelFolder) -> Dialect | None:
    """Return the dialect that a folder is written in, or None for plain weights."""
    return next((dialect for dialect in DIALECTS.values() if dialect.matches(folder)), None)


def linears(folder: ModelFolder) -> dict[str, Linear]:
    """Return the quantized linears of a folder by module name; empty for plain weights."""
    dialect = of(folder)
    return dialect.linears(folder) if dialect else {}


def config(folder: ModelFolder) -> QuantConfig:
    """Return the quantization settings of a folder; empty ones for plain weights."""
    return read(folder).config
