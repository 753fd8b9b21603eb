"""FP8 KV cache: calibrated scales against an independent forward, ModelOpt's export, and what evaluation computes with them."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import runtime_models

from annie_quant import checkpoint, quantize
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import UsageError

torch = pytest.importorskip(
    "torch", reason="calibration runs on torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="models are loaded with transformers: pip install annie-quant[quantize]"
)

KEY, VALUE = "model.layers.3.self_attn.k_proj.k_scale", "model.layers.3.self_attn.v_proj.v_scale"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from annie_quant import data

    home = tmp_path_factory.mktemp("kv")
    runtime_models.save_reference(home / "bf16")
    data.generate("annie", teacher="offline", n=10, output=home / "calib.jsonl", seed=1)
    for kind in ("none", "fp8", "fp8_cast"):
        quantize.run(
            "direct",
            home / "bf16",
            home / kind,
            calib_data=home / "calib.jsonl",
            calib_samples=2,
            kv_cache=kind,
        )
    return home


def modelopt_export(source: Path, folder: Path, kv: dict) -> Path:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        ids = torch.randint(0, 200, (4, 64), generator=torch.Generator().manual_seed(1))
        config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
        config["quant_cfg"] = [
            *config["quant_cfg"],
            {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": kv},
        ]
        mtq.quantize(model, config, lambda m: m(ids))
        export_hf_checkpoint(model, export_dir=folder)
    return folder


def test_scales_are_amax_of_keys_and_values(home: Path) -> None:
    """Against one forward of the whole model, whose cache holds the keys and values."""
    from transformers import AutoModelForCausalLM

    from annie_quant.data.rows import read_conversations
    from annie_quant.quantize.calibration_text import samples_of_rows

    stored = ModelFolder(home / "fp8")
    assert {
        n for n in stored if n.endswith("_scale") and ".self_attn." in n and "weight" not in n
    } == {KEY, VALUE}
    model = AutoModelForCausalLM.from_pretrained(home / "bf16", dtype=torch.float32)
    tops = np.zeros(2)
    for sample in samples_of_rows(home / "bf16", read_conversations(home / "calib.jsonl", 2)):
        with torch.inference_mode():
            cache = model(torch.tensor([sample.ids]), use_cache=True).past_key_values
        tops = np.maximum(
            tops, [float(getattr(cache.layers[3], n).abs().max()) for n in ("keys", "values")]
        )
    np.testing.assert_allclose([stored.scalar(KEY), stored.scalar(VALUE)], tops / 448, rtol=1e-4)


def test_the_rest_of_the_checkpoint_is_unchanged(home: Path) -> None:
    plain, scaled = ModelFolder(home / "none"), ModelFolder(home / "fp8")
    assert set(scaled) - set(plain) == {KEY, VALUE} and set(plain) <= set(scaled)
    assert all(plain.tensor(n).tobytes() == scaled.tensor(n).tobytes() for n in plain)
    for kind in ("fp8", "fp8_cast"):
        assert checkpoint.audit(home / kind, source=home / "bf16").findings == []


def test_settings_are_modelopts(home: Path, tmp_path: Path) -> None:
    """ModelOpt 0.47's own FP8 export has the same two names and settings, and its cast has no scale."""
    pytest.importorskip(
        "modelopt", reason="its export is the reference: pip install annie-quant[quantize]"
    )
    fp8 = {"num_bits": (4, 3)}
    for kind, kv in (("fp8", fp8), ("fp8_cast", {**fp8, "use_constant_amax": True})):
        theirs, ours = modelopt_export(home / "bf16", tmp_path / kind, kv), home / kind
        names = [
            {n for n in ModelFolder(f) if n.endswith(("k_scale", "v_scale"))}
            for f in (theirs, ours)
        ]
        assert names[0] == names[1] == ({KEY, VALUE} if kind == "fp8" else set())
        for file, parts in (
            ("config.json", ("quantization_config", "kv_cache_scheme")),
            ("hf_quant_config.json", ("quantization", "kv_cache_quant_algo")),
        ):
            a, b = (json.loads((f / file).read_text())[parts[0]][parts[1]] for f in (theirs, ours))
            assert a == b and a is not None
        assert not [f for f in checkpoint.audit(theirs).findings if f.code.startswith("kv_")]


def test_evaluation_rounds_keys_and_values_with_the_scales(home: Path) -> None:
    import annie_quant.offline
    from annie_quant.offline import codec
    from annie_quant.offline.emulation import emulate
    from annie_quant.offline.engine import Engine, Row
    from annie_quant.offline.profiles import find_profile

    model = annie_quant.offline.load(home / "fp8", dtype=torch.float32)
    ids = torch.randint(3, 200, (40,), generator=torch.Generator().manual_seed(3)).tolist()

    def logits(name: str) -> torch.Tensor:
        with torch.inference_mode(), emulate(model, find_profile(name)):
            ((_, out),) = Engine(model).scores([Row(ids[:32], ids[32:])])
        return out

    exact, fp8, nvfp4 = (logits(f"w4a16{suffix}") for suffix in ("", "-fp8kv", "-nvfp4kv"))
    assert 0 < float((fp8 - exact).abs().mean()) < float((nvfp4 - exact).abs().mean())
    attention = model.get_submodule("model.layers.3.self_attn")
    scale = float(ModelFolder(home / "fp8").scalar(KEY))
    key = torch.linspace(-450 * scale, 450 * scale, 64).reshape(1, 1, 2, 32)
    rounded, _ = codec.cache_rounding("fp8")(attention, key, key)
    expected = (key / np.float32(scale)).clamp(-448, 448).to(
        torch.float8_e4m3fn
    ).float() * np.float32(scale)
    assert torch.equal(rounded, expected) and float(rounded.max()) == pytest.approx(448 * scale)


def test_an_evaluation_takes_a_kv_cache(home: Path, tmp_path: Path) -> None:
    """`annie-quant eval --numerics w4a16-fp8kv`: its logits differ from those of the profile without it."""
    from annie_quant import runtime
    from annie_quant.judge import Case, Workload

    case = Case("c", ({"role": "user", "content": "What is 3 and 4?"},))
    workload = Workload("sums", "", None, "Be brief.", None, False, 6, 0, ("non_empty",), (case,))
    numerics = ["w4a16", "w4a16-fp8kv", "w4a16-nvfp4kv"]
    result = runtime.evaluate(
        home / "fp8",
        home / "bf16",
        [workload],
        numerics,
        cache=tmp_path,
        with_ensemble=False,
        dtype="float32",
    )
    kl = [result["numerics"][n]["kl"]["mean"] for n in numerics]
    assert len(set(kl)) == 3 and set(result["verdict"]["profiles"]) == set(numerics)
    assert any("repeat token 0" in note for note in result["notes"])


def test_nvfp4_and_unknown_formats_are_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="NVFP4 KV cache is not written here"):
        quantize.run("direct", home / "bf16", tmp_path / "out", kv_cache="nvfp4")
    with pytest.raises(UsageError, match="unknown KV cache 'int8'"):
        quantize.run("direct", home / "bf16", tmp_path / "out", kv_cache="int8")
    with pytest.raises(UsageError, match="conversations to calibrate with"):
        quantize.run("direct", home / "bf16", tmp_path / "out", kv_cache="fp8")
    assert not (tmp_path / "out").exists()
