"""Small workloads, a scripted model and the readers that the benchmark tests share."""

from __future__ import annotations

import json
import random

from fake_server import Script, words

from annie_quant import bench
from annie_quant.bench.aggregate import aggregate_records
from annie_quant.judge.workloads import build_workload

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search_memory",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]


def workload(name, cases, **more):
    return build_workload(
        {
            "name": name,
            "max_tokens": 50,
            "system": "You are Annie.",
            "gates": ["non_empty", "no_markdown", "thinking_leak"],
            "cases": cases,
            **more,
        }
    )


def ask(text):
    return [{"role": "user", "content": text}]


FACTS = workload(
    "factual",
    [{"id": f"f{i}", "messages": ask(f"Capital {i}?"), "expect": {"contains": ["Tokyo"]}} for i in range(6)],
    gates=["non_empty", "no_markdown", "thinking_leak", "factual"],
)
MEMORY = workload(
    "tool_memory",
    [{"id": "m", "messages": ask("What of my robot?"), "expect": {"tool": "search_memory"}}],
    tools=TOOLS,
    gates=["tool_call", "tool_call_raw"],
)
TALK = workload("multi_turn", [{"id": "t", "turns": ["one", "two", "three", "four", "five"]}])


def annie(body):
    """A well-behaved model."""
    if body.get("tools"):
        return Script(tools=[("search_memory", '{"query": "robot project"}')])
    if "Capital" in body["messages"][-1]["content"] or "capital" in body["messages"][-1]["content"]:
        return words("It is Tokyo of course.")
    return words(f"You said {body['messages'][-1]['content']}.")


def backends(a, b):
    return [bench.Backend("a", a.url), bench.Backend("b", b.url + "/v1")]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def row(backend, first=10.0, case="c", workload="w", turn=0, **more):
    return {
        "id": f"{backend}/{workload}/{case}/{turn}",
        "backend": backend,
        "workload": workload,
        "case": case,
        "turn": turn,
        "repeat": 0,
        "warmup": False,
        "cold": False,
        "concurrency": 1,
        "error": None,
        "status": 200,
        "text": "Hi.",
        "reasoning": "",
        "tool_calls": [],
        "first_content_ms": first,
        "itl_ms": [1.0, 2.0],
        "tpot_ms": 1.5,
        "e2e_ms": first + 30,
        "decode_tok_s": 600.0,
        "completion_tokens": 20,
        "tokens_estimated": False,
        "usage": {"prompt_tokens": 5},
        "checks": {"non_empty": True},
        "faults": {},
        **more,
    }


def known(name, **more):
    return {
        "name": name,
        "meta": {},
        "model": name,
        "runtime": "llama.cpp",
        "model_meta": {},
        "sampling_defaults": {},
        "chat_template_sha256": "t",
        **more,
    }


def folder_of(where, shift, leaks=0):
    """A stored run: 30 prompts, content TTFT 100 ms and `shift` times more."""
    rng = random.Random(shift)
    rows = [row("a", (100 + i) * shift * rng.gauss(1, 0.01), case=str(i)) for i in range(30)]
    for bad in rows[:leaks]:
        bad["checks"] = {"non_empty": False}
    served = aggregate_records(rows, {"w": {"temperature": 0}}, {"a": known("a")})
    where.mkdir()
    (where / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (where / "bench.json").write_text(json.dumps({"aggregates": served}))
    return where
