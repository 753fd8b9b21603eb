"""The transformers quantizer for NVFP4: quant_method "modelopt", and "compressed-tensors" where its format is NVFP4.

FP8 in blocks goes through it under its own method, which hf.load sets: transformers' quantizer of "fp8" stays as it is.

transformers 5.14 has no ModelOpt loader, and its compressed-tensors loader needs that package. Which modules are quantized is
read from the checkpoint's tensors, not from the ignore list, which is written in three dialects and is sometimes wrong.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightConverter
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.dialects import compressed_tensors, fp8, modelopt
from annie_quant.checkpoint.linears import FP8_BLOCK, is_per_token
from annie_quant.errors import CheckpointError
from annie_quant.hf import replacement
from annie_quant.hf.experts import SingleExperts, separate
from annie_quant.hf.nvfp4_linear import NVFP4Linear, PackedNVFP4Linear, nvfp4_linears
from annie_quant.hf.replacement import check_shapes, find_module, meta_tensor, replace_linear
from annie_quant.models import aliases

log = logging.getLogger(__name__)

ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "MIXED_PRECISION", FP8_BLOCK)
BLOCK_FP8, NAMED_BLOCK_FP8 = "annie_quant_fp8", "annie_quant_fp8_block"
DIALECTS = {
    modelopt.NAME: modelopt,
    compressed_tensors.NAME: compressed_tensors,
    BLOCK_FP8: fp8,
    NAMED_BLOCK_FP8: compressed_tensors,
}
SCALE_SUFFIXES = tuple(f".{name}" for kind in (NVFP4Linear, PackedNVFP4Linear) for name in kind.NAMES[1:])
KV_CACHE_SCALE_SUFFIXES = (".k_scale", ".v_scale")


class UnchangedConfig(QuantizationConfigMixin):
    """A quantization_config that is saved exactly as it was read."""

    def __init__(self, quant_method: str = modelopt.NAME, **fields: Any) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]  # transformers' enum has no "modelopt"
        self.__dict__.update(fields)

    def to_dict(self) -> dict[str, Any]:
        fields = {k: v for k, v in super().to_dict().items() if not k.startswith("_")}
        return fields | {"quant_method": DIALECTS[str(self.quant_method)].NAME}


class NVFP4Quantizer(HfQuantizer):
    """Replaces each linear that the checkpoint stores as NVFP4 or FP8 by NVFP4Linear, FP8Linear or BlockFP8Linear.

    Raises CheckpointError that names the tensor for everything it cannot read.
    """

    requires_calibration = True
    quantization_config: UnchangedConfig

    @property
    def dialect(self) -> Any:
        return DIALECTS[str(self.quantization_config.quant_method)]

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        settings = self.dialect.read(self.quantization_config.to_dict())
        if settings.algo not in ALGORITHMS:
            raise CheckpointError(
                f"quant_algo {settings.algo!r} is not supported here, expected one of {', '.join(ALGORITHMS)}",
                "quantize to NVFP4 (annie-quant quantize), or serve this checkpoint with vLLM",
            )
        if settings.kv_cache or settings.raw.get("kv_cache_scheme"):
            log.warning("the checkpoint's config requests a quantized KV cache; here the cache has the model's dtype")

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        files = kwargs.get("checkpoint_files") or []
        if not files:
            raise CheckpointError("NVFP4 is read from safetensors files, and this checkpoint has none")
        self.folder = Path(files[0]).parent
        with replacement.as_audit_finding(self.folder):
            folder = ModelFolder(self.folder)
            linears = self.dialect.linears(folder)
            settings = self.dialect.config(folder)
            self.singles = single_experts(folder)
            with torch.device("meta"):
                separate(model, folder.family, lambda name: any(a in self.singles for a in aliases(name)))
            for linear in linears.values():
                replace_linear(model, linear, folder, is_per_token(settings, linear.name))
            linear_tensors = {t for linear in linears.values() for t in linear.tensors()}
            for name in folder:
                if name not in linear_tensors and name.endswith(SCALE_SUFFIXES) and find_module(model, parent(name)):
                    raise CheckpointError(
                        f"{name}: the other tensors of its linear are missing", replacement.AUDIT_HINT
                    )
            if not nvfp4_linears(model) and settings.algo != FP8_BLOCK:
                raise CheckpointError(
                    f"{self.folder.name}: config.json declares NVFP4, and no tensor is NVFP4", replacement.AUDIT_HINT
                )
            check_shapes(model, folder)
        for name in folder:
            if name.endswith(KV_CACHE_SCALE_SUFFIXES) and (match := find_module(model, parent(name))):
                match.module.register_buffer(name.rpartition(".")[2], meta_tensor(folder, name))
        self.dtypes = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
        return model

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        """Leave out transformers' merging of single experts where the model has single ones, too."""
        if not self.singles:
            return super().update_weight_conversions(weight_conversions)
        merges = [c for c in weight_conversions if isinstance(c, WeightConverter)]
        return super().update_weight_conversions([c for c in weight_conversions if c not in merges])

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for name, p in model.named_parameters():
            # transformers leaves a tensor that it renamed (a multimodal checkpoint's) in the file's dtype.
            if p.device.type != "meta" and p.dtype != self.dtypes.get(name, p.dtype):
                p.data = p.data.to(self.dtypes[name])
        with replacement.as_audit_finding(self.folder):
            replacement.check_values(model)
        single = {m for experts in model.modules() if isinstance(experts, SingleExperts) for m in experts.modules()}
        for linear in nvfp4_linears(model).values():
            if linear.codes.device.type == "cuda" and linear not in single:  # of experts, those that run one by one
                linear.prepare()
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters: gradients reach the input, the packed weights do not change

    @property
    def is_compileable(self) -> bool:
        return torch.cuda.is_available()


