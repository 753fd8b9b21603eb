"""The check of other libraries' FP4 kernels, with correct, faulty and failing kernels in NumPy; no GPU."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from annie_quant.cli.doctor import print_stack
from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.gemm import known_failures, oracle, stack_check


def product(case, a=None, w=None, sa=None, sw=None):
    left = oracle.dequantize(case.a if a is None else a, case.a_scale if sa is None else sa)
    right = oracle.dequantize(case.w if w is None else w, case.w_scale if sw is None else sw)
    import ml_dtypes

    return ((left.astype(np.float32) @ right.astype(np.float32).T) * np.float32(case.alpha)).astype(
        ml_dtypes.bfloat16
    )


def swap(codes):
    return (codes >> 4) | (codes << 4)


def drop_tail(case):
    out = product(case)
    out[-1, -1] = 0
    return out


PLANTED = {
    "swapped nibbles": lambda c: product(c, w=swap(c.w)),
    "both swapped but one row": lambda c: product(c, w=np.concatenate([swap(c.w[:1]), c.w[1:]])),
    "swizzled scales read as linear": lambda c: product(
        c, sw=stack_check.swizzled(c.w_scale)[: c.w_scale.shape[0], : c.w_scale.shape[1]]
    ),
    "a neighbour's scale": lambda c: product(c, sw=np.roll(c.w_scale, 1, 1)),
    "alpha forgotten": lambda c: product(c) / c.alpha,
    "one element lost": drop_tail,
    "not a number": lambda c: product(c) * np.nan,
}


def test_a_right_kernel_passes():
    assert stack_check.judge("right", product).verdict == "right"


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_wrong_and_have_a_remedy(fault):
    row = stack_check.judge(fault, PLANTED[fault])
    assert row.verdict == "wrong"
    assert row.worst > 1
    assert "backend" in row.remedy


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "121a"),
        ("CUDA error: an illegal instruction was encountered", "38423"),
        ("This kernel only supports sm120.", "sm120_family"),
        ("Capturing CUDA graphs failed: operation not permitted", "--enforce-eager"),
        ("ptxas fatal : Value 'sm_121a' is not defined for option 'gpu-name'", "TRITON_PTXAS_PATH"),
    ],
)
def test_known_failures_are_recognised(message, remedy):
    def call(case):
        raise RuntimeError(message)

    row = stack_check.judge("broken", call)
    assert row.verdict == "failed"
    assert remedy in row.remedy
    assert (
        known_failures.find_failure("INFO: Graph capturing finished in 5 secs, took 0.54 GiB")
        is None
    )


def test_missing_stacks_are_reported_and_unknown_ones_refused():
    result = stack_check.examine("flashinfer")
    assert [r.verdict for r in result.backends] == ["missing"] or result.backends
    with pytest.raises(UsageError, match="no stack called"):
        stack_check.examine("nonsense")


def test_one_wrong_case_makes_a_backend_wrong_whatever_the_others_do():
    """An error is visible, a wrong result is not: it must be reported, whichever comes first."""
    for raising in (1, 16):

        def call(case, raising=raising):
            if case.a.shape[0] == raising:
                raise RuntimeError("an illegal instruction was encountered")
            return product(case, w=swap(case.w))

        row = stack_check.judge("both", call)
        assert row.verdict == "wrong"
        assert "--linear-backend" in row.remedy


OPS = """
import torch
from annie_quant.gemm import oracle

