"""Paths in the checkout, for tests, measurements and fuzzers."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
HELPERS = TESTS / "helpers"
DATA = TESTS / "data"
CALIBRATION = DATA / "calibration.jsonl"
TINY_ANNIE = ROOT / "annie_quant" / "assets" / "tiny-annie"
