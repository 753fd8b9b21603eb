"""`annie-quant init`: a folder with a persona, gate workloads and calibration data, made from a prompt, tools and logs.

    prompt + tools           persona.json; prompts are made from the tools, conversations are written by the bf16 model, by
                             a teacher, or (calls alone) by the offline teacher
    logs (+ prompt, tools)   persona.json, workloads/ and calibration.jsonl from production's own conversations

Secrets are masked before anything is written. README.md of the folder states where all of it comes
from.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
from msgspec.structs import replace

from annie_quant.core.errors import UsageError
from annie_quant.core.files import write_json, write_text
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.templates import render_markdown
from annie_quant.data.behaviours import compare, notes_on
from annie_quant.data.conversations import LoggedTool, tool_names
from annie_quant.data.generation import generate
from annie_quant.data.log_sample import (
    LogSample,
    inferred_tools,
    max_tokens,
    read_sample,
    split_conversations,
)
from annie_quant.data.masking import Scanner
from annie_quant.data.model_rows import (
    SPLIT,
    AnsweringModel,
    ReadBack,
    examples,
    read_back,
    write_rows,
)
from annie_quant.data.rows import read_rows, store_rows
from annie_quant.data.teachers import Options, offline
from annie_quant.data.tool_exchanges import NO_ARGUMENTS_HINT, with_drawn_tools
from annie_quant.data.workloads import WORKLOADS, gate_documents, has_labels
from annie_quant.documents import ChatRow, RowProvenance, WorkloadFile
from annie_quant.documents.persona import PERSONA_FILE, Category, Persona, load_persona
from annie_quant.judge.library import build_workload

CALIBRATION_FILE = "calibration.jsonl"
CARD_FILE = "README.md"
CARD_MARK = "<!-- annie-quant init -->"
PERSONA_FIELDS = ("name", "system_prompt", "tools", "rules", "examples")  # of persona.json
MIN_CASES_TO_DECIDE = 100  # per behaviour, from which on a gate is decided by an interval
N_GENERATED_CASES = 120  # per workload
N_GENERATED_ROWS = 400
MIN_ROWS = 100  # of calibration data


class Initialized(msgspec.Struct, kw_only=True):
    """What init has written.

    cases: number of gate cases per workload.
    behaviours: number of gate cases per behaviour.
    short: the behaviours with fewer than MIN_CASES_TO_DECIDE, where logs can bring more.
    masked: number of masked places per kind of secret.
    max_tokens: of an answer, per workload.
    read_back: what the model says about its rows; None without one.
    examples: ten rows to read.
    lines: what a user must know, one line each. next: what to do now.
    """

    output: str
    persona: str
    tools: list[str]
    conversations: int
    calibration_rows: int
    cases: dict[str, int]
    behaviours: dict[str, int]
    short: dict[str, int]
    masked: dict[str, int]
    max_tokens: dict[str, int]
    read_back: ReadBack | None
    examples: list[str]
    lines: list[str]
    next: str


@dataclass(frozen=True)
class Sources:
    """The inputs of init.

    prompt, tools: None to take those of the logs.
    personal, words: what is masked besides secrets (see Scanner).
    seed: of the sample of the logs, and of generated prompts.
    fill: also generate prompts and conversations where there are logs.
    n_rows: generated conversations.
    model: the bf16 model; it writes conversations, reads them back and counts tokens.
    teacher, options: who writes conversations instead.
    max_tokens: of an answer; None: from the answers' lengths.
    """

    prompt: str | None = None
    tools: list[LoggedTool] | None = None
    logs: Sequence[Path] = ()
    name: str = ""
    personal: bool = False
    words: Sequence[str] = ()
    seed: int = 0
    fill: bool = False
    n_rows: int = N_GENERATED_ROWS
    model: AnsweringModel | None = None
    teacher: str = ""
    options: Options | None = None
    max_tokens: int | None = None


def initialize(
    sources: Sources, output: Path, force: bool = False, progress: Progress = SILENT
) -> Initialized:
    """Write persona.json, workloads/, calibration.jsonl and README.md into `output`.

    A new folder is removed after an error.

    Raises UsageError where there is neither a system prompt nor a log with conversations, and for a
    folder with other files.
    """
    _check_output(output, force)
    is_new = not output.exists()
    try:
        return _write(sources, output, progress)
    except BaseException:
        if is_new:
            shutil.rmtree(output, ignore_errors=True)
        raise


def _write(sources: Sources, output: Path, progress: Progress) -> Initialized:
    if sources.prompt is None and not sources.logs:
        raise UsageError("there is nothing to start from", "give --prompt, --logs, or both")
    scanner = Scanner(sources.personal, sources.words)
    sample = read_sample(sources.logs, sources.seed, progress)
    if sources.logs and not sample.pool.n:
        reasons = "; ".join(sample.problems.lines()) or "the files are empty"
        raise UsageError(
            f"the logs have no conversation that can be used: {reasons}", "--logs takes chat logs"
        )
    lines = [f"left out: {line}" for line in sample.problems.lines()]
    persona, notes = choose_persona(sources, sample, scanner)
    lines += notes
    persona = _store_persona(persona, output)
    count = sources.model.count if sources.model is not None else None
    logged = split_conversations(sample, persona, scanner, count)
    lines += logged.notes
    rows = logged.rows
    workloads = list(logged.gates.documents(sources.max_tokens))
    behaviours = Counter(logged.gates.behaviours)
    if sources.fill or not sources.logs:
        generated = Generated([], sources.max_tokens, [])
        if len(rows) < MIN_CASES_TO_DECIDE:
            generated = generated_rows(persona, sources, output, progress)
            rows += generated.rows
        documents = _generated_documents(persona, sources.seed, generated.max_tokens)
        behaviours.update(_behaviours(documents))
        workloads += documents
        lines += [*_generated_lines(persona, documents), *generated.lines]
        _, undrawn = with_drawn_tools(persona, SPLIT)
        lines += [f"left out: {reason}" for reason in undrawn]
    for workload in workloads:
        alone = replace(workload, persona=None, tools=None)
        build_workload(msgspec.to_builtins(alone), workload.name)  # checked before it is written
        write_json(output / WORKLOADS / f"{workload.name}.json", msgspec.to_builtins(workload))
    store_rows(output / CALIBRATION_FILE, rows)
    reading = None
    if sources.model is not None and rows:
        reading = read_back(rows, persona, sources.model, progress)
        lines.append(reading.line())
    # Without logs every gate has the prompts that it needs, and its user has no more to give.
    short = {}
    if sources.logs:
        short = {name: n for name, n in behaviours.items() if n < MIN_CASES_TO_DECIDE}
    lines += _shortcomings(persona, behaviours, short)
    if rows:
        compared = compare(output / CALIBRATION_FILE, persona)
        lines += notes_on(compared, output / CALIBRATION_FILE)
    lines += _limit_lines(sources, workloads)
    masked = {kind: n for kind, n in scanner.counts.items() if n}
    lines += [f"masked: {n} × {kind}" for kind, n in sorted(masked.items())]
    result = Initialized(
        output=str(output),
        persona=persona.name,
        tools=tool_names(persona.tools),
        conversations=sample.pool.n,
        calibration_rows=len(rows),
        cases={workload.name: len(workload.cases) for workload in workloads},
        behaviours=dict(behaviours),
        short=short,
        masked=masked,
        max_tokens={workload.name: workload.max_tokens for workload in workloads},
        read_back=reading,
        examples=examples(rows),
        lines=lines,
        next=_next_step(sources, output, len(rows)),
    )
    write_text(output / CARD_FILE, render_card(result, persona, sample))
    return result


def _next_step(sources: Sources, output: Path, n_rows: int) -> str:
    """Return the command to run now; where rows are too few, what makes more of them."""
    if n_rows >= MIN_ROWS:
        return (
            f"next: annie-quant search --model BF16 --persona {output} "
            f"--calib-data {output}/{CALIBRATION_FILE} --output RUN"
        )
    reason = ""
    if not n_rows and sources.logs:
        reason = " (all conversations with answers are gate prompts)"
    writer = "" if sources.model is not None else " --model BF16 (or --teacher claude-cli)"
    more = (
        f"record more (annie-quant record), or add --fill{writer} so that a model writes the rest"
    )
    if not sources.logs:
        more = f"add{writer or ' --rows 400'}, or --logs"
    return f"{n_rows} calibration conversations are too few, {MIN_ROWS} or more are needed{reason}: {more}, and --force"


# ---- generated prompts and conversations


@dataclass(frozen=True)
class Generated:
    """Conversations that init lets someone write. max_tokens: for answers to generated prompts; lines: about them."""

    rows: list[ChatRow]
    max_tokens: int | None
    lines: list[str]


def generated_rows(
    persona: Persona, sources: Sources, output: Path, progress: Progress
) -> Generated:
    """Return conversations by the teacher, by default the model; without both, calls alone by the offline teacher."""
    n = sources.n_rows
    limit = sources.max_tokens
    if sources.teacher not in ("", "offline"):
        # Next to the folder, which an error removes: a run that costs money resumes.
        file = output.with_name(f"{output.name}.rows.jsonl")
        generate(persona, sources.teacher, n, file, sources.seed, progress, options=sources.options)
        rows = [cast(ChatRow, row) for row in read_rows(file)]
        file.unlink()
        line = f"{len(rows)} calibration conversations are by {sources.teacher}"
        return Generated(rows, limit, [line])
    if sources.model is not None and not sources.teacher:
        written = write_rows(persona, sources.model, n, sources.seed, progress)
        lines = [f"{len(written.rows)} calibration conversations are by {sources.model.folder}"]
        lines += [
            f"left out: {k} conversations of the model: {why}"
            for why, k in written.left_out.items()
        ]
        return Generated(written.rows, limit or max_tokens(written.lengths, 1), lines)
    drawn, undrawn = with_drawn_tools(persona, SPLIT)
    if undrawn and not drawn.tools and not sources.logs:
        raise UsageError(undrawn[0], NO_ARGUMENTS_HINT)
    if not drawn.tools:
        line = "the offline teacher writes calls alone, and there are no tools to call"
        return Generated([], limit, [line])
    rows = offline_rows(persona, n, sources.seed)
    line = (
        f"{len(rows)} calibration conversations are made by the offline teacher: calls alone, "
        "without the assistant's words; --model BF16 writes whole conversations"
    )
    return Generated(rows, limit, [line])


def offline_rows(persona: Persona, n: int, seed: int) -> list[ChatRow]:
    """Return at most n conversations by the offline teacher, of its categories in turn."""
    teacher = offline.Offline(SPLIT)
    provenance: RowProvenance = {
        "teacher": "offline",
        "model": offline.TEMPLATES_MODEL,
        "persona": persona.source,
        "prompt_sha256": persona.prompt_sha256,
    }

    def of_category(category: Category) -> Iterator[ChatRow]:
        drawn = teacher.conversations(persona, category, n, f"{seed}:{category.name}")
        for i, row in enumerate(drawn):
            row["id"] = f"{category.name}-{i:04d}"
            row["category"] = category.name
            row["provenance"] = provenance
            yield row

    by_category = map(of_category, teacher.categories(persona))
    rounds = itertools.zip_longest(*by_category)
    rows = filter(None, itertools.chain.from_iterable(rounds))
    return sorted(itertools.islice(rows, n), key=lambda row: row["id"])


def _generated_documents(persona: Persona, seed: int, limit: int | None) -> list[WorkloadFile]:
    documents = gate_documents(persona, N_GENERATED_CASES, seed, limit)
    return [replace(d, name=f"generated_{d.name}", persona="..") for d in documents]


def _generated_lines(persona: Persona, documents: Sequence[WorkloadFile]) -> list[str]:
    n_cases = sum(len(document.cases) for document in documents)
    source = "from the tools' schemas" if persona.tools else "by the offline teacher, without tools"
    lines = [f"{n_cases} gate prompts are made {source} (generated_*)"]
    if not any(has_labels(document.cases) for document in documents):
        lines.append(
            "generated prompts have no labels, because the system prompt's rules decide: answers are compared with bf16's"
        )
    return lines


def _limit_lines(sources: Sources, workloads: Sequence[WorkloadFile]) -> list[str]:
    """Return how max_tokens of the workloads was found."""
    if not workloads or sources.max_tokens is not None:
        return []
    limits = ", ".join(f"{workload.name} {workload.max_tokens}" for workload in workloads)
    how = "twice the usual answer, estimated at 2 characters per token; --model DIR counts tokens"
    if sources.model is not None:
        how = "twice the usual answer in the model's tokens"
    return [f"max_tokens: {limits} ({how}; --max-tokens N sets it)"]


def _check_output(output: Path, force: bool) -> None:
    if not output.exists() or not any(output.iterdir()):
        return
    card = output / CARD_FILE
    if not card.is_file() or CARD_MARK not in card.read_text(encoding="utf-8", errors="replace"):
        raise UsageError(f"{output} has other files in it", "choose another --output")
    if not force:
        raise UsageError(
            f"{output} was made by annie-quant init before", "add --force to make it again"
        )


def choose_persona(
    sources: Sources, sample: LogSample, scanner: Scanner
) -> tuple[Persona, list[str]]:
    """Return the persona, with the given prompt and tools or else those of the logs, and notes about it."""
    prompt = sources.prompt
    notes = []
    if prompt is None:
        prompt, n = next(iter(sample.prompts.most_common(1)), ("", 0))
        note = (
            "the logs have no system prompt: the persona has an empty one; --prompt FILE gives it"
        )
        if prompt:
            note = f"the system prompt is the most frequent one of the logs ({n} of {sample.pool.n} conversations)"
        notes.append(note)
    elif not prompt.strip():
        notes.append("the system prompt is empty")
    before = scanner.counts.total()
    masked = scanner.masked(prompt.strip())
    if scanner.counts.total() > before:
        notes.append(
            "the system prompt has a secret in it: it is masked, so it differs from production's"
        )
    tools = sources.tools if sources.tools is not None else list(sample.tools.values())
    if not tools:
        tools = inferred_tools(sample)
        if tools:
            notes.append(
                f"the logs call {len(tools)} tools and list none: their schemas are inferred from the calls; "
                "--tools FILE gives the real ones"
            )
    functions = tuple(
        {"type": "function", "function": scanner.masked(t["function"])} for t in tools
    )
    return Persona(name=sources.name or "Assistant", system_prompt=masked, tools=functions), notes


def _store_persona(persona: Persona, output: Path) -> Persona:
    """Write persona.json into a folder without workloads, and return the persona as it is read from there."""
    (output / WORKLOADS).mkdir(parents=True, exist_ok=True)
    for old in (output / WORKLOADS).glob("*.json"):
        old.unlink()
    write_json(output / PERSONA_FILE, {name: getattr(persona, name) for name in PERSONA_FIELDS})
    return replace(load_persona(output / PERSONA_FILE), source=str(output))


def _behaviours(documents: Sequence[WorkloadFile]) -> Counter[str]:
    """Return the number of prompts per behaviour that they ask for."""
    counts: Counter[str] = Counter()
    for document in documents:
        for case in document.cases:
            expect = case.expect or {}
            asked = (expect.get("logged") or {}).get("calls", ())
            called = [expect["tool"]] if "tool" in expect else asked
            after_result = document.name.endswith("tool_results")
            if after_result or expect.get("turns"):
                counts["answers from a result"] += 1
            elif len(called) == 1:
                counts[f"calls {called[0]}"] += 1
            elif expect.get("no_tool"):
                counts["answers in words"] += 1
    return counts


def _shortcomings(persona: Persona, behaviours: Counter[str], short: dict[str, int]) -> list[str]:
    """Return one line for each behaviour that the gate prompts cannot decide."""
    lines = [
        f"{name}: {n} gate prompts, {MIN_CASES_TO_DECIDE - n} short of {MIN_CASES_TO_DECIDE}; gates on it may stay undecided"
        for name, n in sorted(short.items())
    ]
    never = [name for name in tool_names(persona.tools) if f"calls {name}" not in behaviours]
    if never:
        lines.append(
            f"no gate prompt calls {', '.join(never)}: nothing about {'them' if len(never) > 1 else 'it'} can be judged; "
            "--fill makes prompts from the tools' schemas"
        )
    return lines


def render_card(result: Initialized, persona: Persona, sample: LogSample) -> str:
    """Return the README.md of the folder: the origin of its content, and what is missing."""
    files = [{"split": "calibration", "path": CALIBRATION_FILE}]
    configs = json.dumps([{"config_name": "default", "data_files": files}])
    return render_markdown(
        "init.md", configs=configs, mark=CARD_MARK, result=result, persona=persona, sample=sample
    )
