"""Checks of one answer; judge/gates.py assigns them to gates.

A check takes (answer, case, workload) and returns a reason why the answer fails, "" where it passes, or None where the check
does not apply to the case.
"""