def single_experts(folder: ModelFolder) -> set[str]:
    """Return the modules of experts that the folder stores under a name per expert ("model.layers.3.mlp.experts")."""
    experts = folder.family.experts
    split = (experts.split(name) for name in folder) if experts else ()
    return {f"{expert[0]}.{experts.module}" for expert in split if experts and expert}


def parent(tensor_name: str) -> str:
    """Return the name of the module that has this tensor."""
    return tensor_name.rpartition(".")[0]


def register() -> None:
    """Register the quantizer with transformers for "modelopt", compressed-tensors' NVFP4 and our own FP8 in blocks.

    A transformers that already supports "modelopt" keeps its own quantizer, and compressed-tensors' other formats keep
    theirs.
    """
    for method in (modelopt.NAME, BLOCK_FP8, NAMED_BLOCK_FP8):
        if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            register_quantization_config(method)(UnchangedConfig)
        if method not in AUTO_QUANTIZER_MAPPING:
            register_quantizer(method)(NVFP4Quantizer)
    name = compressed_tensors.NAME
    original_config: Any = AUTO_QUANTIZATION_CONFIG_MAPPING[name]
    original_quantizer: Any = AUTO_QUANTIZER_MAPPING[name]
    if original_config.__name__ == "CompressedTensorsConfigOrNVFP4":
        return

    class CompressedTensorsConfigOrNVFP4(QuantizationConfigMixin):
        """compressed-tensors' settings: UnchangedConfig for NVFP4, transformers' own class for other formats."""

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            kind = UnchangedConfig if is_nvfp4(config_dict) else original_config
            return kind.from_dict(config_dict, *args, **kwargs)

    def quantizer(config: Any, **kwargs: Any) -> HfQuantizer:
        return (NVFP4Quantizer if isinstance(config, UnchangedConfig) else original_quantizer)(config, **kwargs)

    AUTO_QUANTIZATION_CONFIG_MAPPING[name] = CompressedTensorsConfigOrNVFP4
    AUTO_QUANTIZER_MAPPING[name] = quantizer  # type: ignore[assignment]


def is_nvfp4(config: dict[str, Any]) -> bool:
    """Return whether compressed-tensors' settings have a group of packed NVFP4 and no group of another 4-bit format."""
    groups = [g for g in (config.get("config_groups") or {}).values() if isinstance(g, dict)]
    nvfp4_groups = [g for g in groups if "NVFP4" in compressed_tensors.group_algo(g)]
    return bool(nvfp4_groups) and all(
        (g.get("format") or config.get("format")) == compressed_tensors.NVFP4_FORMAT for g in nvfp4_groups
    )
