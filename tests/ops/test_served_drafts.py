"""Accepted drafts of the real llama.cpp against the prediction; planted faults of a head are named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
pytest.importorskip("gguf", reason="the serve extra is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_variants import save_with_head  # noqa: E402

import annie_quant as aq  # noqa: E402
from annie_quant.bench.counters import PositionCounters, position_counters  # noqa: E402
from annie_quant.offline import draft_diagnosis, fingerprint  # noqa: E402
from annie_quant.ops import served_drafts, serving  # noqa: E402
from annie_quant.ops.doctor import CheckResult  # noqa: E402
from annie_quant.ops.server_checks import Served  # noqa: E402

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_head(tmp_path_factory.mktemp("sound") / "bf16")


def exchanged(tensors: Tensors) -> None:
    tensors["mtp.fc.weight"] = torch.cat(tensors["mtp.fc.weight"].chunk(2, 1)[::-1], 1)


def random(tensors: Tensors) -> None:
    """As in a server that loads no linear of the head."""
    generator = torch.Generator().manual_seed(11)
    for name in [n for n, t in tensors.items() if n.startswith("mtp.") and t.ndim == 2]:
        noise = (
            torch.randn(tensors[name].shape, generator=generator) / tensors[name].shape[1] ** 0.5
        )
        tensors[name] = noise.bfloat16()


def rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pow(2).mean().sqrt()


def with_uneven_norm(tensors: Tensors) -> None:
    """Scale the columns of the final norm, and everything that reads it by the inverse: the same model, sensitive to that norm."""
    scale = torch.exp(torch.randn(256, generator=torch.Generator().manual_seed(1)))
    final = 1 + tensors["model.norm.weight"].float()
    for name in ("model.norm.weight", "mtp.norm.weight"):
        tensors[name] = ((1 + tensors[name].float()) * scale - 1).bfloat16()
    tensors["lm_head.weight"] = (tensors["lm_head.weight"].float() / scale).bfloat16()
    name = "mtp.pre_fc_norm_hidden.weight"
    growth = rms(final * scale) / rms(final)
    tensors[name] = ((1 + tensors[name].float()) / scale * growth - 1).bfloat16()


def before_norm(tensors: Tensors) -> None:
    """Undo the final norm in the head's own norm of the hidden state.

    In further steps that norm reads the head's own state, so one draft per step has the fault exactly.
    """
    name = "mtp.pre_fc_norm_hidden.weight"
    final = 1 + tensors["model.norm.weight"].float()
    own = 1 + tensors[name].float()
    tensors[name] = (own / final * rms(final) - 1).bfloat16()


def without_norm(tensors: Tensors) -> None:
    tensors["mtp.norm.weight"] = torch.zeros_like(tensors["mtp.norm.weight"])


def without_attention(tensors: Tensors) -> None:
    name = "mtp.layers.0.self_attn.o_proj.weight"
    tensors[name] = torch.zeros_like(tensors[name])


def checked(
    file: Path, checkpoint: Path, drafts: int = 2, template: Path | None = None
) -> tuple[CheckResult, list[CheckResult]]:
    prompts = fingerprint.prompts(checkpoint, 10)
    with serving.start(file, drafts=drafts, template=template) as server:
        served = Served("llama.cpp", [], prompts)
        drafts_result = served_drafts.check_drafts(server.url, checkpoint, served)
        return drafts_result, served_drafts.check_template(server.url, checkpoint)


def with_change(source: Path, folder: Path, change: Callable[[Tensors], None]) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_sound_head_drafts_as_predicted_and_another_template_is_named(
    sound: Path, tmp_path: Path
) -> None:
    file = Path(aq.checkpoint.convert(sound, "gguf", tmp_path / "sound.gguf").path)
    drafts, (template,) = checked(file, sound, drafts=3)
    assert drafts.level == template.level == "ok", drafts
    other = tmp_path / "other.jinja"
    text = (sound / "chat_template.jinja").read_text()
    other.write_text("{{ 'Talk: ' }}" + text)
    _, (template,) = checked(file, sound, template=other)
    assert template.level == "fault" and "template" in template.message


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (exchanged, draft_diagnosis.EXCHANGED),
        (random, draft_diagnosis.RANDOM),
        (without_norm, draft_diagnosis.DROPPED.format("mtp.norm")),
        (without_attention, draft_diagnosis.DROPPED.format("mtp.layers.0.self_attn")),
    ],
)
def test_a_planted_fault_is_named(
    sound: Path, tmp_path: Path, change: Callable[[Tensors], None], cause: str
) -> None:
    """The server has the faulty head, and the checkpoint the sound one."""
    faulty = with_change(sound, tmp_path / "faulty", change)
    file = Path(aq.checkpoint.convert(faulty, "gguf", tmp_path / "faulty.gguf").path)
    drafts, _ = checked(file, sound)
    assert drafts.level == "fault" and cause in drafts.why, drafts


def test_a_server_that_takes_the_state_before_the_norm_is_named(
    sound: Path, tmp_path: Path
) -> None:
    uneven = with_change(sound, tmp_path / "uneven", with_uneven_norm)
    faulty = with_change(uneven, tmp_path / "faulty", before_norm)
    file = Path(aq.checkpoint.convert(faulty, "gguf", tmp_path / "faulty.gguf").path)
    drafts, _ = checked(file, uneven, drafts=1)
    assert drafts.level == "fault" and draft_diagnosis.BEFORE_NORM in drafts.why, drafts


def test_a_fault_of_the_checkpoint_itself_is_named(sound: Path, tmp_path: Path) -> None:
    faulty = with_change(sound, tmp_path / "faulty", exchanged)
    file = Path(aq.checkpoint.convert(faulty, "gguf", tmp_path / "faulty.gguf").path)
    drafts, _ = checked(file, faulty)
    assert drafts.level == "fault"
    assert "the checkpoint itself" in drafts.why and draft_diagnosis.EXCHANGED in drafts.why


def test_vllms_counters_per_position_are_summed_over_its_engines() -> None:
    page = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="annie"} 20.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="annie"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="annie",position="0"} 17.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="annie",position="1"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="annie",position="0"} 3.0
"""
    assert position_counters(page) == PositionCounters(25.0, [20.0, 9.0])
    assert position_counters("vllm:generation_tokens_total 3.0\n") is None
