"""The model card: README.md of a published checkpoint, written from a run directory, the audit and the calibration data.

Metadata are built and checked by huggingface_hub (ModelCardData, EvalResult); the body says how the checkpoint was made,
what was measured with n and intervals, how to serve this very checkpoint, and what is not known.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from annie_quant import __version__
from annie_quant.errors import UsageError, need
from annie_quant.report.charts.gates import rate
from annie_quant.report.format import count, share, significant, size
from annie_quant.report.pages import tables
from annie_quant.report.pages.html import findings
from annie_quant.report.pages.markdown import grid, inert
from annie_quant.report.run import REFERENCE, Run, Side

TAGS = ("dgx-spark", "blackwell", "nvfp4", "qwen3.5", "modelopt", "annie-quant")
RUNTIMES = ("vllm", "sglang")
WORKLOADS = "annie_quant workloads"


@dataclasses.dataclass(frozen=True)
class Subject:
    """What the card is about: the model's name in the run, its folder, its audit and where it will be found."""

    name: str
    folder: Path
    audit: Any  # annie_quant.checkpoint.Audit
    repo_id: str
    base_model: str
    license: str = ""
    calibration: Path | None = None
    forced: str = ""  # why it is published although something speaks against it
    objections: tuple[str, ...] = ()


def sides_of(run: Run, model: str) -> list[Side]:
    return [s for s in run.sides if s.model == model]


def render(run: Run, subject: Subject) -> str:
    """README.md. Raises UsageError where huggingface_hub refuses the metadata."""
    hub = need("huggingface_hub", "quantize")
    text = f"---\n{metadata(run, subject).to_yaml()}\n---\n\n{body(run, subject)}"
    try:
        hub.ModelCard(text, ignore_metadata_errors=False)
    except ValueError as error:
        raise UsageError(f"the card's metadata are not valid: {error}") from error
    return text


def metadata(run: Run, subject: Subject) -> Any:
    """huggingface_hub.ModelCardData: tags, base model, quantization, every deciding gate as an evaluation result."""
    hub, check = need("huggingface_hub", "quantize"), need("huggingface_hub.utils", "quantize")
    try:
        for name in (subject.repo_id, subject.base_model):
            check.validate_repo_id(name)
            if name.count("/") != 1:
                raise ValueError(f"{name!r} is not OWNER/NAME")
        return hub.ModelCardData(
            base_model=subject.base_model,
            base_model_relation="quantized",
            library_name="transformers",
            license=subject.license or None,
            model_name=subject.repo_id.split("/")[-1],
            pipeline_tag="text-generation",
            quantization=quantization(subject),
            tags=list(TAGS),
            eval_results=results(run, subject) or None,
        )
    except ValueError as error:  # HFValidationError among them
        raise UsageError(f"the card's metadata are not valid: {error}") from error


def quantization(subject: Subject) -> dict[str, Any]:
    summary = subject.audit.to_dict()["summary"]
    known = {k: summary.get(k) for k in ("algorithm", "bits_per_weight", "bits_per_quantized_weight")}
    strategy = recorded(subject).get("strategy")
    named = {"strategy": strategy} if isinstance(strategy, str) else {}
    return {"format": "nvfp4"} | named | {k: v for k, v in known.items() if v is not None}


def recorded(subject: Subject) -> dict[str, Any]:
    """annie_quant.json, which `annie-quant quantize` leaves in a checkpoint: strategy, scale, calibration's hash, options."""
    return read_object(subject.folder / "annie_quant.json")


def results(run: Run, subject: Subject) -> list[Any]:
    """One EvalResult a gate that decides and a side; n and the interval travel as the metric's arguments."""
    hub = need("huggingface_hub", "quantize")
    return [
        hub.EvalResult(
            task_type="text-generation",
            dataset_type="annie_quant/workloads",
            dataset_name=f"{WORKLOADS}, {side.title}",
            dataset_config=side.key.split("/", 1)[1],
            metric_type=gate,
            metric_name=f"{run.gate_title(gate)}, share that passes",
            metric_value=round(rate(row), 4),
            metric_args={"passes": int(row["passes"]), "n": int(row["n"]), **_bounds(row)},
        )
        for side in sides_of(run, subject.name)
        for gate, row in side.gates.items()
        if not row["advisory"]
    ]


def _bounds(row: dict[str, Any]) -> dict[str, float]:
    return {k: round(row[k], 4) for k in ("low", "high") if row[k] is not None}


