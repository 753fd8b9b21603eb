"""Text whose shared prefixes are computed once: the same positions, weights and activations as without sharing."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from paths import CALIBRATION, TINY_ANNIE

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data.rows import read_conversations

torch = pytest.importorskip(
    "torch", reason="the layers run in torch: pip install annie-quant[quantize]"
)
from calibration_texts import conversations  # noqa: E402

from annie_quant.quantize import calibration_samples  # noqa: E402
from annie_quant.quantize.calibration_samples import (  # noqa: E402
    PADDING,
    CalibrationSample,
    SharedText,
    TokenBatch,
    weight_table,
)
from annie_quant.quantize.gptq import Hessian  # noqa: E402
from annie_quant.quantize.layerwise import DecoderLayers  # noqa: E402

WEIGHTS = {
    **calibration_samples.MANNERS_RESPONSE,
    calibration_samples.PROMPT: 0.1,
    calibration_samples.THINKING: 3.0,
}


@pytest.fixture(scope="module", params=["answers", "conversations"])
def samples(request: pytest.FixtureRequest) -> list[CalibrationSample]:
    if request.param == "conversations":
        return conversations()
    rows = calibration_samples.samples_of_rows(TINY_ANNIE, read_conversations(CALIBRATION))
    return [*rows[::4][:8], rows[0]]  # one twice


@pytest.fixture(scope="module")
def text(samples: list[CalibrationSample]) -> SharedText:
    return calibration_samples.arrange(samples, tokens=500)


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
    plain = DecoderLayers(folder, calibration_samples.make_batches(samples))
    shared = DecoderLayers(folder, text.batches)
    expected = hessians(plain, weight_table(WEIGHTS, "cpu"))
    for ours, theirs in zip(
        hessians(shared, text.weight_table(WEIGHTS, "cpu")), expected, strict=True
    ):
        a, b = (np.asarray(h.mean()) for h in (ours, theirs))
        assert np.abs(a - b).max() < 1e-4 * np.abs(b).max()
        assert ours.amax == pytest.approx(theirs.amax, rel=1e-4)


def test_other_layers_and_gpus_get_whole_samples(
    samples: list[CalibrationSample], tmp_path: Path
) -> None:
    text = calibration_samples.arrange(samples, share=False)
    assert all(b.start is None and b.offsets is None for b in text.batches)
    assert torch.equal(text.weight_table(WEIGHTS, "cpu"), weight_table(WEIGHTS, "cpu"))
    shutil.copytree(
        TINY_ANNIE, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".annie_quant")
    )
    config = json.loads((tmp_path / "config.json").read_text())
    types = ModelFolder(tmp_path).text_config["layer_types"]
    for other in ("sliding_attention", "mamba"):
        config.get("text_config", config)["layer_types"] = [*types[:-1], other]
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert not calibration_samples.can_share(ModelFolder(tmp_path))


def test_rows_of_unequal_length_are_continued() -> None:
    batches = calibration_samples.arrange(conversations()).batches
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

    parts = calibration_samples.divide(lengths, 400, 64)
    assert [i for p in parts for i in range(len(lengths))[p]] == list(range(len(lengths)))
    assert all(len(lengths[p]) * lengths[p][-1] <= 400 or len(lengths[p]) == 1 for p in parts)
    if len(lengths) < 10:
        allowed = [
            p
            for p in every(0)
            if all(len(lengths[q]) * lengths[q][-1] <= 400 or q.stop - q.start == 1 for q in p)
        ]
        assert cost(parts) == min(map(cost, allowed))
