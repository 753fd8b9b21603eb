"""A synthetic run directory, made by a seeded script after the schema of run.json: nobody measured these figures.

    python tests/helpers/report_fixture.py FOLDER [prompts a workload]

Four models; naive loses tool calls and markdown under W4A4; some answers are hostile (script tags, control characters,
right-to-left overrides, a megabyte of text, lone surrogates).
"""

from __future__ import annotations

import functools
import json
import math
import random
import statistics
import sys
from pathlib import Path

TINY = Path(__file__).resolve().parents[2] / "annie_quant/assets/tiny-annie"
MODELS = [  # name, label, format, size, bits, gguf, TTFT ms, TPOT ms, share of tool and markdown faults when served
    ("bf16", "bf16", "BF16", 15_021_568, 16.0, 21.0, 1.45, 0.0),
    ("naive", "NVFP4 naive", "NVFP4", 5_136_000, 5.47, 17.5, 1.05, 0.06),
    ("mlp_only", "NVFP4 mlp_only", "NVFP4", 9_830_000, 10.47, 18.5, 1.2, 0.0),
    ("q4_k_m", "Q4_K_M", "Q4_K_M", 5_402_112, 5.75, 19.5, 1.0, 0.01),
]
WORKLOADS = {  # name → gates, tokens of an answer, question
    "greeting": (
        ["non_empty", "no_markdown", "thinking_leak", "stop"],
        14,
        "Good morning! Number {i}.",
    ),
    "factual": (
        ["non_empty", "factual", "no_markdown", "thinking_leak"],
        12,
        "What is the capital of country {i}?",
    ),
    "reasoning": (
        ["non_empty", "reasoning", "thinking_leak"],
        22,
        "I have {i} boxes with five balls each. How many balls?",
    ),
    "long_response": (
        ["non_empty", "no_markdown", "thinking_leak", "repetition", "stop"],
        110,
        "Write a long story about {i} cats.",
    ),
    "tool_memory": (
        ["tool_call", "tool_arguments", "thinking_leak"],
        18,
        "What do you remember about my cat number {i}?",
    ),
    "tool_web": (
        ["tool_call", "tool_arguments", "thinking_leak"],
        18,
        "What is in the news today, item {i}?",
    ),
    "multi_turn": (["non_empty", "no_markdown", "thinking_leak"], 16, "And on day {i}?"),
    "abstention": (["abstention", "non_empty"], 15, "Please paint wall {i}."),
}
HOSTILE = [
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">",
    "</pre></div><style>body{display:none}</style>{{ 7*7 }} ${alert(1)} [link](javascript:alert(1)) | a | b |",
    "abc\x00\x07\x1b[31mred\x1b[0m\u202eevil\u202c\u2066\u2069 \u200fمرحبا بالعالم",
    "lone \ud800 surrogate \udfff and \ufffe \U000e0041",
    "w" + "o" * 1_000_000 + "w",
]


def gate_row(gate: str, passes: int, n: int) -> dict:
    from msgspec import to_builtins

    from annie_quant.judge.gates import tabulate

    return to_builtins(tabulate([{gate: i < passes} for i in range(n)])[gate])


def stats(values: list[float], seed: int) -> dict:
    return dict(stats_of(tuple(values), seed))


@functools.lru_cache(1 << 12)  # most runs of the tests have the same values
def stats_of(values: tuple[float, ...], seed: int) -> dict:
    rng = random.Random(seed)
    ordered = sorted(values)

    def at(q: float) -> float:
        place = q * (len(ordered) - 1)
        low = math.floor(place)
        return ordered[low] + (place - low) * (
            ordered[min(low + 1, len(ordered) - 1)] - ordered[low]
        )

    medians = sorted(
        statistics.median(rng.choices(ordered, k=min(len(ordered), 200))) for _ in range(99)
    )
    return {
        "p50": at(0.5),
        "p90": at(0.9),
        "p99": at(0.99),
        "mean": statistics.fmean(values),
        "low": medians[2],
        "high": medians[96],
        "n": len(values),
        "n_prompts": len(values),
    }


