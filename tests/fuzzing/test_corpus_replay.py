"""Replay of the inputs that fuzzing stored in tests/fuzz/corpus, with some new mutations of all targets' seeds."""

from __future__ import annotations

import random

import pytest
from fuzz.mutate import mutate
from fuzz.targets import TARGETS, one_line
from paths import TESTS

CORPUS = TESTS / "fuzz/corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_corpus_and_mutations(name: str) -> None:
    if name == "gguf":
        pytest.importorskip("gguf", reason="the serve extra is not installed")
    target = TARGETS[name]
    corpus = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    seeds = list(target.seeds())
    assert seeds
    rng = random.Random(name)
    for raw in [
        *seeds,
        *corpus,
        *(mutate(rng, rng.choice(seeds)) for _ in range(100)),
        b"",
        b"\0" * 40,
    ]:
        target.run(raw)


def test_the_harness_reports_unexpected_exceptions() -> None:

    def broken(raw: bytes) -> None:
        raw.decode()

    with pytest.raises(UnicodeDecodeError):
        one_line(broken)(b"\xff")
