"""The system prompts that a checkpoint records are those that its persona is recognised by."""

import json
from pathlib import Path

import pytest

from annie_quant.core.files import sha256_text

runner = pytest.importorskip(
    "annie_quant.quantize.runner",
    reason="quantizing needs torch: pip install annie-quant[quantize]",
)


def test_a_logged_prompt_with_other_white_space_stands_for_the_personas(tmp_path: Path) -> None:
    persona = "You are Flora."
    row = {
        "messages": [
            {"role": "system", "content": persona + "\n"},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Good morning."},
        ],
        "provenance": {"teacher": "log", "prompt_sha256": sha256_text(persona)},
    }
    data = tmp_path / "calibration.jsonl"
    data.write_text(json.dumps(row) + "\n")
    hashes, mismatch = runner._prompt_hashes(data, None, False)
    assert sha256_text(persona) in hashes and mismatch is None
