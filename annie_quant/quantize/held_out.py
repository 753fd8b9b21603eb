"""Hold out some of the calibration conversations, and measure choices of formats and of the rounding on their answers.

The divergence of a choice is the mean KL of all answer tokens plus that of the tokens that decide
(offline/prompts.py). `best` looks once at what plain rounding (naive) would give there, and takes
it where GPTQ is worse by more than the noise, the standard error of the difference over
conversations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from annie_quant import nvfp4
from annie_quant.checkpoint.linears import weight_name
from annie_quant.core.files import sha256_text
from annie_quant.core.progress import Progress
from annie_quant.documents import HeldOut, Ingredient
from annie_quant.models.formats import Format
from annie_quant.quantize.backend import device_kind
from annie_quant.quantize.calibration_samples import CalibrationSample
from annie_quant.quantize.kl_trial import StoredTrials, answers_to_score
from annie_quant.quantize.plan import Export, PlannedLinear, QuantizationPlan
from annie_quant.quantize.shared_text import DistinctPositions
from annie_quant.quantize.strategy import TRIAL_POSITIONS, TRIAL_TOKENS, Job, StrategyOptions

MIN_CONVERSATIONS = 8  # of which two are held out
CONVERSATIONS_PER_HELD_OUT = 4  # at most one of so many is held out
TOO_FEW = (
    f"GPTQ is not compared with plain rounding: {MIN_CONVERSATIONS} conversations or more are needed "
    "(annie-quant data, or init with --logs)"
)
ENOUGH_DECISIONS = 2000  # tokens that decide; with fewer, only large differences are detected
MAX_POSITIONS = {"cpu": 8192, "cuda": 1 << 17}  # held-out tokens, prompts included


def hold_out(
    samples: Sequence[CalibrationSample], max_positions: int | None = None
) -> tuple[list[CalibrationSample], list[CalibrationSample]]:
    """Return the samples to round with and those to judge on, whole conversations of all categories in turn.

    Conversations are held out until ENOUGH_DECISIONS tokens decide: at most one of CONVERSATIONS_PER_HELD_OUT, `max_positions`
    tokens, and TRIAL_TOKENS of answers on a GPU. A prefix that several share counts once, and the first conversation's not at all.
    """
    positions_left = max_positions or MAX_POSITIONS[device_kind()]
    rows: dict[int, list[CalibrationSample]] = {}
    for sample in samples:
        rows.setdefault(sample.row, []).append(sample)
    if len(rows) < MIN_CONVERSATIONS:
        return list(samples), []
    by_category = sorted(rows, key=lambda r: (rows[r][0].category, r))
    candidates = by_category[CONVERSATIONS_PER_HELD_OUT - 1 :: CONVERSATIONS_PER_HELD_OUT]
    if len(candidates) >= CONVERSATIONS_PER_HELD_OUT:
        candidates = in_bit_reversed_order(candidates)
    held: set[int] = set()
    counted = DistinctPositions()
    tokens_left = TRIAL_TOKENS["cuda"]
    decisions = 0
    for row in candidates:
        longest = max((s.ids for s in rows[row]), key=len)
        positions = counted.new(longest) if held else 0
        tokens = sum(len(s.answer) for s in rows[row])
        if len(held) >= 2 and (positions > positions_left or tokens > tokens_left):
            continue
        held.add(row)
        counted.add(longest)
        positions_left -= positions
        tokens_left -= tokens
        decisions += sum(sum(s.decides) for s in rows[row])
        if decisions >= ENOUGH_DECISIONS:
            break
    return [s for s in samples if s.row not in held], [s for s in samples if s.row in held]


def in_bit_reversed_order(items: Sequence[int]) -> list[int]:
    """Return the items by bit-reversed index: the first n of them are spread over all, for any n."""
    bits = max(1, (len(items) - 1).bit_length())
    order = sorted(range(len(items)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    return [items[i] for i in order]


def sum_and_standard_error(differences: Sequence[float]) -> tuple[float, float]:
    """Return the sum of differences, one per conversation, and its standard error."""
    n = len(differences)
    mean = sum(differences) / n
    squares = sum((d - mean) ** 2 for d in differences)
    return sum(differences), math.sqrt(squares * n / max(1, n - 1))


class FormatTrials(StoredTrials):
    """Measures choices of formats on held-out answers.

    rounded: all decoder linears in NVFP4, by the conversations that are not held out.
    """

    def __init__(
        self,
        job: Job[StrategyOptions],
        samples: Sequence[CalibrationSample],
        rounded: QuantizationPlan,
    ) -> None:
        device = device_kind()
        answers = answers_to_score(samples, TRIAL_TOKENS[device], TRIAL_POSITIONS[device])
        super().__init__(job, "format_figures.json", answers)
        self.rounded = rounded

    def measure(self, formats: Mapping[str, Format]) -> np.ndarray:
        """Return Trial.shares of a choice of formats, without those of the unchanged model."""
        return self.figures_of(formats) - self.figures_of({})

    def figures_of(self, formats: Mapping[str, Format]) -> np.ndarray:
        return self.shares(key_of(formats), self.plan_of(formats))

    def plan_of(self, formats: Mapping[str, Format]) -> QuantizationPlan:
        """Return the plan of a choice, with the weights of `rounded`."""
        linears: dict[str, PlannedLinear] = {}
        for name, kind in formats.items():
            linear = self.rounded.linears[name]
            packed = linear.packed if kind.in_four_bits else None
            linears[name] = replace(linear, format=kind, packed=packed)
        return QuantizationPlan(linears)

    def plain_plan_of(self, formats: Mapping[str, Format]) -> QuantizationPlan:
        """Return the plan of a choice, with the decoder's 4-bit weights rounded to nearest, as naive does."""
        plan = self.plan_of(formats)
        in_decoder = self.folder.family.in_decoder
        in_four_bits = {n: f for n, f in formats.items() if f.in_four_bits and in_decoder(n)}
        exported = Export(self.folder, QuantizationPlan.of(in_four_bits))
        for name in in_four_bits:
            weight = exported.weight(weight_name(self.folder, name))
            scale = float(exported.scale(name))
            plan.linears[name].packed = nvfp4.pack(weight, tensor_scale=scale)
        return plan

    def served_and_unrounded(self, name: str, plan: QuantizationPlan) -> np.ndarray:
        """Return each conversation's share of KL and KL at decisions, as served and with no input rounded [conversations, 4].

        name: of other weights than those of `rounded`; "" for these.
        """
        key = f"{name} {key_of(plan.formats)}".strip()
        served = self.shares(key, plan)[:, :2]
        unrounded = self.stored(f"{key} W4A16", lambda: self.trial.shares(plan, inputs=False))
        return np.concatenate((served, unrounded[:, :2]), 1)


