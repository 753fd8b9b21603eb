"""FP8 with a scale per block (Qwen's and DeepSeek's releases): read, audited, run and converted, against transformers."""

from __future__ import annotations

from pathlib import Path

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np
import published_models as published
import pytest

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder, dialects
from annie_quant.core.errors import CheckpointError

NAME = "Qwen/Qwen3.6-35B-A3B-FP8"
BASE = "model.language_model.layers.1"
EXPERT = f"{BASE}.mlp.experts.2.up_proj"
O_PROJ = "model.language_model.layers.3.self_attn.o_proj"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published.write(NAME, tmp_path_factory.mktemp("block") / "fp8")


@pytest.fixture(scope="module")
def plain(fp8: Path) -> Path:
    return Path(aq.checkpoint.convert(fp8, "bf16", fp8.parent / "plain").path)


def reference(folder: Path) -> dict:
    """Return the state dict of transformers' own reader of such checkpoints, which dequantizes to bf16 on a CPU."""
    torch = pytest.importorskip(
        "torch", reason="the oracle is transformers: pip install annie-quant[quantize]"
    )
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()


def test_bf16_numbers_are_those_of_transformers(fp8: Path, plain: Path) -> None:
    """Bit for bit: the FP8 folder and our bf16 copy of it are the same model to transformers."""
    ours, theirs = reference(plain), reference(fp8)
    assert ours.keys() == theirs.keys()
    assert all(ours[n].equal(theirs[n]) for n in theirs)
    assert sum(".experts." in n or n.endswith("_proj.weight") for n in theirs) > 20


def test_the_copy_is_a_plain_checkpoint_with_everything_else_unchanged(
    fp8: Path, plain: Path
) -> None:
    before, after = zoo.read(fp8), zoo.read(plain)
    assert "quantization_config" not in ModelFolder(plain).config
    assert set(after) == {n for n in before if not n.endswith("_inv")}
    assert {t.dtype for t in after.values()} == {np.dtype(zoo.BF16)}
    untouched = [n for n in after if f"{n}_scale_inv" not in before]
    assert all(after[n].tobytes() == before[n].tobytes() for n in untouched)
    assert aq.checkpoint.audit(plain).findings == []
    assert aq.checkpoint.audit(fp8, source=plain).findings == []


def test_a_plain_copy_can_be_quantized_and_any_dialect_becomes_one(
    plain: Path, tmp_path: Path
) -> None:
    """`convert --to bf16` of NVFP4: the nearest bf16 number to what our codec decodes."""
    aq.quantize.run("direct", plain, tmp_path / "nvfp4")
    folder = ModelFolder(tmp_path / "nvfp4")
    back = zoo.read(Path(aq.checkpoint.convert(folder.path, "bf16", tmp_path / "back").path))
    linears = dialects.linears(folder)
    assert len(linears) > 100
    for name, linear in linears.items():
        assert np.array_equal(back[f"{name}.weight"], linear.dequantize(folder).astype(zoo.BF16)), (
            name
        )


