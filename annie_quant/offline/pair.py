"""What is evaluated: the settings of an evaluation, a checkpoint and its bf16 reference, and the comparison of their logits.

KL divergence of the checkpoint's next-token distributions from its reference's, on assistant tokens.
Per token: KL(p || q) = sum p (ln p - ln q) in nats, with p the reference's distribution and q the quantized model's, computed
in float64 from the logits; whether both have the same most likely token; the negative log likelihood of the actual token
under both and the change of its probability; the reference's margin (best minus second-best logit); and the noise (standard
deviation of the logit errors over the reference's eight most likely tokens).
Margins and noise predict flips: with independent normal noise n on both top logits, P(flip) = Φ(-margin / (n √2)). More flips
than predicted mean that the errors are not such noise.

`sensitivity` shows which layers the divergence comes from: each quantized alone, and each restored among all the others. A restored
linear computes with the reference's own weights and unrounded activations. Each measurement is one pass over the reference's
answers. Finished measurements are stored, so that a killed run resumes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
import torch
from scipy.stats import norm

from annie_quant import judge
from annie_quant.checkpoint import prompt_files
from annie_quant.checkpoint.inspection import export_notes
from annie_quant.checkpoint.shards import model_sha256
from annie_quant.core import files
from annie_quant.core.errors import AnnieError, UsageError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.workloads import resolve
from annie_quant.documents import (
    KLFigures,
    KLSummary,
    LayerDivergence,
    MarginBin,
    Sensitivity,
    SensitivityKey,
)
from annie_quant.judge import Workload, tool_eval
from annie_quant.offline.answers import Choices, Reference, choices_of
from annie_quant.offline.engine import Engine, Row, batches
from annie_quant.offline.linears import NVFP4Linear, nvfp4_linears, set_numerics
from annie_quant.offline.loading import load, numerics_of
from annie_quant.offline.prompts import CLASSES, Answered, ScoredAnswer, Template

SHOWN = 3
StrPath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """The settings of an evaluation.

    checkpoint: folder of the model that is judged.
    reference: folder of the bf16 model that it was made from.
    workloads: prompts to choose from; one that is repeated counts once.
    n_per_gate: prompts per gate that are drawn from the workloads; None: all prompts.
    extends: whether more prompts are drawn where a gate that compares with bf16's own answers applies to few of them.
    numerics: names of profiles (profiles.py); those that the checkpoint lacks are skipped.
    ensemble: whether the further members of each numerics are computed (ensemble.py), for a verdict that does not hang on one
        arithmetic.
    conversations: rows whose assistant tokens are scored in addition to the reference's answers.
    faults: of the export, which forbid the verdict "keeps".
    output: JSON file for the evaluation.
    cache: folder for the reference's answers; None: annie_quant in XDG_CACHE_HOME.
    dtype: "float32" or "bfloat16" for everything that is not packed; None: float32 where memory allows.
    device: torch's name; None: a GPU where there is one.
    rows: answers per batch.
    """

    checkpoint: Path
    reference: Path
    workloads: Sequence[Workload] = ()
    n_per_gate: int | None = None
    extends: bool = False
    numerics: Sequence[str] = ("w4a4", "w4a16")
    ensemble: bool = True
    conversations: Sequence[JsonObject] = ()
    faults: Sequence[str] = ()
    output: Path | None = None
    cache: Path | None = None
    dtype: str | None = None
    device: str | None = None
    rows: int = 128

    def audited(self) -> EvaluationJob:
        """Return the job with the faults of the checkpoint's export."""
        return replace(self, faults=export_notes(self.checkpoint, self.reference))

    def prompts(self, n: int | None) -> list[Workload]:
        """Return the workloads with n prompts per gate, or all. Raises UsageError for a temperature above 0."""
        for workload in self.workloads:
            if workload.name == tool_eval.NAME:
                raise UsageError(
                    f"{workload.name} plays its scenarios against a server",
                    "annie-quant bench --workloads tool-eval-bench ...",
                )
            if workload.temperature != 0:
                raise UsageError(
                    f"workload {workload.name} has temperature {workload.temperature}; "
                    "only greedy answers (temperature 0) can be verified offline"
                )
        distinct = judge.distinct_prompts(self.workloads)[0]
        return distinct if n is None else judge.sample(distinct, n)


