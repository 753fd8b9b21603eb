"""qad: quantizers are saved with the weights, gradients reach the weights, two processes do what one does, a killed one resumes."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import forked
import numpy as np
import pytest
import runtime_models
from paths import CALIBRATION

from annie_quant import quantize
from annie_quant.checkpoint import dialects
from annie_quant.checkpoint.shards import ModelFolder

torch = pytest.importorskip(
    "torch", reason="training runs on torch: pip install annie-quant[quantize]"
)
# Training of an attention layer and the MLP before it: gradients of earlier layers are not computed.
EXCLUDED = "linear_attn,layers.0,layers.1"
SETTINGS = {
    "steps": 3,
    "save": 100,
    "lr": 3e-4,
    "checkpointing": 0,
    "calib_samples": 24,
    "exclude": EXCLUDED,
}
RESUMED = {
    "steps": 4,
    "batch": 2,
    "save": 1,
    "lr": 1e-4,
    "calib_samples": 3,
    "exclude": f"{EXCLUDED},layers.2",
}


def weights(folder: Path) -> dict[str, np.ndarray]:
    model = ModelFolder(folder)
    return {
        name: linear.dequantize(model)
        for name, linear in dialects.DIALECTS["modelopt"].linears(model).items()
    }


def test_the_fake_linear_computes_what_the_export_will(tmp_path: Path) -> None:
    from annie_quant.offline import codec
    from annie_quant.quantize.distillation import FakeLinear

    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 8, bias=False)
    top, input_amax = float(plain.weight.detach().abs().max()), 3.0
    fake = FakeLinear.of(plain, top, input_amax)
    x = torch.randn(5, 64)
    packed = codec.nvfp4.pack(plain.weight.detach().numpy(), tensor_scale=top / 2688)
    expected = (
        codec.fake_quant(x, input_amax / 2688)
        @ torch.from_numpy(codec.nvfp4.unpack(packed, "float32")).T
    )
    assert torch.equal(fake(x), expected)
    assert torch.equal(
        FakeLinear.of(plain, top, 0.0)(x),
        x @ torch.from_numpy(codec.nvfp4.unpack(packed, "float32")).T,
    )


def test_gradients_pass_the_rounding_and_the_scales_are_saved() -> None:
    from annie_quant.quantize.distillation import FakeLinear, insert

    model = torch.nn.Sequential(
        torch.nn.Linear(32, 16, bias=False), torch.nn.Linear(16, 4, bias=False)
    )
    insert(model, {"0": 0.5, "1": 0.25}, {"0": 2.0})
    assert all(isinstance(m, FakeLinear) for m in model)
    x = torch.randn(3, 32, requires_grad=True)
    model(x).square().sum().backward()
    assert (
        all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        and x.grad is not None
    )
    state = model.state_dict()
    assert float(state["0.weight_amax"]) == 0.5 and float(state["1.input_amax"]) == 0.0
    other = torch.nn.Sequential(
        torch.nn.Linear(32, 16, bias=False), torch.nn.Linear(16, 4, bias=False)
    )
    insert(other, {"0": 9.0, "1": 9.0}, {})
    other.load_state_dict(state)
    assert torch.equal(other(x), model(x))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of four layers whose layers have some effect."""
    home = tmp_path_factory.mktemp("small")
    runtime_models.save_reference(home / "model", gain=2.0)
    return home


@pytest.fixture(scope="module")
def trained_folder(home: Path) -> Path:
    """A checkpoint that one process trained, four answers per step."""
    quantize.run("qad", home / "model", home / "one", calib_data=CALIBRATION, batch=4, **SETTINGS)
    return home / "one"


def test_training_changes_the_linears_and_nothing_else(
    home: Path, trained_folder: Path, tmp_path: Path
) -> None:
    quantize.run("direct", home / "model", tmp_path / "plain", exclude=EXCLUDED)
    trained, plain = weights(trained_folder), weights(tmp_path / "plain")
    assert trained.keys() == plain.keys()
    assert all(not np.array_equal(trained[n], plain[n]) for n in trained)
    source, result = ModelFolder(home / "model"), ModelFolder(trained_folder)
    for name in source:
        if name.removesuffix(".weight") not in trained:
            assert source.tensor(name).tobytes() == result.tensor(name).tobytes(), name


def test_two_processes_give_the_same_result_as_one(
    home: Path, trained_folder: Path, tmp_path: Path
) -> None:
    """The same four answers per step, in one process or two. The loss weighs tokens differently (a mean of two means), so
    the weights differ, but less than those of a run that learned other answers (seed 1)."""
    more = {"calib_data": str(CALIBRATION), "batch": 2, **SETTINGS}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        group["MASTER_PORT"] = str(free.getsockname()[1])  # as torchrun sets them
    processes = [
        forked.quantize(
            "qad",
            home / "model",
            tmp_path / "two",
            more,
            group | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0, 0]
    other_run = {"calib_data": CALIBRATION, "batch": 4, "seed": 1, **SETTINGS}
    quantize.run("qad", home / "model", tmp_path / "other", **other_run)
    one, two, other = (
        weights(folder) for folder in (trained_folder, tmp_path / "two", tmp_path / "other")
    )
    difference = sum(float(np.abs(one[n] - two[n]).sum()) for n in one)
    control = sum(float(np.abs(one[n] - other[n]).sum()) for n in one)
    assert difference < 0.6 * control
    assert not list(tmp_path.glob(".two*")), "the other processes leave no files"


def alike(one: Path, other: Path) -> float:
    """Return the share of the quantized weights' bytes that are equal."""
    a, b = ModelFolder(one), ModelFolder(other)
    codes = [n for n in a if a.info(n).dtype == "U8"]
    return float(np.mean(np.concatenate([(a.tensor(n) == b.tensor(n)).reshape(-1) for n in codes])))


def test_a_killed_training_resumes_with_the_same_result(home: Path, tmp_path: Path) -> None:
    settings = {"calib_data": CALIBRATION, **RESUMED}
    quantize.run("qad", home / "model", tmp_path / "whole", **settings)
    process = forked.quantize("qad", home / "model", tmp_path / "out", settings)
    stored = tmp_path / ".out.work/trainer/checkpoint-2/trainer_state.json"
    for _ in range(
        15000
    ):  # counted, not timed: on a crowded machine both processes may be stopped for a while
        if not process.is_alive() or stored.is_file():
            break
        time.sleep(0.01)
    process.kill()
    process.join()
    assert stored.is_file() and not (tmp_path / "out").exists(), (
        "killed before it stored anything, or after it was done"
    )
    lines: list[str] = []
    quantize.run("qad", home / "model", tmp_path / "out", report=lines.append, **settings)
    assert any("resuming from checkpoint-" in line for line in lines)
    assert (
        alike(tmp_path / "out", tmp_path / "whole") > 0.99
    )  # sums of training may fall either way by a bit
    assert not stored.exists(), "the work folder is removed after success"


def test_an_unknown_choice_is_refused(home: Path, tmp_path: Path) -> None:
    from annie_quant.core.errors import UsageError

    with pytest.raises(UsageError, match="checkpointing=2"):
        quantize.run(
            "qad", home / "model", tmp_path / "out", calib_data=CALIBRATION, checkpointing=2
        )
