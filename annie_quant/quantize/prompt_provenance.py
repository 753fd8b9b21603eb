"""The hash of the production system prompt: stored with the checkpoint, and compared before an evaluation.

A stale prompt in the calibration data spoils the result, and only the gates would show it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from annie_quant.core.errors import UsageError
from annie_quant.core.files import read_json, sha256_text
from annie_quant.data.rows import read_conversations
from annie_quant.documents import RECIPE_FILE


@dataclass(frozen=True)
class Prompts:
    """The system prompts of conversations.

    sha256: of each prompt.
    mismatch: a sentence where they are not production's prompt.
    """

    sha256: list[str]
    mismatch: str | None = None


def of_data(calib_data: Path | None, persona: str | None, allow: bool) -> Prompts:
    """Return the system prompts of the conversations.

    Raises UsageError where they are not the production prompt (see check_prompt_hash), unless `allow`.
    """
    if calib_data is None:
        return Prompts([])
    from annie_quant.data import check_prompt_hash

    rows = read_conversations(calib_data)
    mismatch = check_prompt_hash(rows, persona, allow=allow)
    systems = {row["messages"][0]["content"] for row in rows if row["messages"][0]["role"] == "system"}
    return Prompts(sorted(sha256_text(s) for s in systems), mismatch)


def check_checkpoint(checkpoint: Path, personas: Iterable[str], allow: bool = False) -> str | None:
    """Check that a checkpoint was made with the system prompts that it is about to be judged with.

    personas: names or files whose prompts are used. A checkpoint without a hash (made elsewhere, or without data) is
    not checked. Returns a sentence where a prompt differs and `allow` is set; raises UsageError otherwise.
    """
    file = checkpoint / RECIPE_FILE
    hashes = read_json(file).get("prompt_sha256") if file.is_file() else None
    if not hashes:
        return None
    from annie_quant.documents.persona import load_persona

    other = [p for p in sorted(set(personas)) if load_persona(p).prompt_sha256 not in hashes]
    if not other:
        return None
    mismatch = (
        f"{checkpoint.name} was calibrated with another system prompt ({hashes[0][:12]}) than persona {other[0]} has now "
        f"({load_persona(other[0]).prompt_sha256[:12]})"
    )
    if not allow:
        raise UsageError(mismatch, "quantize again with current data, or add --allow-prompt-mismatch")
    return mismatch
