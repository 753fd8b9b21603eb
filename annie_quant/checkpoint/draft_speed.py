"""Predict how many tokens per second drafts give, and how many of them are best.

    tokens per second = tokens per step / (V(n + 1) + n * d)

    V(M): a step of the model that verifies M tokens (decode_speed.py). Its weights are read once, a mixture's experts E in part:
          M tokens read E * (1 - (1 - k / E)^M) of them
    d: a draft = (bytes of the head's layer + bytes of the output layer) / bandwidth + the launches of two layers

Tokens per step depend on weights and prompts alone (offline/draft_prediction.py), seconds per step
on the machine, the server and the formats. A draft reads the whole output layer, so that layer's
format decides more than the head's. Where n = 0 is fastest, drafts are better off. A server on a
processor has no prediction (tests/perf/drafts.py fits its steps).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from annie_quant.checkpoint import decode_speed
from annie_quant.checkpoint.decode_speed import TokenBytes, token_bytes
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import is_tied
from annie_quant.core.files import read_whole_json
from annie_quant.documents import Device, Evaluation
from annie_quant.documents.drafts import DRAFTS_FILE, DraftPrediction, TunedHead
from annie_quant.documents.reading import convert

DRAFT_LAYERS = 2  # whose launches a draft costs: the head's layer, and its output layer with the choice of a token
# Returns the seconds of a server's step with a number of drafts.
StepSeconds = Callable[[int], float]


@dataclass(frozen=True)
class DraftCosts:
    """What the steps of a server on a GPU read, and the GPU.

    experts: bytes of all routed experts. active: share of them that a token passes.
    layer, output: bytes of the head's layer with its input product, and of the output layer.
    """

    device: Device
    read: TokenBytes
    experts: float
    active: float
    layer: float
    output: float

    def seconds(self, drafts: int) -> float:
        """Return the seconds of a step with a number of drafts."""
        passed = 1 - (1 - self.active) ** (drafts + 1)
        further = self.experts * (passed - self.active)
        verify_s = 1 / decode_speed.tok_s(self.read, self.device)
        verify_s += further / self.device.read_bytes_s
        return verify_s + drafts * self.draft_s

    @property
    def draft_s(self) -> float:
        """Seconds of one draft."""
        read_s = (self.layer + self.output) / self.device.read_bytes_s
        return read_s + DRAFT_LAYERS * self.device.layer_s


def costs_of(folder: ModelFolder, device: Device | None = None) -> DraftCosts:
    """Return the costs of a model folder's steps. device: see decode_speed.speed_of."""
    family = folder.family
    experts = family.experts
    share = folder.active_share
    output_name = "embed_tokens." if is_tied(folder) else "lm_head."
    layer = 0.0
    output = 0
    routed = 0
    for name in folder:
        size = folder.info(name).size_bytes
        is_routed = experts is not None and experts.contain(name)
        if family.in_mtp(name):
            layer += size * (share if is_routed else 1.0)
        elif is_routed:
            routed += size
        elif output_name in name:
            output += size
    device = device or decode_speed.default_device()
    return DraftCosts(device, token_bytes(folder), routed, share, layer, output)


def speeds_of(prediction: DraftPrediction, seconds: StepSeconds) -> list[float]:
    """Return the predicted tokens per second for one kind of prompt, by drafts per step from 0 on."""
    speeds = [1 / seconds(0)]
    for steps in prediction.by_drafts:
        speeds.append(steps.tokens_per_step.value / seconds(steps.drafts))
    return speeds


def describe(kind: str, prediction: DraftPrediction, seconds: StepSeconds | None) -> str:
    """Return the prediction for one kind of prompt as one line. seconds: None where no speed is known."""
    if seconds is None:
        return f"drafts, {kind}: {_accepted(prediction, 3)}"
    speeds = speeds_of(prediction, seconds)
    best = speeds.index(max(speeds))
    if best == 0:
        rates = f"{_rate(speeds[0])} tok/s without, {_rate(speeds[1])} with one"
        return f"drafts, {kind}: off: {rates} ({_accepted(prediction, 1)})"
    rates = f"{_rate(speeds[best])} tok/s against {_rate(speeds[0])} without"
    return f"drafts, {kind}: {best} per step, about {rates}: {_accepted(prediction, best)}"


def _rate(tok_s: float) -> str:
    return f"{tok_s:,.0f}" if tok_s >= 100 else f"{tok_s:.3g}"


def _accepted(prediction: DraftPrediction, drafts: int) -> str:
    steps = prediction.of(drafts)
    tokens = steps.tokens_per_step
    shares = " ".join(f"{100 * share.value:.0f}" for share in steps.accepted)
    interval = f"{tokens.value:.2f} ({tokens.low:.2f} to {tokens.high:.2f})"
    return f"{interval} tokens per step, {shares} % accepted, {prediction.prompts} prompts"


def read_tuned_head(folder: ModelFolder) -> TunedHead | None:
    """Return what `annie-quant draft` stored in a folder; None without such a file."""
    document = read_whole_json(folder.path / DRAFTS_FILE)
    return convert(TunedHead, document, DRAFTS_FILE) if document is not None else None


def describe_folder(folder: ModelFolder, device: Device | None = None) -> list[str]:
    """Return the predictions that are stored in a folder as lines, "all" prompts first; [] where none are."""
    tuned = read_tuned_head(folder)
    if tuned is None:
        return []
    return describe_kinds(tuned.after, costs_of(folder, device).seconds)


def describe_evaluation(folder: Path, evaluation: Evaluation) -> list[str]:
    """Return the predictions of the first numerics as lines; [] without a head."""
    drafts = next((side.drafts for side in evaluation.numerics.values() if side.drafts), {})
    try:
        seconds = costs_of(ModelFolder(folder)).seconds if drafts else None
    except ShardError:
        seconds = None
    return describe_kinds(drafts, seconds)


def describe_kinds(
    predictions: Mapping[str, DraftPrediction], seconds: StepSeconds | None
) -> list[str]:
    """Return one line per kind of prompt, "all" first."""
    kinds = sorted(predictions, key=lambda kind: (kind != "all", kind))
    return [describe(kind, predictions[kind], seconds) for kind in kinds]