@dataclass(frozen=True)
class ComparedAnswer:
    """One scored answer: kl.FIELDS of each token, float64 [n, len(FIELDS)], and the checkpoint's choices."""

    fields: np.ndarray
    choices: Choices


@dataclass(frozen=True)
class ModelPair:
    """A checkpoint and its reference, loaded, with what their comparison needs. open_pair() makes one.

    job: settings.
    progress: what long steps report to.
    device, dtype: where and in what everything that is not packed is computed.
    template: the reference's tokenizer and chat template, with which both are evaluated.
    model, engine: the checkpoint and its batching.
    reference: the bf16 model, loaded when its answers are not cached.
    start: time.monotonic() when loading began.
    """

    job: EvaluationJob
    progress: Progress
    device: str
    dtype: str
    template: Template
    model: Any
    engine: Engine
    reference: Reference
    start: float

    def scored(self, answered: Sequence[Answered]) -> list[ScoredAnswer]:
        """Return the reference's answers as scored answers."""
        return [
            ScoredAnswer(
                r.workload.name, r.prompt, tuple(self.template.target(c)), r.workload.thinking
            )
            for r, c in answered
        ]

    def compare(
        self, scored: Sequence[ScoredAnswer], text: str | None = None
    ) -> dict[int, ComparedAnswer]:
        """Score the answers with both models, and return the comparison of each by its index.

        text: reported as progress; None reports nothing.
        """
        rows = [Row(s.prompt, s.target) for s in scored]
        comparisons: dict[int, ComparedAnswer] = {}
        both = zip(self.engine.scores(rows), self.reference.scores(rows), strict=True)
        pairs = ((i, logits, expected) for (i, logits), (_, expected) in both)
        for indices, logits, expected in batches(pairs, self.engine.compared_tokens):
            targets = [rows[i].target for i in indices]
            target = torch.tensor([token for t in targets for token in t], device=logits.device)
            choices = choices_of(logits, targets, self.template.end_tokens)
            fields = compare_logits(expected, logits, target)
            parts = np.split(fields, np.cumsum([len(t) for t in targets])[:-1])
            comparisons |= zip(indices, map(ComparedAnswer, parts, choices), strict=True)
            if text is not None:
                self.progress.update(len(comparisons), len(rows), text)
        return comparisons

    def summarize(
        self,
        scored: Sequence[ScoredAnswer],
        comparisons: Mapping[int, ComparedAnswer],
        offset: int = 0,
    ) -> KLSummary | None:
        """Return the KL figures of `scored`, whose comparisons have the indices from `offset` on; None without tokens."""
        if not scored:
            return None
        template = self.template
        classes = [c for a in scored for c in template.classes(a.target, a.thinking)]
        decisions = [d for a in scored for d in template.decisions(a.target, a.thinking)]
        return kl_summary(
            np.concatenate([comparisons[offset + i].fields for i in range(len(scored))]),
            np.repeat([a.category for a in scored], [len(a.target) for a in scored]),
            np.array(classes),
            np.array(decisions, dtype=bool),
        )


@contextmanager
def open_pair(job: EvaluationJob, progress: Progress = SILENT) -> Iterator[ModelPair]:
    """Load the models of a job."""
    start = time.monotonic()
    device = job.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if job.dtype not in (None, "float32", "bfloat16"):
        raise UsageError(f"dtype {job.dtype!r}", "choose float32 or bfloat16")
    dtype = job.dtype or working_dtype([job.checkpoint, job.reference], device)
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32, in convolutions too
    progress.update(0, None, "loading")
    template = Template(job.reference)
    dense_cache = "float32" if dtype == "float32" else "bf16"
    model = load(job.checkpoint, cache=dense_cache, dtype=getattr(torch, dtype), device=device)
    engine = Engine(model, rows=job.rows)
    reference = Reference(job, template, dtype, device)
    try:
        yield ModelPair(job, progress, device, dtype, template, model, engine, reference, start)
    finally:
        reference.cache.close()


class PromptCheck(NamedTuple):
    """blocking: why the verdict cannot be "keeps". notes: what else a reader must know."""

    blocking: list[str]
    notes: list[str]