def key_of(formats: Mapping[str, Format]) -> str:
    """Return the key of a choice of formats in files of measurements."""
    names = {linear: kind.name for linear, kind in formats.items()}
    return sha256_text(json.dumps(sorted(names.items())))[:16]


@dataclass(frozen=True)
class HeldOutLook:
    """The comparison of GPTQ with plain rounding. held_out: None where no conversation was held out."""

    held_out: HeldOut | None = None
    methods: Sequence[Ingredient] = ()

    @property
    def plain_is_better(self) -> bool:
        return len(self.methods) > 1 and self.methods[1].used


def divergences(answers: np.ndarray) -> tuple[float, float, float, float]:
    """Return the figures of Ingredient, from those of each held-out answer [answers, 4]."""
    kl, decisions, kl_w4a16, decisions_w4a16 = answers.sum(0).tolist()
    return kl, decisions, kl_w4a16, decisions_w4a16


def compare_with_plain(
    trials: FormatTrials,
    formats: Mapping[str, Format],
    held: Sequence[CalibrationSample],
    progress: Progress,
) -> HeldOutLook:
    """Return the comparison on held-out answers. formats: of all linears that are quantized."""
    gptq = trials.served_and_unrounded("", trials.plan_of(formats))
    plain = trials.served_and_unrounded("plain rounding", trials.plain_plan_of(formats))
    change, noise = sum_and_standard_error((plain - gptq).sum(1).tolist())
    methods = [
        Ingredient("GPTQ", True, *divergences(gptq), change=0.0, noise=0.0),
        Ingredient("plain rounding", change < -noise, *divergences(plain), change, noise),
    ]
    progress.message(
        f"held-out divergence of plain rounding minus that of GPTQ: {change:+.2g}, noise {noise:.2g}; "
        f"{'plain rounding' if methods[1].used else 'GPTQ'} is used"
    )
    conversations = len({s.row for s in held})
    tokens = sum(len(s.answer) for s in held)
    decisions = sum(sum(s.decides) for s in held)
    return HeldOutLook(HeldOut(conversations, tokens, decisions), methods)
