"""Prompts without answers, mixtures, and rows that a model cannot use, through `quantize` on tiny-annie."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import annie_quant
from paths import CALIBRATION, DATA, TINY_ANNIE

from annie_quant import quantize
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import SILENT
from annie_quant.data.init_folder import offline_rows
from annie_quant.data.model_rows import write_rows
from annie_quant.data.rows import read_conversations
from annie_quant.documents import RECIPE_FILE
from annie_quant.documents.persona import load_persona
from annie_quant.quantize.rates import SPARK_RATES

torch = pytest.importorskip("torch", reason="calibration runs in torch")
pytest.importorskip("transformers", reason="answers are found with the model's tokenizer")
from annie_quant.data.behaviours import Mixture  # noqa: E402
from annie_quant.offline.model_answers import ModelAnswers  # noqa: E402
from annie_quant.offline.prompts import Template, answers_of_row  # noqa: E402
from annie_quant.quantize import calibration_text, estimates, own_answers  # noqa: E402
from annie_quant.quantize.calibration_text import text_of_rows  # noqa: E402

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(file: Path, rows: list[Row]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def job_of(file: Path, **more: Any) -> quantize.Job:
    return quantize.Job(TINY_ANNIE, file.with_suffix(".out"), file, work=file.parent / "w", **more)


def one_answer_rows(n: int) -> list[Row]:
    """Return conversations up to their first answer."""
    rows = []
    for row in read_conversations(CALIBRATION)[:n]:
        roles = [m["role"] for m in row["messages"]]
        end = roles.index("assistant") + 1
        rows.append({**row, "messages": row["messages"][:end]})
    return rows


def prompts_of(rows: list[Row]) -> list[Row]:
    return [{**row, "messages": row["messages"][:-1]} for row in rows]


def checkpoint_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def test_prompts_alone_give_the_checkpoint_of_their_own_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompts with labels that the model would never write are calibrated on the same answers."""
    labelled = one_answer_rows(6)
    for row in labelled:
        row["messages"][-1] = {"role": "assistant", "content": "jars jars jars"}
    files = {
        "labelled": write(tmp_path / "labelled.jsonl", labelled),
        "prompts": write(tmp_path / "prompts.jsonl", prompts_of(labelled)),
    }
    results = {}
    for name, file in files.items():
        output = tmp_path / name
        quantize.run("gptq", TINY_ANNIE, output, calib_data=file)
        results[name] = checkpoint_bytes(output)
        use = json.loads((output / RECIPE_FILE).read_text())["calibration"]
        assert use["own_answers"] == use["conversations"] == 6
    assert results["labelled"] == results["prompts"]


def test_prompts_alone_with_the_files_answers_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "prompts.jsonl", prompts_of(one_answer_rows(4)))
    output = tmp_path / "out"
    words = ["--strategy", "gptq", "--model", str(TINY_ANNIE), "--calib-data", str(file)]
    done = annie_quant("quantize", *words, "--answers", "given", "--output", str(output))
    assert done.returncode == 2
    error, hint = done.stderr.strip().splitlines()[-2:]
    assert "only 0 of 4 conversations" in error
    assert "--answers own lets the model answer" in hint
    assert not output.exists()


def test_a_prompt_whose_own_answer_does_not_end_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = one_answer_rows(6)
    for row in rows:
        row["messages"][-1] = {"role": "assistant", "content": "Hi"}
    monkeypatch.setattr(own_answers, "_MAX_ANSWER_TOKENS", 3)
    file = write(tmp_path / "mixed.jsonl", [*rows[:4], *prompts_of(rows[4:])])
    use = calibration_text.read_answers(job_of(file), SILENT).use
    assert (use.conversations, use.of) == (4, 6)
    (left_out,) = [line for line in use.left_out if "own answer has more than" in line]
    assert left_out.startswith("2 prompts without an answer")