def check_prompts(pair: ModelPair, answered: Sequence[Answered]) -> PromptCheck:
    """Compare the prompts and texts that the checkpoint's own tokenizer and chat template give with the reference's.

    A server uses the checkpoint's own files. Where they give other prompts, the answers that were compared are not the server's.
    """
    folder, source, template = pair.job.checkpoint, pair.job.reference, pair.template
    if folder.resolve() == source.resolve() or prompt_files.same_bytes(folder, source):
        return PromptCheck([], [])
    if not prompt_files.has_tokenizer(folder):
        return PromptCheck(
            [], ["the checkpoint has no tokenizer; both models were evaluated with the reference's"]
        )
    blocking = [difference.message for difference in prompt_files.differences(folder, source)]
    try:
        own = Template(folder)
    except AnnieError as error:
        return PromptCheck(
            [*blocking, f"no server can use the checkpoint's tokenizer: {error.message}"], []
        )
    if set(own.end_tokens) != set(template.end_tokens):
        blocking.append(
            f"its answers end with tokens {own.end_tokens}, the reference's with {template.end_tokens}"
        )
    if other := other_prompts(own, template, answered):
        names = ", ".join(other[:SHOWN]) + (", ..." if len(other) > SHOWN else "")
        blocking.append(
            f"the checkpoint's own tokenizer and chat template give other tokens for {len(other)} of {len(answered)} prompts "
            f"({names}); the answers that were compared are not those of a server"
        )
    notes = (
        []
        if blocking
        else ["the tokenizer's files differ from the reference's, and give the same tokens"]
    )
    return PromptCheck(blocking, notes)


def other_prompts(own: Template, template: Template, answered: Sequence[Answered]) -> list[str]:
    """Return the names of the prompts, or answers, that are other tokens or another text with the checkpoint's own files."""
    other = []
    earlier: dict[tuple[str, str], list[Any]] = {}
    for request, completion in answered:
        messages = earlier.setdefault(request.conversation, [])
        try:
            same = (
                own.request(request.workload, request.case, request.turn, messages).prompt
                == request.prompt
            )
        except AnnieError:
            same = False
        texts = [
            t.tokenizer.decode(completion.tokens, skip_special_tokens=False)
            for t in (own, template)
        ]
        if not same or texts[0] != texts[1]:
            other.append(request.name)
        messages.append(template.message(request, completion))
    return other


def working_dtype(folders: Sequence[Path], device: str) -> str:
    """Return "float32" where both models fit into half of the device's free memory that way, else "bfloat16".

    The same on a CPU and a GPU, so that a verdict does not depend on the device: numerics profiles round from float32
    (emulation.py).
    """
    free = (
        psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    )
    # In float32 both need 8 bytes per weight. On disk they have 2.5 (4 bits and bf16), so this is at most 3.2 times the size;
    # the rest is for activations and logits.
    size = sum(f.stat().st_size for folder in folders for f in folder.glob("*.safetensors"))
    return "float32" if 5 * size < free / 2 else "bfloat16"


# ---- figures of the comparison

FIELDS = ("kl", "same_top", "nll_reference", "nll", "delta_p", "margin", "noise")
NEAR = 8  # most likely tokens over which the noise is computed
MARGIN_EDGES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, math.inf)


@torch.inference_mode()
def compare_logits(
    reference: torch.Tensor, quantized: torch.Tensor, target: torch.Tensor
) -> np.ndarray:
    """Return FIELDS of n tokens, float64 [n, len(FIELDS)]. reference, quantized: logits [n, V]. target: tokens int64 [n]."""
    p = torch.log_softmax(reference.double(), -1)
    q = torch.log_softmax(quantized.double(), -1)
    top = reference.topk(min(NEAR, reference.shape[-1]), -1)
    error = (quantized.double() - reference.double()).gather(-1, top.indices)
    at = target.unsqueeze(-1)
    columns = (
        (p.exp() * (p - q)).sum(-1).clamp_min(0),
        (top.indices[:, 0] == quantized.argmax(-1)).double(),
        -p.gather(-1, at).squeeze(-1),
        -q.gather(-1, at).squeeze(-1),
        q.gather(-1, at).squeeze(-1).exp() - p.gather(-1, at).squeeze(-1).exp(),
        (top.values[:, 0] - top.values[:, 1]).double(),
        error.std(-1, correction=1),
    )
    return torch.stack(columns, -1).cpu().numpy()


