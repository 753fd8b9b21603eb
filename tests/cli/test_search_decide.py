"""When the search drops and passes a strategy, and its reports on models, labels and prompts. No model is run here."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from paths import ROOT, TINY_ANNIE

from annie_quant import judge, quantize
from annie_quant.checkpoint import ModelFolder, decode_speed
from annie_quant.cli.pipeline import search, search_diagnosis, search_text
from annie_quant.cli.pipeline.run_directory import RunDirectory
from annie_quant.cli.pipeline.search_text import outcome as search_outcome
from annie_quant.cli.pipeline.stages import AuditResult, Stages
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.progress import SilentConsole
from annie_quant.data import load_persona
from annie_quant.documents import (
    KLSummary,
    NumericsResult,
    PairedGate,
    PredictedFirstToken,
    SameAnswers,
    SearchResult,
    StrategyRow,
)
from annie_quant.judge import decision
from annie_quant.judge.decision import rule, wording
from annie_quant.judge.gates import GATES, LARGE_N, decide
from annie_quant.judge.sampling import answers_per_gate
from annie_quant.quantize import estimates
from annie_quant.quantize.rates import SPARK_RATES


def gate_row(gate, passes, n):
    row = decide(passes, n, GATES[gate].threshold)
    row.meets = row.verdict
    return row


def pair(gate, passes, n, won=0):
    """The counts of a checkpoint whose reference passes every prompt but the won ones, judged."""
    return judged({"w4a4": {gate: PairedGate(n, n - passes, won)}})["w4a4"][gate]


def judged(members):
    return decision.judge_gates(members)[0]


@pytest.mark.parametrize("lost", range(0, 31))
def test_a_strategy_that_could_still_keep_is_never_dropped_as_impossible(lost):
    """The first reason is exact: if no other prompt changes, the gate does not keep at the last look."""
    reason = rule.cannot_keep("tool_call", pair("tool_call", 30 - lost, 30), 240, 2)
    could = pair("tool_call", 240 - lost, 240).verdict == "keeps"
    assert bool(reason) >= (not could)
    if reason == "out of reach":
        assert not could


def test_one_leak_drops_at_once_and_facts_only_after_too_many_losses():
    leak = pair("thinking_leak", 29, 30)
    assert rule.cannot_keep("thinking_leak", leak, 505, 2) == "no margin"
    assert wording.dropped("thinking_leak", leak, 505, "no margin") == (
        "no thinking leak lost 1 and won 0 of 30: none may be lost"
    )
    assert rule.cannot_keep("thinking_leak", pair("thinking_leak", 30, 30), 505, 2) is None
    # Of 100 facts one may be lost for a lower bound above -5 points; of 160, three.
    assert rule.cannot_keep("factual", pair("factual", 29, 30), 100, 2) is None
    assert rule.cannot_keep("factual", pair("factual", 28, 30), 100, 2)
    assert rule.cannot_keep("factual", pair("factual", 27, 30), 160, 2) is None
    assert rule.cannot_keep("factual", pair("factual", 26, 30), 160, 2)


def test_a_strategy_without_a_difference_is_dropped_early_in_at_most_five_percent_of_searches():
    rng = random.Random(0)
    dropped = 0
    for _ in range(1000):
        changed = [rng.choice((-1, 1)) for _ in range(30) if rng.random() < 0.04]
        counts = PairedGate(30, changed.count(-1), changed.count(1))
        counts = judged({"w4a4": {"tool_call": counts}})["w4a4"]["tool_call"]
        dropped += bool(rule.cannot_keep("tool_call", counts, 240, 2))
    assert dropped / 1000 <= 0.05


def test_looks():
    assert decision.looks(100) == [30, 100] and decision.looks(25) == [25]


def test_final_counts_are_those_of_the_last_evaluation():
    prompts = judge.sample(judge.load_workloads(), 100)
    counts = answers_per_gate(prompts)
    assert all(counts[g] >= LARGE_N for g in ("tool_call", "factual", "reasoning", "no_markdown"))
    early = judge.sample(prompts, 30)
    chosen = {(w.name, c.id) for w in prompts for c in w.cases}
    assert {(w.name, c.id) for w in early for c in w.cases} <= chosen, (
        "an early look has part of the prompts of the last one"
    )


def tables(**gates):
    return {"w4a4": gates, "w4a16": {name: gate_row(name, 100, 100) for name in gates}}


def sides(w4a4, w4a16=None):
    kinds = {"w4a4": w4a4, "w4a16": w4a16 or dict.fromkeys(w4a4, (100, 100))}
    return judged_sides(kinds)


def judged_sides(kinds):
    """Return the verdict over the numerics, and their results."""
    results = {kind: numerics_result(gates) for kind, gates in kinds.items()}
    gates = judged({kind: side.paired for kind, side in results.items()})
    results = {kind: replace(side, paired=gates[kind]) for kind, side in results.items()}
    return judge.judge_members({kind: side.paired for kind, side in results.items()}), results


def test_passing_needs_every_gate_under_every_required_numerics():
    both_numerics = ("w4a4", "w4a16")
    good, bad = sides({"tool_call": (99, 100)}), sides({"tool_call": (97, 100)})
    assert decision.final_reasons(*good, both_numerics) == []
    reasons = decision.final_reasons(*bad, both_numerics)
    assert (
        len(reasons) == 1
        and "w4a4: tool calls undecided: 3 lost" in reasons[0]
        and "would decide" in reasons[0]
    )
    weight_only = {"w4a16": good[1]["w4a16"]}
    assert "weight-only" in decision.final_reasons(good[0], weight_only, both_numerics)[0]
    assert decision.final_reasons(good[0], weight_only, ("w4a16",)) == []
    nothing = judge.judge_members({"w4a16": {}})
    assert "no gate tests anything" in decision.final_reasons(nothing, weight_only, ("w4a16",))[0]


def test_a_base_model_instead_of_the_fine_tune_is_reported():
    base = {
        "tool_call": gate_row("tool_call", 0, 100),
        "no_markdown": gate_row("no_markdown", 3, 400),
    }
    assert search_diagnosis.reference_report(base).startswith("WRONG MODEL")
    fine = {
        "tool_call": gate_row("tool_call", 98, 100),
        "no_markdown": gate_row("no_markdown", 400, 400),
    }
    assert search_diagnosis.reference_report(fine) is None
    weak = fine | {"factual": gate_row("factual", 60, 100)}
    report = search_diagnosis.reference_report(weak)
    assert "factual 60 of 100" in report and "WRONG MODEL" not in report


def test_the_hardened_prompt_is_the_personas_own_rules():
    annie = load_persona("annie")
    prompt = search_diagnosis.hardened_prompt(annie)
    assert "CRITICAL RULES (violations cause errors)" in prompt and all(
        rule in prompt for rule in annie.rules
    )


def test_the_conclusion_from_a_hardened_prompt():
    assert search_diagnosis.reading([None, None]).startswith("no conclusion")
    assert search_diagnosis.reading([True, None]).startswith("restored")
    assert search_diagnosis.reading([True, False]).startswith("not restored")


def test_restored_is_judged_against_bf16_under_the_same_prompt():
    good, bad = gate_row("tool_call", 38, 40), gate_row("tool_call", 10, 40)
    assert (
        search_diagnosis.restored(good, good) is True
        and search_diagnosis.restored(bad, good) is False
    )
    assert search_diagnosis.restored(bad, gate_row("tool_call", 15, 40)) is None
    one = gate_row("thinking_leak", 194, 195)
    assert search_diagnosis.restored(one, one) is True, (
        "not worse than bf16, which leaks once itself under this prompt"
    )


def test_what_only_activations_lose():
    assert "held under W4A16: tool_call" in search_diagnosis.by_activations(
        tables(tool_call=gate_row("tool_call", 40, 100))
    )
    assert search_diagnosis.by_activations(tables(tool_call=gate_row("tool_call", 99, 100))) is None


# Other libraries are tried with --strategies, by a recipe's name.
LIBRARIES = {"autoround", "llmcompressor", "modelopt"}
OWN = sorted(set(quantize.available()) - LIBRARIES)


@pytest.mark.parametrize("model", [TINY_ANNIE, ROOT / "annie_quant/assets/tiny-moe"])
def test_the_order_is_that_of_bytes_per_token(model):
    order, notes = search.frontier_order(model, every=True)
    assert not notes
    # Without --all it is `best` alone, in the same order.
    assert search.frontier_order(model, every=False) == (
        [n for n in order if n.partition("@")[0] == "best"],
        [],
    )
    named = [name for name in order if "@" not in name]
    budgets = {name: float(name.partition("@")[2]) for name in order if "@" in name}
    assert sorted(named) == OWN
    # What the dry run predicts, and before it the smallest budget: a 4-bit head.
    read = {
        n: estimates.estimate(model, n, rates=SPARK_RATES).speed.read_bytes / 1e9 for n in named
    }
    bytes_per_token = [(read | budgets)[name] for name in order]
    assert bytes_per_token == sorted(bytes_per_token)
    assert (
        order[0].startswith("best@")
        and budgets[order[0]] < read["naive"]
        and order[1:3] == ["naive", "best"]
    )
    assert (
        sum(b > read["naive"] for b in budgets.values()) == 4
        and max(budgets.values()) < read["mlp_only"] * 1.5
    )


def test_a_family_without_a_frontier_is_searched_by_its_strategies_alone(tmp_path, monkeypatch):
    def refuse(model):
        raise CheckpointError("no linear can be quantized")

    monkeypatch.setattr(search, "budgets", refuse)
    order, notes = search.frontier_order(TINY_ANNIE, every=False)
    assert sorted(order) == OWN
    assert notes == ["best under budgets is not tried: no linear can be quantized"]


def test_chosen_strategies_may_have_budgets():
    assert search.chosen_order(["mlp_only", "best@0.5", "naive"]) == [
        "mlp_only",
        "best@0.5",
        "naive",
    ]
    for name, message in (
        ("x", "no strategy called 'x'"),
        ("naive@1", "only `best`"),
        ("best@", "GB"),
        ("best@nan", "GB"),
        ("naive:rtn", "only another library has recipes"),
        ("modelopt:", "only another library has recipes"),
        ("libraryx:rtn", "no strategy called 'libraryx'"),
    ):
        with pytest.raises(UsageError, match=message):
            search.chosen_order([name])


def test_a_budget_is_a_limit_of_best_and_its_measurements_are_shared(tmp_path, monkeypatch):
    asked = []

    def run(strategy, model, output, **settings):
        asked.append((strategy, output.name, settings))
        (output / "config.json").parent.mkdir(parents=True)
        (output / "config.json").write_text("{}")
        return SimpleNamespace(size_bytes=1, source_bytes=2)

    monkeypatch.setattr(quantize, "run", run)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
    )
    stages = Stages(
        RunDirectory(tmp_path / "run"), TINY_ANNIE, rows, 4, SilentConsole(), tmp_path / "work"
    )
    for name in ("best@0.0045", "best"):
        stages.quantize(name)
    (strategy, folder, limited), (_, _, plain) = asked
    assert (strategy, folder) == ("best", "best@0.0045") and limited["work"] == plain["work"]
    read = decode_speed.token_bytes(ModelFolder(TINY_ANNIE))
    assert decode_speed.largest_bytes(
        read, decode_speed.DEVICES["gb10"], limited["min_tps"]
    ) == pytest.approx(4.5e6)
    assert "min_tps" not in plain


def test_other_answers_make_the_checkpoints_again(tmp_path, monkeypatch):
    answers = []

    def run(strategy, model, output, **settings):
        answers.append(settings["answers"])
        output.mkdir(parents=True, exist_ok=True)
        (output / "config.json").write_text("{}")
        return SimpleNamespace(size_bytes=1, source_bytes=2)

    monkeypatch.setattr(quantize, "run", run)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
    )
    for source in ("own", "own", "given"):
        directory = RunDirectory(tmp_path / "run")
        Stages(directory, TINY_ANNIE, rows, 4, SilentConsole(), answers=source).quantize("gptq")
    assert answers == ["own", "given"]


class FakeStages:
    """Stages without models. tables: strategy → {"smoke"?, "all": {numerics: {gate: (passes, n)}}}; None: it cannot be made."""

    def __init__(self, tables, tmp_path):
        self.tables, self.dir, self.rows, self.log, self.evaluated = tables, tmp_path, [], [], []
        self.model, self.conversations = tmp_path, tmp_path / "c.jsonl"
        self.console = SilentConsole()

    def quantize(self, strategy, draw=0):
        self.log.append(strategy)
        if self.tables[strategy] is None:
            from annie_quant.core.errors import UsageError

            raise UsageError("infeasible: at least 9 bits are needed")

    def audit(self, strategy, draw=0):
        return AuditResult("sound", {"ok": True, "summary": {}})

    def checkpoint(self, strategy):
        return self.dir / strategy

    def evaluate(self, name, checkpoint, workloads, **more):
        strategy, _, part = name.partition("-")
        entry = self.tables[strategy]
        gates = entry.get("smoke", both(factual=(1, 1))) if part == "smoke" else entry["all"]
        verdict, numerics = judged_sides(gates)
        files = SimpleNamespace(sha256=entry.get("sha256", ""))
        self.evaluated.append(strategy)
        return SimpleNamespace(
            numerics=numerics, members={}, verdict=verdict, checkpoint_files=files
        )


def numerics_result(gates):
    figures = dict.fromkeys(KLSummary.__struct_fields__[:14], 0.0) | {
        "n_tokens": 100,
        "mean": 0.01,
        "flips": 3,
    }
    return NumericsResult(
        gates={g: gate_row(g, *counts) for g, counts in gates.items()},
        kl=KLSummary(**figures),
        kl_conversations=None,
        kl_text=None,
        perplexity=1.0,
        perplexity_reference=1.0,
        same_answers=SameAnswers(n=10, same=9),
        verbosity_ratio=1.0,
        paired={g: PairedGate(n, n - passes, 0) for g, (passes, n) in gates.items()},
        cases=[],
        seconds=0.0,
    )


def search_tables(tmp_path, monkeypatch, tables, every=False, required=(), **limits):
    def measure_size(self, row):
        row.model_sha256 = (tables[row.strategy] or {}).get("sha256", "")
        row.size_bytes, row.bits_per_weight, row.read_bytes, row.predicted_tok_s = 1, 5.0, 1, 2.0
        row.predicted_first_token = PredictedFirstToken(
            device="GB10", server="vllm", prompt_tokens=2048, cached_tokens=0, ms=279.4,
            low_ms=226.1, high_ms=363.0,
        )  # fmt: skip

    monkeypatch.setattr(search.Search, "measure_size", measure_size)
    monkeypatch.setattr(search_diagnosis, "hardened", lambda *a: None)
    stages = FakeStages(tables, tmp_path)
    settings = search.SearchSettings(
        model=tmp_path,
        calib_data=tmp_path,
        output=tmp_path,
        every=every,
        required=required,
        **limits,
    )
    new = search.Search(stages, settings, list(tables), judge.load_workloads())
    new.try_strategies()
    return new.result, stages.log


def both(**gates):
    return {"w4a4": gates, "w4a16": gates}


def test_the_search_stops_at_the_first_that_passes_and_keeps_what_failed(tmp_path, monkeypatch):
    tables = {
        "naive": {"all": both(tool_call=(40, 100), factual=(100, 100))},
        "auto_mixed": None,
        "mlp_only": {"all": both(tool_call=(99, 100), factual=(100, 100))},
        "gptq": {"all": both(tool_call=(99, 100))},
    }
    result, log = search_tables(tmp_path, monkeypatch, tables)
    assert result.chosen == "mlp_only" and log == ["naive", "auto_mixed", "mlp_only"]
    assert [r.passed for r in result.strategies] == [False, False, True]
    assert "infeasible" in result.strategies[1].error
    page = (tmp_path / "search.md").read_text()
    for part in (
        "PASS: ship it",
        "infeasible",
        "tool calls lost 60 and won 0 of 100",
        "99/100 ✓ (-1.0: -4.4 to +1.7)",
        "| 279 (226 to 363) at 2",
    ):
        assert part in page, part
    everything, log = search_tables(tmp_path, monkeypatch, tables, every=True)
    assert everything.chosen == "mlp_only" and log[-1] == "gptq"


def test_two_budgets_that_choose_the_same_formats_are_evaluated_once(tmp_path, monkeypatch):
    lost, kept = both(tool_call=(10, 100)), both(tool_call=(99, 100))
    tables = {
        "best@1": {"all": lost, "sha256": "a"},
        "best@2": {"all": lost, "sha256": "a"},
        "best": {"all": kept, "sha256": "b"},
    }
    stages = FakeStages(tables, tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "FakeStages", lambda *of: stages)
    result, log = search_tables(tmp_path, monkeypatch, tables)
    first, second, third = result.strategies
    assert log == ["best@1", "best@2", "best"] and "best@2" not in stages.evaluated and third.passed
    assert second.strategy == "best@2" and second.path == [
        f"quantize → the same checkpoint as best@1: {first.outcome}"
    ]
    assert (second.outcome, second.numerics, second.verdict) == (
        first.outcome,
        first.numerics,
        first.verdict,
    )


def test_a_weight_only_checkpoint_is_not_evaluated_in_full_where_w4a4_is_required(
    tmp_path, monkeypatch
):
    weight_only = {
        "smoke": {"w4a16": {"factual": (1, 1)}},
        "all": {"w4a16": {"factual": (100, 100)}},
    }
    good = {"all": both(factual=(100, 100))}
    result, _ = search_tables(
        tmp_path, monkeypatch, {"direct": weight_only, "gptq": good}, required=("w4a4", "w4a16")
    )
    assert result.chosen == "gptq" and "weight-only" in result.strategies[0].outcome
    assert not any("n = 100" in step for step in result.strategies[0].path)


def test_a_weight_only_checkpoint_that_keeps_every_gate_is_chosen(tmp_path, monkeypatch):
    """`best` within more bytes rounds no input; a numerics that no server can give it does not count against it."""
    weight_only = {
        "smoke": {"w4a16": {"factual": (1, 1)}},
        "all": {"w4a16": {"factual": (100, 100)}},
    }
    lost = {"smoke": {"w4a16": {"factual": (1, 1)}}, "all": {"w4a16": {"factual": (60, 100)}}}
    result, log = search_tables(
        tmp_path,
        monkeypatch,
        {"best@1": lost, "best@2": weight_only, "gptq": both(factual=(100, 100))},
    )
    assert result.chosen == "best@2" and log[-1] == "best@2" and not result.strategies[0].passed
    assert search_outcome(result).startswith(
        "best@2 is the first to keep every gate under every numerics that it allows"
    )


def test_gibberish_is_followed_by_strategy_c(tmp_path, monkeypatch):
    broken = {"smoke": both(factual=(0, 1)), "all": both(factual=(0, 100))}
    good = {"all": both(factual=(100, 100))}
    result, log = search_tables(
        tmp_path, monkeypatch, {"naive": broken, "mlp_only": good, "auto_mixed": good}
    )
    assert log == ["naive", "auto_mixed"] and result.chosen == "auto_mixed"
    assert result.strategies[0].outcome == "gibberish"


def test_with_all_a_strategy_that_fails_the_smoke_question_is_evaluated_too(tmp_path, monkeypatch):
    """The spread over fine-tunes needs each draw of each strategy; one wrong answer must not leave a cell empty."""
    smoke, good = both(factual=(0, 1)), both(factual=(100, 100))
    result, log = search_tables(
        tmp_path, monkeypatch, {"naive": {"smoke": smoke, "all": good}}, every=True
    )
    row = result.strategies[0]
    assert log == ["naive"] and row.numerics["w4a4"].gates["factual"].n == 100
    assert row.outcome == "gibberish" and not row.passed and result.chosen is None
    assert "smoke question fails: W4A4 factual; W4A16 factual" in row.why[0]


def test_a_search_without_a_passing_strategy_reports_it(tmp_path, monkeypatch):
    result, _ = search_tables(tmp_path, monkeypatch, {"naive": {"all": both(tool_call=(10, 100))}})
    assert result.chosen is None and "None of 1 strategies" in search_outcome(result)
    assert result.strategies[0].outcome == "dropped at n = 30"


def stored_result(reference, rows):
    return SearchResult(
        chosen=None,
        stopped=None,
        required=[],
        command="annie-quant search",
        where="",
        n=100,
        notes=[],
        reference=reference,
        strategies=rows,
        seconds=1.0,
        version="0",
    )


def tried(name, error=None):
    return StrategyRow(name, False, "dropped", [], ["quantize"], {}, error=error)


def test_the_tree_names_what_bf16_itself_misses():
    passing = stored_result({"tool_call": gate_row("tool_call", 120, 120)}, [tried("best")])
    missing = stored_result({"tool_call": gate_row("tool_call", 0, 120)}, [tried("best")])
    assert search_text.tree(passing)[1].startswith("└── YES")
    assert search_text.tree(missing)[1].startswith(
        f"└── NO, not all: {wording.title('tool_call')} 0 of 120"
    )


def test_strategies_that_could_not_be_made_are_not_strategies_that_lose():
    none_made = stored_result({}, [tried("best", "too few tokens"), tried("naive", "no file")])
    assert search_text.outcome(none_made) == "None of 2 strategies could be made: too few tokens"
    one_made = stored_result({}, [tried("best"), tried("naive", "no file")])
    assert search_text.outcome(one_made) == (
        "None of 1 checkpoints keeps every gate under every numerics that it allows; "
        "1 more could not be made: no file"
    )


def test_prompts_that_no_checkpoint_can_keep_are_named_before_the_search():
    assert search.too_few_prompts({"tool_call": gate_row("tool_call", 200, 200)}) == []
    (note,) = search.too_few_prompts({"tool_call": gate_row("tool_call", 20, 20)})
    name = wording.title("tool_call")
    assert note.startswith(f"TOO FEW PROMPTS: without one changed answer {name} (n = 20)")


# ---- other libraries, and the time to the first token


def test_several_recipes_of_a_library_are_searched_at_once():
    names = ["gptq", "modelopt:NVFP4_AWQ_LITE_CFG", "modelopt:general/ptq/nvfp4_default-kv_fp8"]
    assert search.chosen_order(names) == names
    with pytest.raises(UsageError, match="modelopt:a/b and modelopt:a-b have one folder"):
        search.chosen_order(["modelopt:a/b", "modelopt:a-b"])


def test_a_recipe_is_an_option_and_names_a_folder(tmp_path, monkeypatch):
    calls = []

    def run(strategy, model, output, **options):
        calls.append((strategy, output.name, options))
        return quantize.QuantizeResult(strategy, str(output), 1.0, 1, 1, 1)

    monkeypatch.setattr(quantize, "run", run)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 8)
    limits = {"max_ttft_ms": 200.0, "prompt_tokens": 4096, "cached_tokens": 0, "device": "gb10"}
    stages = Stages(
        RunDirectory(tmp_path / "run"), TINY_ANNIE, rows, 4, SilentConsole(), best_options=limits
    )
    for name in ("modelopt:general/ptq/x", "llmcompressor:gptq", "best", "naive"):
        stages.quantize(name)
    strategies, folders, options = zip(*calls, strict=True)
    assert strategies == ("modelopt", "llmcompressor", "best", "naive")
    assert folders == ("modelopt-general-ptq-x", "llmcompressor-gptq", "best", "naive")
    assert options[0]["config"] == "general/ptq/x" and options[1]["recipe"] == "gptq"
    assert limits.items() <= options[2].items() and "max_ttft_ms" not in options[3]


def test_a_checkpoint_whose_first_token_is_too_late_is_not_chosen(tmp_path, monkeypatch):
    """The predictions are 279 ms."""
    kept = {"all": both(tool_call=(99, 100))}
    tables = {"naive": kept, "mlp_only": kept}
    result, _ = search_tables(tmp_path, monkeypatch, tables, max_ttft_ms=250.0)
    assert result.chosen is None
    assert [row.outcome for row in result.strategies] == ["too slow", "too slow"]
    assert result.strategies[0].why == ["first token after 279 ms as predicted, at most 250"]
    assert not result.strategies[0].numerics  # it is not evaluated
    result, _ = search_tables(tmp_path, monkeypatch, tables, max_ttft_ms=250.0, every=True)
    assert result.chosen is None and result.strategies[0].numerics
    result, _ = search_tables(tmp_path, monkeypatch, tables, max_ttft_ms=280.0)
    assert result.chosen == "naive"


def test_the_prompt_of_a_search_fits_the_model(tmp_path):
    for options, message in (
        ({"prompt_tokens": 10**6}, "its context is"),
        ({"prompt_tokens": 100, "cached_tokens": 100}, "100 cached of 100 prompt tokens"),
    ):
        settings = search.SearchSettings(
            model=TINY_ANNIE, calib_data=tmp_path, output=tmp_path / "run", **options
        )
        with pytest.raises(UsageError, match=message):
            search.run(settings, SilentConsole())
    assert not (tmp_path / "run").exists()
