"""`annie-quant init`: a folder with a persona, gate workloads and calibration data, made from a prompt, tools and logs.

    prompt + tools           persona.json; prompts and conversations are made from the tools by the offline teacher
    logs (+ prompt, tools)   persona.json, workloads/ and calibration.jsonl from production's own conversations

Secrets are masked before anything is written. README.md of the folder states where all of it comes
from.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from annie_quant.core.errors import UsageError
from annie_quant.core.files import write_json, write_text
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.templates import render_markdown
from annie_quant.data.log_records import LoggedTool
from annie_quant.data.log_sample import LogSample, inferred_tools, read_sample, split_conversations
from annie_quant.data.masking import Scanner
from annie_quant.data.workloads import WORKLOADS, gate_documents
from annie_quant.documents import CaseFile, ChatRow, RowProvenance
from annie_quant.documents.persona import PERSONA_FILE, Persona, load_persona
from annie_quant.judge.library import build_workload

CALIBRATION_FILE = "calibration.jsonl"
CARD_FILE = "README.md"
CARD_MARK = "<!-- annie-quant init -->"
PERSONA_FIELDS = (
    "name",
    "system_prompt",
    "tools",
    "rules",
    "examples",
)  # those that persona.json gets
MIN_CASES_TO_DECIDE = 100  # per behaviour, from which on a gate is decided by an interval
N_GENERATED_CASES = 120  # per workload
N_GENERATED_ROWS = 400


class Initialized(msgspec.Struct, kw_only=True):
    """What init has written.

    cases: number of gate cases per workload.
    behaviours: number of gate cases per behaviour.
    short: the behaviours with fewer than MIN_CASES_TO_DECIDE, where logs can bring more.
    masked: number of masked places per kind of secret.
    lines: what a user must know, one line each.
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
    lines: list[str]


@dataclass(frozen=True)
class Sources:
    """The inputs of init.

    prompt, tools: None to take those of the logs.
    personal, words: what is masked besides secrets (see Scanner).
    seed: of the sample of the logs, and of generated prompts.
    fill: also generate prompts and conversations where there are logs.
    """

    prompt: str | None = None
    tools: list[LoggedTool] | None = None
    logs: Sequence[Path] = ()
    name: str = ""
    personal: bool = False
    words: Sequence[str] = ()
    seed: int = 0
    fill: bool = False


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
    logged = split_conversations(sample, persona, scanner)
    lines += logged.notes
    rows = logged.rows
    workloads = list(logged.gates.documents())
    behaviours = Counter(logged.gates.behaviours)
    if sources.fill or not sources.logs:
        documents = gate_documents(persona, N_GENERATED_CASES, sources.seed)
        generated = [
            replace(document, name=f"generated_{document.name}", persona="..")
            for document in documents
        ]
        for workload in generated:
            behaviours.update(filter(None, map(_behaviour_of, workload.cases)))
        source = (
            "from the tools' schemas" if persona.tools else "by the offline teacher, without tools"
        )
        lines.append(
            f"{sum(len(w.cases) for w in generated)} gate prompts are made {source} (generated_*)"
        )
        workloads += generated
        if len(rows) < MIN_CASES_TO_DECIDE:
            generated_rows = teacher_rows(persona, sources.seed)
            lines.append(
                f"{len(generated_rows)} calibration conversations are made by the offline teacher"
            )
            rows += generated_rows
    for workload in workloads:
        alone = replace(workload, persona=None, tools=None)
        build_workload(msgspec.to_builtins(alone), workload.name)  # checked before it is written
        write_json(output / WORKLOADS / f"{workload.name}.json", msgspec.to_builtins(workload))
    write_text(
        output / CALIBRATION_FILE,
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
    )
    # Without logs every gate has the prompts that it needs, and its user has no more to give.
    short = (
        {name: n for name, n in behaviours.items() if n < MIN_CASES_TO_DECIDE}
        if sources.logs
        else {}
    )
    lines += _shortcomings(persona, behaviours, short)
    if not rows:
        answered = any(c.has_answer for _, c in sample.pool.conversations())
        reason = (
            "all conversations with answers are gate prompts"
            if answered
            else "the logs have no answers"
        )
        lines.append(
            f"{reason}, so there is no calibration data: add --fill, or annie-quant data --persona"
        )
    masked = {kind: n for kind, n in scanner.counts.items() if n}
    lines += [f"masked: {n} × {kind}" for kind, n in sorted(masked.items())]
    result = Initialized(
        output=str(output),
        persona=persona.name,
        tools=[t["function"]["name"] for t in persona.tools],
        conversations=sample.pool.n,
        calibration_rows=len(rows),
        cases={workload.name: len(workload.cases) for workload in workloads},
        behaviours=dict(behaviours),
        short=short,
        masked=masked,
        lines=lines,
    )
    write_text(output / CARD_FILE, render_card(result, persona, sample))
    return result


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
        notes.append(
            f"the system prompt is the most frequent one of the logs ({n} of {sample.pool.n} conversations)"
            if prompt
            else "the logs have no system prompt: the persona has an empty one; --prompt FILE gives it"
        )
    elif not prompt.strip():
        notes.append("the system prompt is empty")
    before = scanner.counts.total()
    masked = scanner.masked(prompt.strip())
    if scanner.counts.total() > before:
        notes.append(
            "the system prompt has a secret in it: it is masked, so it differs from production's"
        )
    tools = sources.tools if sources.tools is not None else list(sample.tools.values())
    if not tools and (tools := inferred_tools(sample)):
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


def _behaviour_of(case: CaseFile) -> str:
    expect = case.expect or {}
    if "tool" in expect:
        return f"calls {expect['tool']}"
    if expect.get("no_tool"):
        return "answers in words"
    return "answers from a result" if expect.get("turns") else ""


def teacher_rows(persona: Persona, seed: int) -> list[ChatRow]:
    """Return the offline teacher's calibration conversations."""
    from annie_quant.data.teachers import offline

    teacher = offline.Offline("calibration")
    n = max(1, N_GENERATED_ROWS // len(persona.categories))
    provenance: RowProvenance = {
        "teacher": "offline",
        "model": offline.TEMPLATES_MODEL,
        "persona": persona.source,
        "prompt_sha256": persona.prompt_sha256,
    }
    rows: list[ChatRow] = []
    for category in persona.categories:
        conversations = teacher.conversations(persona, category, n, f"{seed}:{category.name}")
        for i, row in enumerate(conversations):
            row["id"] = f"{category.name}-{i:04d}"
            row["category"] = category.name
            row["provenance"] = provenance
            rows.append(row)
    return rows


def _shortcomings(persona: Persona, behaviours: Counter[str], short: dict[str, int]) -> list[str]:
    """Return one line for each behaviour that the gate prompts cannot decide."""
    lines = [
        f"{name}: {n} gate prompts, {MIN_CASES_TO_DECIDE - n} short of {MIN_CASES_TO_DECIDE}; gates on it may stay undecided"
        for name, n in sorted(short.items())
    ]
    names = [t["function"]["name"] for t in persona.tools]
    never = [name for name in names if f"calls {name}" not in behaviours]
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
