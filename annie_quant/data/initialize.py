"""`annie-quant init`: a persona, gate workloads and calibration data from what a user has.

    prompt + tools           persona.json; prompts and conversations are made from the tools by the offline teacher
    logs (+ prompt, tools)   persona.json, workloads/ and calibration.jsonl from production's own conversations

Logs are read as a stream into a bounded sample (logs/pool.py). Near-duplicates are left out, a conversation is used either for
calibration or for gates, and secrets are masked before anything is written. README.md states where all of it comes from.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from annie_quant.core.errors import UsageError
from annie_quant.core.files import write_json, write_text
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.text import inert
from annie_quant.data.log_workloads import GateCases, calibration_row
from annie_quant.data.logs import Conversation, Problems, read_logs
from annie_quant.data.logs.conversation import Pool, Scanner, without_prefixes
from annie_quant.data.resolve import WORKLOADS, documents
from annie_quant.data.rows import DuplicateFinder, user_text
from annie_quant.documents import CaseFile, ChatRow, RowProvenance, WorkloadFile
from annie_quant.documents.persona import PERSONA_FILE, Persona, load_persona
from annie_quant.judge.library import build_workload

CALIBRATION_FILE, CARD_FILE = "calibration.jsonl", "README.md"
PERSONA_FIELDS = ("name", "system_prompt", "tools", "rules", "examples")  # those that persona.json gets
MIN_CASES = 100  # per behaviour, from which on a gate is decided by an interval
MAX_CONVERSATIONS = 600  # per behaviour, for calibration and gates together
GATE_SHARE = 0.6
N_GENERATED_ROWS = 400
MAX_PROMPTS = 1000  # different system prompts that are counted


class Initialized(msgspec.Struct, kw_only=True):
    """What init has written. behaviours: gate cases per behaviour. lines: what a user must know, one line each."""

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


@dataclass
class Sources:
    """What is given: the system prompt, tools and logs, and how personal data is masked."""

    prompt: str | None = None
    tools: list[dict[str, Any]] | None = None
    logs: Sequence[Path] = ()
    name: str = ""
    personal: bool = False
    words: Sequence[str] = ()
    seed: int = 0
    fill: bool = False


@dataclass
class _Sample:
    """What the logs have: a pool of conversations, counted prompts, tools and formats."""

    pool: Pool
    prompts: Counter[str] = field(default_factory=Counter)
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    formats: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    problems: Problems = field(default_factory=Problems)


def initialize(sources: Sources, output: Path, force: bool = False, progress: Progress = SILENT) -> Initialized:
    """Write persona.json, workloads/, calibration.jsonl and README.md into `output`.

    Raises UsageError where there is neither a system prompt nor a log with conversations, and for a folder with other files.
    """
    check_output(output, force)
    if sources.prompt is None and not sources.logs:
        raise UsageError("there is nothing to start from", "give --prompt, --logs, or both")
    scanner = Scanner(sources.personal, sources.words)
    sample = read_sample(sources, progress)
    if sources.logs and not sample.pool.n:
        reasons = "; ".join(sample.problems.lines()) or "the files are empty"
        raise UsageError(f"the logs have no conversation that can be used: {reasons}", "--logs takes chat logs")
    lines = [f"left out: {line}" for line in sample.problems.lines()]
    persona = persona_of(sources, sample, scanner, lines)
    (output / WORKLOADS).mkdir(parents=True, exist_ok=True)
    for old in (output / WORKLOADS).glob("*.json"):
        old.unlink()
    write_json(output / PERSONA_FILE, {name: getattr(persona, name) for name in PERSONA_FIELDS})
    persona = load_persona(output / PERSONA_FILE)
    persona = msgspec.structs.replace(persona, source=str(output))
    rows, gates = split(sample, persona, scanner, lines)
    stored = list(gates.documents(persona))
    behaviours = dict(gates.behaviours)
    if sources.fill or not sources.logs:
        stored += fill_up(persona, behaviours, lines, sources.seed)
        if len(rows) < MIN_CASES:
            rows += generated_rows(persona, sources.seed, lines)
    write_workloads(output, stored)
    write_text(output / CALIBRATION_FILE, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    short = {name: n for name, n in behaviours.items() if n < MIN_CASES}
    lines += [
        f"{name}: {n} gate prompts, {MIN_CASES - n} short of {MIN_CASES}; gates on it may stay undecided"
        for name, n in sorted(short.items())
    ]
    if never := [t["function"]["name"] for t in persona.tools if f"calls {t['function']['name']}" not in behaviours]:
        lines.append(
            f"no gate prompt calls {', '.join(never)}: nothing about {'them' if len(never) > 1 else 'it'} can be judged; "
            "--fill makes prompts from the tools' schemas"
        )
    if not rows:
        answered = any(c.has_answer for _, c in sample.pool.conversations())
        reason = "all conversations with answers are gate prompts" if answered else "the logs have no answers"
        lines.append(f"{reason}, so there is no calibration data: add --fill, or annie-quant data --persona")
    lines += [f"masked: {n} × {kind}" for kind, n in sorted(scanner.counts.items()) if n]
    result = Initialized(
        output=str(output),
        persona=persona.name,
        tools=[t["function"]["name"] for t in persona.tools],
        conversations=sample.pool.n,
        calibration_rows=len(rows),
        cases={document.name: len(document.cases) for document in stored},
        behaviours=behaviours,
        short=short,
        masked={kind: n for kind, n in scanner.counts.items() if n},
        lines=lines,
    )
    write_text(output / CARD_FILE, render_card(result, persona, sample.formats, sample.files))
    return result


def check_output(output: Path, force: bool) -> None:
    if not output.exists() or not any(output.iterdir()):
        return
    card = output / CARD_FILE
    own = card.is_file() and CARD_MARK in card.read_text(encoding="utf-8", errors="replace")
    if not own:
        raise UsageError(f"{output} has other files in it", "choose another --output")
    if not force:
        raise UsageError(f"{output} was made by annie-quant init before", "add --force to make it again")


def read_sample(sources: Sources, progress: Progress) -> _Sample:
    """Read all logs as a stream."""
    sample = _Sample(Pool(sources.seed))
    for conversation in read_logs(sources.logs, sample.problems):
        sample.formats[conversation.format] += 1
        sample.files[conversation.source] += 1
        if conversation.system and (len(sample.prompts) < MAX_PROMPTS or conversation.system in sample.prompts):
            sample.prompts[conversation.system] += 1
        for tool in conversation.tools or ():
            sample.tools.setdefault(tool["function"]["name"], tool)
        sample.pool.add(conversation)
        if sample.pool.n % 1000 == 0:
            progress.update(sample.pool.n, None, "reading logs")
    return sample


def persona_of(sources: Sources, sample: _Sample, scanner: Scanner, lines: list[str]) -> Persona:
    """Return the persona: the given prompt and tools, else those of the logs."""
    prompt = sources.prompt
    if prompt is None:
        prompt, n = next(iter(sample.prompts.most_common(1)), ("", 0))
        lines.append(
            f"the system prompt is the logs' commonest one ({n} of {sample.pool.n} conversations)"
            if prompt
            else "the logs have no system prompt: the persona has an empty one; --prompt FILE gives it"
        )
    elif not prompt.strip():
        lines.append("the system prompt is empty")
    prompt, before = prompt.strip(), sum(scanner.counts.values())
    masked = scanner.masked(prompt)
    if sum(scanner.counts.values()) > before:
        lines.append("the system prompt has a secret in it: it is masked, so it differs from production's")
    tools = sources.tools if sources.tools is not None else list(sample.tools.values())
    if not tools and (tools := inferred_tools(sample)):
        lines.append(
            f"the logs call {len(tools)} tools and list none: their schemas are inferred from the calls; "
            "--tools FILE gives the real ones"
        )
    return Persona(
        name=sources.name or "Assistant",
        system_prompt=masked,
        tools=tuple({"type": "function", "function": scanner.masked(t["function"])} for t in tools),
    )


def inferred_tools(sample: _Sample) -> list[dict[str, Any]]:
    """Return tools with the arguments that the logged calls have; an argument of every call is required."""
    calls_by_tool: dict[str, list[dict[str, Any]]] = {}
    for _, conversation in sample.pool.conversations():
        for message in conversation.messages:
            for call in message.get("tool_calls") or ():
                calls_by_tool.setdefault(str(call["function"]["name"]), []).append(call["function"]["arguments"])
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": name.replace("_", " "),
                "parameters": {
                    "type": "object",
                    "properties": {k: _schema([a[k] for a in calls if k in a]) for k in sorted(set().union(*calls))},
                    "required": sorted(set(calls[0]).intersection(*calls)),
                },
            },
        }
        for name, calls in sorted(calls_by_tool.items())
    ]


def _schema(values: Sequence[Any]) -> dict[str, Any]:
    kinds = {
        "boolean" if isinstance(v, bool) else "integer" if isinstance(v, int) else "number" if isinstance(v, float)
        else "string" if isinstance(v, str) else "array" if isinstance(v, list) else "object"
        for v in values
    }  # fmt: skip
    return {"type": kinds.pop()} if len(kinds) == 1 else {}


def split(sample: _Sample, persona: Persona, scanner: Scanner, lines: list[str]) -> tuple[list[ChatRow], GateCases]:
    """Return calibration rows and gate cases of disjoint conversations, none of them nearly a repetition of another."""
    offered = {t["function"]["name"] for t in persona.tools}
    conversations = without_prefixes(list(sample.pool.conversations()))
    finder, n_repeated, n_missing = DuplicateFinder(), sample.pool.repeated, Counter[str]()
    chosen: dict[str, list[Conversation]] = {}
    for behaviour, conversation in conversations:
        own = {t["function"]["name"] for t in conversation.tools or ()}
        if missing := [name for name in conversation.calls if name not in (own or offered)]:
            n_missing.update(set(missing))
            continue
        if len(chosen.get(behaviour, ())) >= MAX_CONVERSATIONS:
            continue
        text = user_text({"messages": conversation.messages})
        if finder.find(text) is not None:
            n_repeated += 1
            continue
        finder.add("", text)
        conversation.messages = scanner.conversation(conversation.messages)
        conversation.system = scanner.masked(conversation.system)
        conversation.tools = scanner.masked(conversation.tools)
        chosen.setdefault(behaviour, []).append(conversation)
    if n_repeated:
        lines.append(f"left out: {n_repeated:,} conversations that repeat another one, or nearly")
    for name, n in sorted(n_missing.items()):
        lines.append(f"left out: {n} conversations that call {name}, which is not among the tools")
    rows: list[ChatRow] = []
    for_gates: list[Conversation] = []
    for part in chosen.values():
        for_calibration = [c for c in part if c.has_answer]
        n_gates = round(GATE_SHARE * len(part))
        calibration = for_calibration[: len(part) - n_gates]
        taken = {id(c) for c in calibration}
        for_gates += [c for c in part if id(c) not in taken]
        rows += filter(None, (calibration_row(c, persona, i) for i, c in enumerate(calibration, len(rows))))
    gates = GateCases(persona, rows)
    for conversation in for_gates:
        gates.add(conversation)
    if gates.shared:
        lines.append(f"left out: {gates.shared} gate prompts that are also in the calibration data, or nearly")
    return rows, gates


def fill_up(persona: Persona, behaviours: dict[str, int], lines: list[str], seed: int) -> list[WorkloadFile]:
    """Return generated workloads and count their cases in `behaviours`."""
    stored = []
    for document in documents(persona, 120, seed):
        stored.append(msgspec.structs.replace(document, name=f"generated_{document.name}", persona=".."))
        for case in document.cases:
            for name in _behaviours_of(case):
                behaviours[name] = behaviours.get(name, 0) + 1
    source = "from the tools' schemas" if persona.tools else "by the offline teacher, without tools"
    lines.append(f"{sum(len(d.cases) for d in stored)} gate prompts are made {source} (generated_*)")
    return stored


def _behaviours_of(case: CaseFile) -> Iterable[str]:
    expect = case.expect or {}
    if expect.get("tool"):
        yield f"calls {expect['tool']}"
    elif expect.get("no_tool"):
        yield "answers in words"
    elif expect.get("turns"):
        yield "answers from a result"


def generated_rows(persona: Persona, seed: int, lines: list[str]) -> list[ChatRow]:
    """Return the offline teacher's calibration conversations."""
    from annie_quant.data.teachers import offline

    teacher = offline.Offline("calibration")
    per_category = max(1, N_GENERATED_ROWS // len(persona.categories))
    rows = []
    provenance: RowProvenance = {
        "teacher": "offline",
        "model": offline.MODEL,
        "persona": persona.source,
        "prompt_sha256": persona.prompt_sha256,
    }
    for category in persona.categories:
        for i, row in enumerate(teacher.conversations(persona, category, per_category, f"{seed}:{category.name}")):
            row |= {"id": f"{category.name}-{i:04d}", "category": category.name, "provenance": provenance}
            rows.append(row)
    lines.append(f"{len(rows)} calibration conversations are made by the offline teacher")
    return rows


def write_workloads(output: Path, stored: Sequence[WorkloadFile]) -> None:
    for document in stored:
        alone = msgspec.structs.replace(document, persona=None, tools=None)
        build_workload(msgspec.to_builtins(alone), document.name)  # checked before it is written
        write_json(output / WORKLOADS / f"{document.name}.json", msgspec.to_builtins(document))


CARD_MARK = "<!-- annie-quant init -->"


def render_card(result: Initialized, persona: Persona, formats: Mapping[str, int], files: Mapping[str, int]) -> str:
    """Return the README.md of the folder: where its content comes from, and what it lacks."""
    head = {
        "configs": [{"config_name": "default", "data_files": [{"split": "calibration", "path": "calibration.jsonl"}]}]
    }
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in head.items()),
        "---",
        CARD_MARK,
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
