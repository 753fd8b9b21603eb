"""The whole line on the embedded model, stage by stage, in one run directory.

    conversations → quantize → audit → evaluate offline → GGUF → serve and measure → judge → report

A stage that finished is not done again: its stamp in stages/ holds a key made from its inputs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import schema
from annie_quant.cli.console import Console
from annie_quant.files import ASSETS, read_json, read_whole_json, write_json
from annie_quant.pipeline.run_directory import RunDirectory
from annie_quant.pipeline.stages import Stages, offline_prompts, weight_sizes
from annie_quant.quantize.job import weight_bytes

MODEL = ASSETS / "tiny-annie"
CALIBRATION_ROWS = 48
KL_ROWS = 60
LAYER_PROMPTS = 8  # for the divergence layer by layer

# name → label, strategy (None: made from bf16 as it is), GGUF type (None: as the checkpoint is)
SIDES: dict[str, tuple[str, str | None, str | None]] = {
    "bf16": ("bf16", None, "BF16"),
    "naive": ("NVFP4 naive", "naive", None),
    "mlp_only": ("NVFP4 mlp_only", "mlp_only", None),
    "q4_k_m": ("Q4_K_M", None, "Q4_K_M"),
}
STRATEGIES = ("naive", "mlp_only", "direct")


def run(output: str | Path, n_offline: int = 25, n_served: int = 100, console: Console | None = None) -> dict[str, Any]:
    """Run every stage into `output` and return the verdict: sentence, passed, reasons, gates, stages, report."""
    console = console or Console()
    directory = RunDirectory(output)
    with directory.locked():
        return Line(directory, n_offline, n_served, console).run()


class Line:
    """The stages and what they hand to each other."""

    def __init__(self, directory: RunDirectory, n_offline: int, n_served: int, console: Console) -> None:
        self.dir, self.n_offline, self.n_served = directory, n_offline, n_served
        self.stages = Stages(directory, MODEL, directory / "calibration.jsonl", CALIBRATION_ROWS, console)

    def run(self) -> dict[str, Any]:
        stages = self.stages
        stages.stage("data", {"n": 500}, ["calibration.jsonl"], self.make_data)
        for strategy in STRATEGIES:
            stages.quantize(strategy)
            stages.audit(strategy)
        for side in SIDES:
            stages.stage(
                f"gguf-{side}", {"text": stages.text_key()}, [f"gguf/{side}.gguf"], partial(self.convert, side)
            )
        workloads = offline_prompts(self.n_offline)
        for strategy in STRATEGIES:
            stages.evaluate(
                strategy,
                stages.checkpoint(strategy),
                workloads,
                conversations=stages.conversations,
                n_conversations=KL_ROWS,
                settings={"kl_rows": KL_ROWS},
            )
        layers = {"n": LAYER_PROMPTS, "text": stages.text_key()}
        stages.stage("layers-naive", layers, ["sensitivity/naive.json"], self.layers)
        served = {"n": self.n_served, "text": stages.text_key()}
        stages.stage("bench", served, ["records.jsonl", "bench.json"], self.measure)
        return self.finish()

    def make_data(self, step: Any) -> dict[str, Any]:
        from annie_quant import data

        summary = data.generate("annie", "offline", 500, self.stages.conversations, seed=0, progress=step)
        return {"summary": "500 conversations", "data": summary}

    def convert(self, side: str, step: Any) -> dict[str, Any]:
        from annie_quant import checkpoint

        _, strategy, kind = SIDES[side]
        source = self.stages.checkpoint(strategy) if strategy else MODEL
        target = self.dir / f"gguf/{side}.gguf"
        target.parent.mkdir(exist_ok=True)
        checkpoint.convert(source, to="gguf", output=target, type=kind)
        return {"summary": f"{target.stat().st_size / 1e6:.1f} MB", "size_bytes": target.stat().st_size}

    def layers(self, step: Any) -> dict[str, Any]:
        """Which layers naive's divergence comes from, over the prompts that tip first: those that want a tool."""
        from annie_quant import judge, runtime

        output = self.dir / "sensitivity/naive.json"
        output.parent.mkdir(exist_ok=True)
        asked = judge.sample(judge.load_workloads(["tool_memory", "tool_web"]), LAYER_PROMPTS)
        found = runtime.sensitivity(
            self.stages.checkpoint("naive"),
            MODEL,
            asked,
            numerics="w4a4",
            modes=("alone",),
            output=output,
            cache=self.dir / "eval",
            progress=step,
        )
        worst = max(found["alone"], key=lambda layer: found["alone"][layer]["mean"])
        return {"summary": f"most from {worst}"}

    def measure(self, step: Any) -> dict[str, Any]:
        from annie_quant import bench, judge, serve
        from annie_quant.bench import memory

        workloads = judge.sample(judge.load_workloads(), self.n_served)
        servers, source = [], self.stages.base["model"]
        used = memory.system_used()
        try:
            for name in SIDES:
                step.say(f"starting {name}")
                servers.append(
                    serve.start(self.dir / f"gguf/{name}.gguf", runtime="llama.cpp", log=self.dir / f"logs/{name}.log")
                )
            backends = [
                bench.Backend(name, server.url, meta={"model": name, "source": source, "pid": server.pid})
                for name, server in zip(SIDES, servers, strict=True)
            ]
            done = bench.run(
                backends, workloads, self.dir.path, warmup=2, runs=1, progress=step, resume=self.same_bench()
            )
        finally:
            for server in servers:
                server.stop()
        left = memory.after_stop(10.0)
        kept = None if used is None or left is None else left - used
        return {"summary": f"{done.requests} requests", "memory_kept_after_stop_bytes": kept}

    def same_bench(self) -> bool:
        """Whether the records there are come from these very settings; others are measured anew."""
        wanted = self.stages.base | {"n": self.n_served, "text": self.stages.text_key()}
        marker = self.dir / "stages/.bench-settings"
        same = read_whole_json(marker) == wanted
        write_json(marker, wanted)
        return same

    def finish(self) -> dict[str, Any]:
        """Aggregate what the stages left, judge it, write run.json and the report."""
        from annie_quant import bench, judge, report

        aggregates = bench.aggregate(self.dir.path)
        aggregates.models = [self.model_row(name) for name in SIDES]
        offline = {s: read_json(self.dir / f"eval/{s}.json")["numerics"] for s in STRATEGIES}
        aggregates.offline = msgspec.convert(offline, dict[str, dict[str, schema.OfflineSide]])
        verdict = judge.verdict(aggregates)
        stages = [schema.Stage(**{k: s[k] for k in ("name", "seconds", "summary")}) for s in self.stages.stamps]
        config = {"n_offline": self.n_offline, "n_served": self.n_served, "model": self.stages.base["model"]}
        environment = msgspec.convert(bench.environment(), schema.Environment)
        self.dir.write_run(config, aggregates, verdict, environment, stages)
        paths = report.build(self.dir.path)
        gates = {f"{s} {k}": v.gates for s in STRATEGIES for k, v in aggregates.offline[s].items()}
        gates |= {SIDES[b][0]: v.gates for b, v in aggregates.served.items()}
        more = {"gates": gates, "stages": stages, "report": str(paths[0])}
        result: dict[str, Any] = msgspec.to_builtins(msgspec.structs.asdict(verdict) | more)
        return result

    def model_row(self, side: str) -> schema.ModelRow:
        label, strategy, kind = SIDES[side]
        folder = self.dir / f"models/{strategy}" if strategy else MODEL
        gguf = self.dir / f"gguf/{side}.gguf"
        size = gguf.stat().st_size if kind == "Q4_K_M" else weight_bytes(folder)
        return schema.ModelRow(
            name=side,
            label=label,
            format=kind or "NVFP4",
            size_bytes=size,
            bits_per_weight=8 * size / parameters(MODEL),
            checkpoint=str(folder),
            gguf=str(gguf),
        )


def parameters(folder: Path) -> int:
    """How many weights a checkpoint holds."""
    return sum(elements for elements, _ in weight_sizes(folder).values())
