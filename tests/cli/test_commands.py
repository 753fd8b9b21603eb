"""The command line: help for every command, exit codes, one line on stderr for expected errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import CliRunner, annie_quant, options_of
from paths import TINY_ANNIE

from annie_quant import cli as cli_package
from annie_quant import judge
from annie_quant.cli import app as cli
from annie_quant.core.errors import UsageError

COMMANDS = [
    "demo",
    "data",
    "quantize",
    "search",
    "audit",
    "convert",
    "compare",
    "eval",
    "validate-gpu",
    "serve",
    "doctor",
    "bench",
    "report",
]


def own_process(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "annie_quant", *args], capture_output=True, text=True
    )


def test_the_promised_commands_are_there() -> None:
    assert set(COMMANDS) <= set(cli)


def test_the_command_line_loads_no_benchmark_before_a_command_needs_one() -> None:
    code = "import sys, annie_quant.cli; print([n for n in sys.modules if n.startswith(('annie_quant.bench', 'torch'))])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "[]"
    )


def test_bars_of_transformers_are_off_before_an_estimate_imports_it(monkeypatch, tmp_path) -> None:
    """tqdm reads the variable once, when it is imported."""
    from annie_quant.quantize import estimates

    seen: list[str | None] = []

    def refuse(*_: object, **__: object) -> None:
        seen.append(os.environ.get("TQDM_DISABLE"))
        raise UsageError("stop here")

    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(estimates, "is_large", lambda model: True)
    monkeypatch.setattr(estimates, "estimate", refuse)
    words = ("quantize", "--strategy", "direct", "--model", str(TINY_ANNIE))
    assert annie_quant(*words, "--output", str(tmp_path / "out")).returncode == 2
    assert seen == ["1"]


@pytest.mark.parametrize("name", sorted(cli_package.COMMANDS))
def test_every_command_has_a_help_text(name: str) -> None:
    assert cli[name].help
    undescribed = [
        option for option, argument in options_of(name).items() if not argument.parameter.help
    ]
    assert undescribed == []
    shown = CliRunner().invoke(cli, [name, "--help"])
    assert shown.exit_code == 0 and "Usage:" in shown.output


def test_the_list_of_commands_has_whole_sentences_in_80_columns() -> None:
    shown = CliRunner().invoke(cli, ["--help"]).output
    assert max(map(len, shown.splitlines())) <= 80
    text = "".join(shown.replace("│", "").split())  # a line may end in a word's hyphen
    for name in cli_package.COMMANDS:
        first_sentence = cli[name].help.split("\n\n")[0].split(". ")[0].rstrip(".")
        assert f"{name}{''.join(first_sentence.split())}." in text


def test_an_unknown_option_is_a_usage_error_on_stderr() -> None:
    done = annie_quant("quantize", "--stratgy", "naive")
    assert done.returncode == 2 and done.stdout == "" and "--strategy" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [(["nothere"], 3, "nothere: not there"), ([], 2, "CHECKPOINT requires an argument")],
)
def test_an_error_is_also_one_json_object(words: list[str], code: int, message: str) -> None:
    done = annie_quant("audit", *words, "--json")
    result = json.loads(done.stdout)
    assert (
        done.returncode == result["exit_code"] == code
        and message in result["error"]
        and message in done.stderr
    )


def test_a_folder_without_a_model_is_a_one_line_error_with_exit_3(tmp_path: Path) -> None:
    done = own_process(
        "quantize",
        "--strategy",
        "naive",
        "--model",
        str(tmp_path),
        "--output",
        str(tmp_path / "out"),
    )
    assert done.returncode == 3
    assert "no config.json" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_unknown_strategy_lists_the_known_ones(tmp_path: Path) -> None:
    done = annie_quant(
        "quantize",
        "--strategy",
        "magic",
        "--model",
        str(tmp_path),
        "--output",
        str(tmp_path / "out"),
    )
    assert done.returncode == 2 and "naive" in done.stderr and "mlp_only" in done.stderr


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["serve", "x.gguf", "--runtime", "magic"], "llama.cpp, sglang, vllm"),
        (["data", "--teacher", "magic"], "claude-cli, offline, openai"),
    ],
)
def test_an_unknown_part_lists_the_names_of_the_help(words: list[str], names: str) -> None:
    outcome = CliRunner().invoke(cli, words)
    assert (
        isinstance(outcome.exception, UsageError)
        and outcome.exception.hint == f"choose one of: {names}"
    )
    help_text = CliRunner().invoke(cli, [words[0], "--help"]).output
    assert all(name in help_text for name in names.split(", "))


def test_an_audit_of_an_empty_folder_names_it_and_counts_one_finding(tmp_path: Path) -> None:
    done = annie_quant("audit", str(tmp_path))
    assert done.returncode == 1 and done.stdout.splitlines()[0] == str(tmp_path)
    assert "1 finding;" in done.stdout


def test_a_quantize_prints_one_time(tmp_path: Path) -> None:
    done = annie_quant(
        "quantize",
        "--strategy",
        "direct",
        "--model",
        str(TINY_ANNIE),
        "--output",
        str(tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\d s\b", done.stderr)) == 1, done.stderr


def test_an_existing_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "keep.txt").write_text("mine")
    done = annie_quant(
        "quantize",
        "--strategy",
        "naive",
        "--model",
        str(tmp_path / "model"),
        "--output",
        str(tmp_path / "out"),
    )
    assert done.returncode == 2 and "--force" in done.stderr
    assert (tmp_path / "out" / "keep.txt").read_text() == "mine"


def test_doctor_prints_one_json_object_and_nothing_else() -> None:
    import json

    done = own_process("doctor", "--json")
    findings = json.loads(done.stdout)["findings"]
    assert {f["check"] for f in findings} >= {
        "python",
        "_nvfp4",
        "_stream",
        "gpu",
        "memory",
        "disk",
    }
    assert all(f["fix"] for f in findings if f["level"] == "fault")


def test_eval_passes_its_batch_size_to_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="evaluating needs torch")
    from command_line import CliRunner

    from annie_quant.offline import evaluation
    from annie_quant.offline.pair import EvaluationJob

    requests: list[int | None] = []
    verdicts = ["keeps"]

    def run(settings: EvaluationJob, *_: object) -> SimpleNamespace:
        requests.append(settings.rows)
        gate = {"verdict": "pass", "passes": 2, "n": 2, "low": 0.3, "high": 1.0}
        verdict = SimpleNamespace(verdict=verdicts[-1])
        document = {"numerics": {"bf16": {"gates": {"factual": gate}}}}
        return SimpleNamespace(verdict=verdict, notes=[], blocking=[], to_dict=lambda: document)

    monkeypatch.setattr(evaluation, "run", run)
    tiny = str(TINY_ANNIE)
    for words in (["--rows", "16"], []):
        done = CliRunner().invoke(cli, ["eval", tiny, "--reference", tiny, "--json", *words])
        assert done.exit_code == 0, done.output
    assert requests == [16, None], "the engine knows how many fit"
    assert (
        CliRunner().invoke(cli, ["eval", tiny, "--reference", tiny, "--rows", "0"]).exit_code == 2
    )
    for verdict, code in {"keeps": 0, "undecided": 0, "loses": 1, "fragile": 1}.items():
        verdicts.append(verdict)
        assert (
            CliRunner().invoke(cli, ["eval", tiny, "--reference", tiny, "--json"]).exit_code == code
        )


def test_eval_predicts_the_first_token_of_the_prompt_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch", reason="evaluating needs torch")
    from command_line import CliRunner

    from annie_quant.offline import evaluation

    def run(*_: object) -> SimpleNamespace:
        verdict = SimpleNamespace(verdict="keeps")
        return SimpleNamespace(verdict=verdict, notes=[], blocking=[], to_dict=dict)

    monkeypatch.setattr(evaluation, "run", run)
    command = ["eval", str(TINY_ANNIE), "--reference", str(TINY_ANNIE), "--json"]
    times = []
    for words in (["512"], ["1024"], ["1024", "--cached-tokens", "512"]):
        done = CliRunner().invoke(cli, [*command, "--prompt-tokens", *words])
        assert done.exit_code == 0, done.output
        predicted = json.loads(done.stdout)["predicted_first_token"]
        times.append((predicted["prompt_tokens"], predicted["cached_tokens"], predicted["ms"]))
    assert [row[:2] for row in times] == [(512, 0), (1024, 0), (1024, 512)]
    assert times[0][2] < times[2][2] < times[1][2]
    for words, message in (
        (["--prompt-tokens", "1000000"], "its context is"),
        (["--cached-tokens", "5000"], "5,000 cached of"),
    ):
        done = CliRunner().invoke(cli, [*command, *words])
        assert isinstance(done.exception, UsageError) and message in done.exception.message
    done = CliRunner().invoke(cli, [*command, "--prompt-tokens", "0"])
    assert done.exit_code == 2 and "Must be >= 1" in done.output


@pytest.mark.parametrize(
    "words",
    [
        ["eval", ".", "--reference", "."],
        ["search", "--model", ".", "--calib-data", "x", "--output", "y"],
    ],
)
def test_no_prompts_are_an_error_and_no_empty_table(words: list[str]) -> None:
    from command_line import CliRunner

    done = CliRunner().invoke(cli, [*words, "--n", "0"])
    assert done.exit_code == 2 and "Must be >= 1" in done.output


def test_no_prompts_are_an_error_from_python() -> None:
    with pytest.raises(UsageError, match="1 or more, got 0"):
        judge.sample(judge.load_workloads(["factual"]), 0)


def test_a_prompt_that_cannot_be_read_is_named_with_the_form_that_is_expected(tmp_path):
    (tmp_path / "prompt.bin").write_bytes(b"\xff\xfe\x00")
    for path, reason in (
        (tmp_path / "missing", "No such file"),
        (tmp_path / "prompt.bin", "codec can't decode"),
    ):
        outcome = CliRunner().invoke(
            cli, ["init", "--prompt", str(path), "--output", str(tmp_path / "out")]
        )
        assert reason in outcome.exception.message and "Errno" not in outcome.exception.message
        assert "UTF-8" in outcome.exception.hint


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("search --model m --calib-data c --calib-samples 0", "Must be >= 1"),
        ("bench --backend-a x http://localhost:9 --budget-s -1", "Must be > 0"),
        ("bench --backend-a x http://localhost:9 --runs 0", "Must be >= 1"),
        ("bench --backend-a x http://localhost:9 --concurrency 1.5", "not a list of whole numbers"),
        ("bench --backend-a x http://localhost:9 --rate a", "not a list of numbers"),
        ("bench --backend-a x http://localhost:9 --concurrency ,", "an empty list"),
        ("quantize --strategy best --model m --max-gb -1", "Must be > 0"),
    ],
)
def test_a_number_out_of_range_is_refused_before_anything_is_read(
    words: str, message: str, tmp_path: Path
) -> None:
    done = annie_quant(*words.split(), "--output", str(tmp_path / "out"))
    assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [("serve", "stopped"), ("bench", "finished work is saved"), ("audit", "interrupted\n")],
)
def test_an_interrupt_says_what_is_saved(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli_package._report_interrupt(command)
    printed = capsys.readouterr().err
    assert message in printed
    assert ("saved" in printed) == (command == "bench")


def test_an_option_that_is_repeated_counts_as_it_was_written_last(tmp_path: Path) -> None:
    output = tmp_path / "c.jsonl"
    options = ["--persona", "nobody", "--persona", "annie", "--n", "30", "--output", str(output)]
    done = own_process("data", *options)
    assert done.returncode == 0, done.stderr
    assert len(output.read_text().splitlines()) == 30
