"""Judging a checkpoint without a server: behavioural gates, KL divergence and perplexity against its bf16 reference.

The reference answers every prompt greedily once (kept on disk by a hash of its weights); each checkpoint is then
checked against those answers under W4A4 and W4A16 numerics (verification.py), in one pass that gives the KL figures
as well.
On a CPU both models compute in float32 where memory allows: what decides an answer is then the weights and the numerics
that are judged, not how a batch was cut.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from annie_quant import __version__, judge
from annie_quant.data.rows import read_conversations
from annie_quant.errors import UsageError
from annie_quant.evaluate.decoding import Decoded
from annie_quant.evaluate.engine import Engine, Row
from annie_quant.evaluate.kl import Tally, compare_logits
from annie_quant.evaluate.process_group import ALONE, Team, device_of, team
from annie_quant.evaluate.prompts import CLASSES, Ask, Scored, Template, conversation_answers, text_pieces
from annie_quant.evaluate.reference import Answers, Distributions, default_cache, fingerprint
from annie_quant.evaluate.verification import Difference, Outcome, answers, converse, first_difference, target_of
from annie_quant.hf.loading import load, numerics_of
from annie_quant.hf.nvfp4_linear import NVFP4Linear, set_numerics
from annie_quant.judge import Workload

SCHEMA_VERSION = 1
Progress = Callable[[float, float | None, str], None]


def evaluate(
    model_dir: str | os.PathLike,
    reference_dir: str | os.PathLike,
    workloads: Sequence[Workload] | None = None,
    numerics: Sequence[str] = ("w4a4", "w4a16"),
    n_per_gate: int | None = None,
    conversations: str | os.PathLike | Sequence[dict] | None = None,
    n_conversations: int | None = None,
    cache: str | os.PathLike | None = None,
    progress: Progress | None = None,
    dtype: str | None = None,
    device: str | None = None,
    rows: int = 128,
    text: str | os.PathLike | None = None,
) -> dict[str, Any]:
    """Gates, KL divergence and perplexity of the checkpoint in model_dir, under each of `numerics` that it can do.

    workloads: default all; n_per_gate draws that many prompts a gate from them. conversations: a JSON-lines file (or
    rows) whose assistant tokens are scored besides the reference's own answers. cache: folder for the reference's
    answers, default `.annie_quant` in reference_dir. progress(done, total, text). dtype: float32 or bfloat16 for
    everything that is not packed. text: a plain text file, for perplexity and KL over every token of it. A model without
    NVFP4 linears is judged as it is, under the name "bf16". Under torchrun or accelerate launch every process calls this
    with the same arguments, does its share and gets the whole result.
    Returns a dict that JSON can hold; `numerics` in it has a key a numerics: gates, kl, perplexity, paired, cases.
    """
    start = time.monotonic()
    tell = progress or (lambda done, total, text: None)
    workloads = list(workloads) if workloads is not None else judge.load_workloads()
    if n_per_gate is not None:
        workloads = judge.sample(workloads, n_per_gate)
    warm = [w.name for w in workloads if w.temperature != 0]
    if warm:
        raise UsageError(
            f"workload {warm[0]} samples (temperature is not 0); only greedy answers can be verified offline"
        )
    together = team()
    if together.rank:
        tell = lambda done, total, text: None  # noqa: E731  # one process speaks for all
    device = device or device_of(together)
    dtype = dtype or working_dtype([model_dir, reference_dir], device)
    tell(0, None, "loading")
    template = Template(reference_dir)
    model = load(
        model_dir, cache="float32" if dtype == "float32" else "bf16", dtype=getattr(torch, dtype), device=device
    )
    can = numerics_of(model)
    chosen = can if can == ["bf16"] else [n for n in numerics if n in can]
    if not chosen:
        raise UsageError(f"{model_dir} cannot do {', '.join(numerics)}", f"it can do: {', '.join(can)}")
    reference = Reference(Path(reference_dir), template, dtype, device, Path(cache) if cache else None, rows, together)
    asked = reference.converse(workloads, tell)
    talks = [] if conversations is None else conversation_answers(template, as_rows(conversations, n_conversations))
    pieces = [] if text is None else text_pieces(template, text)
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "version": __version__,
        "model": str(model_dir),
        "reference": str(reference_dir),
        "reference_sha256": reference.sha256,
        "dtype": dtype,
        "device": torch.device(device).type,
        "workloads": {w.name: {"sha256": w.sha256, "n_cases": len(w.cases)} for w in workloads},
        "n_answers": len(asked),
        "n_conversation_answers": len(talks),
        "n_text_tokens": sum(len(p.target) for p in pieces),
        "notes": notes(model_dir, reference_dir, numerics, can, model),
        "reference_gates": msgspec.to_builtins(judge.gate_table(judged(template, asked))),
        "numerics": {},
    }
    engine = Engine(model, rows=rows, team=together)
    for name in chosen:
        if name != "bf16":
            set_numerics(model, name)
        result["numerics"][name] = one_numerics(engine, template, reference, asked, talks, pieces, tell, name)
    result["seconds"] = time.monotonic() - start
    return result


def one_numerics(
    engine: Engine,
    template: Template,
    reference: Reference,
    asked: list[tuple[Ask, Decoded]],
    talks: list[Scored],
    pieces: list[Scored],
    tell: Progress,
    name: str,
) -> dict[str, Any]:
    """One pass over all scored tokens, then the answers that differ."""
    start = time.monotonic()
    own = scored_answers(template, asked)
    compared = compare(engine, reference, template, [*own, *talks, *pieces], tell, f"{name}: checking answers")
    differences = {i: compared[i].difference for i in range(len(asked))}
    kl = tally(template, own, compared)
    more = [
        tally(template, part, compared, at) if part else None
        for part, at in ((talks, len(own)), (pieces, len(own) + len(talks)))
    ]
    todo = sum(d is not None for d in differences.values())
    ended = 0

    def tick(n: int) -> None:
        nonlocal ended
        ended += n
        tell(ended, None, f"{name}: answering where it differs ({todo})")

    outcomes = answers(engine, template, asked, differences, tick)
    table = judged(template, [(o.ask, o.decoded) for o in outcomes])
    before = judged(template, asked)
    lengths = [(o.decoded, d) for o, (_, d) in zip(outcomes, asked, strict=True)]
    return {
        "gates": msgspec.to_builtins(judge.gate_table(table)),
        "kl": kl,
        "kl_conversations": more[0],
        "kl_text": more[1],
        "perplexity": kl.get("perplexity"),
        "perplexity_reference": kl.get("perplexity_reference"),
        "same_answers": {"n": len(outcomes), "same": sum(o.same for o in outcomes)},
        "verbosity_ratio": ratio(sum(len(a.tokens) for a, _ in lengths), sum(len(b.tokens) for _, b in lengths)),
        "paired": paired_gates(before, table),
        "cases": cases(outcomes, table, before),
        "seconds": time.monotonic() - start,
    }


@dataclass(frozen=True)
class Compared:
    """One scored row: kl.FIELDS of each of its tokens, and where the model first leaves it."""

    figures: np.ndarray
    difference: Difference | None


def scored_answers(template: Template, asked: Sequence[tuple[Ask, Decoded]]) -> list[Scored]:
    return [
        Scored(a.workload.name, a.prompt, tuple(target_of(d, template.ends)), a.workload.thinking) for a, d in asked
    ]


def compare(
    engine: Engine, reference: Reference, template: Template, scored: Sequence[Scored], tell: Progress, what: str
) -> dict[int, Compared]:
    """The model beside its reference on every scored token; of a team each process does its batches, all get all."""
    rows = [Row(s.prompt, s.target) for s in scored]
    found: dict[int, Compared] = {}
    for done, (i, ours, theirs) in enumerate(reference.distributions.beside(engine, rows), 1):
        target = torch.tensor(rows[i].target, device=ours.device)
        difference = first_difference(ours.argmax(-1), rows[i].target, template.ends)
        found[i] = Compared(compare_logits(theirs, ours, target), difference)
        tell(done * engine.team.size, len(rows), what)
    return engine.team.gather(found)


def tally(
    template: Template, scored: Sequence[Scored], compared: Mapping[int, Compared], at: int = 0
) -> dict[str, Any]:
    """The figures of these rows, which are numbers `at` and on of what was compared."""
    found = Tally(CLASSES)
    for i, s in enumerate(scored, at):
        found.add(s.category, template.classes(s.target, s.thinking), compared[i].figures)
    return found.summary()


class Reference:
    """The bf16 model: its answers from disk where they are known, the model itself only when something is missing."""

    def __init__(
        self,
        folder: Path,
        template: Template,
        dtype: str,
        device: str,
        cache: Path | None,
        rows: int,
        team: Team = ALONE,
    ) -> None:
        self.folder, self.template, self.dtype, self.device, self.rows = folder, template, dtype, device, rows
        self.team = team
        self.sha256 = fingerprint(folder)
        self.answers = Answers((cache or default_cache(folder)) / f"answers-{self.sha256[:16]}-{dtype}.jsonl", team)
        self.distributions = Distributions(self.engine)
        self._engine: Engine | None = None

    def engine(self) -> Engine:
        if self._engine is None:
            model = load(self.folder, cache="packed", dtype=getattr(torch, self.dtype), device=self.device)
            if numerics_of(model) != ["bf16"]:
                raise UsageError(f"{self.folder} is quantized; --reference wants the bf16 checkpoint")
            self._engine = Engine(model, rows=self.rows, team=self.team)
        return self._engine

    def converse(self, workloads: Sequence[Workload], tell: Progress) -> list[tuple[Ask, Decoded]]:
        """Every ask with the reference's greedy answer, turn by turn."""

        def generate(asks: Sequence[Ask]) -> list[Decoded]:
            return self.answers.complete(asks, self.template.ends, self.engine, tell)

        return converse(self.template, workloads, generate)