def answer(rng: random.Random, workload: str, i: int, faults: float) -> dict:
    """Text, tool calls, checks and faults of one answer."""
    gates = WORKLOADS[workload][0]
    failed = [
        g
        for g in gates
        if g in ("no_markdown", "tool_call", "tool_arguments") and rng.random() < faults
    ]
    text = {
        "factual": f"It is Tokyo, as far as I know, for country {i}.",
        "reasoning": f"That makes {5 * i} balls in all.",
    }.get(workload, f"Sure, here is what I can say about {i}, in plain words.")
    calls: list[dict] = []
    if workload.startswith("tool_"):
        tool = "search_memory" if workload == "tool_memory" else "web_search"
        calls = (
            []
            if "tool_call" in failed
            else [{"id": "c1", "name": tool, "arguments": json.dumps({"query": f"cat {i}"})}]
        )
        text = "Let me think about that." if "tool_call" in failed else ""
    if workload == "long_response":
        text = " ".join(f"Sentence {k} of the story goes on and on." for k in range(12))
    if "no_markdown" in failed:
        text = f"**Sure**, here is a list:\n- one\n- two and `code` for {i}"
    why = {
        "no_markdown": "bold",
        "tool_call": "no tool was called",
        "tool_arguments": "no tool was called",
    }
    return {
        "text": text,
        "tool_calls": calls,
        "checks": {g: g not in failed for g in gates},
        "faults": {g: why[g] for g in failed},
    }


def record(
    rng: random.Random, model: tuple, workload: str, i: int, turn: int, n_tokens: int
) -> dict:
    name, _, _, _, _, ttft, tpot, faults = model
    growth = 1.0 + turn * (0.08 if name != "q4_k_m" else 0.35)
    first = ttft * growth * rng.lognormvariate(0, 0.12)
    gaps = [
        round(tpot * rng.lognormvariate(0, 0.15), 3)
        for _ in range(max(1, int(n_tokens * rng.uniform(0.7, 1.3)) - 1))
    ]
    content = answer(rng, workload, i, faults)
    tool = bool(content["tool_calls"])
    last = first + sum(gaps)
    return {
        "id": f"{name}/{workload}/{i}/0/{turn}",
        "backend": name,
        "model": name,
        "workload": workload,
        "case": f"{workload}-{i}",
        "turn": turn,
        "repeat": 0,
        "block": i,
        "warmup": False,
        "cold": False,
        "session": 1,
        "concurrency": 1,
        "started_at": "2026-11-21T05:00:00.000+00:00",
        "status": 200,
        "error": "",
        "reasoning": "",
        "finish_reason": "tool_calls" if tool else "stop",
        "usage": {"completion_tokens": len(gaps) + 1, "prompt_tokens": 90},
        "first_byte_ms": round(first * 0.6, 3),
        "first_event_ms": round(first * 0.6, 3),
        "first_reasoning_ms": None,
        "first_content_ms": None if tool else round(first, 3),
        "first_tool_ms": round(first, 3) if tool else None,
        "last_token_ms": round(last, 3),
        "done_ms": round(last + 0.2, 3),
        "e2e_ms": round(last + 0.2, 3),
        "tpot_ms": round(sum(gaps) / len(gaps), 4),
        "itl_ms": gaps,
        "decode_tok_s": round(1000 * len(gaps) / sum(gaps), 2),
        "completion_tokens": len(gaps) + 1,
        "tokens_estimated": False,
        "merged_reads": 0,
        **content,
    }


def make_records(n: int, seed: int = 0, hostile: bool = True) -> list[dict]:
    rows = []
    for workload, (_, tokens, _) in WORKLOADS.items():
        for i in range(n):
            for model in MODELS:
                rng = random.Random(f"{seed}/{workload}/{i}/{model[0]}")
                turns = range(5) if workload == "multi_turn" else range(1)
                rows += [record(rng, model, workload, i, turn, tokens) for turn in turns]
    rows[3]["error"], rows[3]["status"], rows[3]["first_content_ms"] = (
        "connection reset by <b>peer</b>",
        0,
        None,
    )
    rows[3]["checks"] = dict.fromkeys(rows[3]["checks"], False)
    if hostile:
        for k, text in enumerate(HOSTILE):
            rows[4 * k + 1] |= {
                "text": text,
                "checks": rows[4 * k + 1]["checks"] | {"no_markdown": False},
                "faults": {"no_markdown": HOSTILE[0]},
            }
    for model in MODELS:
        warm = record(random.Random(1), model, "greeting", 0, 0, 14)
        rows.append(
            warm
            | {
                "id": warm["id"] + "#warm1",
                "warmup": True,
                "cold": True,
                "first_content_ms": 900.0,
                "block": -1,
            }
        )
    return rows


