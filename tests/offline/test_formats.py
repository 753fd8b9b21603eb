"""Every NVFP4 dialect that is read, compared with the weights and activations of the dialect's own library."""

import json
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "modelopt", reason="ModelOpt makes the checkpoints: pip install annie-quant[quantize]"
)
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

import modelopt_backend  # noqa: E402
from runtime_models import dequantized, export_nvfp4, save_reference  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from annie_quant import checkpoint, runtime  # noqa: E402
from annie_quant.offline.linears import (  # noqa: E402
    FP8Linear,
    PackedNVFP4Linear,
    nvfp4_linears,
)

FP8 = {"num_bits": (4, 3), "axis": None}
W4A16 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
MIXED = {  # Qwen3.5's recipe upstream: weight-only NVFP4 in the MLP, FP8 in attention, an FP8 KV cache
    "quant_cfg": [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*mlp*weight_quantizer", "cfg": W4A16, "enable": True},
        *({"quantizer_name": f"*{part}*{side}_quantizer", "cfg": FP8, "enable": True}
          for part in ("self_attn", "linear_attn.out_proj") for side in ("weight", "input")),
        {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": FP8, "enable": True},
    ],
    "algorithm": "max",
}  # fmt: skip


def ids() -> "torch.Tensor":
    return torch.randint(0, 1000, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference(tmp_path_factory.mktemp("reference"))


def quantized(reference: Path, config: dict, folder: Path):
    """ModelOpt's fake-quantized model, and its export in `folder`."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    modelopt_backend.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.bfloat16).eval()
        model = mtq.quantize(model, modelopt_backend.with_backend(config), lambda m: m(ids()))
        with torch.inference_mode():
            names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
            inputs = {
                n: torch.randn(6, model.get_submodule(n).in_features, dtype=torch.bfloat16)
                for n in names
            }
            outputs = {n: model.get_submodule(n)(x) for n, x in inputs.items()}
        modelopt_backend.release(model)
        export_hf_checkpoint(model, export_dir=folder)
    return inputs, outputs


def test_awq_with_pre_quant_scale(reference: Path, tmp_path: Path) -> None:
    from modelopt.torch.quantization import NVFP4_AWQ_LITE_CFG

    inputs, outputs = quantized(reference, NVFP4_AWQ_LITE_CFG, tmp_path)
    assert (
        json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_algo"]
        == "NVFP4_AWQ"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    scaled = [n for n, m in nvfp4_linears(model).items() if m.pre_quant_scale is not None]
    assert len(scaled) == 8 and {n.rpartition(".")[2] for n in scaled} == {
        "down_proj",
        "o_proj",
        "out_proj",
    }
    with torch.inference_mode():
        for name in scaled:  # the scales of the others are folded into the norms before them
            actual, expected = (
                model.get_submodule(name)(inputs[name]).float(),
                outputs[name].float(),
            )
            error = (actual - expected).norm()
            assert error < 0.03 * expected.norm(), name  # the export rounds the scales to bf16
            linear = model.get_submodule(name)
            pre, linear.pre_quant_scale = linear.pre_quant_scale, None
            assert (linear(inputs[name]).float() - expected).norm() > 5 * error, (
                "the scale must matter"
            )
            linear.pre_quant_scale = pre
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    assert same(load_file(tmp_path / "model.safetensors"), load_file(saved / "model.safetensors"))


def test_mixed_precision_with_fp8_linears_and_an_fp8_cache(
    reference: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from modelopt.torch.quantization.tensor_quant import fp8_eager

    inputs, outputs = quantized(reference, MIXED, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "MIXED_PRECISION" and config["kv_cache_scheme"]
    caplog.clear()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [r.message for r in caplog.records if "KV cache" in r.message], (
        "an FP8 cache is ignored with a warning"
    )
    eight = [n for n, m in model.named_modules() if isinstance(m, FP8Linear)]
    assert len(eight) == 7 and len(nvfp4_linears(model)) == 12
    assert runtime.numerics_of(model) == ["w4a16"]
    tensors = load_file(tmp_path / "model.safetensors")
    with torch.inference_mode():
        for name in (*eight, *nvfp4_linears(model)):
            actual, expected = (
                model.get_submodule(name)(inputs[name]).float(),
                outputs[name].float(),
            )
            if not name.endswith(
                ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
            ):  # these share one amax after the export
                assert (actual - expected).norm() < 0.03 * expected.norm(), (
                    name
                )  # ModelOpt's export rounds to bf16 first
        for name in eight:
            rounded = fp8_eager(inputs[name].float(), tensors[f"{name}.input_scale"] * 448)
            weight = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]
            exact = model.get_submodule(name)(inputs[name].float())
            torch.testing.assert_close(exact, rounded @ weight.T, atol=1e-4, rtol=1e-4)
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    assert same(load_file(tmp_path / "model.safetensors"), load_file(saved / "model.safetensors"))
    moved = model.to(torch.float32)
    assert moved.get_submodule(eight[0]).weight.dtype == torch.float8_e4m3fn


def same(before: dict, after: dict) -> bool:
    """The same names, types, shapes and bytes."""
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape), name
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8)
        ), name
    return True


@pytest.mark.parametrize("config", ["FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG"])
def test_fp8_alone_loads_as_the_audit_states(reference: Path, tmp_path: Path, config: str) -> None:
    exported = export_nvfp4(reference, tmp_path / "modelopt", config)
    support = {s.server: s.loads for s in checkpoint.audit(exported).summary.servers}
    assert support["transformers"] == "after"
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    eight = {n: m for n, m in model.named_modules() if isinstance(m, FP8Linear)}
    tensors = load_file(exported / "model.safetensors")
    assert len(eight) == sum(t.dtype == torch.float8_e4m3fn for t in tensors.values()) > 0
    checkpoint.convert(exported, to="bf16", output=tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    with torch.inference_mode():
        a, b = model(ids()).logits, plain(ids()).logits
    assert 0 < (a - b).norm() < 0.2 * b.norm()  # the activations are rounded, too


@pytest.mark.parametrize("config", ["NVFP4_DEFAULT_CFG", "NVFP4_MLP_WEIGHT_ONLY_CFG"])
def test_compressed_tensors(reference: Path, tmp_path: Path, config: str) -> None:
    exported = export_nvfp4(reference, tmp_path / "modelopt", config)
    folder = tmp_path / "compressed"
    checkpoint.convert(exported, to="compressed-tensors", output=folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    linears = nvfp4_linears(model)
    assert linears and all(type(m) is PackedNVFP4Linear for m in linears.values())
    assert runtime.numerics_of(model) == (
        ["w4a4", "w4a16"] if config == "NVFP4_DEFAULT_CFG" else ["w4a16"]
    )
    tensors = load_file(folder / "model.safetensors")
    for name, linear in linears.items():
        weight = by_compressed_tensors(tensors, name, linear.group)
        assert torch.equal(linear.rows(0, linear.out_features, torch.float32), weight), name
    original = runtime.load(exported, "w4a16")
    runtime.set_numerics(model, "w4a16")
    with torch.inference_mode():  # the reciprocals of the global scales round once more
        a, b = model(ids()).logits.float(), original(ids()).logits.float()
    assert (a - b).norm() < 0.01 * b.norm()
    model.save_pretrained(tmp_path / "saved")
    assert same(tensors, load_file(tmp_path / "saved" / "model.safetensors"))
    after, before = (
        json.loads((f / "config.json").read_text())["quantization_config"]
        for f in (tmp_path / "saved", folder)
    )
    assert after == before


def by_compressed_tensors(tensors: dict, name: str, group: int) -> "torch.Tensor":
    """One weight as the package dequantizes it: its own unpacked codes times scale / global scale in float32."""
    helpers = pytest.importorskip(
        "compressed_tensors.compressors.nvfp4.helpers", reason="pip install compressed-tensors"
    )
    packed = tensors[f"{name}.weight_packed"]
    values = helpers.unpack_fp4_from_uint8(
        packed, packed.shape[0], packed.shape[1] * 2, dtype=torch.float32
    )
    scale = tensors[f"{name}.weight_scale"].float() / tensors[f"{name}.weight_global_scale"]
    return (values.unflatten(-1, (-1, group)) * scale.unsqueeze(-1)).flatten(-2)


def test_other_compressed_tensors_formats_keep_transformers_quantizer() -> None:
    from transformers.quantizers.auto import AutoQuantizationConfig
    from transformers.utils.quantization_config import CompressedTensorsConfig

    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": True,
        "dynamic": False,
    }
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized",
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}  # fmt: skip
    assert isinstance(AutoQuantizationConfig.from_dict(config), CompressedTensorsConfig)


def test_group_32_reads_as_modelopt_does(reference: Path, tmp_path: Path) -> None:
    folder = export_nvfp4(reference, tmp_path, "NVFP4_MLP_WEIGHT_ONLY_CFG")
    model = runtime.load(folder)
    weights = dequantized(folder)
    for name, linear in nvfp4_linears(model).items():
        assert linear.group == 32
        assert torch.equal(
            linear.rows(0, linear.out_features, torch.bfloat16), weights[f"{name}.weight"]
        )
