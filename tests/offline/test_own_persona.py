"""The line for a model and persona of the user's own: logs → init → quantize → eval, and what it names instead of failing."""

from __future__ import annotations

import json
import shutil

import own_files
import pytest
from command_line import CliRunner
from paths import TINY_ANNIE
from tiny_variants import save_variant

torch = pytest.importorskip(
    "torch", reason="the line needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the line needs transformers: pip install annie-quant[quantize]"
)
pytest.importorskip("annie_quant.nvfp4", reason="the line needs the codec")

from annie_quant.cli import app as cli  # noqa: E402
from annie_quant.judge.gates import REFERENCE_GATES  # noqa: E402
from annie_quant.offline.evaluation import evaluate  # noqa: E402


def command(*arguments):
    outcome = CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)
    return outcome.exit_code, outcome.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "unseen"
    own_files.write_model(folder)
    return folder


@pytest.fixture(scope="module")
def given(tmp_path_factory):  # language: data
    """A system prompt, tools and 200 logged chats, as a user has them."""
    folder = tmp_path_factory.mktemp("own")
    own_files.write_logs(folder)
    return folder


@pytest.fixture(scope="module")
def mine(given):  # language: data
    code, _ = command(
        "init", "--prompt", given / "prompt.txt", "--tools", given / "tools.json", "--logs", given / "chats.jsonl",
        "--output", given / "mine",
    )  # fmt: skip
    assert code == 0
    return given / "mine"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_variant("base", tmp_path_factory.mktemp("base") / "tiny-base")


def test_from_200_chats_to_a_verdict_in_three_commands(model, mine, tmp_path):
    code, _ = command(
        "quantize", "--strategy", "direct", "--model", model, "--calib-data", mine / "calibration.jsonl",
        "--persona", mine, "--output", tmp_path / "q",
    )  # fmt: skip
    assert code == 0
    code, out = command(
        "eval", tmp_path / "q", "--reference", model, "--persona", mine, "--n", 20, "--json"
    )
    result = json.loads(out)
    (side,) = result["numerics"].values()
    assert set(result["workloads"]) == {"answers", "calls", "results"}
    deciding = {name: g for name, g in side["gates"].items() if not g["advisory"]}
    assert set(deciding) <= {*REFERENCE_GATES, "call_rate", "logged_tool"}
    assert deciding["same_tool"]["n"] >= 20 and deciding["same_tool"]["verdict"] != "fail"
    assert code == (1 if result["verdict"]["verdict"] in ("loses", "fragile") else 0)
    # bf16 passes a gate that compares with its own answers by definition, in every member of the ensemble
    bf16 = result["reference_gates"]
    members = [side, *result["members"].values()]
    assert len(members) > 2
    for member in members:
        gates = {name: pair for name, pair in member["paired"].items() if name in REFERENCE_GATES}
        assert {"same_tool", "same_arguments", "same_length"} <= set(gates)
        assert all(
            pair["n"] <= bf16[name]["passes"] == bf16[name]["n"] for name, pair in gates.items()
        )
        # "lost" are changes that bf16's own second arithmetic does not make
        assert all(
            pair["lost"] <= sum(member["outcomes"][name].count(c) for c in "0-")
            for name, pair in gates.items()
        )


def test_a_model_that_lost_its_manners_fails_the_gates_without_labels(base, mine):
    """Negative control: tiny-annie changed back towards its base, judged against tiny-annie's own answers."""
    result = evaluate(base, TINY_ANNIE, persona=mine, n_per_gate=16, rows=64, with_ensemble=False)
    gates = result["numerics"]["bf16"]["gates"]
    assert result["verdict"]["verdict"] == "loses"
    assert gates["same_tool"]["verdict"] == "fail" and gates["same_markdown"]["verdict"] == "fail"


def test_a_base_model_as_the_reference_is_named_and_not_a_failure_of_quantizing(base, mine):
    result = evaluate(
        base,
        base,
        persona=mine,
        workloads=[mine / "workloads" / "calls.json"],
        n_per_gate=12,
        rows=64,
        with_ensemble=False,
    )
    assert any("bf16 calls no tool in" in line and "base model" in line for line in result["notes"])
    gates = result["numerics"]["bf16"]["gates"]
    assert all(g["verdict"] != "fail" for g in gates.values() if not g["advisory"])
    assert {pair["lost"] for pair in result["numerics"]["bf16"]["paired"].values()} == {0}
    assert result["verdict"]["verdict"] in ("keeps", "undecided")


def test_a_chat_template_without_tools_is_named(model, mine, tmp_path):
    shutil.copytree(model, tmp_path / "m", ignore=shutil.ignore_patterns(".annie_quant"))
    path = tmp_path / "m" / "chat_template.jinja"
    path.write_text(path.read_text().replace("{%- if tools %}", "{%- if false %}"))
    result = evaluate(
        tmp_path / "m", tmp_path / "m", persona=mine, workloads=[mine / "workloads" / "calls.json"], n_per_gate=5,
        with_ensemble=False,
    )  # fmt: skip
    assert any("chat template leaves out the tools" in line for line in result["notes"])


def test_the_line_for_a_built_in_persona(tmp_path):
    """Data, workloads and labels of each persona: calibration_data/test_own_persona.py."""
    assert (
        command("data", "--persona", "support", "--n", 60, "--output", tmp_path / "d.jsonl")[0] == 0
    )
    assert (
        command("data", "--check", "--persona", "support", "--output", tmp_path / "d.jsonl")[0] == 0
    )
    code, _ = command(
        "quantize", "--strategy", "direct", "--model", TINY_ANNIE, "--calib-data", tmp_path / "d.jsonl",
        "--persona", "support", "--output", tmp_path / "q",
    )  # fmt: skip
    assert code == 0
    result = evaluate(
        tmp_path / "q", TINY_ANNIE, persona="support", n_per_gate=2, with_ensemble=False
    )
    (side,) = result["numerics"].values()
    assert {"no_tool", "tool_calls", "tool_results"} <= set(result["workloads"])
    assert (
        side["gates"]["same_tool"]["n"] >= 2 and side["gates"]["same_tool"]["basis"] == "reference"
    )


def test_the_command_takes_as_many_prompts_as_bf16s_answers_ask_for(mine, monkeypatch, tmp_path):
    """How many that is, is tested in tests/cli/test_search_own.py."""
    from annie_quant.offline import evaluation

    received = []
    monkeypatch.setattr(
        evaluation, "prompts_per_gate", lambda n, reference: received.append(reference) or 2 * n
    )
    code, out = command(
        "eval", TINY_ANNIE, "--reference", TINY_ANNIE, "--persona", mine, "--workloads", mine / "workloads" / "answers.json",
        "--n", 4, "--json",
    )  # fmt: skip
    assert code == 0 and json.loads(out)["workloads"]["answers"]["n_cases"] == 8
    assert received[0]["same_markdown"].n == 4