def kl_summary(
    fields: np.ndarray, categories: np.ndarray, classes: np.ndarray, decisions: np.ndarray
) -> KLSummary:
    """Return the figures of n tokens, per category, per class and of decisions.

    fields: from compare_logits.
    categories: text [n], in the order in which they are shown.
    classes: int64 [n], indices in CLASSES.
    decisions: bool [n], whether a token decides.
    """
    return KLSummary(
        **msgspec.structs.asdict(figures(fields)),
        by_category={str(c): figures(fields[categories == c]) for c in dict.fromkeys(categories)},
        by_class={
            name: figures(fields[classes == i])
            for i, name in enumerate(CLASSES)
            if (classes == i).any()
        },
        margins=margin_bins(fields),
        decisions=figures(fields[decisions]) if decisions.any() else None,
    )


def figures(rows: np.ndarray) -> KLFigures:
    """Return the figures of tokens float64 [n, len(FIELDS)], n >= 1."""
    col = {name: rows[:, i] for i, name in enumerate(FIELDS)}
    return KLFigures(
        n_tokens=len(rows),
        mean=float(col["kl"].mean()),
        median=float(np.median(col["kl"])),
        p99=float(np.quantile(col["kl"], 0.99)),
        max=float(col["kl"].max()),
        same_top=float(col["same_top"].mean()),
        flips=int((col["same_top"] == 0).sum()),
        flips_predicted=float(flip_chance(col["margin"], col["noise"]).sum()),
        perplexity=float(np.exp(col["nll"].mean())),
        perplexity_reference=float(np.exp(col["nll_reference"].mean())),
        delta_p_mean=float(col["delta_p"].mean()),
        delta_p_rms=float(np.sqrt(np.square(col["delta_p"]).mean())),
        margin_median=float(np.median(col["margin"])),
        noise_median=float(np.median(col["noise"])),
    )


