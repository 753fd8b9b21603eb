"""The prompts that a model is judged with: --persona and --workloads of every command, resolved in one place.

resolve()                                   Annie's workloads
resolve(persona="home")                     a built-in persona and its workloads
resolve(persona="mine/")                    a folder from `annie-quant init`: persona.json and workloads/
resolve(persona="mine.json")                the workloads/ next to the file; without one, prompts made from its tools
resolve(workloads="factual,mine/workloads") names, JSON files and folders, with the persona that
each names, or none
resolve(persona, workloads)                 these workloads with this persona's system prompt and tools

A persona without stored workloads gets these, made from its tools by the offline teacher's
templates of the split "gate":

tool_calls      one request per case; the label is the call
parallel_calls  two calls in one answer
tool_results    a conversation: request, recorded results of the tool, then the answer from them
no_tool         greetings, facts and requests that no tool can fulfil, with all tools on offer
talk            conversations of five turns

A ladder has the same requests at graded levels of one difficulty; bench/cliffs.py finds the level
at which a server breaks.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import judge
from annie_quant.core.errors import UsageError
from annie_quant.core.files import is_folder, read_json, sha256_text
from annie_quant.core.untrusted import JsonObject
from annie_quant.data import exchanges
from annie_quant.data.conversations import tool_names
from annie_quant.data.prompt_rules import rules_of
from annie_quant.data.tool_exchanges import (
    DrawnCall,
    ToolExchange,
    action_of,
    arguments_in_words,
    draw_exchange,
    impossible_request,
    up_to_result,
    with_drawn_tools,
)
from annie_quant.documents import (
    RECIPE_FILE,
    CaseFile,
    ChatMessage,
    ContextFile,
    WorkloadFile,
)
from annie_quant.documents.persona import Persona, load_persona
from annie_quant.judge.answers import Tool
from annie_quant.judge.checks.calls import allowed
from annie_quant.judge.gates import NAMED_REFERENCE_GATES
from annie_quant.judge.library import FOLDER, build_workload
from annie_quant.judge.workloads import Case, Turn, Workload

_PathLike = str | os.PathLike[str]
WORKLOADS = "workloads"  # the folder next to a persona's file
N_GENERATED = 120  # cases per workload made from a persona's tools
GATE_SPLIT = "gate"
GENERATED_MAX_TOKENS = 160  # of the built-in personas' and the ladders' answers
OWN_MAX_TOKENS = 512  # of answers whose length is not known
MAX_CASE_ATTEMPTS = 50  # attempts to draw a new prompt, per case
MAX_REPEATS = 10  # in a row, until it is another tool's turn
TALK_SHARE = 3  # n / TALK_SHARE conversations of several turns
MIN_RARE_CASES = 60  # cases with several calls, or with results; a verdict about them needs 52 that bf16 gets right


def resolve(
    persona: _PathLike | Persona | None = None,
    workloads: _PathLike | Iterable[_PathLike | Workload] | None = None,
) -> list[Workload]:
    """Return the workloads of a persona, or the named ones.

    persona: a name, a JSON file or a folder.
    workloads: names (also bfcl), JSON files or folders, as a list or comma-separated; Workload
        objects are used as they are.

    Raises UsageError for a name or path that does not exist, and where two workloads have the same
    name.
    """
    who = load_persona(str(persona)) if isinstance(persona, (str, os.PathLike)) else persona
    if workloads is not None:
        chosen = [workload for item in _items(workloads) for workload in _load(item)]
        if who is not None:
            chosen = [with_persona(workload, who) for workload in chosen]
    elif who is None:
        chosen = judge.load_workloads()
    else:
        chosen = stored_workloads(who) or generated_workloads(who)
    names = [w.name for w in chosen]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise UsageError(f"two workloads are called {duplicates[0]!r}", "give each its own name")
    return chosen


def stored_workloads(persona: Persona) -> list[Workload]:
    """Return the workloads that are stored for a persona; [] where there are none."""
    if persona.is_built_in:
        folder = FOLDER if persona.source == "annie" else FOLDER / persona.source
    elif persona.folder is not None:
        folder = persona.folder / WORKLOADS
    else:
        return []
    stored = judge.load_workloads(folder=folder) if folder.is_dir() else []
    return [with_persona(workload, persona) for workload in stored]


def generated_workloads(persona: Persona, n: int = N_GENERATED, seed: int = 0) -> list[Workload]:
    """Return workloads made from a persona's tools by the offline teacher's gate templates, the same for the same seed."""
    return [
        with_persona(_built(document), persona) for document in gate_documents(persona, n, seed)
    ]


def _built(document: WorkloadFile) -> Workload:
    content = msgspec.to_builtins(document)
    return replace(build_workload(content), sha256=sha256_text(json.dumps(content, sort_keys=True)))


def with_persona(workload: Workload, persona: Persona) -> Workload:
    """Return the workload with the persona's system prompt and tools, unless it has a system prompt."""
    if workload.system is not None or not persona.source:
        return workload
    return replace(workload, persona=persona.source)


