"""`annie-quant draft`: give a checkpoint an MTP head whose drafts its server accepts.

A fine-tune has lost the head, or has one that drafts the base's answers. The base's head is grafted, and tuned on the checkpoint's
own answers to the user's prompts, with its hidden states in the arithmetic that is served. Nothing else of the checkpoint changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import torch

from annie_quant import __version__
from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.chat_template import ConversationRefused
from annie_quant.checkpoint.draft_heads import find_head, write_with_head
from annie_quant.checkpoint.writer import check_name, check_output, source_key, staged
from annie_quant.core.errors import UsageError
from annie_quant.core.files import write_json
from annie_quant.core.progress import Progress, as_progress
from annie_quant.core.resume import keyed_folder
from annie_quant.data.rows import read_conversations
from annie_quant.documents.drafts import DRAFTS_FILE, DraftPrediction, TunedHead
from annie_quant.judge import load_workloads
from annie_quant.offline.draft_head import DraftHead
from annie_quant.offline.draft_prediction import MAX_DRAFTS, predictions, right_drafts
from annie_quant.offline.emulation import emulate
from annie_quant.offline.engine import Engine
from annie_quant.offline.hidden_states import AnswerStates, DraftedAnswer, answer_states
from annie_quant.offline.loading import load, numerics_of
from annie_quant.offline.profiles import find_profile
from annie_quant.offline.prompts import ScoredAnswer, Template, conversation_answers
from annie_quant.quantize import draft_tuning
from annie_quant.quantize.backend import device_and_dtype
from annie_quant.quantize.draft_tuning import TuningData
from annie_quant.quantize.own_answers import own_answers
from annie_quant.quantize.strategy import sha256_of

# With fewer answers a head learns them by heart, and the held-out ones decide nothing.
MIN_ANSWERS = 40
HELD_OUT_SHARE = 0.1
MIN_HELD_OUT = 8
MAX_ANSWERS = 5000
GENERAL_WORKLOADS = ("text_code", "text_math", "text_prose")
GENERAL_PROMPTS = 16  # of each, half to learn from and half to measure


@dataclass(frozen=True)
class DraftResult:
    """A written checkpoint. notes: what was compared, and what a server does with the head."""

    output: str
    head: TunedHead
    notes: list[str]

    def lines(self) -> list[str]:
        """Return what the drafts give before and after as text, one line per kind of prompt."""
        head = self.head
        lines = [
            f"{head.answers:,} answers, {head.tokens:,} tokens, epoch {head.best_epoch} of {head.epochs}"
        ]
        pairs = {kind: (head.before[kind], after) for kind, after in head.after.items()}
        if head.general_before and head.general_after:
            pairs["general prompts"] = (head.general_before, head.general_after)
        for kind, (before, after) in pairs.items():
            lines.append(f"{kind}: {_describe(before)} → {_describe(after)}")
        return lines


def _describe(prediction: DraftPrediction) -> str:
    """Return "2.52 tokens per step with 3 drafts, 97 46 21 % accepted"."""
    steps = prediction.of(draft_tuning.STEPS)
    shares = " ".join(f"{100 * share.value:.0f}" for share in steps.accepted)
    tokens = steps.tokens_per_step.value
    return f"{tokens:.2f} tokens per step with {steps.drafts} drafts, {shares} % accepted"


@dataclass(frozen=True)
class AnswerSplit:
    """Answers to learn from and held out: the user's, and those to general prompts."""

    train: list[DraftedAnswer]
    held_out: list[DraftedAnswer]
    general: list[DraftedAnswer]


def run(
    model: str | os.PathLike,
    output: str | os.PathLike,
    calib_data: str | os.PathLike,
    base: str | os.PathLike | None = None,
    numerics: str | None = None,
    max_answers: int = MAX_ANSWERS,
    epochs: int = draft_tuning.EPOCHS,
    seed: int = 0,
    force: bool = False,
    report: Progress | Callable[[str], object] | None = None,
) -> DraftResult:
    """Write a copy of `model` with a tuned head into `output`, which appears only when it is complete.

    calib_data: conversations whose prompts the model answers.
    base: folder whose head is grafted; None: the model's own head.
    numerics: profile of the server (profiles.py); None: the first one that the checkpoint has.
    A killed run goes on from its answers and its last epoch. Raises UsageError for too few answers, and what find_head raises.
    """
    target = check_name(output)
    progress = as_progress(report)
    check_output(target, force, (model, base, calib_data))
    folder = ModelFolder(model)
    source = find_head(folder, ModelFolder(base) if base else None)
    template = Template(folder.path)
    given = prompts_of(template, Path(calib_data), max_answers)
    key = {
        "version": __version__,
        "model": source_key(folder),
        "head": source_key(source),
        "calib_data": sha256_of(Path(calib_data)),
        "options": [numerics, max_answers, epochs, seed],
    }
    work = keyed_folder(target.with_name(f".{target.name}.work"), key)
    device, dtype = device_and_dtype(folder)
    engine = Engine(load(folder.path, dtype=dtype, device=str(device)))
    numerics = numerics or numerics_of(engine.model)[0]
    answers = _answers_of(folder.path, template, given, numerics, work, progress)
    split = split_answers(answers, general_answers(folder.path, template, numerics, work, progress))
    head = DraftHead(source, engine.model, torch.float32)
    with emulate(engine.model, find_profile(numerics)):
        progress.message("computing hidden states")
        data = TuningData(
            _states_of(engine, split.train),
            _states_of(engine, split.held_out),
            _states_of(engine, split.general),
        )
        before = measured(engine, head, split, data)
        tuned = draft_tuning.tune(engine, head, data, progress, work, epochs, seed=seed)
        tensors = stored_tensors(head)
        head.load_state_dict({n: as_torch(a, engine.device) for n, a in tensors.items()})
        after = measured(engine, head, split, data)
    named = {f"mtp.{name}": array for name, array in tensors.items()}
    result = TunedHead(
        version=__version__,
        base=source.path.name if base else "",
        base_head_sha256=hash_of({n: source.tensor(n) for n in source if source.family.in_mtp(n)}),
        head_sha256=hash_of(named),
        numerics=numerics,
        answers=len(split.train),
        tokens=sum(len(answer.answer) for answer in split.train),
        epochs=tuned.epochs,
        best_epoch=tuned.best_epoch,
        before=before[0],
        after=after[0],
        general_before=before[1],
        general_after=after[1],
    )
    with staged(target, force=force, inputs=(model, base, calib_data)) as part:
        written = write_with_head(folder, named, source, part)
        write_json(part / DRAFTS_FILE, msgspec.to_builtins(result))
    shutil.rmtree(work, ignore_errors=True)
    compared = f"{written.tensors} tensors of the head written as tuned, {written.changed} of them differ from the base's"
    return DraftResult(str(target), result, [compared, *written.notes])


