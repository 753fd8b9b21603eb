"""What can be known of the GEMM module without a GPU: it imports, says what is missing, refuses bad arrays, and holds the
native FP4 instruction in its sm_121a code and nowhere else."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import annie_quant as aq
from annie_quant.errors import EnvironmentFault, UsageError
from annie_quant.gemm import arrays

ROOT = Path(__file__).parent.parent
BUILT = sorted((ROOT / "annie_quant").glob("_gemm*.so"))
NATIVE = "OMMA"  # what SASS calls mma.kind::mxf4nvf4.block_scale


def without_gpu():
    try:
        return aq.gemm.device_count() == 0
    except EnvironmentFault:
        return True


def test_importing_needs_no_torch_and_no_module():
    code = "import sys, annie_quant.gemm; assert 'torch' not in sys.modules and 'annie_quant._gemm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.skipif(not without_gpu(), reason="this machine has a CUDA GPU")
def test_without_a_gpu_every_entry_says_so_with_exit_code_3():
    calls = [
        lambda: aq.gemm.validate(),
        lambda: aq.gemm.Weight(None, None, 1.0),
        lambda: aq.gemm.pack(None, 1.0),
        lambda: aq.gemm.fake_quant(None, 1.0),
        lambda: aq.gemm.fp4_native(),
    ]
    for call in calls:
        with pytest.raises(EnvironmentFault, match=r"GPU|nvcc") as caught:
            call()
        assert caught.value.exit_code == 3


def test_host_arrays_and_strangers_are_refused_in_words():
    for array, says in [(np.zeros(4, np.float32), "host memory"), ([1, 2], "a list"), ("x", "a str")]:
        with pytest.raises(UsageError, match=says):
            arrays.view(array, "x")


def test_a_cuda_array_is_read_by_interface():
    class Fake:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (4, 6), "typestr": "<f2", "data": (0, False), "version": 3, "strides": (24, 2),
        }  # fmt: skip

    seen = arrays._from_interface(Fake(), "x") if not BUILT or without_gpu() else None
    if seen:
        assert (seen.shape, seen.strides, seen.dtype, seen.contiguous) == ((4, 6), (12, 1), "float16", False)


def test_a_host_dlpack_array_is_refused():
    class Exporter:
        def __init__(self):
            self.array = np.zeros((2, 3), np.float32)

        def __dlpack__(self):
            return self.array.__dlpack__()

    with pytest.raises(UsageError, match="DLPack device type 1"):
        arrays.view(Exporter(), "x")


def test_torch_operator_has_a_fake_kernel():
    torch = pytest.importorskip("torch")
    from annie_quant.gemm import torch_op

    torch_op.register()
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3, 64, dtype=torch.bfloat16, device="cuda")
        packed = torch.empty(1152, dtype=torch.uint8, device="cuda")
        out = torch.ops.annie_quant.nvfp4_linear(x, packed, 32, 64, 1.0)
    assert (tuple(out.shape), out.dtype) == ((2, 3, 32), torch.bfloat16)


@pytest.mark.skipif(not BUILT, reason="annie_quant._gemm is not built here (it needs nvcc)")
def test_module_imports_without_a_driver_and_loads_no_cuda_library():
    code = (
        "import annie_quant._gemm as g\n"
        "maps = open('/proc/self/maps').read() if __import__('os').path.exists('/proc/self/maps') else ''\n"
        "assert 'libcuda.so' not in maps\n"
        "assert g.packed_bytes(17, 48) == 2 * 1152\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def sass(arch):
    tool = shutil.which("cuobjdump")
    if tool is None:
        pytest.skip("needs cuobjdump (CUDA 13) on the PATH")
    run = subprocess.run([tool, "--dump-sass", "-arch", arch, str(BUILT[0])], capture_output=True, text=True)
    if run.returncode or "code for" not in run.stdout:
        pytest.skip(f"this cuobjdump shows no {arch} code: {run.stderr.strip()[:100]}")
    return run.stdout


@pytest.mark.skipif(not BUILT, reason="annie_quant._gemm is not built here (it needs nvcc)")
def test_native_fp4_instruction_is_in_the_sm_121a_code_only():
    assert re.search(rf"\b{NATIVE}\b", sass("sm_121a"))
    assert not re.search(rf"\b{NATIVE}\b", sass("sm_90a"))


def ptx(arch, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    out = tmp_path / f"{arch}.ptx"
    subprocess.run(
        [nvcc, "-std=c++17", "-Icsrc", "--ptx", f"-arch=compute_{arch}", "csrc/gemm/w4a4.cu", "-o", str(out)],
        check=True, cwd=ROOT,
    )  # fmt: skip
    return out.read_text()


def test_ptx_for_sm_121a_holds_the_native_instruction_and_for_sm_90_does_not(tmp_path):
    assert "kind::mxf4nvf4.block_scale" in ptx("121a", tmp_path)
    assert "mxf4nvf4" not in ptx("90", tmp_path)
