"""Which calibration conversations are used: whole rows up to a limit, named in one line, never fewer than half."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from paths import CALIBRATION, TINY_ANNIE

from annie_quant import quantize
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import SILENT
from annie_quant.data.rows import read_conversations

torch = pytest.importorskip("torch", reason="calibration runs in torch")
pytest.importorskip("transformers", reason="answers are found with the model's tokenizer")
from annie_quant.offline.prompts import Template  # noqa: E402
from annie_quant.quantize import calibration_text  # noqa: E402
from annie_quant.quantize.calibration_text import most_shared_prefix, text_of_rows  # noqa: E402

Row = dict[str, Any]


def rows_with_prompt(tokens: int, count: int = 12) -> list[Row]:
    """Return conversations with one system prompt of about `tokens` tokens."""
    rows = read_conversations(CALIBRATION)[:count]
    system = {"role": "system", "content": "the rule is to be kept " * (tokens // 10)}
    return [
        {**row, "messages": [system, *(m for m in row["messages"] if m["role"] != "system")]}
        for row in rows
    ]


def write(file: Path, rows: list[Row]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_prompts_beyond_two_thousand_tokens_are_used_whole() -> None:
    rows = rows_with_prompt(3000)
    text = text_of_rows(TINY_ANNIE, rows)
    assert text.use.conversations == text.use.of == len(rows)
    template = Template(TINY_ANNIE)
    for sample in text.samples:
        assert len(sample.ids) > 2048
        assert sample.answer[-1] in template.end_tokens
        assert sample.ids[len(sample.prompt) :] == sample.answer[:-1]
    assert text.use.prefix > 2900
    sharing = sum(
        not row.get("tools") for row in rows
    )  # the template writes tools before the prompt
    assert text.use.prefix_conversations == sharing
    assert text.use.computed < 0.2 * text.use.tokens
    assert text.use.line().startswith("12 of 12 conversations, ")
    assert f"prefix of {text.use.prefix:,} shared by {sharing}" in text.use.line()


def test_the_limit_is_the_context_unless_it_is_given(tmp_path: Path) -> None:
    rows = rows_with_prompt(5000)
    with pytest.raises(UsageError, match="only 0 of 12 conversations") as error:
        text_of_rows(TINY_ANNIE, rows)
    assert "12 longer than the model's context of 4,096 tokens" in error.value.message
    longest = int(error.value.hint.split()[1])
    assert error.value.hint.startswith("--calib-tokens ")
    assert text_of_rows(TINY_ANNIE, rows, longest).use.conversations == 12
    with pytest.raises(UsageError):
        text_of_rows(TINY_ANNIE, rows, longest // 2)


def test_a_few_long_rows_are_left_out_and_named() -> None:
    rows = [*rows_with_prompt(300, 10), *rows_with_prompt(5000, 2)]
    use = text_of_rows(TINY_ANNIE, rows).use
    assert (use.conversations, use.of) == (10, 12)
    assert use.left_out == [
        "2 longer than the model's context of 4,096 tokens (--calib-tokens)",
    ]
    assert use.line().endswith(f"left out: {use.left_out[0]}")


def test_the_longest_rows_are_left_out_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [*rows_with_prompt(300, 10), *rows_with_prompt(3000, 2)]
    for positions, conversations in ((100_000, 12), (2500, 10)):
        monkeypatch.setattr(calibration_text, "affordable_positions", lambda _, n=positions: n)
        use = text_of_rows(TINY_ANNIE, rows).use
        assert use.conversations == conversations
        assert use.computed <= positions
    assert "2 longer than what half of the free memory holds" in use.line()
    monkeypatch.setattr(calibration_text, "affordable_positions", lambda _: 50)
    with pytest.raises(UsageError) as error:
        text_of_rows(TINY_ANNIE, rows)
    assert error.value.hint.startswith("--calib-samples")


@pytest.mark.parametrize("strategy", ["naive", "gptq", "awq_lite"])
def test_what_was_used_is_reported_and_stored(strategy: str, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", rows_with_prompt(2500, 5))
    lines: list[str] = []
    out = tmp_path / "out"
    result = quantize.run(strategy, TINY_ANNIE, out, file, calib_samples=4, report=lines.append)
    used = json.loads((out / "annie_quant.json").read_text())["calibration"]
    assert (used["conversations"], used["of"]) == (4, 4)
    assert used["limit"] == 4096
    reported = [line for line in lines if line.startswith("calibration: ")]
    assert len(reported) == 1
    assert result.notes == reported
    assert f"4 of 4 conversations, {used['tokens']:,} tokens" in reported[0]
    assert "--calib-samples 4 of 5 in the file" in reported[0]


def test_no_checkpoint_is_written_from_fewer_than_half(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [*rows_with_prompt(30, 2), *rows_with_prompt(5000, 3)])
    with pytest.raises(UsageError, match="only 2 of 5 conversations"):
        quantize.run("naive", TINY_ANNIE, tmp_path / "out", calib_data=file)
    assert not (tmp_path / "out").exists()


def changed_template(folder: Path, old: str, new: str) -> Path:
    for file in TINY_ANNIE.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    template = folder / "chat_template.jinja"
    source = template.read_text()
    assert old in source
    template.write_text(source.replace(old, new))
    return folder


def test_an_answer_that_is_not_located_is_explained(tmp_path: Path) -> None:
    """The reason is the template's, not eos_token_id, unless that lacks the token that ends an answer."""
    rows = rows_with_prompt(30, 4)
    folder = changed_template(tmp_path, "<|im_end|>", "</turn>")
    with pytest.raises(UsageError, match="only 0 of 4 conversations") as error:
        text_of_rows(folder, rows)
    assert "writes no end token ('<|im_end|>'" in error.value.message
    assert "</turn>" in error.value.message
    assert "eos_token_id" not in f"{error.value.message} {error.value.hint}"
    with pytest.raises(UsageError, match="it has no assistant message"):
        text_of_rows(TINY_ANNIE, [{"messages": [{"role": "user", "content": "Hi"}]}])


