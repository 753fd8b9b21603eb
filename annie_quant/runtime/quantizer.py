"""ModelOpt's NVFP4 checkpoints in transformers: the quantizer behind quant_method "modelopt".

transformers 5.14 has none. Which modules are quantized is read from the checkpoint's own tensors (a linear with a
`weight_scale_2`), not from the ignore list: the tensors are what is there, and the list is written in three dialects.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from annie_quant.errors import CheckpointError
from annie_quant.runtime.linear import NVFP4Linear, nvfp4_linears

log = logging.getLogger(__name__)

METHOD = "modelopt"
READS = {"NVFP4", "W4A16_NVFP4"}
PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale")


class ModelOptConfig(QuantizationConfigMixin):
    """quantization_config of a ModelOpt export, kept as it was read so that saving writes it back unchanged."""

    def __init__(self, quant_algo: str | None = None, **rest: Any) -> None:
        rest.pop("quant_method", None)
        self.quant_method = METHOD  # type: ignore[assignment]  # the enum knows no ModelOpt
        self.quant_algo = quant_algo
        self.__dict__.update(rest)

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().to_dict().items() if not k.startswith("_")}


class ModelOptQuantizer(HfQuantizer):
    """Puts an NVFP4Linear wherever the checkpoint holds NVFP4 tensors, and refuses what it cannot read by name."""

    requires_calibration = True
    quantization_config: ModelOptConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        algo = self.quantization_config.quant_algo
        if algo not in READS:
            raise CheckpointError(
                f"quant_algo {algo!r} is not read yet; this runtime reads {', '.join(sorted(READS))}",
                "quantize with the naive, direct or mlp_only strategy, or serve this checkpoint with vLLM",
            )
        if getattr(self.quantization_config, "kv_cache_scheme", None):
            log.warning("the checkpoint asks for a quantized KV cache; it is kept in the model's dtype here")

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        tensors = tensors_in(kwargs.get("checkpoint_files") or [])
        for name in sorted(n.removesuffix(".weight_scale_2") for n in tensors if n.endswith(".weight_scale_2")):
            replace(model, name, tensors)
        if not nvfp4_linears(model):
            raise CheckpointError(
                f"quant_algo is {self.quantization_config.quant_algo} and no tensor of the checkpoint is NVFP4 "
                "(none is called *.weight_scale_2)",
                "annie-quant audit says what is in it",
            )
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for name, linear in nvfp4_linears(model).items():
            check_values(name, linear)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters on top: gradients reach the input, the packed weights hold still

    @property
    def is_compileable(self) -> bool:
        return torch.cuda.is_available()


def tensors_in(files: list[str] | str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{tensor name: (safetensors dtype, shape)} from the headers of the shards."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in [files] if isinstance(files, str) else files:
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (a safe_open handle is no mapping)
                    part = shard.get_slice(name)
                    found[name] = (part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{Path(file).name} is no readable safetensors file: {error}", "copy the shard again"
            ) from error
    return found


def find_linear(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """The module that a checkpoint calls `name`; multimodal prefixes may differ from the class that is being loaded."""
    names = [name, name.replace("model.language_model.", "model."), name.replace("model.", "model.language_model.", 1)]
    for candidate in names:
        try:
            return candidate, model.get_submodule(candidate)
        except AttributeError:
            continue
    return None


def replace(model: nn.Module, name: str, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Put an NVFP4Linear in the place of the linear called `name`, after checking its tensors' types and shapes."""
    found = find_linear(model, name)
    if found is None:
        return  # a part that this class leaves out (vision tower, MTP); transformers lists it as unexpected
    path, old = found
    if not isinstance(old, nn.Linear):
        raise CheckpointError(f"{name} holds NVFP4 tensors but is a {type(old).__name__}, not a linear")
    n, k = old.out_features, old.in_features
    for part in PARTS[:3]:
        if f"{name}.{part}" not in tensors:
            raise CheckpointError(
                f"{name}.{part} is missing; an NVFP4 linear has {', '.join(PARTS[:3])}", "annie-quant audit DIR"
            )
    expect(name, "weight", tensors, "U8", (n, k // 2))
    kind, shape = tensors[f"{name}.weight_scale"]
    groups = shape[1] if len(shape) == 2 else 0
    group = k // groups if groups and k % groups == 0 else 0
    if kind != "F8_E4M3" or shape[0] != n or group not in (16, 32):
        raise CheckpointError(
            f"{name}.weight_scale is {kind} {list(shape)}, expected F8_E4M3 [{n}, {k // 16}] or [{n}, {k // 32}]"
        )
    new = NVFP4Linear(
        k,
        n,
        group=group,
        bias=old.bias is not None,
        activations=f"{name}.input_scale" in tensors,
        dtype=old.weight.dtype,
        device="meta",
    )
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new.requires_grad_(False))


def expect(name: str, part: str, tensors: dict, kind: str, shape: tuple[int, ...]) -> None:
    seen = tensors[f"{name}.{part}"]
    if seen != (kind, shape):
        raise CheckpointError(
            f"{name}.{part} is {seen[0]} {list(seen[1])}, expected {kind} {list(shape)}", "annie-quant audit DIR"
        )


def check_values(name: str, linear: NVFP4Linear) -> None:
    """Scales that would spread NaN or infinity through the model are refused here, by name."""
    tensor_scale, input_scale = linear.scalars()
    for part, value in (("weight_scale_2", tensor_scale), ("input_scale", input_scale)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise CheckpointError(f"{name}.{part} is {value}, expected a positive number", "annie-quant audit DIR")
    bad = int((linear.weight_scale.view(torch.uint8) & 0x7F == 0x7F).sum())
    if bad:
        raise CheckpointError(
            f"{name}.weight_scale holds {bad} NaN block scales (0x7F)", "annie-quant audit DIR --repair"
        )


def register() -> None:
    """Make transformers know quant_method "modelopt"; a transformers that knows it already keeps its own."""
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(ModelOptConfig)
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(ModelOptQuantizer)