def flip_chance(margin: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Return Φ(-margin / (noise √2)), the probability that independent errors swap the two top logits."""
    return norm.cdf(-margin / np.maximum(noise * math.sqrt(2), 1e-30))


def margin_bins(rows: np.ndarray) -> list[MarginBin]:
    """Return counts of tokens, flips and predicted flips per range of the reference's margin."""
    margin, noise = rows[:, FIELDS.index("margin")], rows[:, FIELDS.index("noise")]
    flipped = rows[:, FIELDS.index("same_top")] == 0
    bins = []
    for low, high in itertools.pairwise(MARGIN_EDGES):
        inside = (margin >= low) & (margin < high)
        bins.append(
            MarginBin(
                low,
                None if math.isinf(high) else high,
                n_tokens=int(inside.sum()),
                flips=int(flipped[inside].sum()),
                flips_predicted=float(flip_chance(margin[inside], noise[inside]).sum()),
            )
        )
    return bins


# ---- divergence by layer

LAYER_MODES = ("alone", "restored")


def sensitivity(
    model_dir: StrPath,
    reference_dir: StrPath,
    workloads: Sequence[Workload] | None = None,
    numerics: str | None = None,
    modes: Sequence[str] = LAYER_MODES,
    output: StrPath | None = None,
    cache: StrPath | None = None,
    progress: Progress = SILENT,
    n_per_gate: int | None = None,
    device: str | None = None,
    rows: int = 128,
) -> JsonObject:
    """Measure KL and flips of the checkpoint as it is, and per layer: quantized alone, and restored among the others.

    The parameters that are not listed are those of evaluate.

    Parameters:
        numerics: default: w4a4 if the checkpoint has input scales, else w4a16.
        modes: "alone", "restored" or both.
        output: a JSON file, written after every measurement and read at the start.
        n_per_gate: number of prompts per gate, drawn from the workloads.

    Returns:
        The Sensitivity document as a dict: {"model", "numerics", "key", "all", "alone": {layer: ...}, "restored": ...},
        each measurement with mean and p99 KL in nats per token, same_top, flips and n_tokens.

    Raises:
        UsageError: the checkpoint has no NVFP4 linears.
    """
    job = EvaluationJob(
        checkpoint=Path(model_dir),
        reference=Path(reference_dir),
        workloads=resolve(None, workloads),
        n_per_gate=n_per_gate,
        cache=None if cache is None else Path(cache),
        device=device,
        rows=rows,
    )
    with open_pair(job, progress) as pair:
        return msgspec.to_builtins(
            measure_layers(pair, numerics, modes, None if output is None else Path(output))
        )


def measure_layers(
    pair: ModelPair, numerics: str | None, modes: Sequence[str], output: Path | None
) -> Sensitivity:
    """Sensitivity of loaded models over the job's prompts."""
    scored = pair.scored(
        pair.reference.answer(pair.job.prompts(pair.job.n_per_gate), pair.progress)
    )
    linears = nvfp4_linears(pair.model)
    if not linears:
        raise UsageError(f"{pair.job.checkpoint} has no NVFP4 linears")
    numerics = numerics or numerics_of(pair.model)[0]
    set_numerics(pair.model, numerics)
    reference_model = pair.reference.engine().model
    originals = {name: reference_model.get_submodule(name).weight for name in linears}
    key = SensitivityKey(
        model_sha256(pair.job.checkpoint),
        pair.reference.files.sha256,
        numerics,
        [len(s.target) for s in scored],
    )
    result = stored_sensitivity(output, key) or Sensitivity(str(pair.job.checkpoint), numerics, key)

    def divergence(restored: Iterable[str]) -> LayerDivergence:
        with restored_linears(linears, originals, restored):
            return measure_divergence(pair, scored)

    layers = list(dict.fromkeys(layer_of(name) for name in linears))
    total = 1 + len(modes) * len(layers)
    pair.progress.update(0, total, "sensitivity: all")
    if result.all is None:
        result.all = divergence(())
        store_sensitivity(result, output)
    for index, (mode, layer) in enumerate(((m, layer) for m in modes for layer in layers), 1):
        pair.progress.update(index, total, f"sensitivity: {mode} {layer}")
        measured = result.alone if mode == "alone" else result.restored
        if layer not in measured:
            measured[layer] = divergence(
                n for n in linears if (layer_of(n) == layer) == (mode == "restored")
            )
            store_sensitivity(result, output)
    return result


def layer_of(name: str) -> str:
    """Return the layer of a linear: model.layers.3.mlp.up_proj → layers.3.mlp (attention and MLP are separate)."""
    match = re.search(r"(layers\.\d+\.[^.]+)", name)
    return match.group(1) if match else name


@contextlib.contextmanager
def restored_linears(
    linears: Mapping[str, NVFP4Linear], originals: Mapping[str, torch.Tensor], names: Iterable[str]
) -> Iterator[None]:
    """Let the linears called `names` compute with their original weights and unrounded activations."""
    before = {name: (linears[name].dense, linears[name].numerics) for name in names}
    try:
        for name in before:
            linears[name].dense, linears[name].numerics = originals[name].detach(), "w4a16"
        yield
    finally:
        for name, (dense, numerics) in before.items():
            linears[name].dense, linears[name].numerics = dense, numerics


def measure_divergence(pair: ModelPair, scored: Sequence[ScoredAnswer]) -> LayerDivergence:
    kl = pair.summarize(scored, pair.compare(scored))
    if kl is None:
        raise UsageError(
            "sensitivity needs at least one answer", "give more workloads or a larger n_per_gate"
        )
    return LayerDivergence(kl.mean, kl.p99, kl.same_top, kl.flips, kl.n_tokens)


def stored_sensitivity(output: Path | None, key: SensitivityKey) -> Sensitivity | None:
    """Return the measurements of an earlier run on the same models and answers, or None."""
    try:
        stored = (
            None if output is None else msgspec.convert(files.read_whole_json(output), Sensitivity)
        )
    except msgspec.ValidationError:
        return None
    return stored if stored is not None and stored.key == key else None


def store_sensitivity(result: Sensitivity, output: Path | None) -> None:
    if output is not None:
        files.write_json(output, msgspec.to_builtins(result))
