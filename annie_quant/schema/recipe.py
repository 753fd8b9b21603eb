"""annie_quant.json: how a checkpoint was quantized."""

from __future__ import annotations

from typing import Any

import msgspec

RECIPE_FILE = "annie_quant.json"  # in every checkpoint that annie_quant makes


class Recipe(msgspec.Struct):
    """How a checkpoint was made. It has no path and no time: the same seed gives the same bytes.

    prompt_sha256: of the system prompts in the conversations.  prompt_mismatch: a sentence where they are not the
    production prompt and that was allowed.  kv_cache: format of the KV cache that it asks for.
    """

    version: str
    strategy: str
    calib_data_sha256: str | None
    calib_samples: int
    exclude: list[str]
    scale: str
    options: dict[str, Any]
    seed: int
    prompt_sha256: list[str]
    prompt_mismatch: str | None
    kv_cache: str = "none"
