"""The card of a folder that `annie-quant init` has written: where its content comes from, and what it lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from annie_quant.persona import Persona
from annie_quant.printable import inert

if TYPE_CHECKING:
    from annie_quant.data.initialize import Initialized

MARK = "<!-- annie-quant init -->"


def render(result: Initialized, persona: Persona, formats: Mapping[str, int], files: Mapping[str, int]) -> str:
    head = {
        "configs": [{"config_name": "default", "data_files": [{"split": "calibration", "path": "calibration.jsonl"}]}]
    }
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in head.items()),
        "---",
        MARK,
        f"# {inert(result.persona)}: persona, gate prompts and calibration data",
        "",
        f"Made by `annie-quant init` from {result.conversations:,} logged conversations."
        if result.conversations
        else "Made by `annie-quant init` from a system prompt and tools; no logs.",
        "",
        "- persona.json: the system prompt and the tools",
        "- workloads/: gate prompts. bf16 answers them once, and the quantized model must answer as bf16 does; "
        "`logged.calls` are the calls in the log, which inform and decide nothing",
        f"- calibration.jsonl: {result.calibration_rows} conversations. None of them is a gate's prompt, or nearly",
        "",
        "| log | format or file | conversations |",
        "|---|---|---|",
        *(f"| format | {inert(name)} | {n:,} |" for name, n in sorted(formats.items())),
        *(f"| file | {inert(name)} | {n:,} |" for name, n in sorted(files.items())[:100]),
        "",
        "| workload | prompts |",
        "|---|---|",
        *(f"| {inert(name)} | {n} |" for name, n in result.cases.items()),
        "",
        "| behaviour | gate prompts |",
        "|---|---|",
        *(f"| {inert(name)} | {n} |" for name, n in sorted(result.behaviours.items())),
        "",
        *(f"- {inert(line)}" for line in result.lines),
        f"- system prompt, SHA-256: {persona.prompt_sha256}",
        "",
        "Next: `annie-quant search --model BF16 --persona THIS_FOLDER --calib-data THIS_FOLDER/calibration.jsonl --output RUN`",
        "",
    ]
    return "\n".join(lines)
