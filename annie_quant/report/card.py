"""The model card: README.md of a published checkpoint, from its run directory, its audit and its calibration data.

huggingface_hub builds and checks the metadata (ModelCardData, EvalResult). The body states how the checkpoint was made, what
was measured with n and intervals, how to serve it, and what is not known.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from annie_quant import __version__
from annie_quant.checkpoint import ModelFolder, decode_speed
from annie_quant.checkpoint.header import ShardError
from annie_quant.core.errors import UsageError, need
from annie_quant.core.text import inert
from annie_quant.documents import (
    RECIPE_FILE,
    Audit,
    Environment,
    GateResult,
    SpeedGate,
    salvage_line,
    salvage_or_default,
)
from annie_quant.judge import decision
from annie_quant.report import tables
from annie_quant.report.format import count, share, significant, size
from annie_quant.report.markdown import LEGEND, bullets, grid
from annie_quant.report.recheck import caveats
from annie_quant.report.run import REFERENCE, LoadedRun, RecordedRecipe, ServedModel

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TAGS = ("dgx-spark", "blackwell", "nvfp4", "qwen3.5", "modelopt", "annie-quant")
RUNTIMES = ("vllm", "sglang")
MAX_DIGESTS = 8  # weight files whose SHA-256 is listed


class _Producer(msgspec.Struct):
    name: str = ""
    version: str = ""


class _QuantConfig(msgspec.Struct):
    producer: _Producer = msgspec.field(default_factory=_Producer)


class _Provenance(msgspec.Struct):
    teacher: str | None = None
    model: str | None = None
    persona_sha256: str | None = None
    prompt_sha256: str | None = None
    time: str | None = None


class _Conversation(msgspec.Struct):
    """The part of a row of calibration.jsonl that a card counts."""

    category: str = "uncategorised"
    split: str | None = None
    provenance: _Provenance = msgspec.field(default_factory=_Provenance)


@dataclass(frozen=True)
class Subject:
    """What the card describes.

    name: of the model in the run.
    compared: whether the audit compared the checkpoint with its source.
    calibration: the file of the calibration conversations.
    forced: the reason for publishing in spite of `objections`.
    """

    name: str
    folder: Path
    audit: Audit
    repo_id: str
    base_model: str
    license: str = ""
    compared: bool = False
    calibration: Path | None = None
    forced: str = ""
    objections: tuple[str, ...] = ()

    @property
    def recipe(self) -> RecordedRecipe:
        return salvage_or_default(RecordedRecipe, self.folder / RECIPE_FILE)

    @property
    def repo_name(self) -> str:
        return self.repo_id.split("/")[-1]


def render(run: LoadedRun, subject: Subject) -> str:
    """Return README.md. Raises UsageError where huggingface_hub refuses the metadata."""
    hub, check = need("huggingface_hub", "quantize"), need("huggingface_hub.utils", "quantize")
    try:
        for name in (subject.repo_id, subject.base_model):
            check.validate_repo_id(name)
            if name.count("/") != 1:
                raise ValueError(f"{name!r} is not OWNER/NAME")
        metadata = hub.ModelCardData(
            base_model=subject.base_model,
            base_model_relation="quantized",
            library_name="transformers",
            license=subject.license or None,
            model_name=subject.repo_name,
            pipeline_tag="text-generation",
            quantization=_quantization(subject),
            tags=list(TAGS),
            eval_results=_eval_results(run, subject) or None,
        )
        text = f"---\n{metadata.to_yaml()}\n---\n\n{_body(run, subject)}"
        hub.ModelCard(text, ignore_metadata_errors=False)
    except ValueError as error:  # also HFValidationError
        raise UsageError(f"the card's metadata are not valid: {error}") from error
    return text


def _quantization(subject: Subject) -> dict[str, str | float]:
    summary = subject.audit.summary
    fields = {
        "format": "nvfp4",
        "strategy": subject.recipe.strategy,
        "algorithm": summary.algorithm,
        "bits_per_weight": summary.bits_per_weight,
        "bits_per_quantized_weight": summary.bits_per_quantized_weight,
    }
    return {key: value for key, value in fields.items() if value is not None}


def _eval_results(run: LoadedRun, subject: Subject) -> list[EvalResult]:
    """Return one huggingface_hub.EvalResult per side and deciding gate; n and the interval are the metric's arguments."""
    hub = need("huggingface_hub", "quantize")
    return [
        hub.EvalResult(
            task_type="text-generation",
            dataset_type="annie_quant/workloads",
            dataset_name=f"annie_quant workloads, {side.title}",
            dataset_config=side.name,
            metric_type=gate,
            metric_name=f"{run.gate_title(gate)}, share that passes",
            metric_value=round(r.rate, 4),
            metric_args={"passes": r.passes, "n": r.n, "low": round(r.low, 4), "high": round(r.high, 4)},
        )
        for side in run.sides_of(subject.name)
        for gate, r in side.deciding.items()
    ]