def personas_of(workloads: Sequence[Workload]) -> list[str]:
    """Return the names or files of the personas whose system prompts are used."""
    return sorted({w.persona for w in workloads if w.persona and w.system is None})


def check_checkpoint(
    checkpoint: Path, workloads: Sequence[Workload], allow: bool = False
) -> str | None:
    """Check that a checkpoint was made with the system prompts of the workloads that it is about to be judged with.

    A checkpoint without a hash (made elsewhere, or without data) is not checked. Returns a sentence
    where a prompt differs and `allow` is set; raises UsageError otherwise.
    """
    file = checkpoint / RECIPE_FILE
    hashes: Sequence[str] = (read_json(file).get("prompt_sha256") if file.is_file() else None) or ()
    prompts = {p: load_persona(p).prompt_sha256 for p in personas_of(workloads)} if hashes else {}
    other = [p for p, sha256 in prompts.items() if sha256 not in hashes]
    if not other:
        return None
    mismatch = (
        f"{checkpoint.name} was calibrated with another system prompt ({hashes[0][:12]}) than persona {other[0]} has now "
        f"({prompts[other[0]][:12]})"
    )
    if not allow:
        raise UsageError(
            mismatch, "quantize again with current data, or add --allow-prompt-mismatch"
        )
    return mismatch


def _items(workloads: _PathLike | Iterable[_PathLike | Workload]) -> list[_PathLike | Workload]:
    if isinstance(workloads, str) and workloads.startswith("bfcl:"):
        return [workloads]  # its categories have commas
    if isinstance(workloads, str):
        return [part.strip() for part in workloads.split(",") if part.strip()]
    return [workloads] if isinstance(workloads, os.PathLike) else list(workloads)


def _load(item: _PathLike | Workload) -> list[Workload]:
    if isinstance(item, Workload):
        return [item]
    path = Path(item)
    if not is_folder(path):
        return judge.load_workloads([str(item)])
    inner = path / WORKLOADS
    folder = inner if inner.is_dir() else path
    result = judge.load_workloads(folder=folder)
    if not result:
        raise UsageError(f"{path} has no workloads (*.json)", "annie-quant init makes them")
    if not inner.is_dir() or not (path / "persona.json").is_file():
        return result
    return [with_persona(w, load_persona(path)) for w in result]


