"""Gate workloads for a persona, made from its tools by the offline teacher's templates of the split "gate".

tool_calls      one request per case; the label is the call
parallel_calls  two calls in one answer
tool_results    a conversation: request, recorded results of the tool, then the answer from them
no_tool         greetings, facts and requests that no tool can fulfil, with all tools on offer
talk            conversations of five turns
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from annie_quant.data import exchanges
from annie_quant.data.tool_exchanges import ToolExchange, abstention, draw_exchange
from annie_quant.judge.gates import NAMED_REFERENCE_GATES
from annie_quant.persona import Persona
from annie_quant.schema import CaseFile, WorkloadFile

SPLIT = "gate"
MAX_TOKENS = 160
MAX_DRAWS = 50  # attempts per case to draw a prompt that does not exist yet
TALK_SHARE = 3  # conversations of several turns: n / TALK_SHARE of them
LEAST = 60  # cases with several calls, or with results: a verdict about them needs 52 that bf16 gets right


def documents(persona: Persona, n: int, seed: int = 0) -> Iterator[WorkloadFile]:
    """Yield workloads with about n cases each."""
    tools = [t["function"]["name"] for t in persona.tools]
    if tools:
        yield _document(persona, "tool_calls", ("tool_call", "tool_arguments"), _cases(n, seed, _call_case, persona))
        parallel = _cases(max(LEAST, n // TALK_SHARE), seed, _parallel_case, persona)
        if parallel:
            yield _document(persona, "parallel_calls", ("tool_selection", "tool_values"), parallel)
        results = _cases(max(LEAST, n // TALK_SHARE), seed, _result_case, persona)
        yield _document(persona, "tool_results", ("recall",), results)
    yield _document(persona, "no_tool", ("abstention",), _cases(n, seed, _no_tool_case, persona))
    yield _document(persona, "talk", (), _cases(n // TALK_SHARE, seed, _talk_case, persona))


def _document(persona: Persona, name: str, gates: tuple[str, ...], cases: list[CaseFile]) -> WorkloadFile:
    return WorkloadFile(
        name=name,
        description=f"{name.replace('_', ' ')} of {persona.name}" + ", made from the tools' schemas" * bool(persona.tools),
        tools="persona" if persona.tools else None,
        persona=persona.source or None,
        max_tokens=MAX_TOKENS,
        gates=[*gates, *NAMED_REFERENCE_GATES],
        cases=[msgspec.structs.replace(case, id=f"{name}-{i:03d}") for i, case in enumerate(cases)],
    )


def _cases(
    n: int, seed: int, draw: Callable[[Persona, random.Random, int], CaseFile | None], persona: Persona
) -> list[CaseFile]:
    """Return up to n different cases, fewer where the templates have no more."""
    rng = random.Random(f"{seed}:{draw.__name__}")
    cases: list[CaseFile] = []
    prompts: set[str] = set()
    for _ in range(n * MAX_DRAWS):
        if len(cases) == n:
            break
        case = draw(persona, rng, len(cases))
        key = str(case.messages or case.turns) if case else ""
        if case and key not in prompts:
            prompts.add(key)
            cases.append(case)
    return cases


def _exchange(persona: Persona, rng: random.Random, index: int, calls: int) -> ToolExchange | None:
    """Return an exchange with so many calls, for the tools in turn; None where none was drawn."""
    tool = persona.tools[index % len(persona.tools)]["function"]["name"]
    for _ in range(MAX_DRAWS):
        exchange = draw_exchange(persona, tool, rng, SPLIT)
        if len(exchange.calls) == calls:
            return exchange
    return None


def _call_case(persona: Persona, rng: random.Random, index: int) -> CaseFile | None:
    exchange = _exchange(persona, rng, index, 1)
    if exchange is None:
        return None
    call = exchange.calls[0]
    # A list is a list of alternatives in `arguments`.
    arguments = {key: [value] if isinstance(value, list) else value for key, value in call.arguments.items()}
    return _prompt(exchange.user, {"tool": call.name, "arguments": arguments})


def _parallel_case(persona: Persona, rng: random.Random, index: int) -> CaseFile | None:
    exchange = _exchange(persona, rng, index, 2)
    if exchange is None:
        return None
    calls = [{call.name: _allowed(call.arguments)} for call in exchange.calls]
    return _prompt(exchange.user, {"calls": calls})


def _result_case(persona: Persona, rng: random.Random, index: int) -> CaseFile | None:
    exchange = _exchange(persona, rng, index, 1)
    if exchange is None:
        return None
    results = [{"name": c.name, "arguments": c.arguments, "content": c.result} for c in exchange.calls]
    expected: dict[str, Any] = {"contains": [exchange.fact]} if exchange.fact else {}
    return CaseFile(id=0, turns=[exchange.user, {"results": results}], expect={"turns": [{}, expected]})


def _no_tool_case(persona: Persona, rng: random.Random, index: int) -> CaseFile:
    refusal = abstention(persona, rng, SPLIT) if index % 2 else None
    if refusal is not None:
        return _prompt(refusal[0], {"no_tool": True})
    exchange = exchanges.draw(("greeting", "factual", "conversational")[index % 3], rng, SPLIT)
    return _prompt(_named(exchange.user, persona), {"no_tool": True})


def _talk_case(persona: Persona, rng: random.Random, index: int) -> CaseFile:
    return CaseFile(id=0, turns=[_named(turn.user, persona) for turn in exchanges.conversation(rng, SPLIT)])


def _allowed(value: Any) -> Any:
    """Return a value in the form of judge/checks/calls.py: in an object, each member has a list of allowed values."""
    if isinstance(value, dict):
        return {key: [_allowed(item)] for key, item in value.items()}
    return [_allowed(item) for item in value] if isinstance(value, list) else value


def _prompt(text: str, expect: dict[str, Any]) -> CaseFile:
    """Return a case of one user's message; its id is set with its place in the workload."""
    return CaseFile(id=0, messages=[{"role": "user", "content": text}], expect=expect)


def _named(text: str, persona: Persona) -> str:
    return text.replace("Annie", persona.name)
