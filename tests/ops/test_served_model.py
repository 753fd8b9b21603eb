"""`doctor --server` against the real llama.cpp: the file, the formats, the answers and the drafts.

Each fault is found, and the right checkpoint passes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "modelopt", reason="ModelOpt makes the checkpoints: pip install annie-quant[quantize]"
)
pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
pytest.importorskip("gguf", reason="the serve extra is not installed")
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

from paths import TINY_ANNIE  # noqa: E402
from runtime_models import export_nvfp4, save_reference  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_variants import save_variant  # noqa: E402

import annie_quant as aq  # noqa: E402
from annie_quant.bench.counters import Counters, draft_counters  # noqa: E402
from annie_quant.checkpoint.comparison import compare_file  # noqa: E402
from annie_quant.core.errors import ServerError  # noqa: E402
from annie_quant.offline import fingerprint as offline  # noqa: E402
from annie_quant.ops import served_model, server_checks, serving  # noqa: E402
from annie_quant.ops.doctor import CheckResult  # noqa: E402

Change = Callable[[dict[str, Any]], None]
DOWN, UP = "model.layers.{}.mlp.down_proj", "model.layers.{}.mlp.up_proj"


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the robust variant: random weights amplify llama.cpp's 8-bit rounding of activations beyond any limit."""
    robust = save_variant("robust", tmp_path_factory.mktemp("robust") / "bf16")
    return export_nvfp4(robust, tmp_path_factory.mktemp("right"))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight prompts, of which the last 64 tokens."""
    whole = offline.prompts
    monkeypatch.setattr(server_checks, "N_PROMPTS", 8)
    monkeypatch.setattr(server_checks, "N_TOKENS", 8)
    monkeypatch.setattr(offline, "prompts", lambda *args: [prompt[-64:] for prompt in whole(*args)])


def changed(source: Path, folder: Path, change: Change) -> Path:
    """Return a GGUF file of a checkpoint with changed tensors."""
    shutil.copytree(source, folder)
    tensors = {
        name: tensor.clone() for name, tensor in load_file(source / "model.safetensors").items()
    }
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Path(aq.checkpoint.convert(folder, "gguf", folder.with_suffix(".gguf")).path)


def checked(file: Path, checkpoint: Path) -> dict[str, CheckResult]:
    with serving.start(file) as server:
        findings, _ = served_model.check_served(server.url, checkpoint)
    return {f.check: f for f in reversed(findings)}


def scaled(tensors: dict[str, Any]) -> None:
    tensors[f"{DOWN.format(4)}.weight_scale_2"] *= 2


def swapped(tensors: dict[str, Any]) -> None:
    for end in (".weight", ".weight_scale", ".weight_scale_2"):
        a, b = f"{UP.format(1)}{end}", f"{UP.format(2)}{end}"
        tensors[a], tensors[b] = tensors[b].clone(), tensors[a].clone()


def test_the_right_file_passes(right: Path, tmp_path: Path) -> None:
    found = checked(changed(right, tmp_path / "same", lambda tensors: None), right)
    assert {c: f.level for c, f in found.items()} == {
        "tensors": "ok", "formats": "ok", "served arithmetic": "note", "drafts": "note", "template": "ok"
    }  # fmt: skip
    assert (
        "llama.cpp-cpu" in found["served arithmetic"].message
        and "NVFP4: " in found["formats"].message
    )


@pytest.mark.parametrize(("change", "named"), [(scaled, DOWN.format(4)), (swapped, UP.format(1))])
def test_a_changed_scale_and_swapped_tensors_are_found_in_the_file_and_in_the_answers(
    right: Path, tmp_path: Path, change: Change, named: str
) -> None:
    found = checked(changed(right, tmp_path / "bad", change), right)
    assert found["tensors"].level == "fault" and named in found["tensors"].message
    assert (
        found["served arithmetic"].level == "fault"
        and "none of these" in found["served arithmetic"].message
    )


def test_another_checkpoint_a_quantized_head_and_a_lost_tensor_are_found_in_the_file(
    right: Path, tmp_path: Path
) -> None:
    save_reference(tmp_path / "bf16", seed=1)
    file = Path(
        aq.checkpoint.convert(TINY_ANNIE, "gguf", tmp_path / "other.gguf", type="BF16").path
    )
    assert sum(not t.is_near for t in compare_file(right, file).tensors) > 20
    eight = Path(
        aq.checkpoint.convert(tmp_path / "bf16", "gguf", tmp_path / "eight.gguf", type="Q8_0").path
    )
    content = compare_file(tmp_path / "bf16", eight)
    findings = served_model.findings_of(content, tmp_path / "bf16", eight)
    assert [f.level for f in findings] == [
        "ok",
        "note",
        "ok",
    ] and "lm_head.weight Q8_0" in findings[1].message
    four = content._replace(
        tensors=[
            t._replace(format="Q4_K", error=0.07) for t in content.tensors if "lm_head" in t.name
        ]
    )
    assert (
        "lm_head.weight Q4_K 0.07"
        in served_model.findings_of(four, tmp_path / "bf16", eight)[0].message
    )
    lost = content._replace(
        missing=["model.layers.1.self_attn.q_norm.weight"], unknown=["blk.0.attn_q.bias"]
    )
    assert [f.level for f in served_model.findings_of(lost, tmp_path / "bf16", eight)][:2] == [
        "fault",
        "fault",
    ]


def test_a_server_elsewhere_is_judged_by_its_answers_alone(right: Path) -> None:
    (finding,) = served_model.check_file("http://127.0.0.1:9", right)
    assert finding.level == "note" and "not compared" in finding.message


METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="annie"} 20.0
vllm:generation_tokens_total{engine="0",model_name="annie"} 1.2e+06
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="annie"} 40.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="annie"} 2.0
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="annie"} 1.78e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 7.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="annie"} 30.0
"""  # the names of vLLM's v1/spec_decode/metrics.py (docs.vllm.ai, v0.32.0)


def test_vllms_counters_are_summed_over_its_engines() -> None:
    assert draft_counters(METRICS) == Counters(drafted=42, accepted=30, generated=1_200_000)


def test_without_a_checkpoint_the_doctor_says_what_is_served(right: Path) -> None:
    file = Path(aq.checkpoint.convert(right, "gguf", right.with_suffix(".gguf"), force=True).path)
    with serving.start(file) as server:
        who, missing = served_model.describe_server(server.url)
    assert (
        who.level == "ok"
        and who.message.startswith("llama.cpp ")
        and "weights in NVFP4" in who.message
    )
    assert missing.level == "note" and "--checkpoint" in missing.fix
    with pytest.raises(ServerError, match="does not answer"):
        served_model.describe_server(server.url)
