"""annie_quant.json: how a checkpoint was quantized."""

from __future__ import annotations

from typing import Any

import msgspec

RECIPE_FILE = "annie_quant.json"  # in every checkpoint that annie_quant makes


class HeldOut(msgspec.Struct):
    """Calibration conversations that recipes are compared on: their number, answer tokens, and those of them that decide."""

    conversations: int
    tokens: int
    decisions: int


class Ingredient(msgspec.Struct):
    """An ingredient of a recipe that was tried, and its held-out figures in nats per token.

    used: its divergence was less than the recipe's before it by more than the noise.
    kl, decisions: mean KL as served, and of the tokens that decide; the other two: with no input rounded.
    change: of their sum against the recipe before.  noise: standard error of the change over conversations.
    """

    name: str
    used: bool
    kl: float
    decisions: float
    kl_w4a16: float
    decisions_w4a16: float
    change: float
    noise: float


class Recipe(msgspec.Struct):
    """How a checkpoint was made. It has no path and no time: the same seed gives the same bytes.

    prompt_sha256: of the system prompts in the conversations.  prompt_mismatch: a sentence where they are not the
    production prompt and that was allowed.  kv_cache: format of the KV cache that it asks for.
    held_out, ingredients: of a strategy that compares recipes, in the order in which it tried them.
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
    held_out: HeldOut | None = None
    ingredients: list[Ingredient] = []