def test_rows_that_the_template_refuses_are_left_out_and_named_with_their_line(
    tmp_path: Path,
) -> None:
    """Llama 3's template raises for two calls in one message."""
    refusal = (
        "{%- for m in messages if m.tool_calls and m.tool_calls | length > 1 %}"
        "{{ raise_exception('one call only') }}{% endfor %}"
    )
    state = "{%- set state = namespace(last_user=-1) %}"
    folder = changed_template(tmp_path, state, refusal + state)
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": {"n": n}}} for n in range(2)
    ]
    rows = rows_with_prompt(30, 12)
    for row in (rows[2], rows[5], rows[9]):
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        row["messages"] = [*row["messages"][:2], answer]
    file = write(tmp_path / "rows.jsonl", rows)
    for whole in (False, True):
        use = text_of_rows(folder, read_conversations(file), whole=whole).use
        assert (use.conversations, use.of) == (9, 12)
        assert use.left_out == [
            "3 rows (the chat template refuses it: TemplateError: one call only, first in rows.jsonl, line 3)"
        ]
    few = write(tmp_path / "few.jsonl", [rows[2], rows[5], rows[0]])
    with pytest.raises(UsageError, match="only 1 of 3 conversations") as error:
        text_of_rows(folder, read_conversations(few))
    assert "first in few.jsonl, line 1" in f"{error.value.message} {error.value.hint}"


def test_the_prefix_that_saves_most_is_named() -> None:
    def saved(tokens: int, rows: int) -> int:
        return tokens * (rows - 1)

    system = tuple(range(100, 130))
    rows = [(*system, 1, i) for i in range(5)] + [(*system, 2, *range(200), i) for i in range(3)]
    rows += [(7, 8, 9)]
    every = itertools.combinations(sorted(rows), 2)
    lengths = {len([x for x, y in zip(a, b, strict=False) if x == y]) for a, b in every}
    shared = [(n, sum(r[:n] == s[:n] for r in rows)) for n in lengths for s in rows]
    assert saved(*most_shared_prefix(sorted(rows))) == max(saved(*pair) for pair in shared)
    assert most_shared_prefix([(1, 2, 3), (4, 5)]) == (0, 0)
    assert most_shared_prefix([]) == (0, 0)


def test_tokens_of_texts_in_parts_are_those_of_the_whole() -> None:
    template = Template(TINY_ANNIE)
    rows = [*rows_with_prompt(2000, 6), *rows_with_prompt(900, 3)]
    for row in rows:
        text = template.render(row["messages"], row.get("tools"), False, False)
        assert template.ids(text) == template.tokenize(text)
    assert template.splits_are_exact


def test_a_long_conversation_is_used_up_to_its_last_answer_that_fits() -> None:
    short = rows_with_prompt(30, 1)[0]
    long_turn = {"role": "user", "content": "the rule is to be kept " * 500}
    answer = {"role": "assistant", "content": "I see."}
    row = {**short, "messages": [*short["messages"], long_turn, answer]}
    text = text_of_rows(TINY_ANNIE, [row])
    assert text.use.conversations == 1
    assert len(text.samples) == 1
    assert text.use.left_out == [
        "1 later answers longer than the model's context of 4,096 tokens (--calib-tokens)"
    ]


def test_a_rerun_uses_the_rows_of_the_interrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory differs between the two runs."""
    file = write(tmp_path / "c.jsonl", [*rows_with_prompt(300, 10), *rows_with_prompt(3000, 2)])
    job = quantize.Job(TINY_ANNIE, tmp_path / "out", file, work=tmp_path / "work")
    for positions in (2500, 100_000):
        monkeypatch.setattr(calibration_text, "affordable_positions", lambda _, n=positions: n)
        assert calibration_text.read_answers(job, SILENT).use.conversations == 10
