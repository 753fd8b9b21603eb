"""Personas and conversations for calibration, training and evaluation.

load_persona("annie" | path)                      Persona: name, system_prompt, tools, rules, examples, categories, sha256
generate(persona, teacher="offline", n=500, ...)  conversations evenly over the categories, validated, resumable
validate(rows, persona)                           check the rules for such data (requirements R1 and R2)
check_apart(rows, *others)                        train, calibration and gate prompts are never shared
check_prompt_hash(rows, persona, allow=False)     the data has the system prompt that is served now
"""

from __future__ import annotations

from annie_quant.data.generation import CATEGORIES, GenerationResult, generate
from annie_quant.data.row_rules import ValidatedRows, validate
from annie_quant.data.rows import check_apart, check_prompt_hash, read_rows
from annie_quant.data.teachers import Options
from annie_quant.documents.persona import Category, Persona, load_persona

__all__ = [
    "CATEGORIES",
    "Category",
    "GenerationResult",
    "Options",
    "Persona",
    "ValidatedRows",
    "check_apart",
    "check_prompt_hash",
    "generate",
    "load_persona",
    "read_rows",
    "validate",
]