def _body(run: LoadedRun, subject: Subject) -> str:
    parts = [f"# {inert(subject.repo_name)}", _opening(run, subject)]
    if subject.objections:
        parts += ["**Published although:**", bullets(subject.objections), f"Reason given: {inert(subject.forced)}"]
    parts += ["## How it was made", bullets(_origin(subject)), "## Calibration", *_calibration(subject)]
    parts += ["## Results", *_results(run, subject), "## Serving", *_serving(subject)]
    parts += ["## Limits", bullets(_limits(run, subject))]
    parts.append(f"Made and measured with annie_quant {__version__}.")
    return "\n\n".join(parts) + "\n"


def _opening(run: LoadedRun, subject: Subject) -> str:
    gates = [g for g in decision.deciding_gates(run.aggregates, subject.name) if not isinstance(g.result, SpeedGate)]
    outcomes = Counter(gate.outcome for gate in gates)
    places = dict.fromkeys(gate.where for gate in gates)
    passed, failed = ("kept", "lost") if any(gate.compared for gate in gates) else ("passed", "failed")
    standing = decision.standing_of(run.aggregates, subject.name, with_speed=False)
    summary = subject.audit.summary
    return (
        f"[{inert(subject.base_model)}](https://huggingface.co/{subject.base_model}) in NVFP4 for NVIDIA DGX Spark (GB10) "
        f"and other Blackwell GPUs: {size(summary.size_bytes)}, {significant(summary.bits_per_weight)} bits per weight. "
        f"{_predicted(subject.folder)}"
        f"Verdict: {standing}. Of {count(outcomes.total())} behavioural gates ({', '.join(map(inert, places)) or 'none'}) "
        f"{outcomes['pass']} {passed}, {outcomes['fail']} {failed}, {outcomes['undecided']} undecided."
    )


def _predicted(folder: Path) -> str:
    """Return the predicted speed on a GB10, or "" for a folder that cannot be read, which the audit reports."""
    try:
        speed = decode_speed.predict(ModelFolder(folder), decode_speed.DEVICES["gb10"])
    except ShardError:
        return ""
    return f"Predicted decode of one stream: {decode_speed.describe(speed)}. "


def _recipe_comparison(recipe: RecordedRecipe) -> str:
    """Return what was used and refused on held-out conversations, or ""."""
    if recipe.held_out is None or not recipe.ingredients:
        return ""
    used, refused = ([i.name for i in recipe.ingredients if i.used is used] for used in (True, False))
    return (
        f"recipe {' + '.join(used)}, compared on {count(recipe.held_out.conversations)} held-out conversations"
        f" ({count(recipe.held_out.decisions)} tokens that decide)"
        + (f"; refused: {', '.join(refused)}" if refused else "")
    )


def _origin(subject: Subject) -> list[str]:
    summary, recipe = subject.audit.summary, subject.recipe
    producer = salvage_or_default(_QuantConfig, subject.folder / "hf_quant_config.json").producer
    algorithm = [
        f"strategy {recipe.strategy}" if recipe.strategy else "",
        f"scale {recipe.scale}" if recipe.scale else "",
        _recipe_comparison(recipe),
    ]
    algorithm += [
        f"algorithm {summary.algorithm}",
        f"written by {producer.name} {producer.version}" if producer.name else "",
    ]
    findings = len(subject.audit.findings)
    return [
        ", ".join(filter(None, algorithm)),
        f"quantized: {', '.join(summary.quantized or ()) or 'nothing'}",
        f"kept in 16 bits: {', '.join(summary.unquantized or ()) or 'nothing'}",
        f"audit of every tensor, {'compared with' if subject.compared else 'without'} its source: "
        + (f"{findings} findings, see below" if findings else "sound"),
        *(f"{f.name}: SHA-256 {_digest(f)}" for f in sorted(subject.folder.glob("*.safetensors"))[:MAX_DIGESTS]),
    ]


def _calibration(subject: Subject) -> list[str]:
    """Return where the calibration conversations came from, by the provenance of their rows."""
    path, recipe = subject.calibration, subject.recipe
    if recipe.calib_data_sha256 is None:
        return ["None: this strategy was given no calibration data."]
    if path is None or not path.is_file():
        return ["Not on record: no calibration data were given to the card (`annie-quant publish --calib-data`)."]
    rows, unreadable = [], 0
    for line in path.read_bytes().splitlines():
        try:
            rows.append(salvage_line(_Conversation, line))
        except ValueError:
            unreadable += 1
    used = [r for r in rows if r.split in ("calibration", None)]
    categories = sorted(Counter(r.category for r in used).items())

    def values(field: Callable[[_Provenance], str | None]) -> str:
        texts = sorted({text for r in used if (text := field(r.provenance))})
        return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "") or "not on record"

    times = sorted(r.provenance.time for r in used if r.provenance.time)
    digest = _digest(path)
    lines = [
        f"{count(len(used))} conversations for calibration of {count(len(rows))} in the file: "
        + ", ".join(f"{n} {category}" for category, n in categories),
        f"teacher: {values(lambda p: p.teacher)}; model: {values(lambda p: p.model)}",
        f"persona SHA-256: {values(lambda p: p.persona_sha256)}; prompt SHA-256: {values(lambda p: p.prompt_sha256)}",
        f"written {times[0][:10]} to {times[-1][:10]}" if times else "time: not on record",
        f"file SHA-256: {digest}",
    ]
    if isinstance(recipe.calib_data_sha256, str):
        same = recipe.calib_data_sha256 == digest
        lines.append(
            f"the checkpoint's own record names {'this file' if same else f'another file, SHA-256 {recipe.calib_data_sha256}'}, "
            f"{count(recipe.calib_samples)} conversations at most"
        )
    if unreadable:
        lines.append(f"{unreadable} lines could not be read")
    return [bullets(lines)]


