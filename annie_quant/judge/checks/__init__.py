"""Checks of one answer; judge/gates.py assigns them to gates.

A check takes (answer, case, workload, reference) and returns why the answer fails, "" where it
passes, or None where it does not apply to the case. The reference is the bf16 model's own answer to
the prompt.
"""
