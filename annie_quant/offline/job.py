"""The work of `annie-quant eval` and `runtime.evaluate`: load the models, evaluate, and write the files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from annie_quant.checkpoint.inspection import export_notes
from annie_quant.core import files
from annie_quant.core.errors import EnvironmentFault
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import Evaluation
from annie_quant.documents.persona import Persona
from annie_quant.judge.sampling import compares_with_reference, prompts_per_gate
from annie_quant.offline import layers
from annie_quant.offline.evaluation import evaluate_pair, reference_gates
from annie_quant.offline.pair import EvaluationJob, StrPath, Workloads, distinct_workloads, open_pair


def evaluate(
    model_dir: StrPath,
    reference_dir: StrPath,
    workloads: Workloads = None,
    numerics: Sequence[str] = ("w4a4", "w4a16"),
    n_per_gate: int | None = None,
    conversations: StrPath | Sequence[JsonObject] | None = None,
    n_conversations: int | None = None,
    cache: StrPath | None = None,
    progress: Progress | None = None,
    dtype: str | None = None,
    device: str | None = None,
    rows: int = 128,
    text: StrPath | None = None,
    persona: StrPath | Persona | None = None,
    with_ensemble: bool = True,
) -> JsonObject:
    """Return gates, KL divergence and perplexity of a checkpoint under each of `numerics` that it supports.

    A model without NVFP4 linears is evaluated as it is, under the name "bf16".

    Parameters:
        model_dir: folder of the checkpoint.
        reference_dir: folder of the bf16 checkpoint that it was made from.
        workloads: Workload objects, names, JSON files or folders; default: those of the persona, else Annie's.
        persona: a name, a JSON file or a folder from `annie-quant init`; its system prompt and tools are used (data/workloads.py).
        n_per_gate: number of prompts per gate, drawn from the workloads; default: all.
        conversations: a JSON-lines file, or rows, whose assistant tokens are scored in addition to the reference's answers.
        n_conversations: most conversations, taken evenly over the file.
        cache: folder for the reference's answers; default: annie_quant in XDG_CACHE_HOME.
        dtype: "float32" or "bfloat16" for everything that is not packed; default: float32 on a CPU if memory allows.
        rows: answers per batch.
        text: a plain text file for perplexity and KL over all of its tokens.
        with_ensemble: also compute the further members of each numerics (ensemble.py), for a verdict that does not hang on one
            arithmetic.

    Returns:
        The Evaluation document as a dict that JSON can hold: `numerics` has one entry per numerics, with gates, kl,
        perplexity, paired and cases.

    Raises:
        UsageError: a workload has a temperature, or the checkpoint supports none of `numerics`.
    """
    job = EvaluationJob(
        checkpoint=Path(model_dir),
        reference=Path(reference_dir),
        workloads=distinct_workloads(workloads, persona),
        n_per_gate=n_per_gate,
        numerics=numerics,
        ensemble=with_ensemble,
        conversations=conversations,
        n_conversations=n_conversations,
        text=text,
        faults=export_notes(model_dir, reference_dir),
        cache=None if cache is None else Path(cache),
        dtype=dtype,
        device=device,
        rows=rows,
    )
    return run(job, progress or SILENT).to_dict()


def run(job: EvaluationJob, progress: Progress = SILENT) -> Evaluation:
    """Evaluate a checkpoint and write the result to the job's output."""
    if job.output is not None:
        check_writable(job.output)  # before an hour of evaluation, not after it
    with open_pair(job, progress) as pair:
        chosen = job.prompts(job.n_per_gate)
        if job.extends and job.n_per_gate is not None and compares_with_reference(chosen):
            per_gate = prompts_per_gate(job.n_per_gate, reference_gates(pair, chosen))
            chosen = chosen if per_gate == job.n_per_gate else job.prompts(per_gate)
        result = evaluate_pair(pair, job, chosen)
        if job.layers_n is not None and list(result.numerics) != ["bf16"]:
            first = next(iter(result.numerics))
            resumed = None if job.output is None else job.output.with_suffix(".layers.json")
            result.layers = layers.measure(pair, job.prompts(job.layers_n), first, output=resumed)
            kl = result.numerics[first].kl
            if kl is not None:
                kl.by_layer = result.layers.by_layer()
    if job.output is not None:
        files.write_json(job.output, result.to_dict())
    return result


def check_writable(path: Path) -> None:
    """Raise EnvironmentFault if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise EnvironmentFault(
            f"{path}: cannot be written ({error.strerror}{files.owner(path.parent)})", "choose another --output"
        ) from error