def _columns(run: LoadedRun, subject: Subject) -> LoadedRun:
    """Return the run with the card's columns only: the reference, this model, and the incumbent."""
    incumbents = [s.model for s in run.served if run.verdict.incumbent in (s.name, s.model)]
    names = dict.fromkeys([REFERENCE, subject.name, *incumbents])
    models = [m for name in names for m in run.models if m.name == name]
    document = replace(run.document, aggregates=replace(run.aggregates, models=models))
    return dataclasses.replace(run, document=document, sides=[s for name in names for s in run.sides_of(name)])


def _results(run: LoadedRun, subject: Subject) -> list[str]:
    sides, columns = run.sides_of(subject.name), _columns(run, subject)
    if not sides:
        return ["Nothing was measured."]
    parts = [
        f"{LEGEND} Offline: greedy answers without a server, under W4A4 (activations quantized too) and W4A16 (weights "
        "only) arithmetic. Served: behind a real server.",
        grid(tables.side_by_side(columns)),
    ]
    if (kl := tables.kl_table(columns, sides)).rows:
        parts += ["KL divergence from bf16 per assistant token, in nats:", grid(kl, 2)]
    if (table := tables.latency_table(columns, "ttft_content_ms")).rows:
        parts += [f"{table.caption}:", grid(table)]
    speeds = [(s, s.data.speed_gates.get("ttft"), s.data.speed_gates.get("decode")) for s in columns.served]
    counts = [
        f"{run.label(s.model)}: TTFT over {count(ttft.n)} requests, decode over {count(decode.n)}"
        for s, ttft, decode in speeds
        if ttft and decode
    ]
    if counts:
        parts.append(bullets(counts))
    if columns.served:
        parts.append(f"Measured on: {inert(_machine(run))}. Speeds of another machine or server differ.")
    return parts


def _machine(run: LoadedRun) -> str:
    environment = run.document.environment
    if environment == Environment():
        return "not on record"
    cores = f"{environment.cores} cores" if environment.cores else ""
    texts = [text for text in (environment.cpu, cores) if text]
    return ", ".join([*texts, *(run.gpu_names or ["no GPU"])])


def _serving(subject: Subject) -> list[str]:
    """Return the commands for the runtimes that load this checkpoint, according to its audit."""
    from annie_quant.ops import serving

    name = subject.repo_name
    parts = [f"    hf download {subject.repo_id} --local-dir {name}"]
    servers = subject.audit.summary.servers
    for runtime in RUNTIMES:
        support = next((s for s in servers if s.server.lower() == runtime and s.loads == "yes"), None)
        if support:
            command = serving.command(Path(name), runtime=runtime).replace(str(Path(name).resolve()), f"$PWD/{name}")
            parts += [f"{support.server}:", f"    {command}"]
    others = [str(support) for support in servers if support.loads != "yes"]
    return parts + ([bullets(others)] if others else [])


def _limits(run: LoadedRun, subject: Subject) -> list[str]:
    sides = run.sides_of(subject.name)
    lines = [
        f"{run.gate_title(gate)}, {side.title}: {_failure(result, side.word(gate))}"
        for side in sides
        for gate, result in side.deciding.items()
        if result.verdict != "pass"
    ]
    lines += [
        f"{gate.title}, {gate.where}: {'cannot be decided' if gate.outcome == 'undecided' else gate.verdict}"
        for gate in decision.deciding_gates(run.aggregates, subject.name)
        if "+" in gate.where and gate.outcome != "pass"
    ]
    kinds = {s.kind for s in sides}
    if "offline" not in kinds:
        lines.append("not evaluated without a server: behaviour under other arithmetic is unknown")
    if ServedModel.kind not in kinds:
        lines.append("not measured behind a server: speed is unknown")
    elif not any("GB10" in gpu for gpu in run.gpu_names):
        lines.append("speeds were not measured on a DGX Spark")
    lines += [f"audit: {f.message}" for f in subject.audit.findings]
    lines += caveats(run)
    lines.append("gates check one assistant's manners with its own prompts; other uses were not judged")
    return list(dict.fromkeys(lines))


def _failure(result: GateResult, word: str) -> str:
    verb = {"fail": "fails", "loses": "loses"}.get(word, "cannot be decided")
    return f"{verb} ({count(result.passes)} of {count(result.n)}, {share(result.low)} to {share(result.high)})"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
