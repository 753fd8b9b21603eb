"""Numerics profiles: activation formats against ggml's own reference and a brute force, and where the emulation rounds."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
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
ml_dtypes = pytest.importorskip("ml_dtypes")

import dense_models  # noqa: E402
from runtime_models import dequantized, export_nvfp4, save_reference  # noqa: E402

from annie_quant import nvfp4, quantize  # noqa: E402
from annie_quant.core.errors import UsageError  # noqa: E402
from annie_quant.offline import codec, load, profiles, set_numerics  # noqa: E402
from annie_quant.offline.decoding import generate  # noqa: E402
from annie_quant.offline.emulation import RoundedSigmoid, SumOrder, emulate  # noqa: E402
from annie_quant.offline.engine import Engine, Row  # noqa: E402
from annie_quant.offline.linears import NVFP4Linear, nvfp4_linears  # noqa: E402


def sample(rows: int = 40, k: int = 128) -> np.ndarray:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((rows, k)).astype(np.float32) * 10.0 ** rng.integers(-3, 3, (rows, 1))
    x[0] = 0
    return x.astype(np.float32)


def test_q8_0_equals_gguf_quants() -> None:
    gguf = pytest.importorskip("gguf", reason="the serve extra is not installed")
    x = sample()
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    assert np.array_equal(codec.q8_0(torch.from_numpy(x)).numpy(), expected)


def test_searched_nvfp4_is_the_best_of_five_scales() -> None:
    x = sample()
    e2m1 = ml_dtypes.float4_e2m1fn
    expected = np.zeros_like(x)
    for row, column in np.ndindex(len(x), x.shape[1] // 16):
        block = x[row, 16 * column : 16 * column + 16]
        code = int(
            np.float32(min(np.abs(block).max() / np.float32(6), 448))
            .astype(ml_dtypes.float8_e4m3fn)
            .view(np.uint8)
        )
        errors = {}
        for offset in (0, -1, 1, -2, 2):
            if 0 <= code + offset <= 126:
                scale = np.uint8(code + offset).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
                scaled = np.clip(block / (scale or np.float32(1)), -6, 6)
                values = scaled.astype(e2m1).astype(np.float32) * scale
                errors.setdefault(float(np.square(values - block).sum()), values)
        expected[row, 16 * column : 16 * column + 16] = errors[min(errors)]
    own = codec.nvfp4_searched(torch.from_numpy(x)).numpy()
    assert (
        np.allclose(own, expected, rtol=1e-6, atol=0) or np.mean(own != expected) < 2e-3
    )  # equal errors: either scale


@pytest.fixture(scope="module")
def naive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference = save_reference(tmp_path_factory.mktemp("reference"))
    return export_nvfp4(reference, tmp_path_factory.mktemp("naive"))


@pytest.fixture(scope="module")
def model(naive: Path):
    return load(naive, cache="float32", dtype=torch.float32)


@torch.inference_mode()
def logits(model) -> torch.Tensor:
    ids = torch.arange(2 * 48).reshape(2, 48) * 7 % model.config.vocab_size
    return model(input_ids=ids).logits


@pytest.mark.parametrize("name", ["vllm-cutlass", "vllm-marlin", "llama.cpp-cpu"])
def test_values_are_rounded_where_the_server_rounds(model, name: str) -> None:
    profile = profiles.find_profile(name)
    outputs, inputs, handles = {}, {}, []

    def spy(module, args, output, key) -> None:
        outputs[key], inputs[key] = output.clone(), args[0].clone()

    with emulate(model, profile):
        for key, module in model.named_modules():
            if key.endswith("norm") or isinstance(module, torch.nn.Linear):
                handles.append(
                    module.register_forward_hook(lambda m, a, o, key=key: spy(m, a, o, key))
                )
        logits(model)
    for handle in handles:
        handle.remove()

    def in_bf16(x: torch.Tensor) -> bool:
        return torch.equal(x, x.bfloat16().float())

    linears = nvfp4_linears(model)
    assert len(outputs) > 30
    for key, output in outputs.items():
        if name.startswith("vllm"):
            assert in_bf16(output) and in_bf16(inputs[key]), key
        elif isinstance(model.get_submodule(key), torch.nn.Linear):
            assert in_bf16(inputs[key]) == (key not in linears) and not in_bf16(output), key
        else:
            assert not in_bf16(output), key


def test_roundings_between_modules_are_those_of_vllm(model) -> None:
    """The formulas that reproduced vLLM 0.32's tensors bit for bit (tests/perf/trace_server.py, 2026-11-22)."""
    values, before, handles = {}, {}, []
    rounded = profiles.find_profile("vllm-cutlass")

    def bf16(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float()

    def keep(key):
        def hook(m, a, o):
            values[key] = o[0].clone() if isinstance(o, tuple) else o.clone()
            if a:
                values[key + ".in"] = a[0].clone()

        return hook

    def keep_input(key):
        return lambda m, a: before.update({key: a[0].clone()})

    with emulate(model, rounded):
        for key, module in model.named_modules():
            if (
                key
                and torch.nn.Module.forward is not type(module).forward
                and not key.endswith("model")
            ):
                handles.append(module.register_forward_hook(keep(key)))
            if key.endswith("layernorm"):
                handles.append(module.register_forward_pre_hook(keep_input(key)))
        logits(model)
    for handle in handles:
        handle.remove()
    layer = next(k for k in values if k.endswith(".mlp"))
    norm = layer.replace("mlp", "post_attention_layernorm")
    gate, up, down = (values[f"{layer}.{k}"] for k in ("gate_proj", "up_proj", "down_proj.in"))
    assert torch.equal(down, bf16(bf16(torch.nn.functional.silu(gate)) * up)), (
        "the activation is rounded before the product"
    )
    total = before[norm]
    assert not torch.equal(total, bf16(total)), "a norm gets the unrounded sum"
    weight = 1 + model.get_submodule(norm).weight.float()
    expected = bf16(
        total
        * torch.rsqrt(total.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
        * weight
    )
    assert torch.equal(values[norm], expected)
    assert torch.equal(values[norm + ".in"], bf16(total)), (
        "the residual that the next sum starts from is rounded"
    )
    rotary = next(v for k, v in values.items() if k.endswith("rotary_emb"))
    assert torch.equal(rotary, bf16(rotary))


@pytest.mark.parametrize("cache", ["packed", "float32"])
def test_emulated_products_round_both_sides_to_bfloat16(naive: Path, cache: str) -> None:
    """vLLM's --linear-backend emulation dequantizes into the model's dtype and then multiplies."""
    layer = next(iter(nvfp4_linears(load(naive, cache=cache, dtype=torch.float32)).values()))
    x = (
        torch.randn(9, layer.in_features, generator=torch.Generator().manual_seed(0))
        .bfloat16()
        .float()
    )
    layer.set_numerics("vllm-cutlass")
    operands = layer.rounded_input(x)
    weight = layer.rows(0, layer.out_features, torch.float32)
    assert torch.allclose(layer(x), operands @ weight.T, rtol=1e-5, atol=1e-5)
    layer.set_numerics("vllm-emulation")
    expected = operands.bfloat16().float() @ weight.bfloat16().float().T
    for order in (None, torch.randperm(layer.in_features), torch.randperm(layer.in_features)):
        layer.reorder(order, 1)
        assert torch.allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, operands @ weight.T, rtol=1e-4, atol=1e-5)


def test_gates_of_attention_are_rounded_before_the_product(model) -> None:
    """transformers multiplies by torch.sigmoid(gate), which is not a module."""
    attention = next(m for k, m in model.named_modules() if k.endswith("self_attn"))
    for name, is_rounded in (("vllm-cutlass", True), ("float32", False)):
        with emulate(model, profiles.find_profile(name)):
            assert ("forward" in attention.__dict__) == is_rounded
        assert "forward" not in attention.__dict__
    gated = torch.nn.Module()
    gated.forward = lambda x: 2 * torch.sigmoid(x)
    RoundedSigmoid(gated, lambda x: x.sigmoid().bfloat16().float())
    x = torch.linspace(-3, 3, 7)
    assert torch.equal(gated(x), 2 * torch.sigmoid(x).bfloat16().float())
    assert not torch.equal(torch.sigmoid(x), torch.sigmoid(x).bfloat16().float())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vllm-cutlass", lambda b: b.sigmoid()),
        ("w4a4+bf16", lambda b: b.sigmoid().bfloat16().float()),
        ("float32", lambda b: b.sigmoid()),
    ],
)
def test_beta_is_rounded_as_the_profile_names_it(
    model, monkeypatch: pytest.MonkeyPatch, name: str, expected
) -> None:
    is_member = name.endswith("+bf16")
    profile = (
        profiles.in_bfloat16(profiles.find_profile("w4a4"))
        if is_member
        else profiles.find_profile(name)
    )
    layer = next(m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet"))
    rule, logit, beta = layer.chunk_gated_delta_rule, [], []

    def spy(*args, **options):
        beta.append(options["beta"].clone())
        return rule(*args, **options)

    monkeypatch.setattr(layer, "chunk_gated_delta_rule", spy)
    with emulate(model, profile):
        handle = layer.in_proj_b.register_forward_hook(lambda m, a, o: logit.append(o.clone()))
        logits(model)
        handle.remove()
    assert torch.equal(beta[0], expected(logit[0]))
    assert "forward" not in layer.__dict__


def test_the_model_is_unchanged_afterwards(model) -> None:
    set_numerics(model, "w4a4")
    state = {
        k: v.clone()
        for k, v in model.state_dict().items()
        if v.dtype.is_floating_point and v.element_size() > 1
    }
    before = logits(model)
    for name in ("vllm-cutlass", "llama.cpp-cpu"):
        with emulate(model, profiles.find_profile(name), SumOrder(permutation=1)):
            assert not torch.equal(logits(model), before)
    set_numerics(model, "w4a4")
    assert torch.equal(logits(model), before)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items() if k in state)


