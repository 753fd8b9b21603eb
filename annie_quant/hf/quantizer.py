"""NVFP4 checkpoints in transformers: the quantizer behind quant_method "modelopt", and behind "compressed-tensors" where
that means NVFP4.

transformers 5.14 has no ModelOpt loader, and for compressed-tensors' NVFP4 one that needs that package. Which modules are
quantized is read from the checkpoint's own tensors, not from the ignore list: the tensors are what is there, and the list
is written in three dialects.
"""

from __future__ import annotations

import logging
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

from annie_quant import models
from annie_quant.checkpoint import Linear, ModelFolder
from annie_quant.checkpoint.dialects import compressed_tensors, modelopt
from annie_quant.errors import CheckpointError
from annie_quant.hf import load_checks
from annie_quant.hf.fp8_linear import FP8Linear
from annie_quant.hf.nvfp4_linear import NVFP4Linear, PackedNVFP4Linear, nvfp4_linears

log = logging.getLogger(__name__)

READS = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "MIXED_PRECISION")
DIALECTS = {modelopt.NAME: modelopt, compressed_tensors.NAME: compressed_tensors}
PARTS = tuple(f".{name}" for kind in (NVFP4Linear, PackedNVFP4Linear) for name in kind.NAMES[1:])
CACHE_SCALES = (".k_scale", ".v_scale")  # of a quantized KV cache


class KeptConfig(QuantizationConfigMixin):
    """quantization_config kept as it was read, so that saving writes it back unchanged."""

    def __init__(self, quant_method: str = modelopt.NAME, **rest: Any) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]  # the enum knows no ModelOpt
        self.__dict__.update(rest)

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().to_dict().items() if not k.startswith("_")}


class NVFP4Quantizer(HfQuantizer):
    """Puts an NVFP4Linear or an FP8Linear wherever the checkpoint holds such tensors, and refuses by name what it cannot
    read."""

    requires_calibration = True
    quantization_config: KeptConfig

    @property
    def dialect(self) -> Any:
        return DIALECTS[str(self.quantization_config.quant_method)]

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        settings = self.dialect.read(self.quantization_config.to_dict())
        if settings.algo not in READS:
            raise CheckpointError(
                f"quant_algo {settings.algo!r} is not read; this runtime reads {', '.join(READS)}",
                "quantize to NVFP4 (annie-quant quantize), or serve this checkpoint with vLLM",
            )
        if settings.kv_cache or settings.raw.get("kv_cache_scheme"):
            log.warning("the checkpoint asks for a quantized KV cache; here the cache keeps the model's dtype")

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        files = kwargs.get("checkpoint_files") or []
        if not files:
            raise CheckpointError("NVFP4 is read from safetensors files, and there are none here")
        self.folder = Path(files[0]).parent
        with load_checks.named(self.folder):
            folder = ModelFolder(self.folder)
            linears = self.dialect.linears(folder)
            for linear in linears.values():
                replace(model, linear, folder)
            owned = {t for linear in linears.values() for t in linear.tensors()}
            for name in folder:
                if name not in owned and name.endswith(PARTS) and find(model, name.rpartition(".")[0]):
                    raise CheckpointError(f"{name}: the other tensors of its linear are missing", load_checks.HINT)
            if not nvfp4_linears(model):
                raise CheckpointError(
                    f"{self.folder.name}: the configuration says NVFP4, and no tensor is", "annie-quant audit DIR"
                )
            check_shapes(model, folder)
        for name in folder:
            if name.endswith(CACHE_SCALES) and (found := find(model, name.rpartition(".")[0])):
                found[1].register_buffer(name.rpartition(".")[2], empty(folder, name))
        self.dtypes = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for name, p in model.named_parameters():
            # transformers leaves a tensor that it renamed (a multimodal checkpoint's) in the file's dtype.
            if p.device.type != "meta" and p.dtype != self.dtypes.get(name, p.dtype):
                p.data = p.data.to(self.dtypes[name])
        with load_checks.named(self.folder):
            load_checks.check(model)
        for linear in nvfp4_linears(model).values():
            if linear.codes.device.type == "cuda":
                linear.prepare()
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters on top: gradients reach the input, the packed weights hold still

    @property
    def is_compileable(self) -> bool:
        return torch.cuda.is_available()