def test_an_estimate_counts_prompts_without_answers(tmp_path: Path) -> None:
    rows = prompts_of(one_answer_rows(5))
    use = text_of_rows(TINY_ANNIE, rows, with_open=True).use
    assert use.conversations == 5
    assert use.behaviour_line() == "5 no answer yet"
    with pytest.raises(UsageError, match="only 0 of 5"):
        text_of_rows(TINY_ANNIE, rows)
    file = write(tmp_path / "prompts.jsonl", rows)
    words = ["--strategy", "gptq", "--model", str(TINY_ANNIE), "--calib-data", str(file)]
    done = annie_quant("quantize", *words, "--dry-run", "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "5 of 5 conversations" in done.stdout
    assert "  answers 5 no answer yet" in done.stdout


def test_the_time_of_own_answers_follows_their_number(tmp_path: Path) -> None:
    """A conversation of five turns has five answers; the file's answers take no time."""
    rates = replace(SPARK_RATES, float32_flop_s=SPARK_RATES.cpu_flop_s)
    assert rates.on_cpu
    (turns, *_) = [r["messages"] for r in read_conversations(CALIBRATION) if len(r["messages"]) > 8]
    assert sum(m["role"] == "assistant" for m in turns) == 5
    seconds = []
    for number, messages in enumerate((turns, [*turns[:2], *turns[-1:]])):
        file = write(tmp_path / f"{number}.jsonl", [{"messages": messages}])
        estimate = estimates.estimate(TINY_ANNIE, "gptq", rates=rates, calib_data=file)
        seconds.append(estimate.seconds["own answers"])
        given = estimates.estimate(
            TINY_ANNIE, "gptq", rates=rates, calib_data=file, answers="given"
        )
        assert "own answers" not in given.seconds
    assert 2 < seconds[0] / seconds[1] < 5


def test_the_record_names_what_the_used_answers_do(tmp_path: Path) -> None:
    rows = read_conversations(CALIBRATION)
    template = Template(TINY_ANNIE)
    n_answers = sum(len(answers_of_row(template, row)) for row in rows)
    use = text_of_rows(TINY_ANNIE, rows).use
    counts = {b.name: b.answers for b in use.behaviours}
    labels: dict[str, int] = {}
    for row in rows:
        for message in row["messages"]:
            for call in message.get("tool_calls") or ():
                name = f"calls {call['function']['name']}"
                labels[name] = labels.get(name, 0) + 1
    assert {name: n for name, n in counts.items() if name.startswith("calls ")} == labels
    assert sum(counts.values()) == n_answers
    assert counts["answers from a result"] == sum(
        row["messages"][i]["role"] == "assistant" and row["messages"][i - 1]["role"] == "tool"
        for row in rows
        for i in range(1, len(row["messages"]))
    )


def test_weights_reach_the_samples_and_the_record() -> None:
    mixture = Mixture(gates={"declines": 3}, factors={"calls": 4.0})
    text = text_of_rows(TINY_ANNIE, read_conversations(CALIBRATION), mixture=mixture)
    weights = {b.name: b.weight for b in text.use.behaviours}
    for sample in text.samples:
        assert sample.weight == pytest.approx(weights[sample.behaviour], abs=1e-4)
    calls = next(w for name, w in weights.items() if name.startswith("calls "))
    assert calls == pytest.approx(4 * weights["talk"], rel=1e-3)
    mean = sum(s.weight for s in text.samples) / len(text.samples)
    assert mean == pytest.approx(1)
    assert "the gates: 3 declines" in text.use.behaviour_line()
    assert "weights: calls " in text.use.behaviour_line()


def test_a_mixture_changes_the_checkpoint_and_none_does_not(tmp_path: Path) -> None:
    file = write(tmp_path / "c.jsonl", read_conversations(CALIBRATION)[::5])
    results = {}
    for mixture in ("given", "calls=1", "calls=0.2"):
        output = tmp_path / mixture
        quantize.run("gptq", TINY_ANNIE, output, calib_data=file, answers="given", mixture=mixture)
        results[mixture] = checkpoint_bytes(output)
        assert json.loads((output / RECIPE_FILE).read_text())["mixture"] == mixture
    assert results["given"] == results["calls=1"] != results["calls=0.2"]


def test_a_mixture_is_refused_where_no_answers_are_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="naive reads whole conversations") as error:
        quantize.run(
            "naive", TINY_ANNIE, tmp_path / "out", calib_data=CALIBRATION, mixture="calls=2"
        )
    assert "gptq" in error.value.hint
    assert not (tmp_path / "out").exists()