def test_a_permutation_changes_the_order_of_sums_alone(model) -> None:
    with emulate(model, profiles.find_profile("float32")):
        plain = logits(model)
    with emulate(model, profiles.find_profile("float32"), SumOrder(permutation=1)):
        other = logits(model)
    assert not torch.equal(plain, other)
    assert torch.allclose(plain, other, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))


def test_a_tied_head_is_not_permuted(model) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(32, 64), torch.nn.Linear(64, 32, bias=False)
            self.head.weight = self.embed.weight

    tied = Tied()
    with emulate(tied, profiles.find_profile("float32"), SumOrder(permutation=1)):
        assert torch.allclose(
            tied.head(tied.embed.weight[:3]), tied.embed.weight[:3] @ tied.embed.weight.T
        )


def test_the_emulation_has_the_noise_of_a_real_bfloat16_model(model, naive: Path) -> None:
    real = load(naive, "w4a16", cache="bf16", dtype=torch.bfloat16)
    exact, marlin = profiles.find_profile("float32"), profiles.find_profile("vllm-marlin")
    with emulate(model, exact):
        plain = logits(model)
    with emulate(model, marlin):
        emulated = logits(model)
    noise = float((emulated - plain).square().mean().sqrt())
    real_noise = float((logits(real).float() - plain).square().mean().sqrt())
    assert 0.4 < noise / real_noise < 2.5, (noise, real_noise)


