"""How Hypothesis draws inputs: the same ones in every run, and new ones, 20 times as many, for `make test-thorough`."""

import os

from hypothesis import settings

FACTOR = 20 if "ANNIE_QUANT_FUZZ" in os.environ else 1

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("thorough", max_examples=100 * FACTOR, database=None, deadline=None)


def load_profile():
    """Load the profile of this run."""
    settings.load_profile("thorough" if FACTOR > 1 else "repeatable")


def examples(count):
    """Return the number of examples of a test in this run.

    count: the number in an ordinary run.
    """
    return count * FACTOR