def test_thinking_of_rows_is_left_out_and_named_where_the_model_does_not_think(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY_ANNIE, folder)
    template = folder / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    user = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."}
    rows = [{"messages": [user, answer], "thinking": True}, {"messages": [user, answer]}]
    file = write(tmp_path / "c.jsonl", rows)
    text = text_of_rows(folder, read_conversations(file))
    assert text.samples[0].ids == text.samples[1].ids
    assert text.samples[0].kinds == text.samples[1].kinds, "the answer is not thinking"
    assert text.use.left_out == [
        "1 thought (thinking is on in these rows, and the chat template has none, first in c.jsonl, line 1)"
    ]
    assert text_of_rows(TINY_ANNIE, rows).use.left_out == []


def test_thinking_is_counted_where_the_model_thinks() -> None:
    user = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."}
    rows = [{"messages": [user, answer], "thinking": True}, {"messages": [user, answer]}]
    counts = {b.name: b.answers for b in text_of_rows(TINY_ANNIE, rows).use.behaviours}
    assert counts == {"talk": 2, "thinks": 1}


def test_rows_that_the_model_wrote_stay_and_those_of_templates_do_not(tmp_path: Path) -> None:
    """`init --model` and the offline teacher's rows go through the same pass before calibration."""
    persona = load_persona("annie")
    model = ModelAnswers(TINY_ANNIE)
    try:
        written = write_rows(persona, model, 8, 0, SILENT).rows
    finally:
        model.close()
    drawn = offline_rows(load_persona(str(DATA / "personas" / "library.json")), 6, 0)
    tokenizer = Template(TINY_ANNIE).tokenizer
    uses = []
    texts = []
    for number, rows in enumerate((written, drawn)):
        file = write(tmp_path / f"{number}.jsonl", [dict(row) for row in rows])
        for answers in ("given", "own"):
            text = calibration_text.read_answers(job_of(file, answers=answers), SILENT)
            texts.append([tokenizer.decode(sample.answer) for sample in text.samples])
        uses.append(text.use)
    # A garbled word may have other tokens when it is read than when it is written.
    assert texts[0] == texts[1]
    assert uses[0].given_answers >= 0.8 * uses[0].n_answers
    assert texts[2] != texts[3]
    assert uses[1].own_answers > 0


def test_logged_requests_without_answers_are_calibrated_on(tmp_path: Path) -> None:
    """Through a log's form, `init` and `quantize`, with the command lines that a user has."""
    questions = [f"What is the capital of {name}?" for name in ("Peru", "Chad", "Oman", "Laos")]
    questions += [
        f"Do I have {n} notes about the garden {w}?" for n, w in ((3, "walk"), (4, "tea"))
    ]
    lines = [
        json.dumps({"request": {"messages": [{"role": "user", "content": text}]}})
        for text in questions
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Be brief.")
    mine = tmp_path / "mine"
    words = ["--prompt", str(prompt), "--logs", str(tmp_path / "log.jsonl"), "--output", str(mine)]
    assert annie_quant("init", *words).returncode == 0
    output = tmp_path / "out"
    words = ["--model", str(TINY_ANNIE), "--calib-data", str(mine / "calibration.jsonl")]
    done = annie_quant("quantize", "--strategy", "gptq", *words, "--output", str(output))
    assert done.returncode == 0, done.stderr
    use = json.loads((output / RECIPE_FILE).read_text())["calibration"]
    assert use["own_answers"] == use["conversations"] > 0
    assert sum(b.get("answers", 0) for b in use["behaviours"]) == use["own_answers"]