def gate_documents(
    persona: Persona, n: int, seed: int = 0, max_tokens: int | None = None
) -> Iterator[WorkloadFile]:
    """Yield workloads with about n cases each, made from the persona's tools.

    A case has a label only where any answer that obeys the system prompt has it: for a built-in
    persona, and where the prompt has no rules about calls. Other cases are compared with bf16 alone.

    max_tokens: of an answer; None: usual for templates.
    """
    drawn, _ = with_drawn_tools(persona, GATE_SPLIT)
    n_rare = max(MIN_RARE_CASES, n // TALK_SHARE)
    with_tools = (
        ("tool_calls", n, _call_case, ("tool_call", "tool_arguments")),
        ("parallel_calls", n_rare, _parallel_case, ("tool_selection", "tool_values")),
        ("tool_results", n_rare, _result_case, ("recall",)),
    )
    others = (
        ("no_tool", n, _no_tool_case, ("abstention",)),
        ("talk", n // TALK_SHARE, _talk_case, ()),
    )
    usual = GENERATED_MAX_TOKENS if persona.is_built_in else OWN_MAX_TOKENS
    for who, kinds in ((drawn, with_tools if drawn.tools else ()), (persona, others)):
        for name, n_cases, draw, gates in kinds:
            cases = _cases(n_cases, seed, draw, who)
            if cases:
                yield _document(persona, name, gates, cases, max_tokens or usual)


def _document(
    persona: Persona, name: str, gates: tuple[str, ...], cases: list[CaseFile], max_tokens: int
) -> WorkloadFile:
    named = gates if has_labels(cases) else ()
    asks = any("logged" in (case.expect or {}) for case in cases)
    informative = ["logged_tool"] if asks else []
    source = ", made from the tools' schemas" if persona.tools else ""
    return WorkloadFile(
        name=name,
        description=f"{name.replace('_', ' ')} of {persona.name}{source}",
        tools="persona" if persona.tools else None,
        persona=persona.source or None,
        max_tokens=max_tokens,
        gates=[*named, *informative, *NAMED_REFERENCE_GATES],
        informative=informative,
        cases=[msgspec.structs.replace(case, id=f"{name}-{i:03d}") for i, case in enumerate(cases)],
    )


def has_labels(cases: Iterable[CaseFile]) -> bool:
    """Return whether a case has a label; the call that a prompt asks for is none (`logged`)."""
    return any({*(case.expect or {})} - {"logged"} for case in cases)


def _cases(
    n: int,
    seed: int,
    draw: Callable[[Persona, random.Random, int], CaseFile | None],
    persona: Persona,
) -> list[CaseFile]:
    """Return up to n different cases, fewer where the templates have no more."""
    rng = random.Random(f"{seed}:{draw.__name__}")
    cases: list[CaseFile] = []
    prompts: set[str] = set()
    skipped = 0
    repeats = 0
    for _ in range(n * MAX_CASE_ATTEMPTS):
        if len(cases) == n:
            break
        case = draw(persona, rng, len(cases) + skipped)
        key = str(case.messages or case.turns) if case else ""
        repeats += 1
        if case and key not in prompts:
            prompts.add(key)
            cases.append(case)
            repeats = 0
        elif repeats == MAX_REPEATS:  # the next tool's turn: this one has few prompts
            skipped += 1
            repeats = 0
    return cases


def _exchange(persona: Persona, rng: random.Random, index: int, calls: int) -> ToolExchange | None:
    """Return an exchange with `calls` calls, for the tools in turn; None where none was drawn."""
    return _exchange_with(persona, persona.tools[index % len(persona.tools)], rng, calls)


def _exchange_with(
    persona: Persona, tool: Tool, rng: random.Random, calls: int
) -> ToolExchange | None:
    exchanges = (
        draw_exchange(persona, tool["function"]["name"], rng, GATE_SPLIT)
        for _ in range(MAX_CASE_ATTEMPTS)
    )
    return next((exchange for exchange in exchanges if len(exchange.calls) == calls), None)


def _call_case(persona: Persona, rng: random.Random, index: int) -> CaseFile | None:
    return _case_of_calls(persona, _exchange(persona, rng, index, 1))


def _case_of_calls(persona: Persona, exchange: ToolExchange | None) -> CaseFile | None:
    """Return the case of a request for one or two calls.

    Where the prompt's own rules decide about calls, the case has no label: the calls that the request
    asks for are in it as a log has them, which inform and decide nothing.
    """
    if exchange is None:
        return None
    calls = exchange.calls
    if not persona.is_built_in and rules_of(persona).conditional:
        return _prompt(exchange.user, {"logged": {"calls": [call.name for call in calls]}})
    if len(calls) == 1:
        return _prompt(exchange.user, expected_call(calls[0]))
    return _prompt(exchange.user, {"calls": [{c.name: allowed(c.arguments)} for c in calls]})


def expected_call(call: DrawnCall) -> dict[str, object]:
    """Return a case's `expect` for one call. A list is a list of alternatives in `arguments`."""
    arguments = {
        key: [value] if isinstance(value, list) else value for key, value in call.arguments.items()
    }
    return {"tool": call.name, "arguments": arguments}


def _parallel_case(persona: Persona, rng: random.Random, index: int) -> CaseFile | None:
    return _case_of_calls(persona, _exchange(persona, rng, index, 2))


def _result_case(persona: Persona, rng: random.Random, index: int) -> CaseFile | None:
    exchange = _exchange(persona, rng, index, 1)
    if exchange is None:
        return None
    if not persona.is_built_in:
        messages = up_to_result(persona, exchange)
        return CaseFile(id=0, messages=messages)
    results = [exchange.calls[0].as_result()]
    expected: dict[str, Any] = {"contains": [exchange.fact]} if exchange.fact else {}
    return CaseFile(
        id=0, turns=[exchange.user, {"results": results}], expect={"turns": [{}, expected]}
    )


def _no_tool_case(persona: Persona, rng: random.Random, index: int) -> CaseFile | None:
    rules = rules_of(persona)
    if not persona.is_built_in and rules.language != "en":
        greetings = rules.phrases.greetings[GATE_SPLIT]
        return _prompt(rng.choice(greetings), {}) if greetings else None
    refusal = impossible_request(persona, rng, GATE_SPLIT) if index % 2 else None
    if refusal is not None:
        return _prompt(refusal[0], {"no_tool": True})
    category = ("greeting", "factual", "conversational")[index % 3]
    exchange = exchanges.draw_category(category, rng, GATE_SPLIT)
    # A fact may be looked up by a tool, or declined.
    is_certain = persona.is_built_in or (category != "factual" and not rules.conditional)
    return _prompt(_named(exchange.user, persona), {"no_tool": True} if is_certain else {})


def _talk_case(persona: Persona, rng: random.Random, index: int) -> CaseFile | None:
    rules = rules_of(persona)
    if persona.is_built_in or rules.language == "en":
        turns = [_named(turn.user, persona) for turn in exchanges.conversation(rng, GATE_SPLIT)]
        return CaseFile(id=0, turns=turns)
    phrases = rules.phrases
    if not phrases.greetings[GATE_SPLIT]:
        return None
    both = (phrases.greetings[GATE_SPLIT], phrases.thanks[GATE_SPLIT])
    return CaseFile(id=0, turns=[rng.choice(texts) for texts in both])


def _prompt(text: str, expect: dict[str, object]) -> CaseFile:
    """Return a case of one user message; its id is set later, by its position in the workload."""
    return CaseFile(id=0, messages=[{"role": "user", "content": text}], expect=expect)


def _named(text: str, persona: Persona) -> str:
    return text.replace("Annie", persona.name)


# ---- ladders
#
#     ladder("tools", n)      5 to 52 tools on offer, the right one among them at any place
#     ladder("tokens", n)     0 to 131,072 tokens of notes before the request
#     ladder("poisoned", n)   four calls before the request, of which the last 0 to 4 are malformed
#     ladder("steps", n)      chains of twelve calls; the level is the step
#
# A level is one workload, ladder_AXIS_LEVEL, with the same cases as the others; a chain is one
# workload. Tools are those of a persona, and those of the workload agent_loop where it has fewer.
# The answers decide no verdict: one question at several levels is not several.

CHAIN_STEPS = 12
HISTORY = 4  # calls before the request, on the axis `poisoned`
OFFERED = 16  # tools, on the axes that do not vary them
LADDER_LEVELS: dict[str, tuple[int, ...]] = {
    "tools": (5, 8, 12, 16, 20, 26, 32, 40, 46, 52),
    "tokens": (0, *(1024 << i for i in range(8))),
    "poisoned": (0, 1, 2, HISTORY),
    "steps": (CHAIN_STEPS,),
}
LADDER_GATES = ("tool_call", "tool_arguments")
BATTERY = "agent_loop"  # the workload with 52 tools


def ladder(axis: str, n: int, persona: Persona | None = None, seed: int = 0) -> list[Workload]:
    """Return the workloads of one axis, with n cases each.

    Raises UsageError for an unknown axis.
    """
    if axis not in LADDER_LEVELS:
        raise UsageError(f"there is no ladder {axis!r}", f"choose of {', '.join(LADDER_LEVELS)}")
    battery = judge.load_workloads([BATTERY])[0]
    own = () if persona is None else persona.tools
    names = tool_names(own)
    shared = battery.tools if isinstance(battery.tools, tuple) else ()
    tools = (*own, *(tool for tool in shared if tool["function"]["name"] not in names))
    base = persona or Persona(name="Annie", system_prompt=battery.system or "")
    who = msgspec.structs.replace(base, tools=tools)
    cases = [_LadderCase(who, own or tools, axis, index, seed) for index in range(n)]
    result = []
    for level in LADDER_LEVELS[axis]:
        key = json.dumps([axis, level, n, seed, who.tools, who.system_prompt], default=dict)
        workload = replace(
            battery,
            name="ladder_steps" if axis == "steps" else f"ladder_{axis}_{level}",
            description=f"The same requests at level {level} of the axis {axis}",
            system=who.system_prompt,
            tools=None,
            max_tokens=GENERATED_MAX_TOKENS,
            gates=LADDER_GATES,
            cases=tuple(case.at(level) for case in cases),
            context=ContextFile(tokens=level) if axis == "tokens" and level else None,
            sha256=sha256_text(key),
        )
        result.append(workload)
    return result


CALLS_BEFORE = {"steps": CHAIN_STEPS - 1, "poisoned": HISTORY}


class _LadderCase:
    """One case of a ladder: what is the same at all its levels."""

    def __init__(
        self, persona: Persona, tools: Sequence[Tool], axis: str, index: int, seed: int
    ) -> None:
        rng = random.Random(f"{seed}/{axis}/{index}")
        before = CALLS_BEFORE.get(axis, 0)
        order = rng.sample(list(tools), len(tools)) if before else tools[index % len(tools) :]
        chosen = [order[i % len(order)] for i in range(before + 1)]
        self.axis = axis
        self.id = f"{index:02d}"
        self.exchanges = [*filter(None, (_exchange_with(persona, tool, rng, 1) for tool in chosen))]
        called = {e.calls[0].name for e in self.exchanges}
        self.called = [tool for tool in persona.tools if tool["function"]["name"] in called]
        self.others = [tool for tool in persona.tools if tool["function"]["name"] not in called]
        rng.shuffle(self.others)

    def at(self, level: int) -> Case:
        """Return the case at one level."""
        count = level if self.axis == "tools" else max(OFFERED, len(self.called))
        offered = [*self.called, *self.others[: count - len(self.called)]]
        random.Random(f"{self.id}/{level if self.axis == 'tools' else ''}").shuffle(offered)
        calls = [e.calls[0] for e in self.exchanges]
        if self.axis == "steps":
            turns: list[Turn] = [_script(calls, offered)]
            turns += [{"results": [call.as_result()]} for call in calls[:-1]]
            chain = {"turns": [expected_call(call) for call in calls]}
            return Case(self.id, turns=tuple(turns), expect=chain, tools=tuple(offered))
        messages: list[ChatMessage] = []
        for number, exchange in enumerate(self.exchanges[:-1]):
            messages += _exchanged(exchange, number, malformed=number >= HISTORY - level)
        messages.append({"role": "user", "content": self.exchanges[-1].user})
        expect = expected_call(calls[-1])
        return Case(self.id, messages=tuple(messages), expect=expect, tools=tuple(offered))


def _exchanged(exchange: ToolExchange, number: int, malformed: bool) -> list[ChatMessage]:
    """Return an earlier request with its answer; malformed: the call is text and its JSON has no end."""
    drawn = exchange.calls[0]
    user: ChatMessage = {"role": "user", "content": exchange.user}
    if malformed:
        text = json.dumps({"name": drawn.name, "arguments": drawn.arguments})[:-2]
        return [user, {"role": "assistant", "content": f"<tool_call>\n{text}"}]
    reply: ChatMessage = {"role": "assistant", "content": exchange.reply}
    return [user, *drawn.messages(number), reply]


def _script(calls: Sequence[DrawnCall], tools: Sequence[Tool]) -> str:
    """Return the request for a chain of calls."""
    documents: dict[str, JsonObject] = {}
    for tool in tools:
        documents[tool["function"]["name"]] = tool["function"]
    lines = ["Do these steps in this order, with one call each, the next one after each result:"]
    for number, call in enumerate(calls, 1):
        action = action_of(documents[call.name])
        lines.append(
            ", ".join(filter(None, (f"{number}. {action}", arguments_in_words(call.arguments))))
        )
    return "\n".join(lines)
