"""The whole pipeline on the embedded model, stage by stage, in one run directory.

    conversations → quantize → audit → evaluate offline → GGUF → serve and measure → judge → report

A checkpoint with input scales is judged as vLLM and SGLang compute it on a GPU, with 4-bit inputs, one without as Marlin does; best
also on a llama.cpp server, which rounds inputs to 8 bits. A finished stage is not done again with the same inputs. bf16's answers
are computed while the checkpoints are made, and the checkpoints are evaluated at the same time, one process each; nothing else runs
while servers are measured.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from annie_quant import bench, checkpoint, data, documents, judge, report
from annie_quant.checkpoint import decode_speed
from annie_quant.checkpoint.first_token import predict_folder
from annie_quant.checkpoint.shards import ModelFolder, model_sha256
from annie_quant.checkpoint.size import folder_size, gguf_size
from annie_quant.cli.pipeline import DemoSettings
from annie_quant.cli.pipeline.run_directory import RunDirectory
from annie_quant.cli.pipeline.stages import (
    EvaluationProcesses,
    ProcessJob,
    StageResult,
    Stages,
    prompts_key,
)
from annie_quant.core.errors import EnvironmentFault
from annie_quant.core.files import ASSETS, read_json
from annie_quant.core.progress import Console, Progress, SilentConsole
from annie_quant.core.resume import KeyedJson
from annie_quant.data.workloads import resolve
from annie_quant.documents import Aggregates, ModelRow
from annie_quant.judge import decision
from annie_quant.judge.decision import wording
from annie_quant.judge.metrics import three_digits
from annie_quant.ops import serving
from annie_quant.quantize.runner import weight_bytes

MODEL = ASSETS / "tiny-annie"
PACKAGES = (
    "torch",
    "transformers",
    "modelopt",
    "xllamacpp",
    "gguf",
)  # of the extras quantize and serve
N_CONVERSATIONS = 500
CALIBRATION_ROWS = (
    64  # with 48, and sums as AVX2 adds them, one answer of 693 is empty, which is undecided
)
# Annie's workloads without conversations, whose turns took a third of the time. The served ones test each behaviour of the
# others once: a call, its arguments, none where none fits, a right answer, its form and its end.
SERVED = "abstention,factual,tool_memory,tool_web"
OFFLINE = f"{SERVED},briefing,conversational,greeting,hardened_prompt,long_response,reasoning,thinking_off,thinking_on"
NUMERICS = (
    "vllm-cutlass",
)  # no server has the float32 stream of "w4a4", in which naive loses a third of these calls
WEIGHT_ONLY = ("vllm-marlin",)  # of a checkpoint without 4-bit inputs


class Side(NamedTuple):
    """A model of the demo.

    strategy: None: made from bf16.
    gguf_type: of the file that is served; None: the type of the checkpoint's tensors.
    options: of the strategy, where they are not its defaults.
    """

    label: str
    strategy: str | None = None
    gguf_type: str | None = None
    options: Mapping[str, Any] | None = None


SIDES = {
    "bf16": Side("bf16", gguf_type="BF16"),
    "naive": Side("NVFP4 naive", "naive"),
    # With the default share of .05 one answer of 693 is empty in three of four draws of calibration, and with own answers in some
    # arithmetics, which is undecided. The model was trained on the given answers.
    "best": Side("NVFP4 best", "best", options={"share": 0.02, "answers": "given"}),
    "q4_k_m": Side("Q4_K_M", gguf_type="Q4_K_M"),
}
CANDIDATE = "best"
INCUMBENT = "q4_k_m"
STRATEGIES = [
    side.strategy for side in SIDES.values() if side.strategy
]  # each is judged without a server
BACKENDS = [
    name for name in SIDES if name != "naive"
]  # served: what naive loses is shown without a server


class DemoResult(documents.Verdict, kw_only=True):
    """The verdict, what a reader sees of it (summary_lines), and the path of the report."""

    summary: list[str]
    report: str


def run(settings: DemoSettings, console: Console | None = None) -> DemoResult:
    """Run every stage."""
    check_packages()
    directory = RunDirectory(settings.output)
    with directory.locked():
        return Demo(directory, settings, console or SilentConsole()).run()


def check_packages() -> None:
    """Raise EnvironmentFault that names all missing packages at once, before a stage has run."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(
            f"the demo needs packages that are not installed: {', '.join(missing)}",
            'pip install "annie-quant[quantize,serve]"',
        )