def body(run: Run, subject: Subject) -> str:
    name = subject.repo_id.split("/")[-1]
    parts = [f"# {inert(name)}", opening(run, subject)]
    if subject.objections:
        parts += ["**Published although:**", bullets(subject.objections), f"Reason given: {inert(subject.forced)}"]
    parts += ["## How it was made", bullets(making(subject)), "## Calibration", *calibration(subject)]
    parts += ["## Results", *measured(run, subject), "## Serving", *serving(subject)]
    parts += ["## Limits", bullets(limits(run, subject))]
    parts.append(f"Made and measured with annie_quant {__version__}.")
    return "\n\n".join(parts) + "\n"


def bullets(items: Any) -> str:
    return "\n".join(f"- {inert(item)}" for item in items)


def opening(run: Run, subject: Subject) -> str:
    sides = sides_of(run, subject.name)
    rows = [r for s in sides for r in s.gates.values() if not r["advisory"]]
    verdicts = Counter(r["verdict"] for r in rows)
    told = ", ".join(
        f"{verdicts[v]} {w}" for v, w in (("pass", "passed"), ("fail", "failed"), ("undecided", "undecided"))
    )
    summary = subject.audit.to_dict()["summary"]
    return (
        f"[{inert(subject.base_model)}](https://huggingface.co/{subject.base_model}) in NVFP4 for NVIDIA DGX Spark (GB10) "
        f"and other Blackwell GPUs: {size(summary.get('size_bytes'))}, "
        f"{significant(summary.get('bits_per_weight'))} bits per weight. "
        f"Of {count(len(rows))} behavioural gates {told}."
    )


def making(subject: Subject) -> list[str]:
    summary, producer, made = subject.audit.to_dict()["summary"], "", recorded(subject)
    config = read_object(subject.folder / "hf_quant_config.json")
    if isinstance(config.get("producer"), dict):
        producer = " ".join(str(config["producer"].get(k, "")) for k in ("name", "version")).strip()
    rows = [
        "".join(f"{k} {made[k]}, " for k in ("strategy", "scale") if isinstance(made.get(k), str))
        + f"algorithm {summary.get('algorithm')}"
        + (f", written by {producer}" if producer else ""),
        f"quantized: {', '.join(summary.get('quantized') or ()) or 'nothing'}",
        f"kept in 16 bits: {', '.join(summary.get('kept') or ()) or 'nothing'}",
        "audit of every tensor: "
        + ("sound" if subject.audit.ok else f"{len(subject.audit.findings)} findings, see below"),
    ]
    weights = sorted(subject.folder.glob("*.safetensors"))
    return rows + [f"{f.name}: SHA-256 {_digest(f)}" for f in weights[:8]]


def calibration(subject: Subject) -> list[str]:
    """Where the calibration conversations came from, as their own provenance says."""
    path, made = subject.calibration, recorded(subject)
    if "calib_data_sha256" in made and made["calib_data_sha256"] is None:
        return ["None: this strategy was given no calibration data."]
    if path is None or not path.is_file():
        return ["Not on record: no calibration data were given to the card (`annie-quant publish --calib-data`)."]
    rows, unread = [], 0
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
            rows.append(row if isinstance(row, dict) else {})
        except ValueError:
            unread += 1
    used = [r for r in rows if r.get("split") in ("calibration", None)]
    kinds = Counter(str(r.get("category", "uncategorised")) for r in used)
    found = [r["provenance"] for r in used if isinstance(r.get("provenance"), dict)]

    def said(key: str) -> str:
        values = sorted({str(p[key]) for p in found if p.get(key)})
        return ", ".join(values[:4]) + (f" and {len(values) - 4} more" if len(values) > 4 else "") or "not on record"

    times = sorted(str(p["time"]) for p in found if p.get("time"))
    lines = [
        f"{count(len(used))} conversations for calibration of {count(len(rows))} in the file: "
        + ", ".join(f"{v} {k}" for k, v in sorted(kinds.items())),
        f"teacher: {said('teacher')}; model: {said('model')}",
        f"persona SHA-256: {said('persona_sha256')}; prompt SHA-256: {said('prompt_sha256')}",
        f"written {times[0][:10]} to {times[-1][:10]}" if times else "time: not on record",
        f"file SHA-256: {_digest(path)}",
    ]
    if isinstance(used_by := made.get("calib_data_sha256"), str):
        same = used_by == _digest(path)
        lines.append(
            f"the checkpoint's own record names {'this file' if same else f'another file, SHA-256 {used_by}'}, "
            f"{count(made.get('calib_samples'))} conversations at most"
        )
    if unread:
        lines.append(f"{unread} lines could not be read")
    return [bullets(lines)]


