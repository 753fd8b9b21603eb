"""Ten answers recorded from the real llama.cpp server (xllamacpp 2026.10.11549, tiny-annie as Q4_K_M, thinking on)."""

from __future__ import annotations

import pytest
from paths import DATA
from replay_server import ReplayServer

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

import annie_quant as aq  # noqa: E402

FOLDER = DATA / "stream_llama_cpp"


@pytest.fixture(scope="module")
def recorded() -> aq.stream.Timings:
    return aq.stream.Timings.load(FOLDER)


def test_every_answer_decodes(recorded: aq.stream.Timings) -> None:
    for record in recorded.records():
        assert record["error"] is None and record["warnings"] == []
        assert (
            record["reasoning"] and "Paris" in record["text"] and record["finish_reason"] == "stop"
        )
        assert record["completion_tokens"] == record["server_timings"]["predicted_n"]
        assert record["clock"] == "kernel" and record["unstamped_events"] == 0


def test_our_times_agree_with_the_servers_timings(recorded: aq.stream.Timings) -> None:
    """llama.cpp times its own decoding. It counts n tokens where TPOT counts n - 1 gaps; the machine was busy."""
    for record in recorded.records():
        own = record["server_timings"]
        assert record["tpot_ms"] == pytest.approx(own["predicted_per_token_ms"], rel=0.02)
        first_ms = min(record["first_reasoning_ms"], record["first_content_ms"])
        assert first_ms > own["prompt_ms"], "the first token cannot come before the prompt was read"


def test_a_replay_gives_the_same_records(recorded: aq.stream.Timings) -> None:
    with ReplayServer(recorded, speed=1000) as server:
        again = aq.stream.run([aq.stream.Request(server.url, json={}, timeout_s=10)] * 3).records()
    for first, second in zip(recorded.records(), again, strict=False):
        for same in ("text", "reasoning", "usage", "server_timings", "finish_reason", "error"):
            assert first[same] == second[same]
