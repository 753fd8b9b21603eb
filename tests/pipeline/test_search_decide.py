"""When the search drops and passes a strategy; what it says of models, labels and prompts. No model is run here."""

from __future__ import annotations

import random

import pytest
from msgspec import to_builtins

from annie_quant import judge
from annie_quant.data import load_persona
from annie_quant.judge import decision
from annie_quant.judge.gate_rule import LARGE_N, Threshold
from annie_quant.judge.gate_rule import decide as by_rule
from annie_quant.judge.gates import GATES
from annie_quant.judge.sample import answers_per_gate
from annie_quant.pipeline import search
from annie_quant.pipeline.search import explain, table

RATE = Threshold("rate", 10, 0.6)


def gate_row(gate, passes, n):
    return by_rule(passes, n, GATES[gate].threshold)


@pytest.mark.parametrize("passes", range(0, 31))
def test_an_early_drop_is_never_of_one_that_every_end_could_still_pass(passes):
    """Exactness of the first reason: when it speaks, no number of further passes makes the gate's own rule say pass."""
    seen = gate_row("tool_call", passes, 30)
    why = decision.cannot_pass("tool_call", seen, 100, 2)
    could = any(by_rule(passes + more, 100, RATE).verdict == "pass" for more in range(71))
    if why and "even if" in why:
        assert not could
    if not could:
        assert why


def test_one_leak_drops_at_once_and_facts_when_too_many_are_wrong():
    assert "thinking_leak" in decision.cannot_pass("thinking_leak", gate_row("thinking_leak", 29, 30), 505, 2)
    assert decision.cannot_pass("thinking_leak", gate_row("thinking_leak", 30, 30), 505, 2) is None
    # 100 facts must all be right for a lower bound of 0.95; 160 may hold two mistakes.
    assert decision.cannot_pass("factual", gate_row("factual", 29, 30), 100, 2)
    assert decision.cannot_pass("factual", gate_row("factual", 29, 30), 160, 2) is None


def test_a_strategy_at_the_threshold_is_dropped_early_in_at_most_five_percent_of_searches():
    """The correction holds: a model whose true rate is well enough to pass is seldom lost to the early look."""
    rng = random.Random(0)
    dropped = 0
    for _ in range(2000):
        passes = sum(rng.random() < 0.6 for _ in range(30))
        why = decision.cannot_pass("tool_call", gate_row("tool_call", passes, 30), 100, 2)
        dropped += bool(why and "confidence" in why)
    assert dropped / 2000 <= 0.05


def test_a_broken_one_is_dropped_by_its_interval():
    assert "below 60%" in decision.cannot_pass("tool_call", gate_row("tool_call", 10, 30), 400, 2)


def test_looks():
    assert decision.looks(100) == [30, 100] and decision.looks(25) == [25]


def test_final_counts_are_what_the_evaluation_will_judge():
    asked = judge.sample(judge.load_workloads(), 100)
    counts = answers_per_gate(asked)
    assert all(counts[g] >= LARGE_N for g in ("tool_call", "factual", "reasoning", "no_markdown"))
    early = judge.sample(asked, 30)
    chosen = {(w.name, c.id) for w in asked for c in w.cases}
    assert {(w.name, c.id) for w in early for c in w.cases} <= chosen, "an early look asks part of what is asked in all"


def sides(**gates):
    return {"w4a4": gates, "w4a16": {name: gate_row(name, 100, 100) for name in gates}}


def as_json(numerics):
    """As evaluate's result has them."""
    return {kind: {"gates": to_builtins(gates)} for kind, gates in numerics.items()}


