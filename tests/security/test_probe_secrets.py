"""Commands that talk to a server outside `bench`: a key that the server repeats is in nothing that they write or print."""

from __future__ import annotations

import pytest
from command_line import CliRunner
from fake_server import FakeServer, Script, words
from planted_secrets import HUB, KEY, PASSWORD, where

from annie_quant.cli import app as cli

# What a server repeats of the key: all of it, in capital letters, or pieces in several events.
ANSWERS = {
    "whole": [f"red {KEY}"],
    "capital letters": [f"red {KEY.upper()}"],
    "in pieces": ["red sk-", "planted-", "0123456789abcd", "efghijklmnop"],
}


def command(*arguments: str) -> tuple[str, str]:
    done = CliRunner().invoke(cli, [str(a) for a in arguments])
    return done.output, str(done.exception)


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    monkeypatch.setenv("PLANTED_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", HUB)
    monkeypatch.setenv("OPENAI_API_KEY", PASSWORD)


@pytest.mark.parametrize("form", ANSWERS)
def test_doctor_images_prints_no_key(form, tmp_path):
    def answer(body: dict) -> Script:
        return Script(content=ANSWERS[form])

    with FakeServer(answer) as server:
        printed = command(
            "doctor", "--server", server.url, "--images", "--key-env", "PLANTED_KEY", "--json"
        )
        assert len(server.bodies) == 3
    assert "answer" in printed[0], printed
    assert where(tmp_path, *printed, *(text[::-1] for text in printed)) == []


def test_the_search_finds_a_key_that_was_not_sent(tmp_path):
    """Negative control: a key that this command does not know is printed like any other answer."""
    with FakeServer(lambda body: Script(content=ANSWERS["whole"])) as server:
        printed = command("doctor", "--server", server.url, "--images", "--json")
    assert where(tmp_path, *printed) != []


def test_a_refusal_of_an_image_prints_no_key(tmp_path):
    def answer(body: dict) -> Script:
        if isinstance(body["messages"][0]["content"], str):
            return words("yes")
        return Script(status=400, error=f"no images for {KEY}")

    with FakeServer(answer) as server:
        printed = command("doctor", "--server", server.url, "--images", "--key-env", "PLANTED_KEY")
    assert "refuses a message with an image" in " ".join(printed[0].split()), printed
    assert where(tmp_path, *printed) == []
