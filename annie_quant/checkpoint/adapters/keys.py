"""The names of an adapter's tensors, as peft, Unsloth and axolotl write them.

A name is the path of a module in the class that was trained, and what the tensor is of it:
"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from annie_quant.core.errors import CheckpointError

_PREFIX = "base_model.model."
# Wrappers of FSDP, torch.compile and gradient checkpointing, which some trainers leave in names.
WRAPPERS = re.compile(r"(?:_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
# The adapter's own name ("default") is in the names of writers other than peft's save_pretrained.
_FACTOR = re.compile(
    r"(?P<module>.+?)(?P<wrapped>(?:\.base_layer)*)"
    r"\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?!weight$|bias$)[^.]+)?(?:\.(?P<leaf>weight|bias))?"
)
_TOKENS = re.compile(r"(?P<module>.+?)(?:\.token_adapter)?\.trainable_tokens_delta(?:\.[^.]+)?")
# Names inside wrappers of whole modules, which the base does not have.
_INSIDE = re.compile(
    r"(?:\.token_adapter)?\.base_layer(?=\.)|\.modules_to_save(?:\.default)?(?=\.)"
)
_ORIGINAL = re.compile(r"\.original_module(?=\.)")

Part = Literal[
    "lora_A",
    "lora_B",
    "lora_B.bias",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "tokens",
    "tensor",
    "original",
]


@dataclass(frozen=True)
class AdapterKey:
    """The name of a tensor of an adapter, taken apart.

    key: as in the file.
    path: of the module in the class that was trained, or of the tensor where part is "tensor" or
        "original".
    part: what it is: a matrix of the LoRA, rows of tokens, a tensor that replaces the base's, or a
        copy of the base's own, which is not used.
    depth: of how many wrappers it is the inside. Parameters of one module have one wrapper each.
    """

    key: str
    path: str
    part: Part
    depth: int = 0


def parse(key: str) -> AdapterKey | None:
    """Return the parts of a name, or None for one that no known writer uses."""
    name = WRAPPERS.sub("", key)
    while name.startswith(_PREFIX):
        name = name.removeprefix(_PREFIX)
    match = _FACTOR.fullmatch(name)
    if match is not None:
        return _factor(key, match)
    match = _TOKENS.fullmatch(name)
    if match is not None:
        return AdapterKey(key, match["module"], "tokens")
    if ".lora_" in name or ".trainable_tokens" in name:
        return None
    if _ORIGINAL.search(name):
        return AdapterKey(key, _ORIGINAL.sub("", name), "original")
    return AdapterKey(key, _INSIDE.sub("", name), "tensor")


def _factor(key: str, match: re.Match[str]) -> AdapterKey | None:
    module = match["module"]
    part = match["part"]
    depth = match["wrapped"].count(".base_layer")
    if match["leaf"] == "bias":
        return AdapterKey(key, module, "lora_B.bias", depth) if part == "lora_B" else None
    if part in ("lora_A", "lora_B") and match["leaf"] is None:
        return None
    return AdapterKey(key, module, part, depth)  # type: ignore[arg-type]


def parse_all(keys: Iterable[str]) -> list[AdapterKey]:
    """Return the parts of all names. Raises CheckpointError for those that are not known."""
    parsed = {key: parse(key) for key in keys}
    unknown = [key for key, parts in parsed.items() if parts is None]
    if unknown:
        others = f", and {len(unknown) - 1} others" if unknown[1:] else ""
        raise CheckpointError(
            f"the adapter's tensor {unknown[0]}{others}: no kind that is merged here",
            "merge it where it was trained, and give the merged folder as --model",
        )
    return [parts for parts in parsed.values() if parts is not None]