def test_passing_needs_every_gate_under_every_required_numerics():
    good, bad = gate_row("tool_call", 97, 100), gate_row("tool_call", 62, 100)
    assert decision.final_reasons(sides(tool_call=good), ("w4a4", "w4a16")) == []
    why = decision.final_reasons(sides(tool_call=bad), ("w4a4", "w4a16"))
    assert len(why) == 1 and "W4A4: tool_call 62 of 100, undecided" in why[0] and "would decide" in why[0]
    assert "weight-only" in decision.final_reasons({"w4a16": {"tool_call": good}}, ("w4a4", "w4a16"))[0]
    assert decision.final_reasons({"w4a16": {"tool_call": good}}, ("w4a16",)) == []


def test_a_base_model_given_as_fine_tune_is_named():
    base = {"tool_call": gate_row("tool_call", 0, 100), "no_markdown": gate_row("no_markdown", 3, 400)}
    assert explain.reference_report(to_builtins(base)).startswith("WRONG MODEL")
    fine = {"tool_call": gate_row("tool_call", 98, 100), "no_markdown": gate_row("no_markdown", 400, 400)}
    assert explain.reference_report(to_builtins(fine)) is None
    weak = fine | {"factual": gate_row("factual", 60, 100)}
    said = explain.reference_report(to_builtins(weak))
    assert "factual 60 of 100" in said and "WRONG MODEL" not in said