def test_profiles_that_do_not_apply_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown numerics"):
        profiles.find_profile("w8a8")
    layer = NVFP4Linear(48, 16, activations=False)
    with pytest.raises(UsageError, match="input_scale"):
        layer.set_numerics("vllm-cutlass")
    for name in ("llama.cpp-cpu", "llama.cpp-blackwell"):
        with pytest.raises(UsageError, match="multiple of 32"):
            layer.set_numerics(name)
    with pytest.raises(UsageError, match="input_scale"):
        layer.set_numerics("w4a4-prompts")


# ---- prompts in one format, answers in another


@pytest.fixture(scope="module", params=["qwen3.5", "qwen2"])
def w4a4(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with input scales: DeltaNet and attention, or attention alone."""
    home = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3.5":
        source = save_reference(home / "bf16", gain=2.0, layers=2)
    else:
        source = dense_models.make(home / "bf16", "qwen2")
    return export_nvfp4(source, home / "w4a4")


@torch.inference_mode()
def two_plain_forwards(
    folder: Path, prompt: list[int], answer: list[int], in_prompt: Callable, in_answer: Callable
) -> torch.Tensor:
    """Return the logits of an answer's tokens by transformers' own classes on the weights that ModelOpt dequantizes.

    The prompt is one forward that fills the cache, the answer's tokens one forward each; hooks round the linears' inputs.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().eval()
    state = {name: tensor.float() for name, tensor in dequantized(folder, "float32").items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    functions = {}

    def rounds(scale: float):
        return lambda module, args: (functions["now"](args[0], scale), *args[1:])

    for name, module in model.named_modules():
        if f"{name}.weight_scale_2" in stored:
            scale = float(stored[f"{name}.input_scale"])
            module.register_forward_pre_hook(rounds(scale))
    functions["now"] = in_prompt
    output = model(torch.tensor([prompt]), use_cache=True)
    rows = [output.logits[0, -1]]
    functions["now"] = in_answer
    for token in answer[:-1]:
        cache = output.past_key_values
        output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        rows.append(output.logits[0, -1])
    return torch.stack(rows)


def to_nvfp4(x: torch.Tensor, scale: float) -> torch.Tensor:
    rounded = nvfp4.fake_quant(x.reshape(-1, x.shape[-1]).numpy(), tensor_scale=np.float32(scale))
    return torch.from_numpy(rounded).view(x.shape)


def test_prompts_are_rounded_and_answers_are_not(w4a4: Path) -> None:
    rng = np.random.default_rng(0)
    shared = rng.integers(5, 300, 40).tolist()
    rows = [
        Row([*shared, *rng.integers(5, 300, tail).tolist()], rng.integers(5, 300, size).tolist())
        for tail, size in ((1, 9), (12, 3), (30, 1), (30, 14))
    ]

    def unrounded(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x

    model = load(w4a4, dtype=torch.float32)
    engine = Engine(model)
    computed = {}
    for name in ("w4a4-prompts", "w4a4", "w4a16"):
        with emulate(model, profiles.find_profile(name)):
            computed[name] = dict(engine.scores(rows))
    for i, row in enumerate(rows):
        expected = two_plain_forwards(w4a4, row.prompt, row.target, to_nvfp4, unrounded)
        apart = {name: float((x[i] - expected).abs().max()) for name, x in computed.items()}
        # Sums in another order move a value over a midpoint now and then.
        assert apart["w4a4-prompts"] < 0.1 * apart["w4a16"], apart
        if len(row.target) > 1:
            assert apart["w4a4-prompts"] < 0.1 * apart["w4a4"], apart
    with emulate(model, profiles.find_profile("w4a4-prompts")):
        answers = generate(engine, [row.prompt for row in rows], [12] * len(rows), set())
    for row, answer in zip(rows, answers, strict=True):
        steps = two_plain_forwards(w4a4, row.prompt, answer.tokens, to_nvfp4, unrounded)
        chosen = steps.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert (steps.max(-1).values - chosen).max() < 1e-3, "greedy under the same arithmetic"


def test_llama_cpp_on_blackwell_decodes_with_8_bits(w4a4: Path) -> None:
    rng = np.random.default_rng(1)
    row = Row(rng.integers(5, 300, 30).tolist(), rng.integers(5, 300, 10).tolist())
    profile = profiles.in_float32(profiles.find_profile("llama.cpp-blackwell"))
    model = load(w4a4, dtype=torch.float32)
    with emulate(model, profile):
        ((_, logits),) = Engine(model).scores([row])
    expected = two_plain_forwards(
        w4a4,
        list(row.prompt),
        list(row.target),
        lambda x, _: codec.nvfp4_searched(x),
        lambda x, _: codec.q8_0(x),
    )
    other = two_plain_forwards(
        w4a4, list(row.prompt), list(row.target), *[lambda x, _: codec.nvfp4_searched(x)] * 2
    )
    assert (logits - expected).abs().max() < 0.1 * (logits - other).abs().max()


@torch.inference_mode()
def test_without_a_batch_a_forward_of_several_tokens_is_a_prompt() -> None:
    layer = NVFP4Linear(64, 16)
    layer.input_scale.fill_(0.001)
    layer.set_numerics("w4a4-prompts")
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer.rounded_input(x[:, :1]), x[:, :1])
    rounded = layer.rounded_input(x)
    assert torch.equal(rounded, to_nvfp4(x, 0.001)) and not torch.equal(rounded, x)
    with layer.prompts.set(torch.ones(2, 4, dtype=torch.bool)), pytest.raises(UsageError) as error:
        layer.rounded_input(x)
    assert "its prompts are not known" in error.value.message


@torch.inference_mode()
def test_plain_norms_and_biases_are_rounded_twice(tmp_path: Path) -> None:
    """A Qwen2 in the bfloat16 arithmetic of the model's own classes: transformers' norm, and vLLM's `out = out + bias`."""
    folder = tmp_path / "w4a16"
    quantize.run("direct", dense_models.make(tmp_path / "bf16", "qwen2"), folder)
    model = load(folder, cache="float32", dtype=torch.float32)
    norm, linear = (
        model.get_submodule(f"model.layers.0.{n}") for n in ("input_layernorm", "self_attn.q_proj")
    )
    generator = torch.Generator().manual_seed(0)
    norm.weight.copy_(torch.randn(norm.weight.shape, generator=generator).bfloat16())
    linear.bias.copy_(torch.randn(linear.bias.shape, generator=generator).bfloat16())
    x = torch.randn(64, norm.weight.numel(), generator=generator).bfloat16()
    before = linear(x.float())
    with emulate(model, profiles.find_profile("vllm-marlin")):
        normed, biased = norm(x.float()), linear(x.float())
    assert torch.equal(normed.bfloat16(), type(norm).forward(norm.bfloat16(), x))
    product = x.float() @ linear.weights(torch.float32).T
    expected = product.bfloat16() + linear.bias.bfloat16()
    assert (
        biased.bfloat16() != expected
    ).float().mean() < 1e-3  # a sum in another order may round to the neighbour
    assert ((product + linear.bias).bfloat16() != expected).float().mean() > 0.05
    assert torch.equal(linear(x.float()), before)
