"""What fuzzing found is kept in tests/fuzz/corpus and replayed here, with some fresh mutations of every target's seeds."""

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
    kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    seeds = list(target.seeds())
    assert seeds
    rng = random.Random(name)
    for raw in [*seeds, *kept, *(mutate(rng, rng.choice(seeds)) for _ in range(100)), b"", b"\0" * 40]:
        target.run(raw)


def test_a_broken_reader_is_found() -> None:
    """The harness itself: an exception that is not the package's own comes through."""

    def broken(raw: bytes) -> None:
        raw.decode()

    with pytest.raises(UnicodeDecodeError):
        one_line(broken)(b"\xff")
