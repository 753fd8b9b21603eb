"""Scales moved between tensors, on weights with outliers: no sound fold is refused, and every planted mismatch is reported.

The model is a Qwen2 of two layers: heavy-tailed weights, norms with gains from .02 to 20, input channels with columns of very
different size, biases. Real ones have the same: Qwen2.5-Coder-0.5B's sound AWQ export was refused by a rule that compared fitted
gains, because 4 bits leave little of a weak column in 128 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np
import pytest

from annie_quant import checkpoint, nvfp4
from annie_quant.checkpoint import writer
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.inspection import export_notes
from annie_quant.models.formats import W4A16

HIDDEN, WIDTH, HEADS, KV, HEAD = 256, 512, 8, 2, 32
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": HIDDEN, "intermediate_size": WIDTH,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV, "vocab_size": 1536, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
LAYER = "model.layers.1"
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
UP, DOWN, VALUES, OUTPUT = (
    f"{LAYER}.{n}" for n in ("mlp.up_proj", "mlp.down_proj", "self_attn.v_proj", "self_attn.o_proj")
)
BF16 = ml_dtypes.bfloat16
Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(11)
    tensors: Weights = {
        "model.embed_tokens.weight": np.resize(rng.standard_normal((64, HIDDEN)), (1536, HIDDEN)),
        "model.norm.weight": np.ones(HIDDEN),
    }
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV * HEAD, HIDDEN),
        "self_attn.v_proj": (KV * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN), "mlp.down_proj": (HIDDEN, WIDTH),
    }  # fmt: skip
    for i in range(2):
        for name, shape in shapes.items():
            columns = np.exp(0.4 * rng.standard_normal(shape[1]))
            columns[rng.choice(shape[1], 3, replace=False)] *= 8
            tensors[f"model.layers.{i}.{name}.weight"] = 0.02 * rng.standard_t(5, shape) * columns
            if name in READERS["input_layernorm"]:
                tensors[f"model.layers.{i}.{name}.bias"] = rng.standard_t(3, shape[0])
        for norm in READERS:
            gains = np.exp(0.5 * rng.standard_normal(HIDDEN))
            gains[:3], gains[3:6] = 20, 0.02
            tensors[f"model.layers.{i}.{norm}.weight"] = gains
    folder = tmp_path_factory.mktemp("folds") / "source"
    return zoo.save(folder, {n: t.astype(BF16) for n, t in tensors.items()}, CONFIG)


def scales(size: int, spread: float, seed: int = 1) -> np.ndarray:
    """Return input scales with a few outliers, as AWQ's search gives them."""
    rng = np.random.default_rng(seed)
    s = np.exp(spread * rng.standard_normal(size))
    s[rng.choice(size, 4, replace=False)] *= np.exp(3 * spread)
    return s


def fold(weights: Weights, spread: float, exact: bool = True) -> dict[str, np.ndarray]:
    """Fold scales into both norms of the second layer, up's rows, and v's rows with their bias; return each by its producer.

    exact: the scales are those of the norms after rounding, as awq_lite's; otherwise the norms are rounded afterwards.
    """
    folded = {}
    for norm, readers in READERS.items():
        name, s = f"{LAYER}.{norm}.weight", scales(HIDDEN, spread)
        plain = weights[name]
        weights[name] = (plain / s).astype(BF16).astype(np.float64)
        s = plain / weights[name] if exact else s
        for reader in readers:
            weights[f"{LAYER}.{reader}.weight"] = weights[f"{LAYER}.{reader}.weight"] * s
        folded[norm] = s
    r = folded[UP] = scales(WIDTH, spread, 2)
    weights[f"{UP}.weight"] = weights[f"{UP}.weight"] / r[:, None]
    weights[f"{DOWN}.weight"] = weights[f"{DOWN}.weight"] * r
    r = folded[VALUES] = scales(KV * HEAD, spread, 3)
    weights[f"{VALUES}.weight"] = weights[f"{VALUES}.weight"] / r[:, None]
    weights[f"{VALUES}.bias"] = weights[f"{VALUES}.bias"] / r
    per_query = np.repeat(r.reshape(KV, HEAD), HEADS // KV, axis=0).reshape(
        -1
    )  # a value head serves its query heads
    weights[f"{OUTPUT}.weight"] = weights[f"{OUTPUT}.weight"] * per_query
    return folded


