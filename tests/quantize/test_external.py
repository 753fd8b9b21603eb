"""The strategies llmcompressor and autoround, with stand-ins for the libraries, which CI does not have.

The stand-ins have the calls and arguments of llm-compressor 0.14.0.1 and AutoRound 0.16.1, with which both strategies ran on
tiny-annie (tests/perf/engines.md). They write what naive does, in compressed-tensors' layout.
"""

from __future__ import annotations

import importlib.machinery
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from paths import CALIBRATION, TINY_ANNIE

from annie_quant import checkpoint, quantize
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.quantize import external

torch = pytest.importorskip("torch", reason="pip install annie-quant[quantize]")
from safetensors.torch import load_file, save_file  # noqa: E402  needs torch

from annie_quant.quantize.strategies import autoround, llmcompressor  # noqa: E402

ROWS = 4
QKV = "model.layers.0.linear_attn.in_proj_qkv"


@pytest.fixture(scope="module")
def naive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-annie by naive in compressed-tensors' layout, with another tensor scale for one of two linears that servers fuse."""
    folder = tmp_path_factory.mktemp("naive")
    quantize.run("naive", TINY_ANNIE, folder / "modelopt", calib_data=CALIBRATION, calib_samples=2)
    checkpoint.convert(folder / "modelopt", to="compressed-tensors", output=folder / "ct")
    file = folder / "ct/model.safetensors"
    tensors = load_file(file)
    tensors[f"{QKV}.weight_scale"] = (tensors[f"{QKV}.weight_scale"].float() / 2).to(
        torch.float8_e4m3fn
    )
    tensors[f"{QKV}.weight_global_scale"] /= 2
    save_file(tensors, file, metadata={"format": "pt"})
    return folder / "ct"


def install(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    for name, contents in modules.items():
        dotted = name.replace("__", ".")
        module = types.ModuleType(dotted)
        module.__spec__ = importlib.machinery.ModuleSpec(dotted, None)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, dotted, module)
    monkeypatch.setattr(external.importlib.metadata, "version", lambda _: "0.0")


def run(strategy: str, output: Path, **options: Any) -> quantize.QuantizeResult:
    text = {"calib_data": CALIBRATION, "calib_samples": ROWS, "answers": "given"}
    return quantize.run(strategy, TINY_ANNIE, output, **text, **options)


