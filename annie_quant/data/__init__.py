"""Personas and conversations: who the assistant is, and how she talks, for calibration, training and judging.

load_persona("annie" | path)                      Persona: name, system_prompt, tools, rules, examples, sha256
generate(persona, teacher="offline", n=500, ...)  conversations in the founding five categories, validated
validate(rows)                                    what the founding documents ask of such data
"""

from __future__ import annotations

from annie_quant.data.generate import CATEGORIES, generate
from annie_quant.data.persona import Persona, load_persona
from annie_quant.data.validate import validate

__all__ = ["CATEGORIES", "Persona", "generate", "load_persona", "validate"]
