"""naive and mlp_only against ModelOpt itself: bytes of weights and scales, input scales, and the settings files."""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import shared
from dense_models import make
from paths import CALIBRATION, TINY_ANNIE

from annie_quant import quantize
from annie_quant.checkpoint.chat_template import with_decoded_calls
from annie_quant.checkpoint.linears import covering_pattern
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data.rows import read_conversations

torch = pytest.importorskip(
    "torch", reason="calibration runs on torch: pip install annie-quant[quantize]"
)
transformers = pytest.importorskip("transformers", reason="models are loaded with transformers")

ROWS = 6
BF16_STEP = 2.0**-7  # largest relative distance of two neighbours in bf16
# ModelOpt's exclusions name nn.Embedding, not Gemma's scaled subclass of it. Neither is quantized.
UNLISTED = {"gemma3": {"model.embed_tokens"}}
CONFIGS = {"naive": "NVFP4_DEFAULT_CFG", "mlp_only": "NVFP4_MLP_ONLY_CFG"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("sources")
    return {"tiny-annie": TINY_ANNIE} | {
        kind: make(home / kind, kind) for kind in ("qwen2-tied", "llama-bias", "gemma3")
    }


def texts(source: Path) -> Iterator[torch.Tensor]:
    """Yield the conversations as the model's own template writes them, one row each."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    for row in read_conversations(CALIBRATION, ROWS):
        ids = tokenizer.apply_chat_template(
            [with_decoded_calls(m) for m in row["messages"]],
            row.get("tools"),
            enable_thinking=bool(row.get("thinking")),
            return_dict=False,
        )
        yield torch.tensor([ids[:2048]])


def quantize_by_modelopt(
    source: Path, strategy: str, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """Let ModelOpt calibrate a model that computes in `dtype`, one conversation at a time."""
    import modelopt.torch.quantization as mtq

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
        mtq.quantize(
            model,
            copy.deepcopy(getattr(mtq, CONFIGS[strategy])),
            lambda m: [m(ids) for ids in texts(source)],
        )
    return model


def by_modelopt(source: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that ModelOpt filled, in this run or an earlier one."""
    pytest.importorskip("modelopt", reason="the reference: pip install annie-quant[quantize]")
    program = "".join(inspect.getsource(part) for part in (quantize_by_modelopt, texts, make))
    inputs = shared.modelopt_inputs(source, CALIBRATION.read_bytes(), ROWS, CONFIGS, name, program)
    return shared.stored(name, inputs, make)


def export_by_modelopt(source: Path, strategy: str) -> Path:
    """Let ModelOpt quantize a model in bf16 and export it."""

    def make(folder: Path) -> None:
        model = quantize_by_modelopt(source, strategy, torch.bfloat16)
        from modelopt.torch.export import export_hf_checkpoint

        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            export_hf_checkpoint(model, export_dir=folder)

    return by_modelopt(source, f"max_{strategy}", make)


def largest_inputs_by_modelopt(source: Path) -> dict[str, float]:
    """Let ModelOpt calibrate a model in float32, and return the largest input of each linear."""

    def make(folder: Path) -> None:
        modules = quantize_by_modelopt(source, "naive", torch.float32).named_modules()
        quantizers = {
            n: q
            for n, m in modules
            if (q := getattr(m, "input_quantizer", None)) and hasattr(q, "_amax")
        }
        (folder / "amax.json").write_text(
            json.dumps({n: float(q.amax) for n, q in quantizers.items()})
        )

    return json.loads((by_modelopt(source, "max_float32", make) / "amax.json").read_text())


def input_scales(folder: Path) -> dict[str, float]:
    shards = ModelFolder(folder)
    return {n: float(shards.tensor(n)) for n in shards if n.endswith("input_scale")}


@pytest.mark.parametrize("strategy", CONFIGS)
@pytest.mark.parametrize("kind", ["tiny-annie", "qwen2-tied", "llama-bias", "gemma3"])
def test_modelopts_own_export(
    sources: dict[str, Path], tmp_path: Path, kind: str, strategy: str
) -> None:
    """All bytes but those of input scales are equal; these are within two steps of bf16, in which ModelOpt computes."""
    source = sources[kind]
    theirs = export_by_modelopt(source, strategy)
    quantize.run(strategy, source, tmp_path / "ours", calib_data=CALIBRATION, calib_samples=ROWS)
    a, b = ModelFolder(tmp_path / "ours"), ModelFolder(theirs)
    assert set(a) == set(b)
    for name in b:
        assert (
            a.info(name).dtype == b.info(name).dtype and a.info(name).shape == b.info(name).shape
        ), name
        if not name.endswith("input_scale"):
            assert a.tensor(name).tobytes() == b.tensor(name).tobytes(), name
    ours, reference = input_scales(tmp_path / "ours"), input_scales(theirs)
    assert ours.keys() == reference.keys() and len(ours) >= 2 * 3
    assert max(abs(ours[n] / reference[n] - 1) for n in ours) < 2 * BF16_STEP
    expected, written = (
        json.loads((f / "config.json").read_text()) for f in (theirs, tmp_path / "ours")
    )
    assert_same_settings(
        written.pop("quantization_config"), expected.pop("quantization_config"), "ignore", b, kind
    )
    assert written == expected
    expected, written = (
        json.loads((f / "hf_quant_config.json").read_text()) for f in (theirs, tmp_path / "ours")
    )
    assert_same_settings(
        written["quantization"], expected["quantization"], "exclude_modules", b, kind
    )


def assert_same_settings(
    ours: dict, theirs: dict, excluded: str, folder: ModelFolder, kind: str
) -> None:
    """Equal except for the producer's version and for the spelling of the excluded modules, which cover the same ones."""
    for settings in (ours, theirs):
        settings.pop("producer", None)
    patterns, expected = ours.pop(excluded), theirs.pop(excluded)
    assert ours == theirs
    modules = {n.removesuffix(".weight") for n in folder if n.endswith(".weight")} | {"lm_head"}
    modules -= UNLISTED.get(kind, set())
    assert {m for m in modules if covering_pattern(m, expected)} - norms(folder) == {
        m for m in modules if covering_pattern(m, patterns)
    }


def norms(folder: ModelFolder) -> set[str]:
    return {
        n.removesuffix(".weight")
        for n in folder
        if n.endswith(".weight") and len(folder.info(n).shape) == 1
    }


@pytest.mark.parametrize("kind", ["tiny-annie", "qwen2-tied", "llama-bias"])
def test_input_scales_are_those_of_modelopt_where_both_compute_in_float32(
    sources: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Shared prefixes and padding change no maximum: what differs in the test above is ModelOpt's rounding to bf16."""
    largest = largest_inputs_by_modelopt(sources[kind])
    quantize.run(
        "naive", sources[kind], tmp_path / "ours", calib_data=CALIBRATION, calib_samples=ROWS
    )
    for name, scale in input_scales(tmp_path / "ours").items():
        assert scale == pytest.approx(
            largest[name.removesuffix(".input_scale")] / (6 * 448), rel=1e-4
        ), name


def test_a_batch_of_rows_has_the_largest_inputs_of_its_rows(sources: dict[str, Path]) -> None:
    """Padding repeats text, and its inputs count for nothing."""
    from annie_quant.core.progress import SILENT
    from annie_quant.quantize import input_stats
    from annie_quant.quantize.calibration_samples import CONTENT, CalibrationSample

    folder = ModelFolder(sources["qwen2-tied"])
    rows = [(5, 9, 200, 31) * n for n in (2, 7, 11)]
    samples = [CalibrationSample("", ids, (CONTENT,) * len(ids), ()) for ids in rows]
    linears = [
        f"model.layers.{i}.{m}" for i in range(2) for m in ("self_attn.q_proj", "mlp.down_proj")
    ]
    alone = [input_stats.largest_inputs(folder, linears, [row], SILENT)[0] for row in samples]
    together = input_stats.largest_inputs(folder, linears, samples, SILENT)[0]
    for name in linears:
        assert together[name] == pytest.approx(max(a[name] for a in alone), rel=1e-5)


def test_naive_runs_without_modelopt(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the strategy that runs ModelOpt itself imports it, and only in its functions."""
    package = Path(quantize.__file__).parents[1]
    importing = re.compile(r"^(\s*)(import|from) modelopt\b", re.MULTILINE)
    for file in package.rglob("*.py"):
        for match in importing.finditer(file.read_text()):
            assert match[1] and file.name in ("awq_scales.py", "modelopt.py"), file
    for name in [name for name in sys.modules if name.partition(".")[0] == "modelopt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "modelopt", None)
    for strategy in ("naive", "mlp_only"):
        out = tmp_path / strategy
        quantize.run(strategy, sources["qwen2-tied"], out, calib_data=CALIBRATION, calib_samples=2)
        assert (out / "hf_quant_config.json").is_file()


def test_a_family_that_is_not_known_is_calibrated_as_a_whole(tmp_path: Path) -> None:
    """Mistral: transformers computes it in bf16 as ModelOpt does, so that all bytes are ModelOpt's."""
    source = make(tmp_path / "mistral", "mistral")
    theirs = export_by_modelopt(source, "naive")
    quantize.run("naive", source, tmp_path / "ours", calib_data=CALIBRATION, calib_samples=ROWS)
    a, b = ModelFolder(tmp_path / "ours"), ModelFolder(theirs)
    assert set(a) == set(b) and len(input_scales(theirs)) == 2 * 7
    assert all(a.tensor(n).tobytes() == b.tensor(n).tobytes() for n in b)


def test_inputs_with_nan_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from annie_quant.core.errors import CheckpointError

    bad = tmp_path / "bad"
    bad.mkdir()
    for file in sources["qwen2-tied"].iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    tensors = load_file(bad / "model.safetensors")
    norm = tensors["model.layers.1.input_layernorm.weight"]
    norm[3] = np.array(np.nan, norm.dtype)
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.self_attn\.q_proj: NaN or inf among its inputs"
    ):
        quantize.run("naive", bad, tmp_path / "out", calib_data=CALIBRATION, calib_samples=1)
    assert not (tmp_path / "out").exists()
