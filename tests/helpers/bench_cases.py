"""Small workloads, a scripted model, records and stored runs for the benchmark tests."""

from __future__ import annotations

import json
import random

from fake_server import Script, words
from flat_records import record_of

from annie_quant import bench, documents
from annie_quant.bench import confounds
from annie_quant.bench.aggregates import aggregate_records
from annie_quant.documents import BenchConfig, Ended, Identity, convert
from annie_quant.judge.library import build_workload

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search_memory",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
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
    [
        {"id": f"f{i}", "messages": ask(f"Capital {i}?"), "expect": {"contains": ["Tokyo"]}}
        for i in range(6)
    ],
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
    """A model that answers correctly."""
    if body.get("tools"):
        return Script(tools=[("search_memory", '{"query": "robot project"}')])
    if "Capital" in body["messages"][-1]["content"] or "capital" in body["messages"][-1]["content"]:
        return words("It is Tokyo of course.")
    return words(f"You wrote {body['messages'][-1]['content']}.")


def backends(a, b):
    return [bench.Backend("a", a.url), bench.Backend("b", b.url + "/v1")]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def row(backend, first=10.0, case="c", workload="w", turn=0, **more):
    """A measured record."""
    fields = {
        "status": 200,
        "text": "Hi.",
        "finish_reason": "stop",
        "first_content_ms": first,
        "itl_ms": [1.0, 2.0],
        "tpot_ms": 1.5,
        "e2e_ms": first + 30,
        "decode_tok_s": 600.0,
        "completion_tokens": 20,
        "usage": {"prompt_tokens": 5},
        "checks": {"non_empty": True},
        **more,
    }
    identifier = f"{backend}/{workload}/{case}/{turn}"
    return record_of(
        id=identifier, backend=backend, workload=workload, case=case, turn=turn, **fields
    )


def known(name, **more):
    """What a server reports about itself."""
    fields = {"model": name, "runtime": "llama.cpp", "chat_template_sha256": "t", **more}
    return convert(Identity, {"name": name, **fields})


def config_of(**workloads):
    """Settings of a benchmark: config_of(w={"temperature": 0})."""
    return convert(BenchConfig, {"workloads": workloads})


def check(identities, records=()):
    """confounds.find_confounds with default settings."""
    return confounds.find_confounds(identities, list(records), BenchConfig(), Ended())


def folder_of(where, shift, leaks=0):
    """A stored run: 30 prompts, content TTFT 100 ms and `shift` times more."""
    rng = random.Random(shift)
    rows = [row("a", (100 + i) * shift * rng.gauss(1, 0.01), case=str(i)) for i in range(30)]
    for record in rows:
        record.prompt_sha256 = record.case
    for record in rows[:leaks]:
        record.judgement.checks = {"non_empty": False}
    identities, config = {"a": known("a")}, config_of(w={"temperature": 0})
    where.mkdir()
    (where / "records.jsonl").write_bytes(
        b"".join(documents.encode_record(r) + b"\n" for r in rows)
    )
    aggregates = aggregate_records(rows, config, identities)
    documents.write(
        where / "bench.json",
        documents.Bench(config=config, backends=identities, aggregates=aggregates),
    )
    return where