def narrowed(run: Run, subject: Subject) -> Run:
    """The run with the card's columns only: the reference, this model, and what it would replace."""
    incumbent = run.doc["verdict"].get("incumbent")
    wanted = [
        REFERENCE,
        subject.name,
        *(s.model for s in run.of("served") if incumbent in (s.key.split("/", 1)[1], s.model)),
    ]
    kept = dict.fromkeys(wanted)
    models = [m for name in kept for m in run.models if m["name"] == name]
    return dataclasses.replace(run, models=models, sides=[s for name in kept for s in sides_of(run, name)])


def measured(run: Run, subject: Subject) -> list[str]:
    small = narrowed(run, subject)
    if not sides_of(run, subject.name):
        return ["Nothing was measured."]
    parts = [
        "Passes of n with ✓ pass, ✗ fail, ? undecided; 95 % Wilson intervals in brackets. Offline: greedy answers without "
        "a server, under W4A4 (activations quantized too) and W4A16 (weights only) arithmetic. Served: behind a real server.",
        grid(tables.side_by_side(small), ""),
    ]
    if (kl := tables.kl_table(dataclasses.replace(small, sides=sides_of(run, subject.name)))).rows:
        parts += ["KL divergence from bf16 per assistant token, in nats:", grid(kl, "model", 2)]
    table = tables.latency_table(small, "ttft_content_ms")
    if table.rows:
        parts += [f"{table.caption}:", grid(table, "workload")]
    counts = [
        f"{run.label(s.model)}: TTFT over {count(v['ttft'].get('n'))} requests, decode over {count(v['decode'].get('n'))}"
        for s in small.of("served")
        if {"ttft", "decode"} <= (v := s.data["speed_gates"]).keys()
    ]
    if counts:
        parts.append(bullets(counts))
    if small.of("served"):
        parts.append(f"Measured on: {inert(machine(run))}. Speeds of another machine or server differ.")
    return parts


def machine(run: Run) -> str:
    environment = run.doc["environment"]
    found = [str(environment[k]) for k in ("cpu", "cores") if isinstance(environment.get(k), (str, int))]
    gpus = environment.get("gpus")
    names = [str(g.get("name") if isinstance(g, dict) else g) for g in gpus] if isinstance(gpus, list) else []
    words = f"{found[0]}, {found[1]} cores" if len(found) == 2 else ", ".join(found)
    return ", ".join(filter(None, [words, *names, "" if names else "no GPU"])) or "not on record"


def serving(subject: Subject) -> list[str]:
    """Commands for the runtimes that load this checkpoint, as its audit says."""
    from annie_quant import serve

    name = subject.repo_id.split("/")[-1]
    parts = [f"    hf download {subject.repo_id} --local-dir {name}"]
    loads = [str(line) for line in subject.audit.summary.loads]
    for runtime in RUNTIMES:
        verdict = next((x for x in loads if x.lower().startswith(f"{runtime}:")), "")
        if verdict.lower().startswith(f"{runtime}: yes"):
            written = serve.command(Path(name), runtime=runtime)
            parts += [f"{verdict.split(':')[0]}:", "    " + written.replace(str(Path(name).resolve()), f"$PWD/{name}")]
    rest = [line for line in loads if ": yes" not in line]
    return parts + ([bullets(rest)] if rest else [])


def limits(run: Run, subject: Subject) -> list[str]:
    sides, found = sides_of(run, subject.name), []
    for side in sides:
        for gate, row in side.gates.items():
            if row["verdict"] != "pass" and not row["advisory"]:
                told = "fails" if row["verdict"] == "fail" else "cannot be decided"
                found.append(
                    f"{run.gate_title(gate)}, {side.title}: {told} ({count(row['passes'])} of {count(row['n'])}, "
                    f"{share(row['low'])} to {share(row['high'])})"
                )
    kinds = {s.kind for s in sides}
    if "offline" not in kinds:
        found.append("not evaluated without a server: behaviour under other arithmetic is unknown")
    if "served" not in kinds:
        found.append("not measured behind a server: speed is unknown")
    elif not _on_spark(run):
        found.append("speeds were not measured on a DGX Spark")
    found += [f"audit: {f.message}" for f in subject.audit.findings]
    found += findings(run)
    found.append("gates ask for one assistant's manners with its own prompts; other uses were not judged")
    return list(dict.fromkeys(found))


def _on_spark(run: Run) -> bool:
    return "GB10" in json.dumps(run.doc["environment"].get("gpus") or "")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file's object; empty where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
