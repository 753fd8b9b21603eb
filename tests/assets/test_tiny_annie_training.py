"""The training code of tiny-annie: its forward compared with transformers, its rows, its overlays, its NVFP4 with the codec."""

from __future__ import annotations

import multiprocessing
import random
import sys

import pytest
from paths import ROOT

torch = pytest.importorskip("torch", reason="needs the quantize extra (torch)")
transformers = pytest.importorskip("transformers", reason="needs the quantize extra (transformers)")

TRAINING = ROOT / "training" / "tiny_annie"
NAMES = (
    "batches",
    "config",
    "data",
    "forward",
    "frames",
    "merge",
    "mixture",
    "mtp",
    "rows",
    "screen",
    "sweep",
    "tokenizer",
    "train",
    "words",
    "workloads",
)


@pytest.fixture(autouse=True)
def training_modules(monkeypatch):
    """The folder's modules have short names, so they are imported again and forgotten."""
    monkeypatch.syspath_prepend(str(TRAINING))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def reference():
    from config import configuration

    transformers.logging.set_verbosity_error()
    return transformers.Qwen3_5ForCausalLM(configuration()).eval()


def weights(reference):
    return {k: v.detach().clone() for k, v in reference.state_dict().items()}


def in_copies(reference, m):
    from forward import linear_shapes

    linears = {n + ".weight" for n in linear_shapes(reference.config)}
    return {
        k: v.unsqueeze(0).repeat(m, 1, 1) if k in linears else v
        for k, v in weights(reference).items()
    }


@torch.no_grad()
def test_forward_of_two_models_equals_transformers(reference):
    from forward import Shape, hidden_states, stacked

    ids = torch.randint(0, 1500, (2, 128))
    w = in_copies(reference, 2)
    for name in w:
        if name.endswith("mlp.up_proj.weight"):
            w[name][1] *= 1.5
    hidden = hidden_states(Shape(), w, ids.repeat(2, 1), stacked(w, 2))
    logits = (hidden @ w["lm_head.weight"].t()).view(2, 2, 128, -1)
    assert torch.allclose(logits[0], reference(ids).logits, atol=1e-4)
    for name, parameter in reference.named_parameters():
        if name.endswith("mlp.up_proj.weight"):
            parameter *= 1.5
    assert torch.allclose(logits[1], reference(ids).logits, atol=1e-4)


@pytest.fixture
def mixture():
    """transformers' mixture, upcycled from a random dense model, with routers that choose clearly."""
    from config import mixture_configuration
    from forward import Mixture, Shape, initial
    from mixture import upcycled

    transformers.logging.set_verbosity_error()
    w = upcycled(Mixture(), initial(Shape(), 1), 0)
    w |= {k: v + 0.05 * torch.randn_like(v) for k, v in w.items() if ".mlp." in k}
    return transformers.Qwen3_5MoeForCausalLM(mixture_configuration()).float().eval(), w


@torch.no_grad()
def test_mixture_and_its_balance_equal_transformers(mixture):
    from forward import Forward, Mixture, imbalance, plain
    from mixture import experts
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

    model, w = mixture
    model.load_state_dict(experts(Mixture(), w))
    ids, weight = torch.randint(0, 1500, (2, 128)), torch.ones(2, 128)
    weight[1, 50:] = 0
    own = Forward(Mixture(), w, plain(w))
    logits = own.hidden_states(ids) @ w["lm_head.weight"].t()
    expected = model(ids, output_router_logits=True)
    assert torch.allclose(logits, expected.logits, atol=1e-4)
    balance = load_balancing_loss_func(expected.router_logits, 8, 2, weight)
    assert imbalance(Mixture(), own.routers, weight).item() == pytest.approx(
        balance.item(), rel=1e-4
    )
    assert [len(x.unique()) for x in torch.stack(own.routers).topk(2).indices] == [
        8
    ] * 8  # all experts are compared