class Modifier:
    """QuantizationModifier, GPTQModifier and AWQModifier: keyword arguments."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings


def install_llmcompressor(monkeypatch: pytest.MonkeyPatch, naive: Path, calls: list[Any]) -> None:
    def oneshot(
        *,
        model: Any,
        dataset: Any,
        recipe: Any,
        num_calibration_samples: int,
        processor: Any,
    ) -> None:
        calls.append((list(dataset), recipe, num_calibration_samples, processor))

        def save_pretrained(folder: Path, save_compressed: bool) -> None:
            assert save_compressed
            shutil.copytree(naive, folder)

        model.save_pretrained = save_pretrained

    install(
        monkeypatch,
        llmcompressor={"oneshot": oneshot},
        llmcompressor__modifiers__quantization={"QuantizationModifier": Modifier},
        llmcompressor__modifiers__gptq={"GPTQModifier": Modifier},
    )


def test_llmcompressor_gets_the_text_and_what_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, naive: Path
) -> None:
    calls: list[Any] = []
    install_llmcompressor(monkeypatch, naive, calls)
    result = run("llmcompressor", tmp_path / "out", exclude="layers.1.mlp")
    assert checkpoint.audit(tmp_path / "out", source=TINY_ANNIE).ok
    assert "gptq by llm-compressor 0.0" in result.notes
    ((batches, (modifier,), count, tokenizer),) = calls
    assert count == len(batches) and tokenizer.chat_template
    rows = sum(len(batch["input_ids"]) for batch in batches)
    assert rows == ROWS
    # The prompt and the answer, rendered by the model's template.
    first = tokenizer.decode(batches[0]["input_ids"][0])
    assert first.startswith("<|im_start|>") and "<|im_start|>assistant" in first
    ignored = modifier.settings["ignore"]
    assert {"lm_head", "model.layers.0.linear_attn.in_proj_a"} <= set(ignored)
    assert "model.layers.1.mlp.up_proj" in ignored and "model.layers.0.mlp.up_proj" not in ignored
    assert modifier.settings["scheme"] == "NVFP4" and modifier.settings["dampening_frac"] == 0.05
    run("llmcompressor", tmp_path / "rtn", recipe="rtn")
    assert "dampening_frac" not in calls[1][1][0].settings


def test_a_recipe_file_is_the_librarys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, naive: Path
) -> None:
    calls: list[Any] = []
    install_llmcompressor(monkeypatch, naive, calls)
    file = tmp_path / "mine.yaml"
    file.write_text("default_stage: {}\n")
    run("llmcompressor", tmp_path / "out", recipe=str(file))
    assert calls[0][1] == str(file)
    with pytest.raises(UsageError, match="--exclude-layers is not for"):
        run("llmcompressor", tmp_path / "no", recipe=str(file), exclude="layers.1.mlp")
    with pytest.raises(UsageError, match="expected a YAML file, or one of: rtn, gptq"):
        run("llmcompressor", tmp_path / "no", recipe="GPTQ2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs it")
@pytest.mark.parametrize("recipe", ["awq", "awq_gptq"])
def test_awq_by_llmcompressor_takes_a_gpu(tmp_path: Path, recipe: str) -> None:
    with pytest.raises(EnvironmentFault, match="pins memory for a CUDA device"):
        run("llmcompressor", tmp_path / "out", recipe=recipe)


def test_autoround_gets_rows_of_one_length(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, naive: Path
) -> None:
    calls: list[dict[str, Any]] = []

    class AutoRound:
        def __init__(self, model: Any, tokenizer: Any, **settings: Any) -> None:
            calls.append(settings)

        def quantize_and_save(self, output_dir: str, format: str) -> None:
            assert format == "llm_compressor"
            shutil.copytree(naive, Path(output_dir) / "tiny-annie-nvfp-w4g16")

    install(monkeypatch, auto_round={"AutoRound": AutoRound}, compressed_tensors={})
    result = run("autoround", tmp_path / "out", seed=7)
    assert checkpoint.audit(tmp_path / "out", source=TINY_ANNIE).ok
    assert "light by AutoRound 0.0" in result.notes
    assert not [f for f in (tmp_path / "out").iterdir() if f.is_dir()]
    (settings,) = calls
    assert (settings["iters"], settings["lr"], settings["seed"]) == (50, 5e-3, 7)
    (batch,) = settings["dataset"]
    assert batch["attention_mask"] is None
    assert tuple(batch["input_ids"].shape) == (ROWS, settings["seqlen"])
    ignored = settings["ignore_layers"].split(",")
    assert "lm_head" in ignored and "model.layers.0.mlp.up_proj" not in ignored


def test_rows_are_spread_over_all_and_repeat_their_own_tokens() -> None:
    rows = [(i, i + 1, i + 2)[: 1 + i % 3] for i in range(19)]
    ids = autoround.equal_rows(rows).tolist()
    assert len(ids) == 16  # steps of eight
    for row in ids:
        own = rows[row[0]]
        assert row == [own[i % len(own)] for i in range(3)]


def test_fused_linears_get_one_tensor_scale_and_keep_their_codes(
    tmp_path: Path, naive: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(naive, folder)
    before = ModelFolder(naive)
    codes = [audit.code for audit in checkpoint.audit(folder, source=TINY_ANNIE).findings]
    assert codes == ["fused_tensor_scale"]
    assert len(external.share_tensor_scales(folder)) == 1
    after = ModelFolder(folder)
    assert checkpoint.audit(folder, source=TINY_ANNIE).ok
    assert (
        after.tensor(f"{QKV}.weight_packed").tobytes()
        == before.tensor(f"{QKV}.weight_packed").tobytes()
    )
    assert external.share_tensor_scales(folder) == []


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (llmcompressor.LIBRARY, r"pip install llmcompressor && .*transformers<5\.15"),
        (autoround.LIBRARY, "pip install auto-round compressed-tensors"),
        (autoround.WRITER, "pip install auto-round compressed-tensors"),
    ],
)
def test_a_missing_library_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, library: external.Library, words: str
) -> None:
    monkeypatch.setitem(sys.modules, library.module, None)
    with pytest.raises(EnvironmentFault, match=f"{library.name} ") as refused:
        library.load()
    assert "\n" not in refused.value.message
    import re

    assert re.search(words, refused.value.hint)