def test_dealing_anew_gives_no_answer_back_to_its_own_question():
    rows = [
        {"id": i, "messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]}
        for i in range(20)
    ]
    dealt = explain.dealt_anew(rows)
    assert sorted(r["messages"][-1]["content"] for r in dealt) == sorted(f"a{i}" for i in range(20))
    assert all(r["messages"][0]["content"][1:] != r["messages"][1]["content"][1:] for r in dealt)
    assert dealt == explain.dealt_anew(rows)


def test_the_hardened_prompt_is_the_personas_own_rules():
    annie = load_persona("annie")
    prompt = explain.hardened_prompt(annie)
    assert "CRITICAL RULES (violations cause errors)" in prompt and all(rule in prompt for rule in annie.rules)


def test_what_a_hardened_prompt_means():
    assert explain.reading([None, None]).startswith("no conclusion")
    assert explain.reading([True, None]).startswith("restored")
    assert explain.reading([True, False]).startswith("not restored")


def test_restored_is_judged_beside_bf16_under_the_same_prompt():
    well, ill = (to_builtins(gate_row("tool_call", n, 40)) for n in (38, 10))
    assert explain.restored(well, well) is True and explain.restored(ill, well) is False
    assert explain.restored(ill, to_builtins(gate_row("tool_call", 20, 40))) is None
    one = to_builtins(gate_row("thinking_leak", 194, 195))
    assert explain.restored(one, one) is True, "no worse than bf16, which leaks once itself under this prompt"


def test_what_only_activations_lose():
    assert "held under W4A16: tool_call" in explain.by_activations(
        as_json(sides(tool_call=gate_row("tool_call", 40, 100)))
    )
    assert explain.by_activations(as_json(sides(tool_call=gate_row("tool_call", 99, 100)))) is None


def test_the_order_is_cheapest_first_and_training_last():
    order = search.chosen_order(None)
    assert [s for s in order if s in ("naive", "direct", "mlp_only", "qad")] == ["naive", "direct", "mlp_only", "qad"]
    assert order[-1] == "qad"
    assert search.chosen_order(["mlp_only", "naive"]) == ["mlp_only", "naive"]
    with pytest.raises(Exception, match="no strategy called 'x'"):
        search.chosen_order(["x"])


class FakeStages:
    """Stages whose models are tables: strategy → (size, {numerics: {gate: (passes, n)}} at each look)."""

    def __init__(self, tables, tmp_path):
        self.tables, self.dir, self.stamps, self.log = tables, tmp_path, [], []
        self.model, self.conversations = tmp_path, tmp_path / "c.jsonl"

    def quantize(self, strategy):
        self.log.append(strategy)
        if self.tables[strategy] is None:
            from annie_quant.errors import UsageError

            raise UsageError("infeasible: at least 9 bits are needed")

    def audit(self, strategy):
        return {"summary": "sound", "audit": {"ok": True, "summary": {}}}

    def checkpoint(self, strategy):
        return self.dir / strategy

    def evaluate(self, name, checkpoint, workloads, **more):
        strategy, _, part = name.partition("-")
        found = self.tables[strategy]
        gates = found.get("smoke", both(factual=(1, 1))) if part == "smoke" else found["all"]
        numerics = {
            kind: {
                "gates": to_builtins({g: gate_row(g, *counts) for g, counts in table.items()}),
                "kl": {"mean": 0.01, "flips": 3, "n_tokens": 100},
                "same_answers": {"same": 9, "n": 10},
            }
            for kind, table in gates.items()
        }
        return {"numerics": numerics, "reference_gates": {}}


def walk(tmp_path, monkeypatch, tables, every=False):
    from annie_quant.cli.console import Console

    monkeypatch.setattr(
        search.Search,
        "sizes",
        lambda self, s: {"size_bytes": 1, "bits_per_weight": 5.0, "read_bytes": 1, "ceiling_tok_s": 2.0},
    )
    monkeypatch.setattr(explain, "hardened", lambda *a: None)
    stages = FakeStages(tables, tmp_path)
    found = search.Search(stages, 100, ("w4a4", "w4a16"), every, list(tables), Console())
    found.walk()
    return found.found, stages.log


def both(**gates):
    return {"w4a4": gates, "w4a16": gates}


def test_the_walk_stops_at_the_first_that_passes_and_keeps_what_failed(tmp_path, monkeypatch):
    tables = {
        "naive": {"all": both(tool_call=(40, 100), factual=(100, 100))},
        "auto_mixed": None,
        "mlp_only": {"all": both(tool_call=(99, 100), factual=(100, 100))},
        "qad": {"all": both(tool_call=(99, 100))},
    }
    found, log = walk(tmp_path, monkeypatch, tables)
    assert found["chosen"] == "mlp_only" and log == ["naive", "auto_mixed", "mlp_only"]
    assert [r["passed"] for r in found["strategies"]] == [False, False, True]
    assert "infeasible" in found["strategies"][1]["error"]
    page = (tmp_path / "search.md").read_text()
    for part in ("PASS: ship it", "infeasible", "tool_call 40 of 100", "99/100 ✓"):
        assert part in page, part
    everything, log = walk(tmp_path, monkeypatch, tables, every=True)
    assert everything["chosen"] == "mlp_only" and log[-1] == "qad"


def test_a_weight_only_checkpoint_is_not_judged_at_length_where_w4a4_is_asked_for(tmp_path, monkeypatch):
    weight_only = {"smoke": {"w4a16": {"factual": (1, 1)}}, "all": {"w4a16": {"factual": (100, 100)}}}
    good = {"all": both(factual=(100, 100))}
    found, _ = walk(tmp_path, monkeypatch, {"direct": weight_only, "gptq": good})
    assert found["chosen"] == "gptq" and "weight-only" in found["strategies"][0]["outcome"]
    assert not any("n = 100" in step for step in found["strategies"][0]["path"])


def test_gibberish_goes_on_with_strategy_c_as_the_founding_tree_says(tmp_path, monkeypatch):
    broken = {"smoke": both(factual=(0, 1)), "all": both(factual=(0, 100))}
    good = {"all": both(factual=(100, 100))}
    found, log = walk(tmp_path, monkeypatch, {"naive": broken, "mlp_only": good, "auto_mixed": good})
    assert log == ["naive", "auto_mixed"] and found["chosen"] == "auto_mixed"
    assert found["strategies"][0]["outcome"] == "gibberish"


def test_a_search_that_nobody_passes_says_so(tmp_path, monkeypatch):
    found, _ = walk(tmp_path, monkeypatch, {"naive": {"all": both(tool_call=(10, 100))}})
    assert found["chosen"] is None and "None of 1 strategies" in table.outcome(found)
    assert found["strategies"][0]["outcome"] == "dropped at n = 30"
