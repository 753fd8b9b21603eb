"""How Hypothesis draws inputs: the same ones in every run, and new ones, 40 times as many, for `make test-thorough`."""

import os

from hypothesis import settings

THOROUGH = "ANNIE_QUANT_FUZZ" in os.environ


def examples(count):
    """Return the number of examples of a test in this run: half of `count`, and in a thorough run 20 times as many."""
    return count * 20 if THOROUGH else -(-count // 2)


settings.register_profile(
    "repeatable", derandomize=True, max_examples=examples(100), database=None, deadline=None
)
settings.register_profile("thorough", max_examples=examples(100), database=None, deadline=None)


def load_profile():
    """Load the profile of this run."""
    settings.load_profile("thorough" if THOROUGH else "repeatable")
