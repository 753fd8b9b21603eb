"""Every strategy's checkpoint passes the audit, has the announced size, and calls the tool on the real server."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from paths import CALIBRATION

import annie_quant as aq
from annie_quant import quantize
from annie_quant.checkpoint.shards import ModelFolder

pytest.importorskip(
    "torch", reason="the strategies run on torch: pip install annie-quant[quantize]"
)
from annie_quant.quantize import mixed_formats

MODEL = Path(aq.__file__).parent / "assets/tiny-annie"
ALL_BUT_LAST = ",".join(f"layers.{i}" for i in range(7))
# Settings that make the slow strategies short; their results are tested elsewhere.
SETTINGS: dict[str, dict] = {
    "auto_mixed": {"exclude": ALL_BUT_LAST, "bits": 6.0},
    "awq_lite": {"exclude": ALL_BUT_LAST},
    "best": {"exclude": ALL_BUT_LAST},
    "modelopt": {"config": "NVFP4_DEFAULT_CFG"},
    "autoround": {"recipe": "rtn", "answers": "given"},
    "llmcompressor": {"recipe": "rtn", "answers": "given"},
}
# Libraries that this package does not install (tests/perf/engines.md has their runs).
LIBRARIES = {"autoround": "auto_round", "llmcompressor": "llmcompressor"}


@pytest.fixture(scope="module", params=sorted(quantize.available()))
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, quantize.QuantizeResult, Path]:
    if request.param in LIBRARIES:
        library = LIBRARIES[request.param]
        pytest.importorskip(library, reason=f"{library} is not installed: it needs other versions")
    output = tmp_path_factory.mktemp("run") / request.param
    settings = {"calib_samples": 2, **SETTINGS.get(request.param, {})}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_formats, "TOKENS", 64)  # of each trial of `best`
        patch.setattr(mixed_formats, "POSITIONS", 512)
        result = quantize.run(request.param, MODEL, output, calib_data=CALIBRATION, **settings)
    return request.param, result, output


def test_it_passes_the_audit_and_records_how_it_was_made(
    run: tuple[str, quantize.QuantizeResult, Path],
) -> None:
    strategy, result, output = run
    audit = aq.checkpoint.audit(output, source=MODEL)
    assert audit.ok, [f.message for f in audit.findings]
    written = json.loads((output / "annie_quant.json").read_text())
    assert written["strategy"] == strategy and len(written["prompt_sha256"]) == 1
    algorithm = json.loads((output / "config.json").read_text())["quantization_config"][
        "quant_algo"
    ]
    assert algorithm in ("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"), (
        "no format whose inputs a server has to scale"
    )
    assert result.size_bytes < 0.95 * result.source_bytes
    assert result.expected_bytes == pytest.approx(ModelFolder(output).weight_bytes, rel=1e-4)


def test_it_calls_the_tool_on_the_real_server(
    run: tuple[str, quantize.QuantizeResult, Path],
) -> None:
    pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
    pytest.importorskip("gguf", reason="the serve extra is not installed")
    _, _, output = run
    file = aq.checkpoint.convert(output, "gguf", output.parent / "x.gguf").path
    persona = aq.data.load_persona("annie")
    body = {
        "messages": [
            {"role": "system", "content": persona.system_prompt},
            {"role": "user", "content": "Do you remember anything about my garden?"},
        ],
        "tools": list(persona.tools),
        "max_tokens": 96,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with aq.serve.start(file) as server:
        request = urllib.request.Request(
            server.url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            choice = json.loads(answer.read())["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "search_memory" and choice["finish_reason"] == "tool_calls"
