"""The production system prompt's hash: taken from the calibration data, kept with the checkpoint, compared at judgement.

A stale prompt in the data spoiled one round of the founding project's fine-tunes, and nobody saw it until the gates.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from annie_quant.data.rows import read_conversations
from annie_quant.errors import UsageError
from annie_quant.files import read_json, sha256_text

PROVENANCE = "annie_quant.json"  # in every output: how it was made


def of_data(calib_data: Path | None, persona: str | None, allow: bool) -> dict[str, Any]:
    """{"prompt_sha256": the system prompts' hashes in the conversations, "prompt_mismatch": sentence or None}.

    Raises UsageError where the data's system prompt is not production's (check_prompt_hash says which that is), unless
    `allow`.
    """
    if calib_data is None:
        return {"prompt_sha256": [], "prompt_mismatch": None}
    from annie_quant.data import check_prompt_hash

    rows = read_conversations(calib_data)
    stale = check_prompt_hash(rows, persona, allow=allow)
    systems = {row["messages"][0]["content"] for row in rows if row["messages"][0]["role"] == "system"}
    return {"prompt_sha256": sorted(sha256_text(s) for s in systems), "prompt_mismatch": stale}


def check_checkpoint(checkpoint: Path, personas: Iterable[str], allow: bool = False) -> str | None:
    """See that a checkpoint was made with the system prompt that it is about to be judged with.

    personas: names or files whose prompts are asked. A checkpoint that keeps no hash (made elsewhere, or without data)
    is not judged by this. Returns a sentence where they differ and `allow` is set; raises UsageError otherwise.
    """
    file = checkpoint / PROVENANCE
    kept = read_json(file).get("prompt_sha256") if file.is_file() else None
    if not kept:
        return None
    from annie_quant.persona import load_persona

    other = [p for p in sorted(set(personas)) if load_persona(p).prompt_sha256 not in kept]
    if not other:
        return None
    said = (
        f"{checkpoint.name} was calibrated with another system prompt ({kept[0][:12]}) than persona {other[0]} has now "
        f"({load_persona(other[0]).prompt_sha256[:12]})"
    )
    if not allow:
        raise UsageError(said, "quantize again with today's data, or say --allow-prompt-mismatch")
    return said
