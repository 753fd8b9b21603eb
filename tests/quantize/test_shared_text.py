"""Text whose shared prefixes are computed once: the same positions, weights and activations as without sharing."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dense_models import make
from paths import CALIBRATION, TINY_ANNIE

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data.rows import read_conversations

torch = pytest.importorskip(
    "torch", reason="the layers run in torch: pip install annie-quant[quantize]"
)
from calibration_texts import conversations, make_batches  # noqa: E402

from annie_quant.quantize import calibration_samples, calibration_text, shared_text  # noqa: E402
from annie_quant.quantize.calibration_samples import (  # noqa: E402
    CONTENT,
    PADDING,
    PROMPT,
    CalibrationSample,
    TokenBatch,
    weight_table,
)
from annie_quant.quantize.gptq import Hessian  # noqa: E402
from annie_quant.quantize.layerwise import DecoderLayers  # noqa: E402
from annie_quant.quantize.shared_text import PassCost, SharedText  # noqa: E402

WEIGHTS = {
    calibration_samples.PROMPT: 0.1,
    calibration_samples.CONTENT: 1.0,
    calibration_samples.TOOL_MARKUP: 8.0,
    calibration_samples.THINKING: 3.0,
    calibration_samples.END_OF_TURN: 8.0,
}


@pytest.fixture(scope="module", params=["answers", "conversations"])
def samples(request: pytest.FixtureRequest) -> list[CalibrationSample]:
    if request.param == "conversations":
        return conversations()
    rows = calibration_text.samples_of_rows(TINY_ANNIE, read_conversations(CALIBRATION))
    return [*rows[::4][:8], rows[0]]  # one twice


@pytest.fixture(scope="module")
def text(samples: list[CalibrationSample]) -> SharedText:
    return shared_text.arrange(samples, cost=PassCost(500, 64))


def paths(text: SharedText) -> list[tuple[list[int], list[int]]]:
    """Return (all tokens up to the end, codes of the batch's own) of each row of each batch."""
    positions = []
    for batch in text.batches:
        for row, (ids, kinds) in enumerate(zip(batch.ids, batch.kinds, strict=True)):
            real = kinds != PADDING
            before = tokens_before(text, batch, row)
            assert batch.offsets is None or batch.offsets[row] == len(before)
            positions.append(([*before, *map(int, ids[real])], list(map(int, kinds[real]))))
    return positions


def tokens_before(text: SharedText, batch: TokenBatch, row: int) -> list[int]:
    """Return the tokens that a row continues."""
    if batch.start is None or batch.rows is None:
        return []
    earlier, row = text.batches[batch.start], int(batch.rows[row])
    own = earlier.ids[row][earlier.kinds[row] != PADDING]
    return [*tokens_before(text, earlier, row), *map(int, own)]


def test_it_is_shorter_and_batches_are_bounded(
    samples: list[CalibrationSample], text: SharedText
) -> None:
    assert any(b.start is not None for b in text.batches)
    assert sum(b.ids.size for b in text.batches) < sum(len(s.ids) for s in samples)
    for i, batch in enumerate(text.batches):
        assert batch.start is None or batch.start < i
        assert batch.ids.size <= 500 or len(batch.ids) == 1


def test_every_position_of_every_sample_counts_once(
    samples: list[CalibrationSample], text: SharedText
) -> None:
    counts = {code: counts for counts, code in text.codes.items()}
    positions: Counter[tuple[tuple[int, ...], int]] = Counter()
    for ids, codes in paths(text):
        first = len(ids) - len(codes)
        for i, code in enumerate(codes):
            for kind, n in enumerate(counts[code]):
                positions[tuple(ids[: first + i + 1]), kind] += n
    expected = Counter((s.ids[: i + 1], kind) for s in samples for i, kind in enumerate(s.kinds))
    assert +positions == expected


def hessians(layers: DecoderLayers, table: torch.Tensor) -> list[Hessian]:
    """Return the Hessian of each group of linears of every layer."""
    every = []
    for layer in itertools.islice(layers, 4):  # three of DeltaNet and one of attention
        own = {group[0]: Hessian(table) for group in layer.groups() if group}
        layer.observe(dict(own))
        every += own.values()
        layer.advance()
    return every


def test_hessians_are_those_of_the_samples(
    samples: list[CalibrationSample], text: SharedText
) -> None:
    folder = ModelFolder(TINY_ANNIE)
    plain = DecoderLayers(folder, make_batches(samples))
    shared = DecoderLayers(folder, text.batches)
    expected = hessians(plain, weight_table(WEIGHTS, plain.device))
    for ours, theirs in zip(
        hessians(shared, text.weight_table(WEIGHTS, shared.device)), expected, strict=True
    ):
        a, b = (h.mean().cpu().numpy() for h in (ours, theirs))
        assert np.abs(a - b).max() < 1e-4 * np.abs(b).max()
        assert ours.amax == pytest.approx(theirs.amax, rel=1e-4)


def test_a_sample_of_weight_two_counts_as_if_it_were_there_twice() -> None:
    """Also where its prefix is shared with samples of other weights."""
    rows = calibration_text.samples_of_rows(TINY_ANNIE, read_conversations(CALIBRATION))[::6][:6]
    weighted = [replace(s, weight=w) for s, w in zip(rows, (2, 1, 3, 1, 2, 1), strict=True)]
    repeated = [replace(s, weight=1.0) for s in weighted for _ in range(int(s.weight))]
    folder = ModelFolder(TINY_ANNIE)
    results = []
    for samples in (weighted, repeated, rows):
        text = shared_text.arrange(samples, cost=PassCost(500, 64))
        layers = DecoderLayers(folder, text.batches)
        results.append(hessians(layers, text.weight_table(WEIGHTS, layers.device)))
    for ours, theirs, plain in zip(*results, strict=True):
        a, b, c = (h.mean().cpu().numpy() for h in (ours, theirs, plain))
        assert np.abs(a - b).max() < 1e-4 * np.abs(b).max()
        assert np.abs(a - c).max() > 1e-3 * np.abs(b).max()  # the weights matter


def test_rows_of_unequal_length_are_continued() -> None:
    batches = shared_text.arrange(conversations()).batches
    continued = [batches[start] for start in {b.start for b in batches if b.start is not None}]
    assert any(len(set(b.lengths)) > 1 for b in continued)
    assert sum(b.ids.size for b in batches) < 0.7 * sum(len(s.ids) for s in conversations())


@pytest.mark.parametrize("lengths", [[5], [3, 3, 3], [1, 2, 300, 310], [*range(1, 40)]])
def test_rows_are_divided_at_the_least_cost(lengths: list[int]) -> None:
    def cost(parts: list[slice]) -> int:
        return sum(len(lengths[p]) * lengths[p][-1] + 64 for p in parts)

    def every(begin: int) -> list[list[slice]]:
        ends = range(begin + 1, len(lengths) + 1)
        rest = {e: every(e) if e < len(lengths) else [[]] for e in ends}
        return [[slice(begin, e), *parts] for e in ends for parts in rest[e]]

    parts = shared_text.divide(lengths, 400, 64)
    assert [i for p in parts for i in range(len(lengths))[p]] == list(range(len(lengths)))
    assert all(len(lengths[p]) * lengths[p][-1] <= 400 or len(lengths[p]) == 1 for p in parts)
    if len(lengths) < 10:
        allowed = [
            p
            for p in every(0)
            if all(len(lengths[q]) * lengths[q][-1] <= 400 or q.stop - q.start == 1 for q in p)
        ]
        assert cost(parts) == min(map(cost, allowed))


def long_rows() -> list[CalibrationSample]:
    """Return rows of up to 330 tokens: most begin with the same 170 tokens, two of these share 60 more, one shares nothing."""
    rng = np.random.default_rng(3)

    def tokens(count: int) -> list[int]:
        return rng.integers(10, 1500, count).tolist()

    system = tokens(170)
    second = [*system, *tokens(60)]
    prompts = [[*system, *tokens(n)] for n in (5, 40, 150)]
    prompts += [[*second, *tokens(n)] for n in (3, 90)]
    prompts.append(tokens(310))
    samples = []
    for prompt in prompts:
        answer = tokens(12)
        kinds = [PROMPT] * (len(prompt) - 1) + [CONTENT] * 12
        samples.append(CalibrationSample("", (*prompt, *answer[:-1]), tuple(kinds), tuple(answer)))
    return samples


def model_of(kind: str, folder: Path) -> ModelFolder:
    return ModelFolder(TINY_ANNIE if kind == "qwen3_5" else make(folder, kind))


def hessians_of_whole_rows(folder: ModelFolder) -> dict[str, tuple[np.ndarray, float]]:
    """Return each linear's weighted second moment and largest input, by transformers' own model, one row at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32).eval()
    totals: dict[str, tuple[np.ndarray, float, float]] = {}
    weights = np.zeros(0)

    def observe(name: str, module: object, args: tuple[torch.Tensor, ...]) -> None:
        x = args[0][0].double().numpy()
        total, weight, top = totals.get(name, (0.0, 0.0, 0.0))
        total = total + (x.T * weights) @ x
        totals[name] = total, weight + weights.sum(), max(top, np.abs(x).max())

    for name, module in model.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(functools.partial(observe, name))
    with torch.inference_mode():
        for sample in long_rows():
            weights = np.array([WEIGHTS[kind] for kind in sample.kinds])
            model.model(torch.tensor([sample.ids]))
    return {name: (total / weight, top) for name, (total, weight, top) in totals.items()}


def errors_in_pieces(folder: ModelFolder, text: SharedText) -> list[float]:
    """Return the largest errors of Hessians and largest inputs, relative to the largest values of whole rows."""
    expected = hessians_of_whole_rows(folder)
    model = DecoderLayers(folder, text.batches)
    table = text.weight_table(WEIGHTS, model.device)
    errors = []
    for layer in model:
        own = {name: Hessian(table) for name in layer.linears}
        layer.advance(dict(own))
        for name, hessian in own.items():
            total, top = expected[f"{layer.index}.{name}"]
            mean = hessian.mean()
            assert mean is not None
            errors.append(float(np.abs(mean.cpu().numpy() - total).max() / np.abs(total).max()))
            errors.append(abs(hessian.amax - top) / top)
    return errors


@pytest.mark.parametrize("kind", ["qwen3_5", "llama3", "qwen3", "gemma3"])
@pytest.mark.parametrize("tokens", [13, 97])  # 170 is 13 * 13 + 1: a piece of one token
def test_rows_in_pieces_have_the_statistics_of_whole_rows(
    kind: str, tokens: int, tmp_path: Path
) -> None:
    text = shared_text.arrange(long_rows(), cost=PassCost(tokens, 8))
    assert max(b.ids.shape[1] for b in text.batches) <= tokens
    assert sum(int(b.lengths.sum()) for b in text.batches) < 0.6 * sum(
        len(s.ids) for s in long_rows()
    )
    assert max(errors_in_pieces(model_of(kind, tmp_path), text)) < 1e-4


@pytest.mark.parametrize("kind", ["qwen3_5", "llama3", "gemma3"])
@pytest.mark.parametrize("lost", ["start", "offsets"])
def test_pieces_without_what_they_continue_have_other_statistics(
    kind: str, lost: str, tmp_path: Path
) -> None:
    """The control of the test above: nothing continued, or positions from 0."""
    text = shared_text.arrange(long_rows(), cost=PassCost(97, 8))
    for i, batch in enumerate(text.batches):
        if batch.offsets is None:
            continue
        if lost == "start":
            text.batches[i] = TokenBatch(batch.ids, batch.kinds)
        else:
            text.batches[i] = replace(batch, offsets=np.zeros_like(batch.offsets))
    assert max(errors_in_pieces(model_of(kind, tmp_path), text)) > 1e-2


def test_positions_of_a_shared_prefix_count_once() -> None:
    counted = shared_text.DistinctPositions()
    rows = [s.ids for s in long_rows()]
    total = 0
    for row in [*rows, rows[0], rows[1][:50]]:
        total += counted.new(row)
        counted.add(row)
    assert total == len({row[: n + 1] for row in rows for n in range(len(row))})
