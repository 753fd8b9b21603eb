"""The transformers quantizer for NVFP4: quant_method "modelopt", and "compressed-tensors" where its format is NVFP4.

It replaces a model's linears by NVFP4Linear, FP8Linear or BlockFP8Linear, with the shapes and types of the checkpoint's headers.
transformers 5.14 has no ModelOpt loader, and its compressed-tensors loader needs that package. Which modules are quantized is
read from the checkpoint's tensors, not from the ignore list, which is written in three dialects and is sometimes wrong. FP8 in
blocks has another method, which loading.load sets: transformers' quantizer of "fp8" stays as it is.

While a checkpoint is loaded only cheap checks run: types and shapes in the headers, the scales, and whether other weights are
finite. If one fails, the audit reads the whole folder, and its first finding that makes answers useless is raised.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightConverter
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from annie_quant import checkpoint, models, nvfp4
from annie_quant.checkpoint import Linear, ModelFolder
from annie_quant.checkpoint.checks import DEADLY
from annie_quant.checkpoint.dialects import compressed_tensors, fp8, modelopt
from annie_quant.checkpoint.linears import LARGEST_SCALE, read_struct
from annie_quant.core.errors import CheckpointError
from annie_quant.core.untrusted import JsonObject
from annie_quant.models import aliases
from annie_quant.models.formats import FP8, FP8_BLOCK, FP8_CHANNEL, KNOWN_ALGORITHMS, MIXED
from annie_quant.offline.linears import (
    BlockFP8Linear,
    FP8Linear,
    NamedBlockFP8Linear,
    NVFP4Linear,
    PackedNVFP4Linear,
    nvfp4_linears,
    separate,
)

AUDIT = "annie-quant audit DIR"
SCALE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def find_module(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """Return the name in the model and the module that a checkpoint calls `name`, with or without the multimodal prefix."""
    for candidate in aliases(name):
        with contextlib.suppress(AttributeError):
            return candidate, model.get_submodule(candidate)
    return None


def replace_linear(
    model: nn.Module, linear: Linear, folder: ModelFolder, per_token: bool = False
) -> None:
    """Replace one linear of the model, after a check of its tensors' types and shapes.

    per_token: the settings ask for FP8 activations with a scale per token.

    A linear of a part that the model class leaves out (vision tower, MTP) is skipped; transformers reports its tensors as
    unexpected.
    """
    match = find_module(model, linear.name)
    if match is None:
        if ".experts." in linear.name and not folder.family.is_auxiliary(linear.name):
            raise CheckpointError(
                f"{linear.name}: this runtime reads no quantized experts (transformers stores them as one 3-D weight)",
                "audit, compare and convert work; serve it with vLLM",
            )
        return
    name, module = match
    if not isinstance(module, nn.Linear):
        raise CheckpointError(
            f"{linear.name} has {linear.format} tensors but is a {type(module).__name__}, expected a linear"
        )
    n = module.out_features
    k = module.in_features
    expected = ("U8", (n, k // 2)) if linear.format == "nvfp4" else ("F8_E4M3", (n, k))
    expect(folder, linear.weight, expected[0], expected[1])
    with torch.device("meta"):
        packed = linear.format == "nvfp4"
        new: Any = (
            build_nvfp4(linear, folder, module)
            if packed
            else build_fp8(linear, folder, module, per_token)
        )
    new._is_hf_initialized = True  # so that transformers draws no random values for it
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new.requires_grad_(False))


def expect(folder: ModelFolder, name: str, dtype: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor. Raises CheckpointError for another type than `dtype` and other shapes than these."""
    info = folder.info(name)
    if info.dtype != dtype or info.shape not in shapes:
        texts = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(
            f"{name} is {info.dtype} {list(info.shape)}, expected {dtype} {texts}", AUDIT
        )
    return info.shape


