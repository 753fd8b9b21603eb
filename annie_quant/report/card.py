"""The model card: README.md of a published checkpoint, from its run directory, its audit and its calibration data.

huggingface_hub builds and checks the metadata (ModelCardData, EvalResult). The body states how the checkpoint was made, what
was measured with n and intervals, how to serve it, and what is not known.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from annie_quant import __version__, documents
from annie_quant.checkpoint import ModelFolder, decode_speed, draft_speed, first_token
from annie_quant.core.errors import UsageError, need
from annie_quant.core.files import sha256_file
from annie_quant.core.templates import render_markdown
from annie_quant.judge import decision
from annie_quant.judge.decision import wording
from annie_quant.judge.decision.rule import Judgement
from annie_quant.report import format, tables
from annie_quant.report.recheck import caveats
from annie_quant.report.run import REFERENCE, LoadedRun, RecordedRecipe

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TAGS = ("dgx-spark", "blackwell", "nvfp4", "qwen3.5", "modelopt", "annie-quant")
CARD_RUNTIMES = ("vllm", "sglang")
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
    audit: documents.Audit
    repo_id: str
    base_model: str
    license: str = ""
    compared: bool = False
    calibration: Path | None = None
    forced: str = ""
    objections: tuple[str, ...] = ()

    @property
    def recipe(self) -> RecordedRecipe:
        return documents.salvage_or_default(RecordedRecipe, self.folder / documents.RECIPE_FILE)

    @property
    def repo_name(self) -> str:
        return self.repo_id.split("/")[-1]


def render(run: LoadedRun, subject: Subject) -> str:
    """Return README.md. Raises UsageError where huggingface_hub refuses the metadata."""
    hub = need("huggingface_hub", "quantize")
    check = need("huggingface_hub.utils", "quantize")
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
    names = ("algorithm", "bits_per_weight", "bits_per_quantized_weight")
    fields = {"format": "nvfp4", "strategy": subject.recipe.strategy}
    fields |= {name: getattr(subject.audit.summary, name) for name in names}
    return {key: value for key, value in fields.items() if value is not None}


def _eval_results(run: LoadedRun, subject: Subject) -> list[EvalResult]:
    """Return one huggingface_hub.EvalResult per side and deciding gate; n and the interval are the metric's arguments."""
    hub = need("huggingface_hub", "quantize")
    results = []
    for side in run.sides_of(subject.name):
        for gate, r in side.deciding.items():
            interval = {"low": round(r.low, 4), "high": round(r.high, 4)}
            results.append(
                hub.EvalResult(
                    task_type="text-generation",
                    dataset_type="annie_quant/workloads",
                    dataset_name=f"annie_quant workloads, {side.title}",
                    dataset_config=side.name,
                    metric_type=gate,
                    metric_name=f"{run.gate_title(gate)}, share that passes",
                    metric_value=round(r.rate, 4),
                    metric_args={"passes": r.passes, "n": r.n, **interval},
                )
            )
    return results


def _body(run: LoadedRun, subject: Subject) -> str:
    sides = run.sides_of(subject.name)
    columns = _columns(run, subject)
    summary = subject.audit.summary
    rows, unreadable = _conversations(subject.calibration)
    servers = {
        support.server.lower(): support for support in summary.servers if support.loads == "yes"
    }
    gb10 = decode_speed.DEVICES["gb10"]
    speed = decode_speed.predict_if_readable(subject.folder, gb10)
    return render_markdown(
        "card.md",
        version=__version__,
        text=format,
        grid=tables.grid,
        digest=sha256_file,
        times=tables.TIMES,
        wording=wording,
        run=columns,
        subject=subject,
        summary=summary,
        predicted=speed and decode_speed.describe(speed),
        first_token=speed and first_token.describe_folder(ModelFolder(subject.folder), device=gb10),
        drafts=speed and draft_speed.describe_folder(ModelFolder(subject.folder), gb10)[:1],
        recipe=subject.recipe,
        producer=documents.salvage_or_default(
            _QuantConfig, subject.folder / "hf_quant_config.json"
        ).producer,
        gates=gate_figures(run, subject.name),
        weights=sorted(subject.folder.glob("*.safetensors"))[:MAX_DIGESTS],
        rows=rows,
        used=[r for r in rows or () if r.split in ("calibration", None)],
        unreadable=unreadable,
        sides=sides,
        main=tables.side_by_side(columns),
        changes=tables.changes(columns),
        kl=tables.kl_table(columns, sides),
        ttft=tables.latency_table(columns, "ttft_content_ms"),
        environment=run.document.environment,
        commands=[(servers[r].server, _command(subject, r)) for r in CARD_RUNTIMES if r in servers],
        unloadable=[str(support) for support in summary.servers if support.loads != "yes"],
        caveats=caveats(run),
    )


def gate_figures(run: LoadedRun, model: str) -> dict[str, object]:
    """Return what the card states of a model's behavioural gates, without speed limits."""
    every = decision.deciding_gates(run.aggregates, model)
    gates = [gate for gate in every if not isinstance(gate.result, documents.SpeedGate)]
    judged = Judgement(gates)
    claim, head = wording.first_screen("", judged, wording.next_step(judged), "")
    return {
        "standing": decision.standing_of(run.aggregates, model, with_speed=False),
        "claim": claim,
        "head": head,
        "blocking": decision.blocking_of(run.aggregates, model),
        "members": [gate for gate in gates if "+" in gate.place and gate.verdict != "keeps"],
    }


def _conversations(path: Path | None) -> tuple[list[_Conversation] | None, int]:
    """Return the calibration rows, and how many lines could not be read; None without a file."""
    if path is None or not path.is_file():
        return None, 0
    lines = path.read_bytes().splitlines()
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            rows.append(documents.salvage_line(_Conversation, line))
    return rows, len(lines) - len(rows)


def _command(subject: Subject, runtime: str) -> str:
    from annie_quant.ops import serving

    name = subject.repo_name
    return serving.command(Path(name), runtime=runtime).replace(
        str(Path(name).resolve()), f"$PWD/{name}"
    )


def _columns(run: LoadedRun, subject: Subject) -> LoadedRun:
    """Return the run with the card's columns only: the reference, this model, and the incumbent."""
    incumbents = [s.model for s in run.served if run.verdict.incumbent in (s.name, s.model)]
    names = dict.fromkeys([REFERENCE, subject.name, *incumbents])
    models = [m for name in names for m in run.models if m.name == name]
    document = replace(run.document, aggregates=replace(run.aggregates, models=models))
    return dataclasses.replace(
        run, document=document, sides=[s for name in names for s in run.sides_of(name)]
    )