METRICS = {
    "ttft_content_ms": "first_content_ms",
    "ttft_tool_ms": "first_tool_ms",
    "itl_ms": "itl_ms",
    "tpot_ms": "tpot_ms",
    "e2e_ms": "e2e_ms",
    "decode_tok_s": "decode_tok_s",
    "completion_tokens": "completion_tokens",
}


def pooled(rows: list[dict], metric: str) -> list[float]:
    values = [r[METRICS[metric]] for r in rows if not r["error"] and r[METRICS[metric]] is not None]
    return [v for value in values for v in (value if isinstance(value, list) else [value])]


def served_part(rows: list[dict], model: tuple) -> dict:
    counts: dict[str, list[int]] = {}
    for r in rows:
        for gate, passed in r["checks"].items():
            total = counts.setdefault(gate, [0, 0])
            total[0] += passed
            total[1] += 1
    workloads = {}
    for w in WORKLOADS:
        own = [r for r in rows if r["workload"] == w]
        workloads[w] = {"n": len(own)} | {m: stats(v, 1) for m in METRICS if (v := pooled(own, m))}
    speed = {
        gate: {
            "metric": metric,
            "value": s["p50"],
            "low": s["low"],
            "high": s["high"],
            "n": s["n"],
            "limit": limit,
            "verdict": "pass",
        }
        for gate, metric, limit in (
            ("ttft", "ttft_content_ms", 120.0),
            ("decode", "decode_tok_s", 25.0),
        )
        for s in [stats(pooled(rows, metric), 2)]
    }
    size = model[3]
    return {
        "model": model[0],
        "runtime": "llama.cpp",
        "gates": {g: gate_row(g, *v) for g, v in counts.items()},
        "workloads": workloads,
        "speed_gates": speed,
        "requests": len(rows),
        "errors": sum(bool(r["error"]) for r in rows),
        "memory_bytes": {
            "idle": 61_000_000 + size,
            "one": 66_000_000 + size,
            "five": 72_000_000 + size,
            "source": "process_rss_bytes",
        },
    }


def offline_part(n: int = 120) -> dict:
    def gates(tools: float, markdown: float) -> dict:
        rates = {
            "factual": 1,
            "reasoning": 1,
            "non_empty": 1,
            "no_markdown": markdown,
            "thinking_leak": 1,
            "tool_call": tools,
            "tool_arguments": tools,
            "abstention": 0.98,
        }
        # Evaluations of 0.1.0 have no answers paired with bf16's, and no `meets`.
        return {g: gate_row(g, round(n * r), n) | {"meets": None} for g, r in rates.items()}

    def figures(mean: float, n_tokens: int) -> dict:
        return {
            "n_tokens": n_tokens,
            "mean": mean,
            "median": 0.04 * mean,
            "p99": 20 * mean,
            "max": 205 * mean,
            "same_top": 1 - mean,
            "flips": round(n_tokens * mean),
            "flips_predicted": 0.9 * n_tokens * mean,
            "perplexity": 1.34,
            "perplexity_reference": 1.33,
            "delta_p_mean": -0.1 * mean,
            "delta_p_rms": mean,
            "margin_median": 4.2,
            "noise_median": 0.5,
        }

    def kl(scale: float) -> dict:
        classes = {
            "tool_call": (0.05, 900),
            "first_token": (0.03, 400),
            "prose": (0.008, 5600),
            "end": (0.002, 512),
        }
        categories = {"greeting": (0.01, 2000), "tools": (0.04, 2000)}
        return figures(0.02 * scale, 7412) | {
            "by_class": {k: figures(mean * scale, n) for k, (mean, n) in classes.items()},
            "by_category": {k: figures(mean * scale, n) for k, (mean, n) in categories.items()},
        }

    return {
        "bf16": {"bf16": {"gates": gates(1, 1)}},
        "naive": {
            "w4a4": {"gates": gates(0.42, 0.68), "kl": kl(1.0), "perplexity": 1.38},
            "w4a16": {"gates": gates(0.97, 0.99), "kl": kl(0.21), "perplexity": 1.34},
        },
        "mlp_only": {
            "w4a4": {"gates": gates(1, 0.99), "kl": kl(0.24), "perplexity": 1.34},
            "w4a16": {"gates": gates(1, 1), "kl": kl(0.06), "perplexity": 1.33},
        },
    }


