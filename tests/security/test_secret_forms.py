"""One table of the forms of secrets: what stops an upload is also masked in logs, and no pattern of 0.2's two lists was lost."""

from __future__ import annotations

import random
import re
import string

import pytest

from annie_quant.core.secrets import FORMS, secret_in
from annie_quant.data.masking import MASK, Scanner

WORD = string.ascii_letters + string.digits
# Prefix, number of characters and whether publishing is refused, from the services' own documentation of their tokens.
TOKENS = [
    ("sk-", 24, True), ("sk-", 16, False), ("sk_live_", 24, False), ("pk_live_", 24, False), ("rk-", 16, False), ("hf_", 34, True),
    ("hf_", 20, False), ("ghp_", 36, True), ("gho_", 36, True), ("ghu_", 36, True), ("ghs_", 36, True), ("ghr_", 36, True),
    ("ghp_", 20, False), ("github_pat_", 82, True), ("github_pat_", 20, False), ("glpat-", 20, True), ("glpat-", 16, False),
    ("AIza", 35, True), ("AIza", 30, False), ("ya29.", 60, False), ("xoxb-", 10, True), ("xoxo-", 10, True), ("xoxe-", 10, True),
    ("nvapi-", 64, True), ("nvapi-", 16, False), ("npm_", 36, True), ("npm_", 20, False), ("pypi-", 60, False),
]  # fmt: skip


def certain(text: str) -> list[str]:
    return [form.name for form in FORMS if form.certain and re.search(form.certain, text)]


@pytest.mark.parametrize(("prefix", "size", "refused"), TOKENS)
def test_tokens_are_refused_or_masked_by_their_length(prefix, size, refused, tmp_path):
    rng = random.Random(f"{prefix}{size}")
    for _ in range(50):
        token = prefix + "".join(rng.choice(WORD) for _ in range(size))
        assert bool(certain(f"a {token} b")) == refused
        masked = Scanner().masked(f"a {token} b")
        assert masked == f"a {MASK} b"
    path = tmp_path / "config.json"
    path.write_text(f'{{"a": "{token}"}}')
    assert secret_in(path) or not refused


@pytest.mark.parametrize(
    "text",
    [
        "ask-me-anything-about-the-token",
        "task-force-of-the-quantization",
        "hf_hub",
        "npm_config_cache",
        "AIzawa",
    ],
)
def test_ordinary_text_is_neither(text):
    assert not certain(text) and Scanner().masked(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIabc\nxyz", "eyJhbGciOiJI" + ".eyJzdWIiOiIx.c2lnbmF0dXJl",
        "AKIA" + "ABCDEFGHIJKLMNOP",
        "Authorization: Bearer " + "a1B2c3d4" * 3, "https://annie:" + "hunter22@example.com/v1",
    ],
)  # fmt: skip
def test_what_is_certain_is_masked(text):
    assert certain(text)
    masked = Scanner().masked(f"before {text}")
    assert MASK in masked and not certain(masked)


def test_every_form_has_a_group_and_valid_patterns():
    for form in FORMS:
        assert form.name.startswith(("a ", "an ")) and form.kind
        for pattern in filter(None, (form.certain, form.likely)):
            assert not re.search(pattern, "")