def export(
    folder: Path, source: Path, change: Callable[[Weights], object], rule: str = "amax"
) -> Path:
    """Write an NVFP4 checkpoint of the source's weights after `change`."""
    weights = {n: t.astype(np.float64) for n, t in zoo.read(source).items()}
    change(weights)
    out: Weights = {}
    modules = [n.removesuffix(".weight") for n in weights if n.endswith("_proj.weight")]
    amax = {m: float(np.abs(weights[f"{m}.weight"]).max()) for m in modules}
    for m in modules:
        group = next((r for r in (*READERS.values(),) if m.endswith(r)), ())
        same = [f"{m.rpartition('.layers.')[0]}.layers.{m.split('.')[2]}.{g}" for g in group] or [m]
        top = nvfp4.tensor_scale(max(amax[x] for x in same), scale=rule)
        t = nvfp4.pack(
            weights[f"{m}.weight"].astype(np.float32), tensor_scale=float(top), scale=rule
        )
        out |= {f"{m}.weight": np.asarray(t.codes), f"{m}.weight_scale": np.asarray(t.block_scale)}
        out[f"{m}.weight_scale_2"] = np.array(t.tensor_scale, np.float32)
    out |= {n: t.astype(BF16) for n, t in weights.items() if n not in out}
    zoo.save(folder, out, CONFIG)
    writer.write_settings(folder, CONFIG, modelopt.settings(dict.fromkeys(modules, W4A16), [], 16))
    return folder


