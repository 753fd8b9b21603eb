"""SGLang by a dated recipe: assets/recipes/sglang.json."""

from __future__ import annotations

from annie_quant.ops.recipes import RecipeRuntime

NAME = "sglang"
_runtime = RecipeRuntime(NAME)
start, command, write = _runtime.start, _runtime.command, _runtime.write