def build_nvfp4(linear: Linear, folder: ModelFolder, old: nn.Linear) -> NVFP4Linear:
    kind = PackedNVFP4Linear if linear.reciprocal else NVFP4Linear
    n = old.out_features
    k = old.in_features
    for name, tensor in (
        (kind.NAMES.block_scale, linear.block_scale),
        (kind.NAMES.tensor_scale, linear.global_scale),
    ):
        if tensor is None:
            raise CheckpointError(
                f"{linear.name}.{name} is missing, {linear.weight} needs it", AUDIT
            )
    _, blocks = expect(folder, linear.block_scale or "", "F8_E4M3", (n, k // 16), (n, k // 32))
    return kind(
        k,
        n,
        group=k // blocks,
        activations=linear.input_global is not None,
        pre_quant=bool(linear.pre_quant),
        bias=old.bias is not None,
        dtype=old.weight.dtype,
    )


def build_fp8(linear: Linear, folder: ModelFolder, old: nn.Linear, per_token: bool) -> FP8Linear:
    n = old.out_features
    k = old.in_features
    bias = old.bias is not None
    dtype = old.weight.dtype
    if linear.block_scale is None:
        raise CheckpointError(
            f"{linear.name}.weight_scale is missing, {linear.weight} needs it", AUDIT
        )
    scale = meta_tensor(folder, linear.block_scale)
    linear.check_fp8_scale(folder)
    if linear.block:
        kind = (
            BlockFP8Linear
            if linear.block_scale.endswith(BlockFP8Linear.SCALE)
            else NamedBlockFP8Linear
        )
        return kind(k, n, block=linear.block, scale_dtype=scale.dtype, bias=bias, dtype=dtype)
    input_shape = folder.info(linear.input_global).shape if linear.input_global else None
    return FP8Linear(
        k,
        n,
        scale_shape=tuple(scale.shape),
        scale_dtype=scale.dtype,
        input_shape=input_shape,
        per_token=per_token,
        bias=bias,
        dtype=dtype,
    )


def check_shapes(model: nn.Module, folder: ModelFolder) -> None:
    """Raise CheckpointError where a tensor's shape differs from the model's.

    transformers does not compare shapes for quantized models. This also finds codes without their scales.
    """
    state = model.state_dict()
    for name in folder:
        module_name, _, part = name.rpartition(".")
        match = find_module(model, module_name)
        info = folder.info(name)
        tensor = state.get(f"{match[0]}.{part}") if match else None
        if tensor is not None and tuple(tensor.shape) != info.shape:
            raise CheckpointError(
                f"{name} is {info.dtype} {list(info.shape)}, and config.json makes it {list(tensor.shape)}",
                "compare config.json with the source checkpoint's",
            )


def meta_tensor(folder: ModelFolder, name: str) -> torch.Tensor:
    """Return a tensor without memory that has the shape and type of a scale in the file."""
    info = folder.info(name)
    if info.dtype not in SCALE_DTYPES:
        raise CheckpointError(f"{name} is {info.dtype}, expected a scale of 16 or 32 bits", AUDIT)
    return torch.empty(info.shape, dtype=SCALE_DTYPES[info.dtype], device="meta")


AUDIT_HINT = "annie-quant audit DIR --repair"


@contextlib.contextmanager
def as_audit_finding(folder: Path) -> Iterator[None]:
    """Replace a CheckpointError raised inside by the audit's finding about `folder`, if the audit has one."""
    try:
        yield
    except CheckpointError as error:
        findings = checkpoint.audit(folder).findings
        deadly = [f for f in findings if f.code in DEADLY]
        deadly.sort(
            key=lambda f: f.code == "orphan_scale"
        )  # last: a missing tensor explains more than the rest of it
        if not deadly:
            raise
        more = f" (and {len(findings) - 1} more findings)" if findings[1:] else ""
        raise CheckpointError(f"{deadly[0].message}{more}", AUDIT_HINT) from error


def check_values(model: nn.Module) -> None:
    """Raise CheckpointError for scales and weights that would spread NaN, infinity or nonsense. Skips meta tensors."""
    for name, module in model.named_modules():
        if any(p.device.type == "meta" for p in module.parameters(recurse=False)):
            continue
        if isinstance(module, NVFP4Linear):
            check_nvfp4_scales(name, module)
        elif isinstance(module, FP8Linear):
            for scale in module.scales():
                if not bool(((scale > 0) & scale.isfinite()).all()):
                    raise CheckpointError(f"{name}: a scale is not a positive number", AUDIT_HINT)
        else:
            for part, weight in module.named_parameters(recurse=False):
                values = weight.exp() if models.is_log_decay(f"{name}.{part}") else weight
                if (
                    weight.is_floating_point()
                    and weight.numel()
                    and not all(map(math.isfinite, values.detach().aminmax()))
                ):
                    raise CheckpointError(f"{name}.{part} holds NaN or infinity", AUDIT_HINT)


def check_nvfp4_scales(name: str, linear: NVFP4Linear) -> None:
    scalars = linear.scalars()
    for part, value, limit in (
        (linear.NAMES.tensor_scale, scalars.tensor_scale, LARGEST_SCALE["tensor"]),
        (linear.NAMES.input_scale, scalars.input_scale, LARGEST_SCALE["input"]),
    ):
        if value is not None and not 0 < value <= limit:
            raise CheckpointError(
                f"{name}.{part} means {value}, expected a positive number of at most {limit:g}",
                AUDIT_HINT,
            )
    scales = linear.block_scale.view(torch.uint8)
    if scales.numel() and int(scales.max()) >= nvfp4.E4M3_NAN:  # as nvfp4.check, on any device
        raise CheckpointError(
            f"{name}.{linear.NAMES.block_scale} holds block scales that are NaN or negative",
            AUDIT_HINT,
        )


_log = logging.getLogger(__name__)

FP8_ALGORITHMS = (FP8_BLOCK, FP8.modelopt, FP8_CHANNEL.modelopt)
_DIALECTS = {
    modelopt.NAME: modelopt,
    compressed_tensors.NAME: compressed_tensors,
    BlockFP8Linear.METHOD: fp8,
    NamedBlockFP8Linear.METHOD: compressed_tensors,
}
SCALE_NAMES = (*NVFP4Linear.NAMES[1:], *PackedNVFP4Linear.NAMES[1:])
SCALE_SUFFIXES = tuple(f".{name}" for name in SCALE_NAMES)
KV_CACHE_SCALE_SUFFIXES = (".k_scale", ".v_scale")


class UnchangedConfig(QuantizationConfigMixin):
    """A quantization_config that is saved exactly as it was read."""

    def __init__(self, quant_method: str = modelopt.NAME, **fields: Any) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]  # transformers' enum has no "modelopt"
        self.__dict__.update(fields)

    def to_dict(self) -> dict[str, Any]:
        fields = {k: v for k, v in super().to_dict().items() if not k.startswith("_")}
        return fields | {"quant_method": _DIALECTS[str(self.quant_method)].NAME}


class NVFP4Quantizer(HfQuantizer):
    """Replaces each linear that the checkpoint stores as NVFP4 or FP8 by NVFP4Linear, FP8Linear or BlockFP8Linear.

    Raises CheckpointError that names the tensor for everything it cannot read.
    """

    requires_calibration = True
    quantization_config: UnchangedConfig

    @property
    def dialect(self) -> Any:
        return _DIALECTS[str(self.quantization_config.quant_method)]

    def validate_environment(self, *args: object, **kwargs: object) -> None:
        settings = self.dialect.read(self.quantization_config.to_dict())
        if settings.algo not in KNOWN_ALGORITHMS:
            raise CheckpointError(
                f"quant_algo {settings.algo!r} is not supported here, expected one of {', '.join(KNOWN_ALGORITHMS)}",
                "quantize to NVFP4 (annie-quant quantize), or serve this checkpoint with vLLM",
            )
        if settings.kv_cache or settings.raw.get("kv_cache_scheme"):
            _log.warning(
                "the checkpoint's config requests a quantized KV cache; here the cache has the model's dtype"
            )

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        files = kwargs.get("checkpoint_files") or []
        if not files:
            raise CheckpointError(
                "NVFP4 is read from safetensors files, and this checkpoint has none"
            )
        self.folder = Path(files[0]).parent
        with as_audit_finding(self.folder):
            folder = ModelFolder(self.folder)
            linears = self.dialect.linears(folder)
            settings = self.dialect.config(folder)
            self.singles = single_experts(folder)
            with torch.device("meta"):
                separate(
                    model, folder.family, lambda name: any(a in self.singles for a in aliases(name))
                )
            for linear in linears.values():
                replace_linear(
                    model, linear, folder, settings.algo_of(linear.name) == FP8_CHANNEL.modelopt
                )
            linear_tensors = {t for linear in linears.values() for t in linear.tensors()}
            for name in folder:
                if (
                    name not in linear_tensors
                    and name.endswith(SCALE_SUFFIXES)
                    and find_module(model, parent(name))
                ):
                    raise CheckpointError(
                        f"{name}: the other tensors of its linear are missing", AUDIT_HINT
                    )
            if not nvfp4_linears(model) and not (
                linears and settings.algo in (*FP8_ALGORITHMS, MIXED)
            ):
                raise CheckpointError(
                    f"{self.folder.name}: config.json declares NVFP4, and no tensor is NVFP4",
                    AUDIT_HINT,
                )
            check_shapes(model, folder)
        for name in folder:
            if name.endswith(KV_CACHE_SCALE_SUFFIXES) and (
                match := find_module(model, parent(name))
            ):
                match[1].register_buffer(name.rpartition(".")[2], meta_tensor(folder, name))
        self.dtypes = {
            name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()
        }
        return model

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        """Leave out transformers' merging of single experts where the model has single ones, too."""
        if not self.singles:
            return super().update_weight_conversions(weight_conversions)
        merges = [c for c in weight_conversions if isinstance(c, WeightConverter)]
        return super().update_weight_conversions([c for c in weight_conversions if c not in merges])

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: object) -> nn.Module:
        for name, p in model.named_parameters():
            # transformers leaves a tensor that it renamed (a multimodal checkpoint's) in the file's dtype.
            if p.device.type != "meta" and p.dtype != self.dtypes.get(name, p.dtype):
                p.data = p.data.to(self.dtypes[name])
        with as_audit_finding(self.folder):
            check_values(model)
        for linear in nvfp4_linears(model).values():
            if linear.codes.device.type == "cuda":
                linear.prepare()
        return model

    def is_serializable(self, *args: object, **kwargs: object) -> bool:
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
    for method in (modelopt.NAME, BlockFP8Linear.METHOD, NamedBlockFP8Linear.METHOD):
        if method not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
            auto.register_quantization_config(method)(UnchangedConfig)
        if method not in auto.AUTO_QUANTIZER_MAPPING:
            auto.register_quantizer(method)(NVFP4Quantizer)
    name = compressed_tensors.NAME
    original_config: Any = auto.AUTO_QUANTIZATION_CONFIG_MAPPING[name]
    original_quantizer: Any = auto.AUTO_QUANTIZER_MAPPING[name]
    if original_config.__name__ == "CompressedTensorsConfigOrNVFP4":
        return

    class CompressedTensorsConfigOrNVFP4(QuantizationConfigMixin):
        """compressed-tensors' settings: UnchangedConfig for NVFP4, transformers' own class for other formats."""

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            kind = UnchangedConfig if _is_nvfp4(config_dict) else original_config
            return kind.from_dict(config_dict, *args, **kwargs)

    def quantizer(config: Any, **kwargs: Any) -> HfQuantizer:
        return (NVFP4Quantizer if isinstance(config, UnchangedConfig) else original_quantizer)(
            config, **kwargs
        )

    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[name] = CompressedTensorsConfigOrNVFP4
    auto.AUTO_QUANTIZER_MAPPING[name] = quantizer  # type: ignore[assignment]


def _is_nvfp4(config: JsonObject) -> bool:
    """Return whether compressed-tensors' settings have a group of packed NVFP4 and no group of another 4-bit format."""
    settings = read_struct(compressed_tensors.CompressedSettings, config)
    formats = {
        g.format or settings.format
        for g in settings.config_groups.values()
        if "NVFP4" in g.algorithm
    }
    return formats == {compressed_tensors.NVFP4_FORMAT}