@pytest.mark.parametrize("rule", ["amax", "four_over_six", "sweep"])
@pytest.mark.parametrize("spread", [0.02, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("exact", [True, False])
def test_no_sound_fold_is_refused(
    source: Path, tmp_path: Path, rule: str, spread: float, exact: bool
) -> None:
    folder = export(tmp_path / "out", source, lambda w: fold(w, spread, exact), rule)
    findings = checkpoint.audit(folder, source=source).findings
    assert not findings, findings
    assert export_notes(folder, source) == []


def norm_twice(w: Weights, s: dict[str, np.ndarray]) -> None:
    w[f"{LAYER}.input_layernorm.weight"] /= s["input_layernorm"]


def norm_not_folded(w: Weights, s: dict[str, np.ndarray]) -> None:
    w[f"{LAYER}.input_layernorm.weight"] *= s["input_layernorm"]


def scale_inverted(w: Weights, s: dict[str, np.ndarray]) -> None:
    w[f"{LAYER}.input_layernorm.weight"] *= s["input_layernorm"] ** 2


def channels_permuted(w: Weights, s: dict[str, np.ndarray]) -> None:
    w[f"{LAYER}.input_layernorm.weight"] *= s["input_layernorm"] / np.roll(s["input_layernorm"], 1)


def one_not_folded(reader: str) -> Callable[[Weights, dict[str, np.ndarray]], None]:
    def change(w: Weights, s: dict[str, np.ndarray]) -> None:
        norm = next(n for n, readers in READERS.items() if reader in readers)
        w[f"{LAYER}.{reader}.weight"] = w[f"{LAYER}.{reader}.weight"] / s[norm]

    return change


def rows_not_cancelled(w: Weights, s: dict[str, np.ndarray]) -> None:
    w[f"{DOWN}.weight"] = w[f"{DOWN}.weight"] / s[UP]


def rows_twice(w: Weights, s: dict[str, np.ndarray]) -> None:
    w[f"{UP}.weight"] = w[f"{UP}.weight"] / s[UP][:, None]


def values_not_cancelled(w: Weights, s: dict[str, np.ndarray]) -> None:
    w[f"{VALUES}.weight"] = w[f"{VALUES}.weight"] * s[VALUES][:, None]


def bias_not_divided(w: Weights, s: dict[str, np.ndarray]) -> None:
    w[f"{VALUES}.bias"] = w[f"{VALUES}.bias"] * s[VALUES]


def gate_scaled(w: Weights, s: dict[str, np.ndarray]) -> None:
    w[f"{LAYER}.mlp.gate_proj.weight"] *= 1.1


PLANTED: dict[str, tuple[Callable[[Weights, dict[str, np.ndarray]], None], str]] = {
    "norm folded twice": (norm_twice, f"{LAYER}.input_layernorm.weight"),
    "norm not folded": (norm_not_folded, f"{LAYER}.input_layernorm.weight"),
    "scale inverted": (scale_inverted, f"{LAYER}.input_layernorm.weight"),
    "channels permuted": (channels_permuted, f"{LAYER}.input_layernorm.weight"),
    "q not folded": (one_not_folded("self_attn.q_proj"), f"{LAYER}.input_layernorm.weight"),
    "k not folded": (one_not_folded("self_attn.k_proj"), f"{LAYER}.input_layernorm.weight"),
    "v not folded": (one_not_folded("self_attn.v_proj"), f"{LAYER}.input_layernorm.weight"),
    "up not folded": (one_not_folded("mlp.up_proj"), f"{LAYER}.post_attention_layernorm.weight"),
    "up's rows are not cancelled": (rows_not_cancelled, DOWN),
    "up's rows divided twice": (rows_twice, DOWN),
    "v's rows are not cancelled": (values_not_cancelled, OUTPUT),
    "v's bias is not divided": (bias_not_divided, f"{VALUES}.bias"),
    "gate a tenth too large": (gate_scaled, f"{LAYER}.mlp.gate_proj"),
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("spread", [0.1, 0.7])
def test_every_planted_mismatch_is_reported_at_its_tensor(
    source: Path, tmp_path: Path, fault: str, spread: float
) -> None:
    change, tensor = PLANTED[fault]
    folder = export(tmp_path / "out", source, lambda w: change(w, fold(w, spread)))
    findings = checkpoint.audit(folder, source=source).findings
    assert tensor in {f.tensor for f in findings}, findings
    assert {f.code for f in findings} <= {"fold_mismatch", "large_error"}
    assert any("BROKEN EXPORT" in note for note in export_notes(folder, source))


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("norm", READERS)
def test_one_channel_of_a_norm_that_is_off_by_two_is_reported(
    source: Path, tmp_path: Path, norm: str, factor: float
) -> None:
    """Sixteen channels, the largest and the smallest gains among them, one at a time."""
    name = f"{LAYER}.{norm}.weight"
    gains = zoo.read(source)[name].astype(np.float64)
    sound = export(tmp_path / "sound", source, lambda w: fold(w, 0.5))
    tensors = zoo.read(sound)
    missed = []
    for channel in np.argsort(gains)[:: HIDDEN // 15]:
        wrong = tensors[name].astype(np.float64)
        wrong[channel] *= factor
        folder = zoo.save(
            tmp_path / "wrong", tensors | {name: wrong.astype(BF16)}, zoo_config(sound)
        )
        if (("fold_mismatch", name)) not in {
            (f.code, f.tensor) for f in checkpoint.audit(folder, source=source).findings
        }:
            missed.append((int(channel), gains[channel]))
    assert not missed


def zoo_config(folder: Path) -> dict:
    return checkpoint.ModelFolder(folder).config


# -- repair


def repaired(folder: Path, source: Path) -> tuple[Weights, list[str]]:
    result = checkpoint.repair(folder, source)
    assert result.remaining == []
    return zoo.read(Path(result.path)), result.actions


def test_repair_keeps_every_byte_of_a_sound_fold(source: Path, tmp_path: Path) -> None:
    folder = export(tmp_path / "out", source, lambda w: fold(w, 0.5))
    before, (after, actions) = zoo.read(folder), repaired(folder, source)
    assert {n: t.tobytes() for n, t in after.items()} == {n: t.tobytes() for n, t in before.items()}
    assert not any("again" in action or "taken" in action for action in actions)


def test_repair_packs_a_wrong_fold_s_layer_again_and_keeps_the_other(
    source: Path, tmp_path: Path
) -> None:
    folder = export(tmp_path / "out", source, lambda w: norm_twice(w, fold(w, 0.5)))
    before, plain, (after, actions) = zoo.read(folder), zoo.read(source), repaired(folder, source)
    assert sum("quantized again" in action for action in actions) == 7
    for name, tensor in after.items():
        if ".layers.0." in name:
            assert tensor.tobytes() == before[name].tobytes(), name
        elif name in plain and tensor.dtype == BF16:
            assert tensor.tobytes() == plain[name].tobytes(), name


def test_a_faulty_linear_of_a_sound_fold_takes_its_layer_with_it(
    source: Path, tmp_path: Path
) -> None:
    folder = export(tmp_path / "out", source, lambda w: fold(w, 0.5))
    tensors = zoo.read(folder)
    tensors[f"{UP}.weight_scale"].view(np.uint8)[0, 0] = 0x7F
    zoo.save(folder, tensors, checkpoint.ModelFolder(folder).config)
    after, plain = repaired(folder, source)[0], zoo.read(source)
    for norm in READERS:
        assert (
            after[f"{LAYER}.{norm}.weight"].tobytes() == plain[f"{LAYER}.{norm}.weight"].tobytes()
        )
    assert checkpoint.audit(folder.with_name("out-repaired"), source=source).ok
