"""The list of versions with a known fault: ranges, the GPU and the kind of model, and the doctor's use of it."""

from __future__ import annotations

import re

import pytest

from annie_quant.models import family_of
from annie_quant.ops import known_faults

DENSE, HYBRID = family_of({"model_type": "llama"}), family_of({"model_type": "qwen3_5_text"})


def effects(package: str, version: str, capability: str, family: object = None) -> list[str]:
    return [
        row.effect for _, row in known_faults.faults_of([(package, version)], capability, family)
    ]


@pytest.mark.parametrize(
    ("package", "version", "capability", "family", "word"),
    [
        ("vllm", "0.18.0", "12.1", None, "cudaErrorIllegalInstruction"),
        ("vllm", "0.28.1rc1.dev43+g6f7df92a8", "12.1", DENSE, "run as W4A16"),
        ("vllm", "0.28.0", "9.0", HYBRID, "malformed tool calls"),
        ("flashinfer-python", "0.6.8.post1", "12.1", None, "b12x"),
    ],
)
def test_a_version_in_a_range_is_named(package, version, capability, family, word) -> None:
    assert any(word in text for text in effects(package, version, capability, family))


@pytest.mark.parametrize(
    ("package", "version", "capability", "family"),
    [
        ("vllm", "0.18.0", "9.0", DENSE),  # another GPU
        ("vllm", "0.18.0", "", DENSE),  # an unknown one
        ("vllm", "0.30.0", "12.1", HYBRID),  # after all ranges
        ("vllm", "0.28.0", "9.0", DENSE),  # no DeltaNet
        ("flashinfer-python", "0.6.9", "12.1", None),
        ("torch", "0.6.6", "12.1", None),
    ],
)
def test_what_a_row_does_not_concern_is_not_named(package, version, capability, family) -> None:
    assert effects(package, version, capability, family) == []


def test_every_row_has_a_date_and_the_thread_that_it_comes_from() -> None:
    for row in known_faults.bad_versions():
        assert re.fullmatch(r"2026-\d\d-\d\d", row.date) and re.search(
            r"[\w-]+/[\w-]+#\d+", row.source
        ), row
        assert known_faults.version_key(row.first or "0") <= known_faults.version_key(row.last)
        assert row.model in ("", "deltanet", "experts")
