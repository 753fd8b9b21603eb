"""adapter_config.json: which adapters can be merged, and the scale of each of their matrices.

Sources: peft 0.21's LoraConfig and LoraLayer (names, scales, patterns), and the field that Unsloth
adds for mixtures of experts.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec

from annie_quant.checkpoint.shards import read_object
from annie_quant.core.errors import CheckpointError
from annie_quant.core.text import printable
from annie_quant.core.untrusted import JsonObject

CONFIG_FILE = "adapter_config.json"
# Initializations that subtract the first product from the base, by the beginning of their name.
CHANGED_BASE = {
    "pissa": "PiSSA",
    "olora": "OLoRA",
    "corda": "CorDA",
    "lora_ga": "LoRA-GA",
    "loftq": "LoftQ",
}
UNCHANGED_BASE = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
# Variants whose update is not a product of two matrices, or is not in every token.
VARIANTS = {
    "alora_invocation_tokens": "aLoRA, which acts only after certain tokens",
    "arrow_config": "Arrow, which routes among adapters",
    "kasa_config": "KaSA",
    "layer_replication": "an adapter that repeats layers of its base",
    "megatron_config": "an adapter of Megatron's layers",
    "monteclora_config": "MonteCLoRA",
    "use_bdlora": "BD-LoRA",
    "use_qalora": "QA-LoRA",
    "velora_config": "VeLoRA",
}
# Fields that do not change how the stored tensors are merged.
HARMLESS = (
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
    "task_type",
)
MERGE_IT_YOURSELF = "merge it where it was trained, and give the merged folder as --model"
MAX_PATTERN = 300  # characters
MAX_RANK = 1 << 20
REPEATED_GROUP = re.compile(r"\)[*+?{]")  # may take a regular expression exponential time
EXPERTS_OUT_FIRST = (0, 19)  # peft version from which A is over the inputs of [E, out, in] experts
LAYOUTS = ("rank_major", "grouped_by_expert")


class AdapterSettings(msgspec.Struct, kw_only=True):
    """The fields of adapter_config.json that decide how a LoRA is merged.

    expert_layout: how the experts are ordered in the columns of lora_B; Unsloth writes it.
    """

    peft_type: str = ""
    r: int = 8
    lora_alpha: float = 8
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str | None = True
    ensure_weight_tying: bool = False
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    peft_version: str | None = None
    expert_layout: str | None = msgspec.field(default=None, name="lora_B_layout")
    auto_mapping: dict[str, Any] | None = None

    @property
    def base_name(self) -> str:
        """The name of the base that it was trained on, without a path; "" where it has none."""
        path = Path(self.base_model_name_or_path or "")
        if path.parent.name == "snapshots":  # of a hub cache: models--OWNER--NAME/snapshots/HASH
            return path.parent.parent.name.rpartition("--")[2]
        return path.name

    @property
    def base_label(self) -> str | None:
        """The base that it was trained on: OWNER/NAME of a hub, or the name of a folder."""
        given = self.base_model_name_or_path
        is_path = given is not None and (given.count("/") != 1 or given.startswith(("/", ".")))
        return self.base_name if is_path else given

    @property
    def version(self) -> tuple[int, int] | None:
        """The first two numbers of the peft version that wrote it."""
        match = re.match(r"(\d{1,4})\.(\d{1,4})", self.peft_version or "")
        return (int(match[1]), int(match[2])) if match else None

    @property
    def summary(self) -> str:
        """Its kind and rank in words."""
        kinds = [("rsLoRA" if self.use_rslora else "LoRA")]
        if self.use_dora:
            kinds.append("DoRA")
        ranks = sorted({self.r, *(self.rank_pattern or {}).values()})
        alphas = sorted({self.lora_alpha, *(self.alpha_pattern or {}).values()})
        return (
            f"{' with '.join(kinds)}, rank {', '.join(map(str, ranks))}, "
            f"alpha {', '.join(f'{alpha:g}' for alpha in alphas)}"
        )

    def rank(self, module: str) -> int:
        """Return the rank of a module. module: its path in the class that was trained."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """Return the factor on the product of a module's two matrices."""
        alpha = _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_parameter(self, path: str) -> bool:
        """Return whether target_parameters names a parameter. path: of the parameter."""
        return any(f".{path}".endswith(f".{name}") for name in self.target_parameters or ())

    def token_indices(self, module: str) -> list[int] | None:
        """Return the ids of the tokens whose rows were trained in a module; None: not given."""
        indices = self.trainable_token_indices
        if isinstance(indices, dict):
            matching = (ids for name, ids in indices.items() if f".{module}".endswith(f".{name}"))
            return next(matching, None)
        return indices