class Demo:
    """The demo's stages."""

    def __init__(self, directory: RunDirectory, settings: DemoSettings, console: Console) -> None:
        persona = settings.persona
        workloads = settings.workloads
        ours = persona is None and workloads is None
        self.persona = data.load_persona(persona or "annie")
        self.served = resolve(persona, SERVED if ours else workloads)
        self.dir = directory
        self.n_served = settings.n_served
        self.answers = ProcessJob(
            reference=str(MODEL),
            cache=str(directory / "eval"),
            n_per_gate=settings.n_offline,
            persona=persona,
            workloads=OFFLINE if ours else workloads,
            numerics=NUMERICS,
        )
        self.stages = Stages(
            directory, MODEL, directory / "calibration.jsonl", CALIBRATION_ROWS, console
        )

    def run(self) -> DemoResult:
        stages = self.stages
        prompts = {
            "n": N_CONVERSATIONS,
            **({} if self.persona.source == "annie" else {"persona": self.persona.sha256}),
        }
        prompts_used = {"asked": prompts_key(self.answers.prompts())}
        with EvaluationProcesses(stages) as processes:
            processes.start("bf16-answers", prompts_used, [], self.answers)
            stages.stage("data", prompts, ["calibration.jsonl"], self.make_data, StageResult)
            for strategy in STRATEGIES:
                stages.quantize(strategy, chosen=SIDES[strategy].options)
                stages.audit(strategy)
            text = {"text": stages.text_key}
            for side in BACKENDS:
                stages.stage(
                    f"gguf-{side}",
                    text,
                    [f"gguf/{side}.gguf"],
                    partial(self.convert, side),
                    StageResult,
                )
            processes.finish()
            inputs = stages.data_inputs() | prompts_used | {"numerics": NUMERICS}
            for strategy in STRATEGIES:
                processes.start(
                    f"eval-{strategy}", inputs, [f"eval/{strategy}.json"], self.evaluation(strategy)
                )
            processes.finish()
        outputs = ["records.jsonl", "bench.json"]
        stages.stage(
            "bench", {"n": self.n_served, **text}, outputs, self.measure_servers, StageResult
        )
        return self.finish()

    def evaluation(self, strategy: str) -> ProcessJob:
        folder = ModelFolder(self.stages.checkpoint(strategy))
        return msgspec.structs.replace(
            self.answers,
            checkpoint=str(folder.path),
            numerics=NUMERICS
            if any(name.endswith(".input_scale") for name in folder)
            else WEIGHT_ONLY,
            until_loss=strategy != CANDIDATE,
            output=str(self.dir / f"eval/{strategy}.json"),
        )

    def make_data(self, progress: Progress) -> StageResult:
        data.generate(
            self.persona, "offline", N_CONVERSATIONS, self.stages.conversations, 0, progress
        )
        return StageResult(f"{N_CONVERSATIONS} conversations")

    def convert(self, name: str, progress: Progress) -> StageResult:
        side = SIDES[name]
        target = self.dir / f"gguf/{name}.gguf"
        target.parent.mkdir(exist_ok=True)
        checkpoint.convert(
            self.source(side), to="gguf", output=target, type=side.gguf_type, force=True
        )
        return StageResult(f"{target.stat().st_size / 1e6:.1f} MB")

    def source(self, side: Side) -> Path:
        return self.stages.checkpoint(side.strategy) if side.strategy else MODEL

    def measure_servers(self, progress: Progress) -> StageResult:
        workloads = judge.sample(self.served, self.n_served)
        servers = []
        source = self.stages.base["model"]
        try:
            for name in BACKENDS:
                progress.message(f"starting {name}")
                log = self.dir / f"logs/{name}.log"
                servers.append(
                    serving.start(self.dir / f"gguf/{name}.gguf", runtime="llama.cpp", log=log)
                )
            backends = [
                bench.Backend(
                    name, server.url, meta={"model": name, "source": source, "pid": server.pid}
                )
                for name, server in zip(BACKENDS, servers, strict=True)
            ]
            settings: dict[str, Any] = {
                "warmup": 1,
                "runs": 1,
                "resume": self.same_bench_settings(),
            }
            settings |= {"candidate": CANDIDATE, "reference": "bf16", "incumbent": INCUMBENT}
            result = bench.run(backends, workloads, self.dir.path, progress=progress, **settings)
        finally:
            for server in servers:
                server.stop()
        return StageResult(f"{result.requests} requests")

    def same_bench_settings(self) -> bool:
        """Return whether the existing records were measured with these settings; other records are measured again."""
        key = self.stages.base | {"n": self.n_served, "text": self.stages.text_key}
        marker = KeyedJson(self.dir / "stages/.bench-settings", key)
        same = marker.load(default=False)
        marker.save(True)
        return same

    def finish(self) -> DemoResult:
        """Aggregate the stages' results, judge them, and write run.json and the report."""
        aggregates = bench.aggregate(self.dir.path)
        aggregates.models = [self.model_row(name) for name in SIDES]
        for strategy in STRATEGIES:
            add_evaluation(aggregates, strategy, self.dir / f"eval/{strategy}.json")
        verdict = judge.verdict(aggregates)
        config = {
            "n_offline": self.answers.n_per_gate,
            "n_served": self.n_served,
            "model": self.stages.base["model"],
        }
        self.dir.write_run(config, aggregates, verdict, bench.environment(), self.stages.rows)
        paths = report.build(self.dir.path)
        summary = summary_lines(aggregates, CANDIDATE, INCUMBENT)
        return DemoResult(**msgspec.structs.asdict(verdict), summary=summary, report=str(paths[0]))

    def model_row(self, name: str) -> ModelRow:
        side = SIDES[name]
        gguf = self.dir / f"gguf/{name}.gguf"
        folder = self.source(side)
        from_gguf = name == INCUMBENT
        size = gguf_size(gguf) if from_gguf else folder_size(checkpoint.ModelFolder(folder))
        return ModelRow(
            name=name,
            label=side.label,
            format=side.gguf_type or "NVFP4",
            size_bytes=gguf.stat().st_size if from_gguf else weight_bytes(folder),
            bits_per_weight=size.bits_per_weight,
            predicted=None if from_gguf else decode_speed.predict(checkpoint.ModelFolder(folder)),
            first_token=None if from_gguf else predict_folder(checkpoint.ModelFolder(folder)),
            checkpoint=str(folder),
            gguf=str(gguf) if name in BACKENDS else "",
            model_sha256=model_sha256(folder),
        )


