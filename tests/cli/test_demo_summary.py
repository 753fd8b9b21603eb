"""The demo's last screen: a sentence per model that says what the decision says, with the counts where it lost most."""

from __future__ import annotations

import pytest

from annie_quant.cli.pipeline.demo import claim, summary_lines
from annie_quant.documents import Aggregates, Comparison, ModelRow, OfflineSide, PairedGate, Roles
from annie_quant.judge.decision import judge_sides
from annie_quant.judge.gates import tabulate


def side(n: int = 240, **lost: int) -> OfflineSide:
    """Return a side with n answers per gate, of which so many are lost."""
    counts = {"tool_call": 0, "factual": 0, "no_markdown": 0} | lost
    return OfflineSide(
        gates=tabulate({gate: i >= few for gate, few in counts.items()} for i in range(n)),
        paired={gate: PairedGate(n, few, 0, passed=n) for gate, few in counts.items()},
    )


def run(**members: OfflineSide) -> Aggregates:
    """Return a run in which these arithmetics judge `nv`."""
    sides, _ = judge_sides(members)
    names = [m for m in sides if "+" not in m]
    return Aggregates(
        roles=Roles(candidate="nv"),
        models=[
            ModelRow(name="bf16", label="bf16", size_bytes=15_260_000),
            ModelRow(name="nv", label="NVFP4 best", size_bytes=5_490_000),
            ModelRow(name="q4", label="Q4_K_M", size_bytes=6_000_000),
        ],
        offline={"nv": {name: sides[name] for name in names}},
        members={"nv": {name: part for name, part in sides.items() if name not in names}},
    )


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        (
            {"w4a4": side(), "w4a4+bf16": side(tool_call=1)},
            "keeps everything that was tested under W4A4 (3 gates)",
        ),
        (
            {"w4a4": side(tool_call=24)},
            "loses under W4A4: does not call the right tool (24 more of 240 prompts)",
        ),
        (
            {"w4a4": side(), "w4a4+bf16": side(tool_call=24)},
            "is fragile under W4A4: in some of its arithmetics, not in all, it does not call the right "
            "tool (24 more of 240 prompts)",
        ),
        (
            {"w4a4": side(100, factual=3)},
            "is undecided under W4A4, too few prompts to exclude that it gets a fact wrong "
            "(3 more of 100 prompts)",
        ),
    ],
)
def test_a_claim_is_the_decision(members, sentence):
    """3 lost of 100 are too many to keep (147 prompts would do) and too few for a p below 5 %."""
    assert claim(run(**members), "nv") == sentence


def test_the_profiles_own_counts_are_shown_and_gates_beyond_three_are_counted():
    members = {"w4a4": side(tool_call=24), "w4a4+perm1": side(tool_call=48)}
    assert claim(run(**members), "nv").endswith("the right tool (24 more of 240 prompts)")
    many = side(tool_call=60, factual=50, no_markdown=40, abstention=30)
    assert claim(run(w4a4=many), "nv") == (
        "loses under W4A4: does not call the right tool (60 more of 240 prompts), gets a fact wrong "
        "(50 more of 240), calls a tool where none fits (30 more of 240) and 1 more"
    )


def test_what_blocks_the_verdict_is_the_claim():
    aggregates = run(w4a4=side())
    aggregates.blocking = {"nv": ["the tokenizer differs"]}
    assert claim(aggregates, "nv") == "cannot be compared: the tokenizer differs"
    assert claim(aggregates, "unknown") == "was not judged"


def test_the_screen_has_every_model_with_its_size_and_one_sentence_about_speed():
    aggregates = run(w4a4=side())
    fields = {"a": "nv", "b": "q4", "workload": "all", "n_prompts": 60, "median_difference": 10.0}
    aggregates.comparisons = [
        Comparison(
            metric="decode_tok_s", median_a=210.0, median_b=330.0, significant=True, **fields
        ),
        Comparison(
            metric="ttft_content_ms", median_a=34.0, median_b=33.0, significant=False, **fields
        ),
    ]
    lines = summary_lines(aggregates, "nv", "q4")
    assert lines[0].startswith("Compared with bf16 (15.3 MB), prompt by prompt, ")
    assert (
        lines[1].startswith("- NVFP4 best (5.5 MB) keeps")
        and lines[2] == "- Q4_K_M (6.0 MB) was not judged."
    )
    assert lines[3] == (
        "In llama.cpp on this CPU NVFP4 best writes 210 tokens/s (Q4_K_M: 330) and begins after 34 ms "
        "(Q4_K_M: 33, no significant difference)."
    )
    assert lines[4].startswith("Not tested: decline, ") and "call a tool" not in lines[4]