# ---- answers


def prompts_of(template: Template, calib_data: Path, most: int) -> list[ScoredAnswer]:
    """Return the answers of the conversations, at most so many, evenly spread. Raises UsageError for too few."""
    answers = conversation_answers(template, read_conversations(calib_data))
    if len(answers) < MIN_ANSWERS:
        raise UsageError(
            f"{calib_data}: {len(answers)} answers to tune on, expected at least {MIN_ANSWERS}",
            "annie-quant data --n 500 makes conversations, or give a larger file",
        )
    count = min(most, len(answers))
    return [answers[i * len(answers) // count] for i in range(count)]


def _answers_of(
    model: Path,
    template: Template,
    given: Sequence[ScoredAnswer],
    numerics: str,
    work: Path,
    progress: Progress,
) -> list[DraftedAnswer]:
    """Return the model's own answers; one that does not end, as far as it goes."""
    answered = own_answers(model, template, given, progress, work, numerics, keeps_cut=True)
    return [DraftedAnswer(a.category, a.prompt, a.target) for a in answered.answers]


def general_answers(
    model: Path, template: Template, numerics: str, work: Path, progress: Progress
) -> list[DraftedAnswer]:
    """Return the model's own answers to prompts about code, mathematics and prose; [] where the template refuses them."""
    prompts = []
    for workload in load_workloads(GENERAL_WORKLOADS):
        for case in workload.cases[:GENERAL_PROMPTS]:
            try:
                prompts.append(template.request(workload, case).prompt)
            except ConversationRefused:
                return []
    empty = tuple(template.end_tokens[:1])
    given = [ScoredAnswer("general", prompt, empty) for prompt in prompts]
    answered = _answers_of(model, template, given, numerics, work, progress)
    return [answer for answer in answered if len(answer.answer) > 1]


def split_answers(
    answers: Sequence[DraftedAnswer], general: Sequence[DraftedAnswer]
) -> AnswerSplit:
    """Return the split: every tenth answer of each kind is held out, and every second general one is measured."""
    usable = sorted((a for a in answers if len(a.answer) > 1), key=lambda answer: answer.kind)
    every = min(round(1 / HELD_OUT_SHARE), len(usable) // MIN_HELD_OUT)
    held_out = [answer for i, answer in enumerate(usable) if i % every == 0]
    prompts = {tuple(answer.prompt) for answer in held_out}
    train = [answer for answer in usable if tuple(answer.prompt) not in prompts]
    return AnswerSplit([*train, *general[::2]], held_out, list(general[1::2]))


def _states_of(engine: Engine, answers: Sequence[DraftedAnswer]) -> list[AnswerStates]:
    """Return the hidden states of answers."""
    return [states.copy() for states in answer_states(engine, answers)]


def measured(
    engine: Engine, head: DraftHead, split: AnswerSplit, data: TuningData
) -> tuple[dict[str, DraftPrediction], DraftPrediction | None]:
    """Return the prediction for held-out prompts by kind, and for general ones."""
    held_out = _predicted(engine, head, split.held_out, data.held_out)
    if not split.general:
        return held_out, None
    return held_out, _predicted(engine, head, split.general, data.general)["general"]


def _predicted(
    engine: Engine,
    head: DraftHead,
    answers: Sequence[DraftedAnswer],
    batches: Sequence[AnswerStates],
) -> dict[str, DraftPrediction]:
    runs: list[list[int]] = [[] for _ in answers]
    for states in batches:
        computed = right_drafts(engine, head, states, MAX_DRAFTS)
        for row, run in zip(states.rows, computed, strict=True):
            runs[row] = run
    return predictions([answer.kind for answer in answers], runs, MAX_DRAFTS)


# ---- the head's tensors


def stored_tensors(head: DraftHead) -> dict[str, np.ndarray]:
    """Return the head's weights in bfloat16, as they are written."""
    return {
        name: value.detach().cpu().float().numpy().astype(ml_dtypes.bfloat16)
        for name, value in head.state_dict().items()
    }


def as_torch(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return an array as float32 on a device."""
    return torch.from_numpy(array.astype(np.float32)).to(device)


def hash_of(tensors: Mapping[str, np.ndarray]) -> str:
    """Return a hash of tensors' names and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()
