"""Candidate and incumbent by the founding documents' dimensions, and what a switch does to the memory budget.

What was not measured is said to be unknown, never guessed; what is computed says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from annie_quant.judge.decision import BUDGET_BYTES
from annie_quant.report.format import DASH, clean, count, number, significant, size
from annie_quant.report.pages.tables import Cell, Table, metric_cell, speed_cell
from annie_quant.report.run import Run, Side

CONTEXT = 32_768  # tokens; what the founding documents configure
CONTAINERS = {"vllm": "vLLM", "sglang": "SGLang"}


@dataclass(frozen=True)
class Pair:
    """Who is compared, and how they are called."""

    candidate: Side
    incumbent: Side | None
    names: tuple[str, str]


def pair(run: Run) -> Pair | None:
    """The verdict's candidate and incumbent as they were served; None where no candidate was."""
    verdict = run.doc["verdict"]
    found = [
        next((s for s in run.of("served") if verdict.get(k) in (s.key.split("/", 1)[1], s.model)), None)
        for k in ("candidate", "incumbent")
    ]
    if found[0] is None:
        return None
    labels = [run.label(s.model) if s else "" for s in found]
    return Pair(found[0], found[1], (labels[0], labels[1]))


def founding_table(run: Run) -> Table | None:
    """The founding documents' dimensions, a row each: incumbent, then candidate."""
    who = pair(run)
    if who is None:
        return None
    sides = [s for s in (who.incumbent, who.candidate) if s]
    titles = [
        f"{run.label(s.model)} ({w})" for s, w in zip(sides, ("current", "candidate")[-len(sides) :], strict=True)
    ]
    table = Table("The founding dimensions: what is served now and what would take its place", titles)
    for title, write in (
        ("runtime", _runtime),
        ("fine-tuning", _weights),
        ("quantization", _format),
        ("model on disk", lambda r, s: Cell(size(model_of(r, s).get("size_bytes")), key=f"size|{s.model}")),
        ("memory, idle", lambda r, s: _memory(s, "idle")),
        ("memory, 5 requests", lambda r, s: _memory(s, "five")),
        (f"cache at {count(CONTEXT)} tokens", _cache),
        ("decode p50, tok/s", lambda r, s: _speed(s, "decode", "decode_tok_s")),
        ("TTFT p50, ms", lambda r, s: _speed(s, "ttft", "ttft_content_ms")),
        ("TTFT, greeting, ms", lambda r, s: _with_n(metric_cell(s, "greeting", "ttft_content_ms"), s, "greeting")),
        ("deployment", _deployment),
        ("context limit", _context),
        ("acceleration", _acceleration),
    ):
        cells = [write(run, s) for s in sides]
        for cell in cells:
            cell.css = f"word {cell.css}" if cell.css in ("pass", "fail", "undecided") else "word"
        table.rows.append((title, cells))
    return table


def model_of(run: Run, side: Side) -> dict[str, Any]:
    return next((m for m in run.models if m["name"] == side.model), {})


def _backend(run: Run, side: Side) -> dict[str, Any]:
    found = run.doc["backends"].get(side.key.split("/", 1)[1])
    return found if isinstance(found, dict) else {}


def _words(text: Any, sub: str = "") -> Cell:
    return Cell(clean(text) if text not in (None, "") else DASH, sub)


def _runtime(run: Run, side: Side) -> Cell:
    version = _backend(run, side).get("version")
    return _words(side.data.get("runtime"), clean(version) if isinstance(version, str) else "")


def _weights(run: Run, side: Side) -> Cell:
    """The same fine-tuned weights behind both, as far as the benchmark was told."""
    who = pair(run)
    both = [s for s in (who.candidate, who.incumbent) if s] if who else []
    sources = {str((_backend(run, s).get("meta") or {}).get("source") or "") for s in both}
    if sources == {""}:
        return _words("not on record")
    return _words("the same weights on both sides" if len(sources) == 1 else "differs, or not on record of both")


def _format(run: Run, side: Side) -> Cell:
    model = model_of(run, side)
    bits = number(model.get("bits_per_weight"))
    return _words(model.get("format") or run.label(side.model), f"{significant(bits)} bits per weight" if bits else "")


def _memory(side: Side, level: str) -> Cell:
    value = side.data["memory_bytes"].get(level)
    return Cell(size(value), key=f"memory|{side.key}|{level}" if value is not None else "")


def _speed(side: Side, gate: str, metric: str) -> Cell:
    cell, row = speed_cell(side, gate, metric), side.data["speed_gates"].get(gate, {})
    return Cell(cell.text, _joined(cell.sub, row.get("n")), cell.key, cell.css)


def _with_n(cell: Cell, side: Side, workload: str) -> Cell:
    n = side.data["workloads"].get(workload, {}).get("n")
    return Cell(cell.text, _joined(cell.sub, n) if cell.key else "", cell.key)


def _joined(interval: str, n: Any) -> str:
    return ", ".join(filter(None, [interval, f"n = {count(n)}" if n else ""]))


