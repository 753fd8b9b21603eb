"""Judge answers: workloads, gates, statistics, the decision.

The evaluation without a server and the benchmark of servers use the same functions. Nothing here imports torch; scipy,
jsonschema and markdown-it are imported where they are used.

    load_workloads(names=None, folder=None)    prompts and what is expected of their answers
    Answer, parse_raw(text, thinking, tools)   an answer from a server, or from raw text
    prompt_sha256(case, workload)              what identifies a prompt: its content, whatever its id
    sample(workloads, n)                       the same workloads with a seeded choice of their cases
    gate_table([Judged(...)])                  pass rates with Wilson intervals and verdicts (gates.py)
    wilson(k, n), compare(...), holm(...)      statistics
    judge_members({member: {gate: counts}})    keeps, loses, undecided or fragile (decision/rule.py)
    verdict(aggregates)                        the outcome of a run, with reasons and caveats (decision/)
"""

from __future__ import annotations

from annie_quant.documents import Answer
from annie_quant.judge.answers import parse_raw, raw_view
from annie_quant.judge.decision import judge_evaluation, judge_members
from annie_quant.judge.decision import run_verdict as verdict
from annie_quant.judge.gates import Judged, checks, faults, gate_table
from annie_quant.judge.library import load_workloads
from annie_quant.judge.sampling import sample
from annie_quant.judge.statistics import compare, holm, median_interval, wilson
from annie_quant.judge.workloads import (
    Case,
    Workload,
    distinct_prompts,
    prompt_sha256,
    prompts_sha256,
)

__all__ = [
    "Answer",
    "Case",
    "Judged",
    "Workload",
    "checks",
    "compare",
    "distinct_prompts",
    "faults",
    "gate_table",
    "holm",
    "judge_evaluation",
    "judge_members",
    "load_workloads",
    "median_interval",
    "parse_raw",
    "prompt_sha256",
    "prompts_sha256",
    "raw_view",
    "sample",
    "verdict",
    "wilson",
]
