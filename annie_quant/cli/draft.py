"""`annie-quant draft`: graft an MTP head, tune it on the checkpoint's own answers, and predict what its drafts give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from annie_quant.cli.options import AsJson, Force, at_least
from annie_quant.cli.terminal import console, echo, emit, quiet_engines


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Options of `annie-quant draft`.

    Attributes:
        base: Folder whose MTP head is grafted, of the model that was fine-tuned. Default: the checkpoint's own head.
        calib_data: JSON lines of conversations, whose prompts the checkpoint answers (annie-quant data).
        numerics: Arithmetic of the server, as in eval: w4a4, w4a16, vllm-cutlass, llama.cpp-cpu ... Default: the checkpoint's
            first.
        answers: Most answers to learn from.
        epochs: Most passes over them; the tuning ends earlier where held-out prompts gain nothing.
        seed: Order of the answers.
        output: Folder of the new checkpoint.
        dry_run: Print memory and time to expect, and stop.
    """

    base: Path | None = None
    calib_data: Path
    numerics: str | None = None
    answers: Annotated[int, at_least(1)] = 5000
    epochs: Annotated[int, at_least(1)] = 8
    seed: int = 0
    output: Path
    force: Force = False
    dry_run: bool = False
    as_json: AsJson = False


def draft(model: Path, /, *, options: DraftOptions) -> None:
    """Tune the MTP head of a checkpoint, so that its server accepts the drafts. Resumes."""
    quiet_engines()
    from annie_quant.quantize import draft as drafting
    from annie_quant.quantize import draft_estimate

    if options.dry_run:
        estimate = draft_estimate.estimate(
            model, options.base, options.calib_data, options.answers, options.epochs
        )
        for line in estimate.lines():
            echo(line)
        return
    with console.task("draft") as step:
        result = drafting.run(
            model,
            options.output,
            options.calib_data,
            base=options.base,
            numerics=options.numerics,
            max_answers=options.answers,
            epochs=options.epochs,
            seed=options.seed,
            force=options.force,
            report=step,
        )
    if options.as_json:
        emit({"output": result.output, "head": result.head, "notes": result.notes})
        return
    for line in result.lines():
        console.line(line)
    for note in result.notes:
        console.note(note)