def judged(template: Template, found: Sequence[tuple[Ask, Decoded]]) -> list[tuple[Workload, Any, judge.Answer]]:
    return [(a.workload, a.case.at_turn(a.turn), template.answer(a, d)) for a, d in found]


def paired_gates(before: Sequence, after: Sequence) -> dict[str, dict[str, Any]]:
    """For each gate: answers that only the reference or only the quantized model passes, and McNemar's exact p."""
    from scipy.stats import binomtest

    counts: dict[str, list[int]] = {}
    for old, new in zip(before, after, strict=True):
        was, now = judge.checks(old[2], old[1], old[0]), judge.checks(new[2], new[1], new[0])
        for gate in was.keys() & now.keys():
            row = counts.setdefault(gate, [0, 0, 0])
            row[0] += 1
            row[1] += was[gate] and not now[gate]
            row[2] += now[gate] and not was[gate]
    return {
        gate: {"n": n, "lost": lost, "won": won, "p": float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0}
        for gate, (n, lost, won) in sorted(counts.items())
    }


def cases(outcomes: Sequence[Outcome], table: Sequence, before: Sequence) -> list[dict[str, Any]]:
    """The answers that differ from the reference's, with both texts and the gates that now fail."""
    found = []
    for o, (workload, case, answer), (_, _, old) in zip(outcomes, table, before, strict=True):
        if not o.same:
            failed = [g for g, passed in judge.checks(answer, case, workload).items() if not passed]
            calls = [f"{c['name']}({c['arguments']})" for c in answer.tool_calls]
            found.append(
                {
                    "case": o.ask.name,
                    "agreed_tokens": o.agreed,
                    "failed": failed,
                    "text": answer.text,
                    "tool_calls": calls,
                    "reference_text": old.text,
                    "reference_tool_calls": [f"{c['name']}({c['arguments']})" for c in old.tool_calls],
                }
            )
    return found