def comparisons(rows: list[dict]) -> list[dict]:
    gate_table = []
    pairs_of_sides = [
        ("bf16", "naive"),
        ("bf16", "mlp_only"),
        ("bf16", "q4_k_m"),
        ("naive", "q4_k_m"),
    ]
    for first, other in pairs_of_sides:
        for w in ("greeting", "factual", "long_response", "all"):
            for metric in ("ttft_content_ms", "decode_tok_s"):
                sides = []
                for name in (first, other):
                    own = [
                        r
                        for r in rows
                        if r["backend"] == name and w in (r["workload"], "all") and not r["error"]
                    ]
                    values = {(r["case"], r["turn"]): r[METRICS[metric]] for r in own}
                    sides.append({k: v for k, v in values.items() if v is not None})
                pairs = [(sides[0][c], sides[1][c]) for c in sides[0] if c in sides[1]]
                gaps = sorted(b - a for a, b in pairs)
                gate_table.append(
                    {
                        "a": first,
                        "b": other,
                        "workload": w,
                        "metric": metric,
                        "n_prompts": len(pairs),
                        "median_a": statistics.median(a for a, _ in pairs),
                        "median_b": statistics.median(b for _, b in pairs),
                        "median_difference": statistics.median(gaps),
                        "low": gaps[len(gaps) // 4],
                        "high": gaps[3 * len(gaps) // 4],
                        "p": 0.00001,
                        "p_holm": 0.00018 if metric == "decode_tok_s" else 0.21,
                        "significant": metric == "decode_tok_s",
                    }
                )
    return gate_table


def make_run(folder: str | Path, n: int = 30, seed: int = 0, hostile: bool = True) -> Path:
    """Write a run directory of n prompts a workload and return its path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    everything = make_records(n, seed, hostile)
    rows = [r for r in everything if not r["warmup"]]
    with (folder / "records.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(r) + "\n" for r in everything)
    by_backend = {m[0]: [r for r in rows if r["backend"] == m[0]] for m in MODELS}
    turns = {}
    for name, own in by_backend.items():
        turns[name] = []
        for turn in range(5):
            s = stats(
                pooled(
                    [r for r in own if r["workload"] == "multi_turn" and r["turn"] == turn],
                    "ttft_content_ms",
                ),
                3,
            )
            turns[name].append(
                {
                    "turn": turn + 1,
                    "n": s["n"],
                    "ttft_content_ms": s["p50"],
                    "low": s["low"],
                    "high": s["high"],
                }
            )
    aggregates = {
        "models": [
            {
                "name": m[0],
                "label": m[1],
                "format": m[2],
                "size_bytes": m[3],
                "bits_per_weight": m[4],
                "checkpoint": f"models/{m[0]}",
                "gguf": f"gguf/{m[0]}.gguf",
            }
            for m in MODELS
        ],
        "offline": offline_part(),
        "served": {m[0]: served_part(by_backend[m[0]], m) for m in MODELS},
        "comparisons": comparisons(rows),
        "turns": turns,
        "ladders": {
            m[0]: [
                {
                    "axis": "tools",
                    "repeats": 1,
                    "points": [
                        {
                            "level": n,
                            "passes": 15 - lost,
                            "n": 15,
                            "low": 0.1,
                            "high": 1.0,
                            "rate": 1 - lost / 15,
                        }
                        for n, lost in ((1, 0), (8, 1), (64, 12))
                    ],
                    "cliff": {"holds": 8, "breaks": 64, "earliest": 64, "latest": 64, "p": 0.001},
                }
            ]
            for m in MODELS[:2]
        },
        "crossover": [
            {
                "a": "bf16",
                "b": "q4_k_m",
                "tokens": None,
                "faster_when_short": "q4_k_m",
                "faster_when_long": "q4_k_m",
            }
        ],
    }
    document = {
        "schema_version": 1,
        "argv": ["annie-quant", "demo", "--output", "runs/demo"],
        "environment": {
            "time": "2026-11-21T05:00:00Z",
            "cpu": "Example CPU",
            "cores": 2,
            "python": "3.11.2",
            "packages": {"numpy": "2.3.0", "xllamacpp": "0.2.0"},
            "gpus": [],
        },
        "config": {"warmup": 2, "runs": 1, "seed": 0, "prefix_cache": "warm"},
        "stages": [
            {"name": "data", "seconds": 2.1, "summary": "500 conversations"},
            {"name": "quantize-naive", "seconds": 3.9, "summary": "5.1 of 15.0 MB"},
            {"name": "bench", "seconds": 134.2, "summary": f"{len(everything)} requests"},
        ],
        "aggregates": aggregates,
        "verdict": {
            "sentence": "Naive NVFP4 loses its tool calls under W4A4 numerics (50 of 120); "
            "mlp_only keeps every gate at 65 % of bf16's size.",
            "passed": False,
            "candidate": "naive",
            "incumbent": "q4_k_m",
            "reasons": ["naive W4A4: tool calls 50 of 120, below the required rate of 60 %."],
            "caveats": [
                "The servers ran on a shared two-core machine: speeds are not those of a DGX Spark.",
                "Synthetic figures: this run was made by tests/helpers/report_fixture.py.",
            ],
        },
    }
    (folder / "run.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    for name in ("naive", "mlp_only"):
        write_evaluation(folder / f"eval/{name}.json", aggregates["offline"][name])
    cases = {
        w: [
            {
                "id": f"{w}-{i}",
                "messages": []
                if w == "multi_turn"
                else [{"role": "user", "content": q.format(i=i)}],
                "turns": [f"Turn {t}: " + q.format(i=i) for t in range(5)]
                if w == "multi_turn"
                else [],
                "expect": {},
                "tools": None,
            }
            for i in range(n)
        ]
        for w, (_, _, q) in WORKLOADS.items()
    }
    inputs = {
        "config": {},
        "workloads": [
            {"name": w, "gates": g, "max_tokens": 200, "temperature": 0, "cases": cases[w]}
            for w, (g, _, _) in WORKLOADS.items()
        ],
    }
    (folder / "inputs.json").write_text(json.dumps(inputs), encoding="utf-8")
    return folder


def write_evaluation(path: Path, offline: dict, checkpoint: Path | None = None, **fields) -> None:
    """Write the evaluation that a model's figures in run.json come from: without a gate that applies to the reference."""
    import evaluations

    from annie_quant.documents import ModelFiles

    sides = {
        numerics: {
            g: "1" * r["passes"] + "0" * (r["n"] - r["passes"]) for g, r in side["gates"].items()
        }
        for numerics, side in offline.items()
    }
    reference = {gate: "-" * len(text) for side in sides.values() for gate, text in side.items()}
    files = None if checkpoint is None else ModelFiles(model_sha256(checkpoint))
    document = evaluations.from_outcomes(
        sides, reference, checkpoint_files=files, **fields
    ).to_dict()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")


def record_hash(folder: Path, model: str, checkpoint: Path) -> None:
    """Write into run.json which checkpoint was measured."""
    document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    for row in document["aggregates"]["models"]:
        if row["name"] == model:
            row["model_sha256"] = model_sha256(checkpoint)
    (folder / "run.json").write_text(json.dumps(document), encoding="utf-8")


def model_sha256(folder: Path) -> str:
    from annie_quant.checkpoint.shards import model_sha256

    return model_sha256(folder)


def make_checkpoint(folder: Path) -> Path:
    """tiny-annie in NVFP4, weights only, which takes half a second; returns the folder."""
    import annie_quant

    annie_quant.quantize.run("direct", TINY, folder)
    return folder


if __name__ == "__main__":
    print(make_run(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 30))