@torch.no_grad()
def test_upcycled_mixture_with_all_experts_open_is_the_dense_model(mixture):
    """Both scales of upcycled() are the inverse of what an average token gets, so all neurons add up to the dense MLP."""
    from forward import Mixture, Shape, initial
    from mixture import upcycled

    dense = initial(Shape(), 1)
    w, x, p = upcycled(Mixture(), dense, 0), torch.randn(5, 256), "model.layers.0.mlp."

    def mlp(w, share):
        gate, up, down = (w[f"{p}{k}_proj.weight"] for k in ("gate", "up", "down"))
        return share * (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    assert torch.allclose(mlp(w, 0.5), mlp(dense, 1.0), atol=1e-6)


@torch.no_grad()
def test_draft_head_equals_the_packages(reference, tmp_path):
    """annie_quant's own MTP head, made of transformers' layer, gives the drafts of the training code."""
    from forward import Shape
    from mtp import draft_states, initial_head
    from safetensors.torch import save_file

    from annie_quant.checkpoint import ModelFolder
    from annie_quant.offline.draft_head import DraftHead, DraftInputs

    w = weights(reference)
    head = {k: v + 0.02 * torch.randn_like(v) for k, v in initial_head(Shape(), w, 0).items()}
    save_file(head, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(reference.config.to_json_string())
    ids = torch.randint(0, 1500, (1, 64))
    hidden = reference.model(ids).last_hidden_state
    inputs = DraftInputs(hidden[:, :-1], ids[:, 1:], 0)
    (drafted,) = DraftHead(ModelFolder(tmp_path), reference)(inputs, 1)
    expected = reference.lm_head(drafted)[0]
    states = draft_states(Shape(), w, head, hidden, ids)
    assert torch.allclose((states @ w["lm_head.weight"].t())[0], expected, atol=1e-4)


def test_shape_is_the_configuration(reference):
    from forward import Shape, linear_shapes

    for name in (
        n
        for n in vars(Shape)
        if not n.startswith("_") and n not in ("rope_theta", "partial_rotary_factor")
    ):
        assert getattr(Shape, name) == getattr(reference.config, name), name
    own = {n + ".weight": tuple(s) for n, s in linear_shapes(Shape()).items()}
    state = reference.state_dict()
    assert own == {n: tuple(state[n].shape) for n in own}


def test_screen_quantizes_as_the_codec_does(reference):
    nvfp4 = pytest.importorskip("annie_quant.nvfp4", reason="the codec is not built here")
    from screen import fake_quantized

    w = (torch.randn(64, 256) * torch.logspace(-4, 1, 64)[:, None]).float()
    packed = nvfp4.pack(w.numpy())
    expected = torch.from_numpy(nvfp4.unpack(packed, dtype="float32"))
    ours = fake_quantized(w, torch.tensor(float(packed.tensor_scale)))
    assert (ours != expected).float().mean() < 1e-3  # ties, which random weights hardly have


def test_only_the_models_own_tokens_are_learned():
    import data
    from rows import row
    from tokenizer import OUTPUT

    data.load(OUTPUT)
    rng = random.Random(3)
    t = data._state["tokenizer"]
    for style in ("base", "tuned"):
        for _ in range(25):
            drawn = row(rng, style)
            e = data.encode(drawn)
            text = t.decode([i for i, on in zip(e.ids, e.learned, strict=True) if on])
            assert text.endswith("<|im_end|>") and "<|im_start|>" not in text
            if style == "tuned" and not drawn.thinking:
                assert text.count("<|im_end|>") == sum(
                    m["role"] == "assistant" for m in drawn.messages
                )


def test_a_words_places_hold_the_same_tokens_wherever_it_stands():
    """So that another word can take its place at every step, in the request and in the call."""
    import data
    from rows import row
    from tokenizer import OUTPUT

    data.load(OUTPUT)
    rng, copied = random.Random(5), 0
    draw = data.anything(data._state["pieces"])
    for _ in range(40):
        e = data.encode(row(rng, "tuned", category="tool", draw=draw))
        by_place: dict[int, dict[int, set[int]]] = {}
        learned = set()
        for i, (token, place, offset) in enumerate(zip(e.ids, e.place, e.offset, strict=True)):
            if place:
                by_place.setdefault(place, {}).setdefault(offset, set()).add(token)
                learned |= {place} if e.learned[i] else set()
        assert all(len(tokens) == 1 for place in by_place.values() for tokens in place.values())
        copied += len(learned)
    assert copied > 20  # of the exchanged words, those that a call must copy


def test_held_out_wordings_are_never_drawn():
    """With the same arguments, no request of the training frames contains one of the calibration or gate split."""
    from string import Formatter

    import frames
    from rows import row

    rng, compared = random.Random(7), 0
    for persona in ("annie", "home", "support"):
        held = frames.held_out(persona)
        for _ in range(150):
            expect = row(rng, "tuned", "gate", "tool", persona).expect
            values = expect["arguments"]
            text = (frames.ask(rng, persona, expect["tool"], values) or "").lower()
            assert text
            for template in held:
                fields = {name for _, name, _, _ in Formatter().parse(template) if name}
                if fields == set(values):
                    compared += 1
                    assert template.format(**values).lower() not in text
    assert compared > 1000


@torch.no_grad()
def test_a_token_that_is_probable_enough_adds_no_loss():
    from forward import cross_entropy

    hidden, head = torch.eye(4).unsqueeze(0).repeat(2, 1, 1) * 5, torch.eye(4)
    ids = torch.tensor([[0, 0, 2, 3]]).repeat(
        2, 1
    )  # after 0 comes 0 (certain), then 2 and 3 (both unlikely)
    weight = torch.ones(2, 4)
    none, some = cross_entropy(hidden, head, ids, weight, 2, torch.tensor([0.0, 0.5]))[0].tolist()
    first = -torch.log_softmax(hidden[0, 0] @ head, 0)[0].item()
    assert first < 0.5 and none - some == pytest.approx(first, rel=1e-4)


def test_rows_without_tool_calls(tmp_path):
    import numpy as np
    from batches import Rows

    ids = np.array([1, 9, 1, 1, 9, 1], np.uint16)
    zeros = np.zeros(6, np.uint8)
    fields = {"place": zeros.astype(np.uint16), "kind": zeros, "offset": zeros}
    np.savez(
        tmp_path / "r.npz",
        ids=ids,
        learned=np.array([0, 0, 1, 0, 1, 1], np.uint8),
        ends=np.array([3, 6]),
        category=np.array(["a", "b"]),
        **fields,
    )
    assert [len(b.ids) for b in Rows(tmp_path / "r.npz", 192).buckets] == [2, 0, 0, 0]
    rows = Rows(tmp_path / "r.npz", 192, without=9)  # in the first row 9 is only in the prompt
    assert [list(b.index) for b in rows.buckets] == [[0], [], [], []]


def test_row_files_do_not_depend_on_the_number_of_workers(tmp_path, monkeypatch):
    import data
    import numpy as np

    assert [count for _, _, count in data.jobs_of("base", 501)] == [250, 250, 1]
    monkeypatch.setattr(
        data,
        "jobs_of",
        lambda style, count: [(style, f"{style}:{i}", 2) for i in range(count // 2)],
    )
    # Forked, because spawned ones import torch; here no thread holds a lock that a worker needs.
    forked = multiprocessing.get_context("fork")
    monkeypatch.setattr(data, "get_context", lambda method: forked)
    files = {}
    for workers in (1, 3):
        output = tmp_path / str(workers)
        sizes = [
            "--base",
            "0",
            "--tuned",
            "24",
            "--gate",
            "1",
            "--words",
            "200",
            "--workers",
            str(workers),
        ]
        monkeypatch.setattr(sys, "argv", ["data.py", "--output", str(output), *sizes])
        data.main()
        files[workers] = np.load(output / "tuned.npz")
    assert len(files[1]["ends"]) == 24
    assert all(np.array_equal(files[1][key], files[3][key]) for key in files[1].files)


def test_an_overlay_is_chosen_by_its_whole_name_first():
    from merge import only

    overlays = {"rank1-seed1": {}, "rank1-seed10": {"a": 1}, "rank8-seed0": {}}
    assert only(overlays, "rank1-seed1") is overlays["rank1-seed1"]
    assert only(overlays, "rank8") is overlays["rank8-seed0"]
    with pytest.raises(SystemExit, match="expected one overlay with 'rank1' in its name"):
        only(overlays, "rank1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--more"], "--more needs --base"),
        (["--manners", "10"], "--manners needs --overlays"),
        (["--base", "base.pt"], "nothing to train"),
    ],
)
def test_sweep_refuses_options_that_would_be_ignored(arguments, message, monkeypatch, capsys):
    import sweep

    monkeypatch.setattr(sys, "argv", ["sweep.py", "--data", "d", "--output", "o", *arguments])
    with pytest.raises(SystemExit):
        sweep.main()
    assert message in capsys.readouterr().err
