"""A key in a URL's user part or query is refused by every command that takes a URL, and shown by none."""

from __future__ import annotations

import pytest
from command_line import annie_quant

from annie_quant.core.secrets import safe_url

KEY = "planted0f3a9c77d1e8"
URLS = [
    f"http://annie:{KEY}@127.0.0.1:9/v1",
    f"http://{KEY}@127.0.0.1:9",
    f"http://127.0.0.1:9/?api_key={KEY}",
]
COMMANDS = [
    ("record", "--upstream", "{url}", "--output", "{out}"),
    ("bench", "--backend-a", "a", "{url}", "--output", "{out}"),
    (
        "bench",
        "--backend-a",
        "a",
        "http://127.0.0.1:9",
        "--backend-b",
        "b",
        "{url}",
        "--output",
        "{out}",
    ),
    (
        "data",
        "--teacher",
        "openai",
        "--url",
        "{url}",
        "--teacher-model",
        "m",
        "--n",
        "5",
        "--output",
        "{out}",
    ),
    ("data", "--teacher", "openai", "--teacher-model", "m", "--n", "5", "--output", "{out}"),
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:3]))
def test_it_is_refused_and_not_shown(tmp_path, url, command):
    words = [word.format(url=url, out=tmp_path / "out") for word in command]
    done = annie_quant(*words, env={"OPENAI_BASE_URL": url, "OPENAI_API_KEY": ""})
    assert done.returncode == 2, done.stderr
    assert KEY not in done.stdout + done.stderr
    assert "environment" in done.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes()


def test_a_shown_url_has_no_secret_and_all_else():
    shown = safe_url(
        f"http://annie:{KEY}@h:1/v1?api_key={KEY}&max_tokens=64&tokenizer=mine&auth_tokens={KEY}#x"
    )
    assert (
        shown
        == "http://h:1/v1?api_key=[redacted]&max_tokens=64&tokenizer=mine&auth_tokens=[redacted]"
    )