def linear_scales(swizzled, rows, cols):  # the formula of 128x4 tiles, per element
    flat = swizzled.view(torch.uint8).flatten().cpu()
    m, k = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    at = ((m // 128) * -(-cols // 4) + k // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4
    return flat[at]

def value(codes, scales):
    return torch.from_numpy(oracle.dequantize(codes.cpu().numpy(), scales.cpu().numpy())).to(codes.device)

def cutlass_scaled_fp4_mm(a, b, a_scales, b_scales, alpha, out_dtype):
    {fault}
    left = value(a, linear_scales(a_scales, a.shape[0], a.shape[1] // 8))
    right = value(b, linear_scales(b_scales, b.shape[0], b.shape[1] // 8))
    return (left @ right.T * alpha.double()).to(out_dtype)
"""
MARLIN = """
import torch
from vllm import _custom_ops as ops

def prepare_fp4_layer_for_marlin(layer):
    layer.weight_scale = torch.nn.Parameter(layer.weight_scale.view(torch.uint8), requires_grad=False)
    layer.workspace = torch.zeros(1)

def apply_fp4_marlin_linear(input, weight, weight_scale, {scale}, workspace, size_n, size_k, bias=None):
    assert weight.shape == (size_n, size_k // 2)
    out = input.double() @ ops.value(weight, weight_scale).T * {scale}.double()
    return out.to(input.dtype)
"""


OURS = "vllm annie_quant (W4A16)"


def without_gpu():
    return bool(stack_check._operator_missing())


def torch_of(array):
    import torch

    return torch.from_numpy(np.ascontiguousarray(array))


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A package with vLLM's names and signatures: its CUTLASS product has the `fault`, its Marlin is correct."""

    def make(fault="pass", scale="weight_global_scale"):
        folder = tmp_path / "vllm"
        deep = folder / "model_executor" / "layers" / "quantization" / "utils"
        deep.mkdir(parents=True)
        for each in (folder, *(deep.parents[i] for i in range(3)), deep):
            (each / "__init__.py").touch()
        (folder / "_custom_ops.py").write_text(OPS.format(fault=fault))
        (deep / "marlin_utils_fp4.py").write_text(MARLIN.format(scale=scale))
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in [n for n in sys.modules if n.split(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)

    yield make
    for name in [n for n in sys.modules if n.split(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.parametrize("scale", ["weight_global_scale", "weight_scale_2"])
def test_vllms_functions_are_called_with_its_signatures(vllm, scale):
    pytest.importorskip("torch")
    vllm(scale=scale)
    for name, call, missing in stack_check.backends("vllm"):
        if name == OURS and missing:
            assert without_gpu() and "GPU" in missing
            continue
        assert missing == ""
        assert stack_check.judge(name, call).verdict == "right", name


def test_the_operator_of_our_plugin_is_judged_as_the_others(vllm, monkeypatch):
    """Emulated on the CPU: right, and wrong with a planted fault."""
    pytest.importorskip("torch")
    import emulated_gemm

    vllm()
    emulated_gemm.install(monkeypatch)
    monkeypatch.setattr(stack_check, "need_device", lambda: None)
    monkeypatch.setattr(stack_check, "_device_tensor", lambda a: torch_of(a))
    call = next(call for name, call, _ in stack_check.backends("vllm") if name == OURS)
    assert stack_check.judge(OURS, call).verdict == "right"
    right = emulated_gemm.prepare
    monkeypatch.setattr(stack_check.torch_op, "prepare", lambda *args: right(*args, fault="scales"))
    assert stack_check.judge(OURS, call).verdict == "wrong"


def test_a_backend_that_crashes_does_not_affect_the_next(vllm):
    """An illegal instruction ends the backend's own process; the right backend is named with its option."""
    pytest.importorskip("torch")
    dies = "import os, sys; print('an illegal instruction was encountered', file=sys.stderr, flush=True); os.abort()"
    vllm(fault=dies)
    result = stack_check.examine("vllm")
    assert [r.verdict for r in result.backends if r.backend != OURS] == ["failed", "right"]
    assert "SIGABRT" in result.backends[0].cases[0].error
    assert "38423" in result.backends[0].remedy
    assert result.choose == ("vllm marlin (W4A16)" if without_gpu() else OURS)
    assert result.switch.endswith("--linear-backend marlin")
    assert (
        result.note == known_failures.NOT_NATIVE
        if stack_check.has_fp4_units()
        else known_failures.NO_FP4_UNITS
    )
    assert (
        stack_check.StackResult.from_dict(json.loads(json.dumps(dataclasses.asdict(result))))
        == result
    )


@pytest.mark.parametrize(
    ("major", "note"), [(9, known_failures.NO_FP4_UNITS), (12, known_failures.NOT_NATIVE)]
)
def test_advice_about_images_is_for_gpus_with_fp4_units(vllm, monkeypatch, major, note):
    """Seen on an H200: the advice for a Hopper GPU was an image with SM12x code."""
    pytest.importorskip("torch")
    vllm(fault="raise RuntimeError('no kernel image is available')")
    calls = {name: call for name, call, _ in stack_check.backends("vllm")}
    # In this process: another one for each backend would import torch.
    monkeypatch.setattr(
        stack_check, "_judge_in_process", lambda _, name, __: stack_check.judge(name, calls[name])
    )
    device = SimpleNamespace(device_info=lambda _: {"major": major, "minor": 0})
    monkeypatch.setattr(stack_check, "native", lambda: device)
    monkeypatch.setattr(stack_check, "device_count", lambda: 1)
    assert stack_check.examine("vllm").note == note


def test_each_backend_is_printed_on_one_line(capsys):
    rows = [
        stack_check.judge("good", product, stack_check.cases()[:1]),
        stack_check.judge("bad", PLANTED["swapped nibbles"], stack_check.cases()[:1]),
        stack_check.BackendResult("gone", "missing", cause="no module"),
    ]
    print_stack(stack_check.StackResult(rows, "good", "--linear-backend good", "a note"))
    output = capsys.readouterr().out
    for line in (
        "✓ good: right",
        "✗ bad: wrong",
        "→ choose a backend",
        "· gone: missing: no module",
    ):
        assert line in output
    assert "choose good   --linear-backend good\na note" in output


def test_swizzle_is_the_documented_formula():
    scales = np.random.default_rng(0).integers(1, 127, (200, 9), dtype=np.uint8)
    flat = stack_check.swizzled(scales).reshape(-1)
    tiles = 3
    for m in range(200):
        for k in range(9):
            at = ((m // 128) * tiles + k // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4
            assert flat[at] == scales[m, k]
    assert flat.size == 256 * 12
    assert (flat == 0).sum() == 256 * 12 - 200 * 9


def test_the_container_command_is_a_list_without_a_shell():
    assert stack_check.container_command("vllm/vllm-openai:v0.20", "docker", running=False) == [
        "docker", "run", "--rm", "-i", "--gpus", "all", "--entrypoint", "python3", "vllm/vllm-openai:v0.20", "-",
    ]  # fmt: skip
    assert (
        stack_check.container_command("my; rm -rf /", "docker", running=True)[3] == "my; rm -rf /"
    )
    for name in ("", "--privileged"):
        with pytest.raises(UsageError, match="not the name of a container"):
            stack_check.container_command(name, "docker", running=False)
    with pytest.raises(UsageError, match="no stack called"):
        stack_check.plan_container("image", "nonsense")


def test_the_script_runs_where_only_numpy_is_installed(tmp_path):
    """Python alone in an empty folder, as in a container: the check runs and its last line is the result."""
    process = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path.append({np_folder()!r}); exec(sys.stdin.read())",
        ],
        input=stack_check.container_script("flashinfer"),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["backends"][0]["backend"].startswith("flashinfer")


def np_folder():
    return str(Path(np.__file__).parents[1])


FAKE = """#!{python}
import json, sys
if sys.argv[1] == "container":
    print("true" if sys.argv[-1] == "alive" else "")
elif "broken" in sys.argv:
    sys.exit("RuntimeError: no kernel image is available for execution on the device")
else:
    print("output of an import")
    note = json.dumps({{"argv": sys.argv[1:], "script": len(sys.stdin.read())}})
    print(json.dumps({{"backends": [], "choose": None, "note": note}}))
"""


def test_a_running_container_is_entered_and_an_image_started(tmp_path, monkeypatch):
    docker = tmp_path / "docker"
    docker.write_text(FAKE.format(python=sys.executable))
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    alive = stack_check.examine_container("alive", "torch")
    call = json.loads(alive.note)
    assert alive.container == "alive" and call["argv"] == ["exec", "-i", "alive", "python3", "-"]
    assert call["script"] > 10_000
    assert json.loads(stack_check.examine_container("some/image:1", "all").note)["argv"][:2] == [
        "run",
        "--rm",
    ]
    with pytest.raises(EnvironmentFault, match="no kernel image") as caught:
        stack_check.examine_container("broken", "vllm")
    assert "121a" in caught.value.hint