def find(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """The module that a checkpoint calls `name`; multimodal prefixes may differ from the class that is being loaded."""
    for candidate in models.aliases(name):
        try:
            return candidate, model.get_submodule(candidate)
        except AttributeError:
            continue
    return None


def replace(model: nn.Module, linear: Linear, folder: ModelFolder) -> None:
    """Put an NVFP4Linear or an FP8Linear in the place of the linear, after checking its tensors' types and shapes."""
    found = find(model, linear.name)
    if found is None and ".experts." in linear.name:
        raise CheckpointError(
            f"{linear.name}: this runtime reads no quantized experts (transformers keeps them as one 3-D weight)",
            "audit, compare and convert work; serve it with vLLM",
        )
    if found is None:
        return  # a part that this class leaves out (vision tower, MTP); transformers lists it as unexpected
    path, old = found
    if not isinstance(old, nn.Linear):
        raise CheckpointError(
            f"{linear.name} holds {linear.format} tensors but is a {type(old).__name__}, not a linear"
        )
    n, k = old.out_features, old.in_features
    info = folder.info(linear.weight)
    wanted = ("U8", (n, k // 2)) if linear.format == "nvfp4" else ("F8_E4M3", (n, k))
    if (info.dtype, info.shape) != wanted:
        raise CheckpointError(
            f"{linear.weight} is {info.dtype} {list(info.shape)}, expected {wanted[0]} {list(wanted[1])}",
            "annie-quant audit DIR",
        )
    make = nvfp4_of if linear.format == "nvfp4" else fp8_of
    new = make(linear, folder, k, n, {"bias": old.bias is not None, "dtype": old.weight.dtype, "device": "meta"})
    new._is_hf_initialized = True  # type: ignore[assignment]  # nothing of it is ever to be drawn at random
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new.requires_grad_(False))


def check_shapes(model: nn.Module, folder: ModelFolder) -> None:
    """transformers does not compare shapes where there is a quantizer; codes without their scales end here too."""
    wanted = model.state_dict()
    for name in folder:
        module, _, part = name.rpartition(".")
        found = find(model, module)
        info, there = folder.info(name), wanted.get(f"{found[0]}.{part}") if found else None
        if there is not None and tuple(there.shape) != info.shape:
            raise CheckpointError(
                f"{name} is {info.dtype} {list(info.shape)}, and config.json makes it {list(there.shape)}",
                "compare config.json with the source checkpoint's",
            )


def nvfp4_of(linear: Linear, folder: ModelFolder, k: int, n: int, more: dict[str, Any]) -> NVFP4Linear:
    kind = PackedNVFP4Linear if linear.reciprocal else NVFP4Linear
    for name, there in (
        (kind.NAMES.block_scale, linear.block_scale),
        (kind.NAMES.tensor_scale, linear.global_scale),
    ):
        if there is None:
            raise CheckpointError(f"{linear.name}.{name} is missing beside {linear.weight}", "annie-quant audit DIR")
    scales = folder.info(linear.block_scale or "")
    if scales.dtype != "F8_E4M3" or scales.shape not in {(n, k // 16), (n, k // 32)}:
        raise CheckpointError(
            f"{scales.name} is {scales.dtype} {list(scales.shape)}, expected F8_E4M3 [{n}, {k // 16}] or [{n}, {k // 32}]",
            "annie-quant audit DIR",
        )
    activations = linear.input_global is not None
    return kind(k, n, group=k // scales.shape[1], activations=activations, pre_quant=bool(linear.pre_quant), **more)


def fp8_of(linear: Linear, folder: ModelFolder, k: int, n: int, more: dict[str, Any]) -> FP8Linear:
    if linear.block_scale is None:
        raise CheckpointError(f"{linear.name}.weight_scale is missing beside {linear.weight}", "annie-quant audit DIR")
    scale = folder.info(linear.block_scale)
    if scale.elements not in (1, n):
        raise CheckpointError(f"{scale.name} is {list(scale.shape)}, expected one number or one for each of {n} rows")
    return FP8Linear(
        k,
        n,
        scale_shape=scale.shape,
        scale_dtype=empty(folder, scale.name).dtype,
        input_shape=folder.info(linear.input_global).shape if linear.input_global else None,
        **more,
    )


def empty(folder: ModelFolder, name: str) -> torch.Tensor:
    """A tensor without memory, of the shape and type that the file holds."""
    info = folder.info(name)
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if info.dtype not in kinds:
        raise CheckpointError(f"{name} is {info.dtype}, expected a scale of 16 or 32 bits", "annie-quant audit DIR")
    return torch.empty(info.shape, dtype=kinds[info.dtype], device="meta")


def register() -> None:
    """Make transformers know quant_method "modelopt", and read compressed-tensors' NVFP4 with the quantizer above.

    A transformers that knows "modelopt" already keeps its own, and compressed-tensors' other formats stay with theirs.
    """
    if modelopt.NAME not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(modelopt.NAME)(KeptConfig)
    if modelopt.NAME not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(modelopt.NAME)(NVFP4Quantizer)
    name = compressed_tensors.NAME
    their_config: Any = AUTO_QUANTIZATION_CONFIG_MAPPING[name]
    their_quantizer: Any = AUTO_QUANTIZER_MAPPING[name]
    if their_config.__name__ == "NVFP4OrTheirs":
        return

    class NVFP4OrTheirs(QuantizationConfigMixin):
        """compressed-tensors' settings: kept as read where they mean NVFP4, transformers' own class elsewhere."""

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            wanted = KeptConfig if is_nvfp4(config_dict) else their_config
            return wanted.from_dict(config_dict, *args, **kwargs)

    def quantizer(config: Any, **kwargs: Any) -> HfQuantizer:
        return (NVFP4Quantizer if isinstance(config, KeptConfig) else their_quantizer)(config, **kwargs)

    AUTO_QUANTIZATION_CONFIG_MAPPING[name] = NVFP4OrTheirs
    AUTO_QUANTIZER_MAPPING[name] = quantizer  # type: ignore[assignment]


def is_nvfp4(config: dict[str, Any]) -> bool:
    """Whether compressed-tensors' settings have a group of packed NVFP4, and no group of another 4-bit format."""
    groups = [g for g in (config.get("config_groups") or {}).values() if isinstance(g, dict)]
    four = [g for g in groups if "NVFP4" in compressed_tensors.group_algo(g)]
    return bool(four) and all(
        (g.get("format") or config.get("format")) == compressed_tensors.NVFP4_FORMAT for g in four
    )
