"""A run directory as the report sees it: what is there, what is missing and the command that makes it.

What has the wrong kind counts as missing (normal.py); a torn line of records.jsonl is counted and skipped. Only
measured requests (no warm-ups) count in figures.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from annie_quant.errors import UsageError
from annie_quant.report import recount, sanitize
from annie_quant.report.format import clean, name
from annie_quant.report.sanitize import mapping
from annie_quant.schema import check_version

NUMERICS = {"bf16": "reference", "w4a4": "W4A4", "w4a16": "W4A16"}
REFERENCE = "bf16"
# Manners first, as the founding documents' tables have them; gates of one's own follow.
ORDER = (
    "tool_call",
    "no_markdown",
    "thinking_leak",
    "factual",
    "reasoning",
    "non_empty",
    "abstention",
    "stop",
    "repetition",
)


@dataclass(frozen=True)
class Side:
    """A model under one numerics (offline) or behind one server, as judged; `gates` and `data` as in run.json."""

    key: str
    model: str
    kind: str  # "offline" or "served"
    title: str
    gates: dict[str, dict[str, Any]]
    data: dict[str, Any]


@dataclass
class Run:
    folder: Path
    doc: dict[str, Any]
    records: list[dict[str, Any]]
    inputs: list[dict[str, Any]]
    torn_lines: int = 0
    models: list[dict[str, Any]] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    missing: list[dict[str, str]] = field(default_factory=list)
    walked: list[str] = field(default_factory=list)  # strategies in the order in which a search tried them

    @property
    def aggregates(self) -> dict[str, Any]:
        aggregates: dict[str, Any] = self.doc["aggregates"]
        return aggregates

    @property
    def measured(self) -> list[dict[str, Any]]:
        """Requests that count: no warm-ups."""
        return [r for r in self.records if not r["warmup"]]

    def of(self, kind: str) -> list[Side]:
        return [s for s in self.sides if s.kind == kind]

    def label(self, model: str) -> str:
        return next((m["label"] for m in self.models if m["name"] == model), name(model))

    def series(self, model: str) -> int:
        """The colour slot of a model: the same in every figure."""
        fixed = {"bf16": 0, "naive": 1, "mlp_only": 2, "q4_k_m": 3}
        if model in fixed:
            return fixed[model]
        others = [m["name"] for m in self.models if m["name"] not in fixed]
        return 4 + (others.index(model) % 4 if model in others else 0)

    @property
    def gate_names(self) -> list[str]:
        """Every gate of any side; those that decide before those that inform."""
        rows: dict[str, bool] = {}
        for side in self.sides:
            for gate, row in side.gates.items():
                rows.setdefault(gate, row["advisory"])
        return sorted(rows, key=lambda gate: (rows[gate], ORDER.index(gate) if gate in ORDER else len(ORDER)))

    def gate_title(self, gate: str) -> str:
        titles = (side.gates[gate].get("title") for side in self.sides if gate in side.gates)
        return clean(next((t for t in titles if t), name(gate)))

    @property
    def workloads(self) -> list[str]:
        seen: dict[str, None] = {}
        for side in self.of("served"):
            seen.update(dict.fromkeys(side.data["workloads"]))
        return list(seen)


def load(run_dir: str | Path) -> Run:
    """Read what there is. Raises UsageError when the folder holds nothing that a report could show."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such run directory", "annie-quant demo makes one in runs/demo")
    records, torn = _records(folder / "records.jsonl")
    source = next((n for n in ("run.json", "bench.json") if (folder / n).is_file()), None)
    evaluations = {p.stem: mapping(_json(p, strict=False)) for p in sorted(folder.glob("eval/*.json"))}
    if source is None and not records and not evaluations:
        raise UsageError(
            f"{folder}: neither run.json, bench.json, records.jsonl nor eval/*.json is there",
            "give a folder that annie-quant demo or bench wrote",
        )
    found = _json(folder / source) if source else {}
    check_version(found, folder / str(source))
    doc = sanitize.document(found)
    if not doc["backends"]:
        doc["backends"] = sanitize.document(_json(folder / "bench.json", strict=False))["backends"]
    run = Run(folder, doc, records, sanitize.inputs(_json(folder / "inputs.json", strict=False)), torn)
    if not run.aggregates["served"] and records:
        # A benchmark that was cut off: its records alone give rates and percentiles.
        counted = recount.served(run.measured, recount.greedy_workloads(run.inputs))
        run.aggregates["served"] = sanitize.aggregates({"served": counted})["served"]
    search = mapping(_json(folder / "search.json", strict=False))
    run.walked = [
        r["strategy"] for r in sanitize.rows_of(search.get("strategies")) if isinstance(r.get("strategy"), str)
    ]
    run.doc["verdict"] = sanitize.words({"candidate": search.get("chosen")}, "candidate") | run.doc["verdict"]
    _models_and_sides(run, evaluations)
    run.missing = _missing(run, source)
    return run


