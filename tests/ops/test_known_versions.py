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
    ("package", "version", "capability", "family", "word"),
    [
        ("vllm", "0.18.0", "9.0", DENSE, "cudaErrorIllegalInstruction"),  # another GPU
        ("vllm", "0.18.0", "", DENSE, "cudaErrorIllegalInstruction"),  # an unknown one
        ("vllm", "0.30.0", "12.1", HYBRID, "run as W4A16"),  # after its range
        ("vllm", "0.28.0", "9.0", DENSE, "malformed tool calls"),  # no DeltaNet
        ("vllm", "0.33.0", "9.0", DENSE, ""),
        ("vllm", "0.26.0", "9.0", DENSE, "white space"),
        ("vllm", "0.26.0", "9.0", DENSE, "gemma4"),  # not Gemma 4
        ("sglang", "0.5.18", "9.0", DENSE, ""),
        ("flashinfer-python", "0.6.9", "12.1", None, ""),
        ("torch", "0.6.6", "12.1", None, ""),
    ],
)
def test_what_a_row_does_not_concern_is_not_named(
    package, version, capability, family, word
) -> None:
    assert not any(word in text for text in effects(package, version, capability, family))


@pytest.mark.parametrize(
    ("package", "version", "word"),
    [
        ("vllm", "0.23.0", "last brace"),
        ("vllm", "0.25.1", "white space"),
        ("vllm", "0.32.0", "in place of length"),
        ("vllm", "0.33.0", "MTP and prefix caching"),  # no release is known to fix it
        ("sglang", "0.5.13", "open thinking"),
        ("sglang", "0.5.16", "in pieces"),
    ],
)
def test_faults_of_the_parsers_are_named(package: str, version: str, word: str) -> None:
    assert any(word in text for text in effects(package, version, "", HYBRID))


def test_every_row_has_a_date_and_the_thread_that_it_comes_from() -> None:
    for row in known_faults.bad_versions():
        assert re.fullmatch(r"2026-\d\d-\d\d", row.date) and re.search(
            r"[\w-]+/[\w-]+#\d+|^measured on the parsers of", row.source
        ), row
        assert not row.last or known_faults.version_key(
            row.first or "0"
        ) <= known_faults.version_key(row.last)
        assert row.model in ("", "deltanet", "experts", "Gemma 4")
