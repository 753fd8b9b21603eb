"""The training code of tiny-annie: its forward compared with transformers, its fake quantization with the codec."""

from __future__ import annotations

import sys

import pytest
from paths import ROOT

torch = pytest.importorskip("torch", reason="needs the quantize extra (torch)")
transformers = pytest.importorskip("transformers", reason="needs the quantize extra (transformers)")

TRAINING = ROOT / "training" / "tiny_annie"
NAMES = ("net", "quant", "config", "tokenizer", "rows", "workloads", "data", "train", "evaluate")


@pytest.fixture(autouse=True)
def training_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(TRAINING))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture(scope="module")
def reference():
    sys.path.insert(0, str(TRAINING))
    try:
        from config import configuration
    finally:
        sys.path.remove(str(TRAINING))
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    return transformers.Qwen3_5ForCausalLM(configuration()).eval()


def stacked(reference, m=2):
    from net import linear_names

    names = set(linear_names(reference.config))
    return {
        k: v.detach().unsqueeze(0).repeat(m, 1, 1) if k in names else v.detach()
        for k, v in reference.state_dict().items()
    }


@torch.no_grad()
def test_forward_equals_transformers(reference):
    from net import Net

    ids = torch.randint(0, 1270, (2, 90))
    net = Net(reference.config, stacked(reference))
    logits = net.logits(net.hidden(ids, 2, residual=torch.float32))
    expected = reference(ids).logits
    assert torch.allclose(logits[0], expected, atol=1e-4) and torch.allclose(logits[1], expected, atol=1e-4)


@torch.no_grad()
def test_generation_equals_transformers_whatever_the_padding(reference):
    from evaluate import generate
    from net import Net

    prompts = [torch.randint(0, 1270, (n,)).tolist() for n in (5, 17, 9)]
    net = Net(reference.config, {k: v.bfloat16() if v.dim() > 1 else v for k, v in stacked(reference).items()})
    net32 = Net(reference.config, stacked(reference))
    assert [len(a) for a in generate(net, 2, prompts, 4, [1273])[0]]
    import net as module

    original = module.Net.hidden
    # In float32 near-ties do not matter, so the tokens must be the same.
    module.Net.hidden = lambda self, ids, m, **more: original(self, ids, m, residual=torch.float32, **more)
    try:
        answers = generate(net32, 2, prompts, 6, [1273])
    finally:
        module.Net.hidden = original
    for prompt, tokens in zip(prompts, answers[1], strict=True):
        out = reference.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=1273)
        assert out[0, len(prompt) :].tolist() == tokens


def test_fake_quantization_equals_the_codec(reference):
    nvfp4 = pytest.importorskip("annie_quant.nvfp4", reason="the codec is not built here")
    import quant

    torch.manual_seed(1)
    w = (torch.randn(64, 256) * torch.logspace(-4, 1, 64)[:, None]).float()
    packed = nvfp4.pack(w.numpy())
    expected = torch.from_numpy(nvfp4.unpack(packed, dtype="float32"))
    assert torch.equal(quant.fake(w, torch.tensor(float(packed.tensor_scale))), expected)


def test_ties_go_to_even():
    import quant

    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.75])
    assert quant.e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -1]


def test_which_linears_are_quantized():
    import quant

    assert quant.quantized("model.layers.0.linear_attn.in_proj_qkv", "naive")
    assert not quant.quantized("model.layers.0.linear_attn.in_proj_a", "naive")
    assert not quant.quantized("model.layers.3.self_attn.q_proj", "mlp_only")
    assert quant.quantized("model.layers.3.mlp.up_proj", "mlp_only")
    assert quant.partners("model.layers.3.self_attn.k_proj.weight") == [
        f"model.layers.3.self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj")
    ]


def test_only_the_models_own_tokens_are_learned():
    import random

    from data import encode, tokenizer
    from rows import row

    rng, t = random.Random(3), tokenizer()
    for style in ("base", "annie"):
        for _ in range(40):
            training_row = row(rng, style)
            ids, start = encode(training_row)
            learned = t.decode(ids[start:])
            assert learned.endswith("<|im_end|>") and "<|im_start|>" not in learned
            assert t.decode(ids[:start]).endswith("<think>\n" if training_row.thinking else "<think>\n\n</think>\n\n")