def add_evaluation(aggregates: Aggregates, model: str, path: Path) -> None:
    """Add an evaluation, with all members of its ensembles, to a run's aggregates."""
    document = read_json(path)
    aggregates.offline[model] = msgspec.convert(
        document["numerics"], dict[str, documents.OfflineSide]
    )
    aggregates.members[model] = msgspec.convert(
        document.get("members", {}), dict[str, documents.OfflineSide]
    )
    blocking = document.get("blocking")
    if blocking:
        aggregates.blocking[model] = list(blocking)


# ---- the last screen: what each model loses or keeps at what size, and one sentence about speed


def summary_lines(aggregates: Aggregates, candidate: str, incumbent: str) -> list[str]:
    """Return one sentence per model, one about the speed of candidate and incumbent, and one about what was not tested."""
    models = {model.name: model for model in aggregates.models}
    reference, *others = models.values()
    lines = [
        f"Compared with {_named(reference)}, prompt by prompt, as vLLM and SGLang compute on a GPU (vLLM CUTLASS) and on a "
        "llama.cpp server:"
    ]
    lines += [f"- {_named(model)} {claim(aggregates, model.name)}." for model in others]
    lines += speed(aggregates, models[candidate], models[incumbent])
    chosen = decision.candidate_decision(aggregates, candidate)
    if chosen and chosen.not_tested:
        lines.append(f"Not tested: {chosen.not_tested}.")
    return lines


def _named(model: ModelRow) -> str:
    return f"{model.label} ({(model.size_bytes or 0) / 1e6:.1f} MB)"


def claim(aggregates: Aggregates, name: str) -> str:
    """Return what a model keeps or loses, to follow its name."""
    chosen = decision.candidate_decision(aggregates, name)
    if chosen is None or not chosen.judged.gates:
        return "was not judged"
    reasons = chosen.confounded or decision.blocking_of(aggregates, name)
    return f"cannot be compared: {', '.join(reasons)}" if reasons else wording.claim(chosen.judged)


def speed(aggregates: Aggregates, candidate: ModelRow, incumbent: ModelRow) -> list[str]:
    """Return one sentence about the times of two served models, in a list; [] where they were not compared."""
    parts = []
    for metric, text in (
        ("decode_tok_s", "writes {} tokens/s"),
        ("ttft_content_ms", "begins after {} ms"),
    ):
        row = decision.compared_with(aggregates, candidate.name, incumbent.name, metric)
        if row is not None and row.median_a is not None and row.median_b is not None:
            ours, theirs = map(three_digits, (row.median_b, row.median_a))
            same = "" if row.significant else ", no significant difference"
            parts.append(f"{text.format(ours)} ({incumbent.label}: {theirs}{same})")
    return [f"In llama.cpp on this CPU {candidate.label} {' and '.join(parts)}."] if parts else []
