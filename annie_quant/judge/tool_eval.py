"""tool-eval-bench's scenarios as a workload, from the package tool-eval-bench (MIT): its conversation loop, its tools, its scoring.

    load()      one case per scenario (69 in version 3.0.0)
    play()      one scenario against a server

A scenario is a conversation whose tools compute their results from the calls before, so it cannot
be a list of turns: the package plays it, and one record has the result. A pass is the package's
status "pass"; its partial passes are fails here. The points are in the record's text.
"""

from __future__ import annotations

import asyncio
import importlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType

from annie_quant.core.errors import EnvironmentFault
from annie_quant.judge.workloads import Case, Workload

NAME = "tool-eval-bench"
GATE = "scenario"


@dataclass(frozen=True)
class Played:
    """The result of a scenario.

    status: "pass", "partial" or "fail".
    error: why the server could not be judged (a time-out, a lost connection); "" where it was.
    """

    status: str
    points: int
    summary: str
    duration_s: float
    error: str = ""


def load() -> Workload:
    """Return the scenarios. Raises EnvironmentFault where the package, or one of its imports, is not installed."""
    scenarios = _package("evals.scenarios").ALL_SCENARIOS
    tools = _package("domain.tools").UNIVERSAL_TOOLS
    version = _package("").__version__
    cases: list[Case] = []
    for scenario in scenarios:
        texts = (scenario.user_message, *scenario.follow_up_messages)
        offered = tools if scenario.tools_override is None else scenario.tools_override
        case = Case(
            id=scenario.id,
            messages=tuple({"role": "user", "content": text} for text in texts),
            tools=tuple(offered),
            category=scenario.category.value,
        )
        cases.append(case)
    described = f"The scenarios of {NAME} {version}, played and scored by the package"
    return Workload(
        NAME,
        described,
        None,
        None,
        None,
        thinking=False,
        max_tokens=1,
        temperature=0.0,
        gates=(GATE,),
        cases=tuple(cases),
        sha256=version,
        default=False,
    )


def play(
    scenario_id: str, url: str, model: str | None, api_key: str | None, timeout_s: float
) -> Played:
    """Play one scenario with the package's own runner. url: the server's root."""
    api = _package("api")
    scenarios = _package("evals.scenarios").ALL_SCENARIOS
    scenario = next(s for s in scenarios if s.id == scenario_id)
    run = api.run_benchmark(
        model=model or "default",
        base_url=url,
        backend="openai",
        api_key=api_key,
        scenarios=[scenario],
        timeout_seconds=timeout_s,
        persist=False,
        probe_engine=False,
        wire_format="openai",
    )
    with ThreadPoolExecutor(1) as pool:  # a notebook's thread has a running event loop
        result = pool.submit(asyncio.run, run).result()["scores"]["scenario_results"][0]
    kinds = _package("domain.scenarios").INFRASTRUCTURE_FAILURE_KINDS
    failed = result["status"] == "fail" and result.get("failure_kind") in kinds
    return Played(
        status=result["status"],
        points=result["points"],
        summary=result["summary"],
        duration_s=result["duration_seconds"],
        error=f"{result['failure_kind']}: {result['summary']}"[:200] if failed else "",
    )


def _package(module: str) -> ModuleType:
    try:
        return importlib.import_module("tool_eval_bench" + ("." + module if module else ""))
    except ImportError as error:
        raise EnvironmentFault(
            f"the workload {NAME} needs {error.name}, which is not installed", f"pip install {NAME}"
        ) from error