def notes(model_dir: Any, reference_dir: Any, asked: Sequence[str], can: Sequence[str], model: Any) -> list[str]:
    """What a reader must know about how this was judged."""
    found = []
    for name in ("tokenizer.json", "chat_template.jinja"):
        ours, theirs = Path(model_dir) / name, Path(reference_dir) / name
        if ours.is_file() and theirs.is_file() and ours.read_bytes() != theirs.read_bytes():
            found.append(f"{name} differs from the reference's; both were judged with the reference's")
    if isinstance(model.get_output_embeddings(), NVFP4Linear):
        found.append("lm_head is quantized; the usual recipes leave it as it was")
    skipped = [n for n in asked if n not in can]
    if skipped and can != ["bf16"]:
        found.append(f"{', '.join(skipped)} does not apply: the checkpoint holds no input scales")
    return found


def working_dtype(folders: Sequence[Any], device: str) -> str:
    """float32 on a CPU where all models fit in half of its free memory that way, else bfloat16."""
    if device != "cpu":
        return "bfloat16"
    import psutil

    # A 4-bit weight is half a byte on disk, a bf16 one two: either way at most 8 times the bytes, 4 here and 4 there.
    size = sum(f.stat().st_size for folder in folders for f in Path(folder).glob("*.safetensors"))
    return "float32" if 5 * size < psutil.virtual_memory().available / 2 else "bfloat16"


def as_rows(conversations: Any, limit: int | None) -> list[dict]:
    if isinstance(conversations, (str, os.PathLike)):
        return read_conversations(conversations, limit)
    return list(conversations)[:limit]


def ratio(a: int, b: int) -> float | None:
    return a / b if b else None
