"""What the demo and the search both do with a strategy: quantize, audit, evaluate; each a stage of one run directory.

A stage that finished from the same inputs is not done again, so a run that was killed goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from annie_quant import __version__, schema
from annie_quant.data.rows import read_rows
from annie_quant.files import read_json, write_json
from annie_quant.judge import decision
from annie_quant.pipeline.run_directory import RunDirectory

FEW = 10  # below it a trial run is meant, where no gate decides


class Stages:
    """The stages of one model in one run directory; `stamps` keeps their names, times and summaries in order."""

    def __init__(self, directory: RunDirectory, model: Path, conversations: Path, samples: int, console: Any) -> None:
        self.dir, self.console = directory, console
        self.model, self.conversations, self.samples = model, conversations, samples
        self.base = {"version": __version__, "model": model_key(model)}
        self.stamps: list[dict[str, Any]] = []
        self._text_key: str | None = None

    def stage(self, name: str, inputs: dict[str, Any], outputs: list[str], work: Callable[[Any], Any]) -> Any:
        """Do `work(step)` unless it is done; returns its result."""

        def with_bar() -> Any:
            with self.console.task(name) as step:
                return work(step)

        stamp, before = self.dir.stage(name, self.base | inputs, outputs, with_bar)
        if before:
            self.console.err.print(f"[dim]✓ {name}, done before ({stamp['seconds']:.1f} s)[/]")
        result = stamp["result"]
        row = {"name": name, "seconds": stamp["seconds"], "summary": result.get("summary", ""), "result": result}
        self.stamps.append(row)
        return result

    def text_key(self) -> str:
        """Of what is said in the conversations; when they were made does not matter."""
        if self._text_key is None:
            said = [[row["messages"], row.get("tools")] for row in read_rows(self.conversations)]
            self._text_key = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
        return self._text_key

    def checkpoint(self, strategy: str) -> Path:
        return self.dir / f"models/{strategy}"

    def quantize(self, strategy: str) -> dict[str, Any]:
        """{"summary", "size_bytes", "seconds"}"""
        from annie_quant import quantize

        def work(step: Any) -> dict[str, Any]:
            result = quantize.run(
                strategy,
                self.model,
                self.checkpoint(strategy),
                calib_data=self.conversations,
                calib_samples=self.samples,
                force=True,
                report=step.say,
                allow_prompt_mismatch=True,  # who walks the stages has looked at the prompt already
            )
            sizes = f"{result.size_bytes / 1e6:,.1f} of {result.source_bytes / 1e6:,.1f} MB"
            return {"summary": sizes, "size_bytes": result.size_bytes, "seconds": result.seconds}

        inputs = {"rows": self.samples, "text": self.text_key()}
        return self.stage(f"quantize-{strategy}", inputs, [f"models/{strategy}/config.json"], work)

    def audit(self, strategy: str) -> dict[str, Any]:
        """{"summary", "audit": Audit.to_dict() without its tensors}"""
        from annie_quant import checkpoint

        def work(step: Any) -> dict[str, Any]:
            found = checkpoint.audit(self.checkpoint(strategy), source=self.model)
            outcome = "sound" if found.ok else f"{len(found.findings)} findings: {found.findings[0].message}"
            return {"summary": outcome, "audit": {k: v for k, v in found.to_dict().items() if k != "tensors"}}

        inputs = {"rows": self.samples, "text": self.text_key()}
        return self.stage(f"audit-{strategy}", inputs, [f"models/{strategy}/config.json"], work)

    def evaluate(
        self,
        name: str,
        checkpoint: Path,
        workloads: Sequence[Any],
        numerics: Sequence[str] = ("w4a4", "w4a16"),
        conversations: Any = None,
        n_conversations: int | None = None,
        settings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """runtime.evaluate's result, kept as eval/<name>.json. settings: what else its key depends on."""
        from annie_quant import runtime

        def work(step: Any) -> dict[str, Any]:
            quiet_transformers()
            result = runtime.evaluate(
                checkpoint,
                self.model,
                workloads,
                numerics=numerics,
                conversations=conversations,
                n_conversations=n_conversations,
                cache=self.dir / "eval",
                progress=step,
            )
            write_json(self.dir / f"eval/{name}.json", result)
            failed = {k: failing(v["gates"], ("fail",)) for k, v in result["numerics"].items()}
            parts = (f"{k}: fails {', '.join(v)}" if v else f"{k}: no gate fails" for k, v in failed.items())
            return {"summary": "; ".join(parts)}

        asked = {w.name: [w.sha256, w.system or "", [c.id for c in w.cases]] for w in workloads}
        inputs = {"rows": self.samples, "text": self.text_key(), "asked": asked, "numerics": list(numerics)}
        self.stage(f"eval-{name}", inputs | (settings or {}), [f"eval/{name}.json"], work)
        return read_json(self.dir / f"eval/{name}.json")


def offline_prompts(n: int) -> list[Any]:
    """The prompts of an evaluation without a server: n a gate, and every tool prompt there is.

    The founding observation is about tool calls; n = 25 leaves a rate of 45 % undecided against the 60 % that are asked for,
    n = 240 does not, and an answer that agrees with the reference's costs next to nothing to check.
    """
    from annie_quant import judge

    everything = judge.load_workloads()
    chosen = {w.name: w for w in judge.sample(everything, n)}
    if n >= FEW:
        chosen |= {w.name: w for w in everything if "tool_call" in w.gates}
    return list(chosen.values())


def quiet_transformers() -> None:
    """Its bars and notes would break up ours."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def gates_of(evaluation: Mapping[str, Any]) -> dict[str, dict[str, schema.GateResult]]:
    """Return the gate table of each numerics of an evaluation."""
    tables = {numerics: side["gates"] for numerics, side in evaluation["numerics"].items()}
    return schema.convert(dict[str, dict[str, schema.GateResult]], tables)


def failing(gates: Mapping[str, Any], outcomes: Sequence[schema.Outcome] = ("fail", "undecided")) -> list[str]:
    """Return the deciding gates of a table that do not pass."""
    return decision.failing(schema.convert(dict[str, schema.GateResult], dict(gates)), outcomes)


def model_key(folder: Path) -> str:
    """The checkpoint's identity by what it holds, wherever it lies."""
    from annie_quant.evaluate.reference import fingerprint

    return fingerprint(folder)[:16]


def weight_sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Tensor → (elements, bytes on disk), from the headers alone."""
    from annie_quant.checkpoint.shards import ModelFolder

    shards = ModelFolder(folder)
    return {name: (shards.info(name).elements, shards.info(name).size_bytes) for name in shards}