def _by_pattern(pattern: dict[str, Any] | None, module: str, default: Any) -> Any:
    """Return the value of the first regular expression that ends the module's path, as peft does."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def read_settings(folder: Path) -> AdapterSettings:
    """Return the settings of an adapter.

    Raises CheckpointError for an adapter that cannot be merged, with the reason.
    """
    content = read_object(folder / CONFIG_FILE)
    if content is None:
        inner = sorted(folder.glob(f"*/{CONFIG_FILE}"))
        example = f", such as {inner[-1].parent}" if inner else ""
        raise CheckpointError(
            f"{folder}: no {CONFIG_FILE} there, so it is not an adapter",
            f"give --adapter the folder that peft's save_pretrained wrote{example}",
        )
    _refuse_kind(content)
    given = {name: value for name, value in content.items() if value is not None}
    try:
        settings = msgspec.convert(given, AdapterSettings)
    except msgspec.ValidationError as error:
        raise _refusal(printable(str(error), 200), "restore the file") from None
    _check_values(settings)
    return settings


def _refusal(reason: str, hint: str = MERGE_IT_YOURSELF) -> CheckpointError:
    return CheckpointError(f"{CONFIG_FILE}: {reason}", hint)


def _refuse_kind(content: JsonObject) -> None:
    """Raise CheckpointError for another method than LoRA, and for settings that are not known."""
    kind = content.get("peft_type")
    if kind != "LORA":
        raise _refusal(f"peft_type {printable(str(kind), 40)}: only LORA can be merged here")
    for name, description in VARIANTS.items():
        if content.get(name):
            raise _refusal(f"{name} is set: {description} is not merged here")
    _refuse_changed_base(content.get("init_lora_weights"))
    known = {*AdapterSettings.__struct_encode_fields__, *HARMLESS, *VARIANTS}
    unknown = [name for name, value in content.items() if value and name not in known]
    if unknown:
        name = printable(unknown[0], 60)
        raise _refusal(f"{name} is set, and its effect on a merge is not known here")


def _refuse_changed_base(init: object) -> None:
    """Raise CheckpointError where training started from a changed base. init: init_lora_weights."""
    name = str(init).lower()
    method = next((m for start, m in CHANGED_BASE.items() if name.startswith(start)), None)
    if method is not None:
        raise _refusal(
            f"init_lora_weights {name}: {method} changed the base's weights at the start, so the "
            "adapter does not fit the original base",
            "save it again with peft's path_initial_model_for_weight_conversion, or give --model "
            "the residual model that training saved, with init_lora_weights true",
        )
    if name not in UNCHANGED_BASE:
        shown = printable(name, 40)
        raise _refusal(f"init_lora_weights {shown} is not known: it may have changed the base")


def _check_values(settings: AdapterSettings) -> None:
    """Raise CheckpointError for values that are not possible."""
    if settings.fan_in_fan_out:
        raise _refusal("fan_in_fan_out is true: no linear of these models is stored transposed")
    patterns = [*(settings.rank_pattern or ()), *(settings.alpha_pattern or ())]
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN or REPEATED_GROUP.search(pattern):
            shown = printable(pattern, 60)
            raise _refusal(f"pattern {shown!r}: longer than {MAX_PATTERN} or a repeated group")
        try:
            re.compile(pattern)
        except re.error as error:
            raise _refusal(f"pattern {printable(pattern, 60)!r}: {error}") from None
    ranks = [settings.r, *(settings.rank_pattern or {}).values()]
    alphas = [settings.lora_alpha, *(settings.alpha_pattern or {}).values()]
    if not 1 <= min(ranks) <= max(ranks) <= MAX_RANK or not all(map(math.isfinite, alphas)):
        limits = f"a rank outside of 1 to {MAX_RANK}, or an alpha that is not finite"
        raise _refusal(limits, "restore the file")
    layout = settings.expert_layout
    if layout is not None and layout not in LAYOUTS:
        expected = " or ".join(LAYOUTS)
        raise _refusal(f"lora_B_layout {printable(layout, 40)!r}, expected {expected}")
