"""The benchmark against the real llama.cpp server with the embedded model, one server as both sides (A/A)."""

from __future__ import annotations

from pathlib import Path

import pytest

import annie_quant
from annie_quant import bench, judge
from annie_quant.bench.confounds import impossible
from annie_quant.bench.run_folder import read_records

MODEL = Path(annie_quant.__file__).parent / "assets" / "tiny-annie"


@pytest.mark.line
def test_a_against_a_on_a_real_server(tmp_path):
    pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
    pytest.importorskip("annie_quant._stream", reason="the streaming client is not built here")
    if not (MODEL / "model.safetensors").exists():
        pytest.skip("the embedded model's weights are not in this checkout")
    from annie_quant import checkpoint
    from annie_quant.ops import serving

    checkpoint.convert(MODEL, to="gguf", output=tmp_path / "tiny.gguf", type="Q8_0")
    server = serving.start(tmp_path / "tiny.gguf", runtime="llama.cpp", log=tmp_path / "server.log")
    try:
        sides = [
            bench.Backend(name, server.url, meta={"pid": server.pid}) for name in ("one", "same")
        ]
        workloads = judge.load_workloads(["factual", "tool_memory", "multi_turn", "thinking_on"])
        result = bench.run(sides, workloads, tmp_path / "run", warmup=1, runs=1, n=3)
    finally:
        server.stop()
    measured = [r for r in read_records(tmp_path / "run" / "records.jsonl") if not r.warmup]
    assert len(measured) == 2 * (3 + 3 + 3 * 5 + 3) and not any(r.answer.error for r in measured)
    codes = {f.code for f in result.aggregates.confounds}
    assert "same_server" in codes and not codes & {
        "different_prompts",
        "different_answers",
        "tokens_estimated",
        "smoke",
    }
    one, same = (result.aggregates.served[name] for name in ("one", "same"))
    assert one.runtime == "llama.cpp" and one.memory_bytes.five > 20e6
    # Greedy decoding: the same server gives the same answers, so the gates are the same.
    assert {g: r.passes for g, r in one.gates.items()} == {
        g: r.passes for g, r in same.gates.items()
    }
    assert one.gates["factual"].passes == one.gates["factual"].n == 3
    assert one.gates["tool_call"].passes == 3
    early = 0
    for row in measured:
        timings = row.timings.server_timings
        # No token can arrive before the server has read the prompt; on a busy machine a stamp may be earlier.
        early += impossible(row) or row.timings.first_token_ms < 0.9 * timings["prompt_ms"]
        assert (
            row.answer.completion_tokens
            == timings["predicted_n"]
            == row.tokens.usage["completion_tokens"]
        )
        assert bool(row.answer.reasoning) == (row.workload == "thinking_on")
    assert early <= 0.1 * len(measured)
