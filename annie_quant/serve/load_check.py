"""Check that a runtime loads a checkpoint before its command is printed or started."""

from __future__ import annotations

import shlex
from pathlib import Path

from annie_quant import checkpoint
from annie_quant.errors import CheckpointError, UsageError
from annie_quant.serve import recipes
from annie_quant.serve.runtimes import llama_cpp


def check_loadable(model: Path, runtime: str, recipe: str | None = None) -> list[str]:
    """Audit a model for one runtime.

    recipe: its name; None: the newest. llama.cpp has none and needs a GGUF file.

    Returns notes for the user: the recipe with its date and who ran it, and findings that the runtime tolerates.
    Raises UsageError where `model` is not what the runtime serves, CheckpointError where it is not loaded by the rules of
    annie_quant.checkpoint.loader_support.
    """
    if runtime == llama_cpp.NAME:
        llama_cpp.check_file(model)
        return []
    name, chosen = recipes.choose(runtime, recipe)
    quoted = shlex.quote(str(model))
    if not (model / "config.json").is_file():
        raise UsageError(f"{model} is not a model folder", f"{runtime} serves a safetensors checkpoint")
    audit = checkpoint.audit(model)
    support = next((s for s in audit.summary.servers if s.server.lower() == runtime), None)
    if support is None:  # its files cannot be read
        first = f": {audit.findings[0].message}" if audit.findings else ""
        raise CheckpointError(f"{model} cannot be served{first}", f"annie-quant audit {quoted}")
    if support.loads == "no":
        raise CheckpointError(f"{runtime} does not load {model}: {support.note}", f"annie-quant audit {quoted}")
    notes = [f"recipe {runtime} {name}: {chosen.note} (source: {chosen.source})"]
    if chosen.image and chosen.tag_moves:
        notes.append(
            f"the tag of {chosen.image} moves to newer images; the one that is here: "
            f"docker inspect --format '{{{{index .RepoDigests 0}}}}' {chosen.image}"
        )
    if support.note:
        notes.append(f"{runtime} loads it: {str(support).partition(': ')[2]}")
    if audit.findings:
        notes.append(f"{len(audit.findings)} findings in {model}: annie-quant audit {quoted}")
    return notes
