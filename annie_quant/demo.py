"""The whole line on the embedded model, stage by stage, in one run directory.

    conversations → quantize → audit → evaluate offline → GGUF → serve and measure → judge → report

A stage that finished is not done again: its stamp in stages/ holds a key made from its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from annie_quant import __version__
from annie_quant.console import Console
from annie_quant.files import read_json, write_json
from annie_quant.quantize.job import weight_bytes
from annie_quant.rundir import RunDirectory

MODEL = Path(__file__).parent / "assets" / "tiny-annie"
CALIBRATION_ROWS = 48
KL_ROWS = 60

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
        self.dir, self.n_offline, self.n_served, self.console = directory, n_offline, n_served, console
        self.stamps: list[dict[str, Any]] = []
        self.base = {"version": __version__, "model": model_key(MODEL)}

    def run(self) -> dict[str, Any]:
        self.stage("data", {"n": 500}, ["calibration.jsonl"], self.make_data)
        for strategy in STRATEGIES:
            outputs = [f"models/{strategy}/config.json"]
            self.stage(f"quantize-{strategy}", {"rows": CALIBRATION_ROWS}, outputs, partial(self.quantize, strategy))
            self.stage(f"audit-{strategy}", {}, [], partial(self.audit, strategy))
        for side in SIDES:
            self.stage(f"gguf-{side}", {}, [f"gguf/{side}.gguf"], partial(self.convert, side))
        for strategy in STRATEGIES:
            inputs = {"n": self.n_offline, "kl_rows": KL_ROWS}
            self.stage(f"eval-{strategy}", inputs, [f"eval/{strategy}.json"], partial(self.evaluate, strategy))
        self.stage("bench", {"n": self.n_served}, ["records.jsonl", "bench.json"], self.measure)
        return self.finish()

    def stage(self, name: str, inputs: dict[str, Any], outputs: list[str], work: Callable[[Any], Any]) -> None:
        def with_bar() -> Any:
            with self.console.task(name) as step:
                return work(step)

        stamp, before = self.dir.stage(name, self.base | inputs, outputs, with_bar)
        if before:
            self.console.err.print(f"[dim]✓ {name}, done before ({stamp['seconds']:.1f} s)[/]")
        self.stamps.append(
            {
                "name": name,
                "seconds": stamp["seconds"],
                "summary": stamp["result"].get("summary", ""),
                "result": stamp["result"],
            }
        )

    def make_data(self, step: Any) -> dict[str, Any]:
        from annie_quant import data

        summary = data.generate(
            "annie", teacher="offline", n=500, output=self.dir / "calibration.jsonl", seed=0, progress=step
        )
        return {"summary": "500 conversations", "data": summary}

    def quantize(self, strategy: str, step: Any) -> dict[str, Any]:
        from annie_quant import quantize

        result = quantize.run(
            strategy,
            MODEL,
            self.dir / f"models/{strategy}",
            calib_data=self.dir / "calibration.jsonl",
            calib_samples=CALIBRATION_ROWS,
            force=True,
            report=step.say,
        )
        return {
            "summary": f"{result['size_bytes'] / 1e6:.1f} of {result['source_bytes'] / 1e6:.1f} MB",
            "size_bytes": result["size_bytes"],
        }

    def audit(self, strategy: str, step: Any) -> dict[str, Any]:
        from annie_quant import checkpoint

        found = checkpoint.audit(self.dir / f"models/{strategy}", source=MODEL)
        outcome = "sound" if found.ok else f"{len(found.findings)} findings"
        return {"summary": outcome, "audit": found.to_dict()}

    def convert(self, side: str, step: Any) -> dict[str, Any]:
        from annie_quant import checkpoint

        _, strategy, kind = SIDES[side]
        source = self.dir / f"models/{strategy}" if strategy else MODEL
        target = self.dir / f"gguf/{side}.gguf"
        target.parent.mkdir(exist_ok=True)
        checkpoint.convert(source, to="gguf", output=target, type=kind)
        return {"summary": f"{target.stat().st_size / 1e6:.1f} MB", "size_bytes": target.stat().st_size}

    def evaluate(self, strategy: str, step: Any) -> dict[str, Any]:
        from annie_quant import judge, runtime

        workloads = judge.sample(judge.load_workloads(), self.n_offline)
        result = runtime.evaluate(
            self.dir / f"models/{strategy}",
            MODEL,
            workloads,
            numerics=("w4a4", "w4a16"),
            conversations=self.dir / "calibration.jsonl",
            n_conversations=KL_ROWS,
            cache=self.dir / "eval",
            progress=step,
        )
        write_json(self.dir / f"eval/{strategy}.json", result)
        failed = {
            k: [g for g, row in v["gates"].items() if row["verdict"] == "fail" and not row["advisory"]]
            for k, v in result["numerics"].items()
        }
        return {
            "summary": "; ".join(
                f"{k}: fails {', '.join(v)}" if v else f"{k}: no gate fails" for k, v in failed.items()
            )
        }

    def measure(self, step: Any) -> dict[str, Any]:
        from annie_quant import bench, judge, serve

        workloads = judge.sample(judge.load_workloads(), self.n_served)
        servers = []
        try:
            for name in SIDES:
                step.say(f"starting {name}")
                servers.append(
                    serve.start(self.dir / f"gguf/{name}.gguf", runtime="llama.cpp", log=self.dir / f"logs/{name}.log")
                )
            backends = [
                bench.Backend(name, server.url, meta={"model": name, "source": self.base["model"], "pid": server.pid})
                for name, server in zip(SIDES, servers, strict=True)
            ]
            done = bench.run(
                backends, workloads, self.dir.path, warmup=2, runs=1, progress=step, resume=self.same_bench()
            )
        finally:
            for server in servers:
                server.stop()
        return {"summary": f"{done['requests']} requests"}

    def same_bench(self) -> bool:
        """Whether the records there are come from these very settings; others are measured anew."""
        wanted, marker = self.base | {"n": self.n_served}, self.dir / "stages/.bench-settings"
        same = marker.is_file() and read_json(marker) == wanted
        write_json(marker, wanted)
        return same

    def finish(self) -> dict[str, Any]:
        """Aggregate what the stages left, judge it, write run.json and the report."""
        from annie_quant import bench, judge, report

        aggregates = bench.aggregate(self.dir.path)
        aggregates["models"] = [self.model_row(name) for name in SIDES]
        aggregates["offline"] = {s: read_json(self.dir / f"eval/{s}.json")["numerics"] for s in STRATEGIES}
        verdict = judge.verdict(aggregates)
        stages = [{k: s[k] for k in ("name", "seconds", "summary")} for s in self.stamps]
        config = {"n_offline": self.n_offline, "n_served": self.n_served, "model": self.base["model"]}
        self.dir.write_run(config, aggregates, verdict, bench.environment(), stages)
        paths = report.build(self.dir.path)
        gates = {f"{s} {k}": v["gates"] for s in STRATEGIES for k, v in aggregates["offline"][s].items()}
        served = {SIDES[b][0]: v["gates"] for b, v in aggregates["served"].items()}
        return verdict | {"gates": gates | served, "stages": stages, "report": str(paths[0])}

    def model_row(self, side: str) -> dict[str, Any]:
        label, strategy, kind = SIDES[side]
        folder = self.dir / f"models/{strategy}" if strategy else MODEL
        gguf = self.dir / f"gguf/{side}.gguf"
        size = gguf.stat().st_size if kind == "Q4_K_M" else weight_bytes(folder)
        return {
            "name": side,
            "label": label,
            "format": kind or "NVFP4",
            "size_bytes": size,
            "bits_per_weight": 8 * size / parameters(MODEL),
            "checkpoint": str(folder),
            "gguf": str(gguf),
        }


def model_key(folder: Path) -> str:
    """The checkpoint's identity: names and sizes of its files, and its weights' hash."""
    import hashlib

    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
        if file.suffix == ".safetensors":
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def parameters(folder: Path) -> int:
    """How many weights a checkpoint holds."""
    import math

    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            total += sum(math.prod(tensors.get_slice(k).get_shape()) for k in tensors.keys())  # noqa: SIM118
    return total