def _json(path: Path, strict: bool = True) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        if strict:
            raise UsageError(f"{path}: not JSON ({error})", "run the command that wrote it again") from error
        return None


def _records(path: Path) -> tuple[list[dict[str, Any]], int]:
    if not path.is_file():
        return [], 0
    rows, torn = [], 0
    for line in path.read_bytes().split(b"\n"):
        if not line.strip():
            continue
        try:
            row = sanitize.record(json.loads(line))
        except ValueError:
            row = None
        if row is None:
            torn += 1
        else:
            rows.append(row)
    return rows, torn


def _models_and_sides(run: Run, evaluations: dict[str, dict[str, Any]]) -> None:
    offline: dict[str, dict[str, Any]] = {m: dict(v) for m, v in run.aggregates["offline"].items()}
    for stem, found in evaluations.items():
        for numerics, value in mapping(found.get("numerics")).items():
            offline.setdefault(stem, {}).setdefault(numerics, sanitize.offline_side(value))
        reference = sanitize.offline_side({"gates": found.get("reference_gates")})
        if reference["gates"]:
            offline.setdefault(REFERENCE, {}).setdefault(REFERENCE, reference)
    _layers(run.folder, offline)
    served = run.aggregates["served"]
    listed: dict[str, dict[str, Any]] = {m["name"]: m for m in run.aggregates["models"]}
    for backend, data in served.items():
        # What a server calls its model says little, and two may say the same: the backend's name then tells them apart.
        if data["model"] not in listed and data["model"] not in offline:
            data["model"] = backend
    for model in [*offline, *(data["model"] for data in served.values())]:
        listed.setdefault(model, {"name": model, "unlisted": True})
    run.models = [m | {"label": clean(m.get("label") or name(m["name"]))} for m in listed.values()]
    for model in listed:
        known = list(NUMERICS)
        for numerics in sorted(offline.get(model, {}), key=lambda k: known.index(k) if k in known else len(known)):
            data, title = offline[model][numerics], f"{NUMERICS.get(numerics, clean(numerics))} offline"
            run.sides.append(Side(f"offline/{model}/{numerics}", model, "offline", title, data["gates"], data))
        for backend, data in served.items():
            if data["model"] == model:
                title = f"{clean(data.get('runtime') or 'server')} served"
                run.sides.append(Side(f"served/{backend}", model, "served", title, data["gates"], data))


def _layers(folder: Path, offline: dict[str, dict[str, Any]]) -> None:
    """sensitivity/<model>.json (runtime.sensitivity) gives each layer's own part of the divergence."""
    for path in sorted(folder.glob("sensitivity/*.json")):
        found = mapping(_json(path, strict=False))
        side = offline.get(path.stem, {}).get(str(found.get("numerics")))
        if side and (layers := sanitize.kl({"by_layer": found.get("alone")}).get("by_layer")):
            side["kl"] = side["kl"] | {"by_layer": layers}


def _missing(run: Run, source: str | None) -> list[dict[str, str]]:
    """Each part that is not there, in words, with the command that makes it."""
    where = clean(run.folder.name)
    found: list[dict[str, str]] = []

    def lacks(part: str, what: str, command: str) -> None:
        found.append({"part": part, "what": what, "command": command})

    bench = "annie-quant bench --backend-a NAME URL --backend-b NAME URL --output DIR"
    if source is None:
        lacks(
            "verdict",
            f"{where} holds no run.json: no verdict, no environment, no stage times",
            "annie-quant demo --output DIR",
        )
    if not any(not m.get("unlisted") for m in run.models):
        lacks("sizes", "no table of models: sizes and bits per weight are unknown", "annie-quant audit MODEL_DIR")
    if not run.of("offline"):
        lacks(
            "offline",
            "no evaluation without a server: gates under W4A4 and W4A16 and KL divergence are unknown",
            "annie-quant eval MODEL_DIR --reference BF16_DIR",
        )
    elif not any(s.data["kl"] for s in run.of("offline")):
        lacks("kl", "no KL divergence was measured", "annie-quant eval MODEL_DIR --reference BF16_DIR")
    if not run.of("served"):
        lacks("served", "no server was measured: latency, speed and served gates are unknown", bench)
    if not run.records:
        lacks("records", "no records.jsonl: distributions, single streams and answers cannot be shown", bench)
    if run.of("served") and not any(s.data["memory_bytes"] for s in run.of("served")):
        lacks(
            "memory",
            "memory of the servers was not measured (it needs their process ids)",
            "annie-quant serve MODEL_DIR, then " + bench,
        )
    if run.of("served") and not run.aggregates["comparisons"]:
        lacks("comparisons", "no paired comparison was made (it needs two backends and the same prompts)", bench)
    return found