@pytest.mark.parametrize("shape", [(160, 300), (128, 128), (1, 1), (257, 130)])
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (2**40, 2**50)])
def test_blocks_at_the_ends_may_be_smaller(
    tmp_path: Path, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    """By the definition, element by element; transformers itself takes whole blocks only."""
    rng = np.random.default_rng(1)
    codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 2, (-(-shape[0] // block[0]), -(-shape[1] // block[1]))).astype(
        np.float32
    )
    settings = {"quant_method": "fp8", "weight_block_size": list(block)}
    tensors = {"a.weight": codes, "a.weight_scale_inv": scale}
    folder = ModelFolder(zoo.save(tmp_path / "x", tensors, {"quantization_config": settings}))
    expected = [
        [np.float32(codes[i, j]) * scale[i // block[0], j // block[1]] for j in range(shape[1])]
        for i in range(shape[0])
    ]
    assert np.array_equal(
        dialects.linears(folder)["a"].dequantize(folder), np.array(expected, np.float32)
    )


def test_a_gguf_file_holds_the_numbers(fp8: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the serve extra is not installed")
    file = aq.checkpoint.convert(fp8, "gguf", tmp_path / "x.gguf").path
    stored = {t.name: t for t in gguf.GGUFReader(file).tensors}
    folder = ModelFolder(fp8)
    for name, module, index in (
        ("blk.3.attn_output", O_PROJ, ()),
        ("blk.1.ffn_up_exps", EXPERT, 2),
    ):
        tensor = stored[f"{name}.weight"]
        ours = gguf.quants.dequantize(tensor.data, tensor.tensor_type)[index]
        codes = folder.tensor(f"{module}.weight").astype(np.float32)
        blocks = folder.tensor(f"{module}.weight_scale_inv").astype(np.float32)
        expected = (
            (codes * np.kron(blocks, np.ones((128, 128), np.float32)))
            .astype(zoo.BF16)
            .astype(np.float32)
        )
        assert np.array_equal(ours.squeeze(), expected), name


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
def test_other_dialects_are_refused_with_the_command_that_works(
    fp8: Path, tmp_path: Path, to: str
) -> None:
    with pytest.raises(CheckpointError, match="FP8 in blocks") as caught:
        aq.checkpoint.convert(fp8, to, tmp_path / "never")
    assert caught.value.hint == f"annie-quant convert {fp8} --to bf16"
    assert not (tmp_path / "never").exists()


def test_the_runtime_multiplies_as_servers_do(
    fp8: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations have a scale per token and 128 columns; without that rounding the model is transformers' own."""
    torch = pytest.importorskip(
        "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
    )
    import annie_quant.offline
    from annie_quant.offline import linears

    ids = torch.arange(5, 21)[None]
    model = annie_quant.offline.load(fp8, dtype=torch.float32)
    tensors: list = []
    attention = model.model.layers[3].self_attn
    attention.o_proj.register_forward_hook(lambda m, args, out: tensors.extend([args[0], out]))
    with torch.inference_mode():
        model(ids)
    x, out = (t[0].numpy() for t in tensors[:2])
    blocks = x.reshape(len(x), -1, 128)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / 448
    rounded = ((blocks / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale).reshape(
        x.shape
    )
    weight = dialects.linears(ModelFolder(fp8))[O_PROJ].dequantize(ModelFolder(fp8))
    largest = np.abs(out).max()
    assert np.abs(out - rounded @ weight.T).max() < 1e-5 * largest
    assert np.abs(out - x @ weight.T).max() > 1e-3 * largest, (
        "negative control: the inputs are rounded"
    )
    # One scale per token would round otherwise: the test could fail.
    token = np.abs(x).max(axis=1, keepdims=True) / 448
    per_token = (x / token).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * token
    assert np.abs(out - per_token @ weight.T).max() > 1e-4 * largest

    original = linears.BlockFP8Linear.dequantized
    monkeypatch.setattr(linears, "fake_quant_fp8", lambda x, scale: x)
    monkeypatch.setattr(
        linears.BlockFP8Linear,
        "dequantized",
        lambda self, dtype: original(self, torch.bfloat16).to(dtype),
    )
    with torch.inference_mode():
        ours, theirs = (
            model(ids).logits,
            annie_quant.offline.load(plain, dtype=torch.float32)(ids).logits,
        )
    assert torch.linalg.norm(ours - theirs) < 1e-5 * torch.linalg.norm(theirs)


def test_other_fp8_is_computed_as_the_settings_ask(tmp_path: Path) -> None:
    """Activations with a scale per token (unsloth) or the stored one (NVIDIA), and KV scales under either name."""
    torch = pytest.importorskip(
        "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
    )
    import annie_quant.offline
    from annie_quant.offline.codec import scale_of

    for name, per_token in (
        ("unsloth/Qwen3.8-27B-NVFP4", True),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", False),
    ):
        folder = ModelFolder(published.write(name, tmp_path / name.partition("/")[0]))
        model = annie_quant.offline.load(folder.path, dtype=torch.float32)
        attention = model.model.layers[3].self_attn
        tensors: list = []
        attention.o_proj.register_forward_hook(
            lambda m, args, out, tensors=tensors: tensors.extend([args[0], out])
        )
        with torch.inference_mode():
            model(torch.arange(5, 21)[None])
        x, out = (t[0].numpy() for t in tensors)
        scale = np.abs(x).max(axis=1, keepdims=True) / 448 if per_token else np.float32(0.01)
        rounded = (
            np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
        )
        weight = dialects.linears(folder)[O_PROJ].dequantize(folder)
        expected, plain = rounded @ weight.T, x @ weight.T
        assert np.abs(out - expected).max() < 1e-4 * np.abs(expected).max()
        assert np.abs(out - plain).max() > 1e-3 * np.abs(expected).max(), (
            "negative control: the inputs are rounded"
        )
        assert float(scale_of(attention, "k_scale")) == (
            pytest.approx(0.02, rel=1e-2) if per_token else 1.0
        )


def test_linears_of_any_width_and_gradients(fp8: Path) -> None:
    """Columns that are no multiple of a block, by NumPy; gradients reach the input."""
    torch = pytest.importorskip(
        "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
    )
    from annie_quant.offline.linears import BlockFP8Linear

    assert BlockFP8Linear(200, 72, block=(2**40, 2**40)).dequantized(torch.float32).shape == (
        72,
        200,
    )
    linear = BlockFP8Linear(200, 72, block=(64, 128), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    linear.weight.data = torch.randn(72, 200, generator=generator).to(torch.float8_e4m3fn)
    linear.weight_scale_inv.data = torch.rand(2, 2, generator=generator) + 0.5
    x = torch.randn(3, 200, generator=generator, requires_grad=True)
    y = linear.half().float()(x)
    assert (
        linear.weight_scale_inv.dtype == torch.float32
        and linear.weight.dtype == torch.float8_e4m3fn
    )
    padded = np.pad(x.detach().numpy(), ((0, 0), (0, 56))).reshape(3, 2, 128)
    scale = np.abs(padded).max(axis=2, keepdims=True) / 448
    rounded = ((padded / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale).reshape(
        3, 256
    )[:, :200]
    blocks = np.kron(linear.weight_scale_inv.numpy(), np.ones((64, 128), np.float32))[:72, :200]
    expected = rounded @ (linear.weight.float().numpy() * blocks).T
    np.testing.assert_allclose(y.detach().numpy(), expected, rtol=1e-5, atol=1e-4)
    y.sum().backward()
    assert x.grad is not None and bool(x.grad.abs().sum() > 0)


def scale_of(tensor: str, change):
    return lambda t, c: t.update({tensor: change(t[tensor])})


def nan_code(codes: np.ndarray) -> np.ndarray:
    codes = codes.copy()
    codes.view(np.uint8)[0, 3] = 0x7F
    return codes


def set_settings(**fields):
    return lambda t, c: c["quantization_config"].update(fields)


FAULTS = {
    "scales dropped": (lambda t, c: t.pop(f"{EXPERT}.weight_scale_inv"), "fp8_scale_missing", EXPERT),
    "a scale per row": (
        scale_of(f"{EXPERT}.weight_scale_inv", lambda s: np.repeat(s, 128, axis=0)), "scale_shape",
        f"{EXPERT}.weight_scale_inv",
    ),
    "blocks of another size": (set_settings(weight_block_size=[64, 64]), "scale_shape", ""),
    "a scale of 0": (
        scale_of(f"{O_PROJ}.weight_scale_inv", lambda s: s * 0), "fp8_scale_bad", f"{O_PROJ}.weight_scale_inv",
    ),
    "scales as bytes": (
        scale_of(f"{O_PROJ}.weight_scale_inv", lambda s: np.ones(s.shape, np.uint8)), "scale_dtype",
        f"{O_PROJ}.weight_scale_inv",
    ),
    "a code that is NaN": (scale_of(f"{EXPERT}.weight", nan_code), "fp8_code_nan", f"{EXPERT}.weight"),
    "codes dropped": (lambda t, c: t.pop(f"{O_PROJ}.weight"), "orphan_scale", f"{O_PROJ}.weight_scale_inv"),
    "a router not listed": (
        lambda t, c: c["quantization_config"]["modules_to_not_convert"].remove(f"{BASE}.mlp.gate"), "not_excluded",
        f"{BASE}.mlp.gate",
    ),
    "a quantized linear listed": (
        lambda t, c: c["quantization_config"]["modules_to_not_convert"].append(f"{BASE}.mlp.shared_expert"),
        "excluded_but_quantized", f"{BASE}.mlp.shared_expert.down_proj",
    ),
    "settings lost": (lambda t, c: c.pop("quantization_config"), "config_missing", "config.json"),
    "one scale per tensor": (set_settings(weight_block_size=None), "method_unknown", "config.json"),
    "static activations": (set_settings(activation_scheme="static"), "algorithm_unknown", "config.json"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_and_refused(fp8: Path, tmp_path: Path, fault: str) -> None:
    change, code, tensor = FAULTS[fault]
    bad = zoo.spoil(fp8, tmp_path / "bad", change)
    findings = aq.checkpoint.audit(bad).findings
    assert any(f.code == code and f.tensor.startswith(tensor) for f in findings), findings
    if code in ("scale_shape", "method_unknown"):
        with pytest.raises(CheckpointError):
            aq.checkpoint.convert(bad, "bf16", tmp_path / "never")
        assert not (tmp_path / "never").exists()
    if fault in ("scales dropped", "a scale per row", "a scale of 0", "static activations"):
        pytest.importorskip(
            "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
        )
        import annie_quant.offline

        with pytest.raises(CheckpointError):
            annie_quant.offline.load(bad)