def _cache(run: Run, side: Side) -> Cell:
    """Keys and values of the attention layers and the states of the linear ones, computed from config.json."""
    found = cache_bytes(_config(run, side))
    if found is None:
        return _words("unknown (no config.json of this model is at hand)")
    tokens, size_bytes = found
    model = number(model_of(run, side).get("size_bytes"))
    short = f" at {count(tokens)} tokens, its limit" if tokens < CONTEXT else ""
    total = f"with the model {size(size_bytes + model)}" if model else ""
    return Cell(
        f"{size(size_bytes)}{short}", _joined(total, None) + ", computed for 16-bit caches", f"cache|{side.model}"
    )


def _config(run: Run, side: Side) -> dict[str, Any]:
    """config.json of the model, or of any other of the run: the forms of one model share it."""
    rows = [model_of(run, side), *run.models]
    for row in rows:
        folder = Path(row.get("checkpoint") or "")
        for place in (folder, run.folder / folder, run.folder / "models" / folder.name):
            try:
                found = json.loads((place / "config.json").read_bytes()) if row.get("checkpoint") else None
            except (OSError, ValueError):
                continue
            if isinstance(found, dict):
                return found | found["text_config"] if isinstance(found.get("text_config"), dict) else found
    return {}


def cache_bytes(config: dict[str, Any], tokens: int = CONTEXT) -> tuple[int, int] | None:
    """(tokens, bytes) of one conversation's caches: 16-bit keys and values a full-attention layer and token; one state
    a linear-attention layer (float32 [value heads, key dim, value dim], and 16-bit convolution columns)."""
    try:
        layers = [str(kind) for kind in config["layer_types"]]
        kept = min(tokens, int(config.get("max_position_embeddings") or tokens))
        full = sum(kind == "full_attention" for kind in layers)
        keys = 2 * full * int(config["num_key_value_heads"]) * int(config["head_dim"]) * 2 * kept
        linear = len(layers) - full
        heads = [int(config.get(f"linear_num_{k}_heads") or 0) for k in ("key", "value")]
        dims = [int(config.get(f"linear_{k}_head_dim") or 0) for k in ("key", "value")]
        columns = 2 * heads[0] * dims[0] + heads[1] * dims[1]
        convolution = 2 * columns * int(config.get("linear_conv_kernel_dim") or 0)
        return kept, keys + linear * (4 * heads[1] * dims[0] * dims[1] + convolution)
    except (KeyError, TypeError, ValueError):
        return None


def container(side: Side) -> str:
    said = str(side.data.get("runtime") or "").lower()
    return next((title for key, title in CONTAINERS.items() if key in said), "")


def _deployment(run: Run, side: Side) -> Cell:
    title = container(side)
    if title:
        return _words(f"{title} from its container image")
    known = "llama" in str(side.data.get("runtime") or "").lower()
    return _words("one binary and one GGUF file" if known else "not on record")


def _context(run: Run, side: Side) -> Cell:
    limit = number(_config(run, side).get("max_position_embeddings"))
    served = number(_backend(run, side).get("max_model_len"))
    return _words(f"{count(limit)} tokens" if limit else DASH, f"{count(served)} served here" if served else "")


def _acceleration(run: Run, side: Side) -> Cell:
    gpus = run.doc["environment"].get("gpus")
    names = [str(g.get("name") if isinstance(g, dict) else g) for g in gpus] if isinstance(gpus, list) else []
    fp4 = "NVFP4" in str(model_of(run, side).get("format") or "")
    can = "FP4 tensor cores on Blackwell" if fp4 and container(side) else "any GPU or CPU"
    return _words(can, f"here: {', '.join(names)}" if names else "here: no GPU")


def registry(run: Run) -> Table | None:
    """What a switch does to the machine's memory budget."""
    who = pair(run)
    if who is None:
        return None
    table = Table(
        f"Memory budget: {size(BUDGET_BYTES)} at the peak for everything that runs on the machine",
        ["highest seen", "room for the rest", "within budget"],
    )
    peaks = {s.key: peak(s) for s in (who.incumbent, who.candidate) if s}
    rows: list[tuple[str, float | None, str]] = [
        (f"{run.label(s.model)} ({w})", peaks[s.key], f"memory|{s.key}|peak")
        for s, w in ((who.incumbent, "current"), (who.candidate, "candidate"))
        if s
    ]
    if len(peaks) == 2:
        both = list(peaks.values())
        rows.append(("both, while switching", sum(b for b in both if b) if all(both) else None, ""))
    for title, value, key in rows:
        if value is None:
            cells = [_words("not measured"), _words(""), Cell("? open", css="word undecided")]
        else:
            fits = value < BUDGET_BYTES
            cells = [
                Cell(size(value), key=key),
                Cell(size(BUDGET_BYTES - value) if fits else "none"),
                Cell("✓ yes" if fits else "✗ no", css=f"word {'pass' if fits else 'fail'}"),
            ]
        table.rows.append((title, cells))
    return table


def peak(side: Side) -> float | None:
    found = [v for k in ("idle", "one", "five") if (v := side.data["memory_bytes"].get(k))]
    return max(found, default=None)
