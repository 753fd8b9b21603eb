"""The GEMM module without a GPU: it imports, reports what is missing, refuses invalid arrays, and has the native FP4
instruction in its sm_121a code only.
"""

import ast
import importlib
import os
import re
import shutil
import struct
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import shared
from paths import ROOT

import annie_quant as aq
from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.gemm import arrays

BUILT = sorted((ROOT / "annie_quant").glob("_gemm*.so"))


def without_gpu():
    try:
        return aq.gemm.device_count() == 0
    except EnvironmentFault:
        return True


def test_importing_needs_no_torch_and_no_module():
    code = "import sys, annie_quant.gemm; assert 'torch' not in sys.modules and 'annie_quant._gemm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_check_that_was_not_made_is_not_passed(monkeypatch):
    """Where the C codec was not built, its comparison counted as passed."""
    from annie_quant.cli import doctor

    validate = importlib.import_module("annie_quant.gemm.validate")
    monkeypatch.delattr(aq, "nvfp4", raising=False)
    monkeypatch.setitem(sys.modules, "annie_quant.nvfp4", None)  # its import fails
    (check,) = validate._codec()
    assert check.ok is None and check.detail.startswith("not compared")
    passed = validate.KernelCheck("another", True, "")
    assert (
        validate.Validation({}, {}, [passed]).ok
        and not validate.Validation({}, {}, [passed, check]).ok
    )
    lines = []
    monkeypatch.setattr(doctor.console, "line", lambda text, mark="": lines.append((text, mark)))
    monkeypatch.setattr(doctor.console, "print_mapping", lambda *arguments: None)
    doctor.print_validation(validate.Validation({}, {}, [check]))
    assert lines[0][1] == doctor.BACKEND_MARKS["missing"]


@pytest.mark.skipif(not without_gpu(), reason="this machine has a CUDA GPU")
def test_without_a_gpu_every_function_raises_with_exit_code_3():
    calls = [
        lambda: aq.gemm.validate(),
        lambda: aq.gemm.Weight(None, None, 1.0),
        lambda: aq.gemm.fake_quant(None, 1.0),
        lambda: aq.gemm.fp4_native(),
    ]
    for call in calls:
        with pytest.raises(EnvironmentFault, match=r"GPU|nvcc") as caught:
            call()
        assert caught.value.exit_code == 3


@pytest.mark.skipif(not BUILT, reason="annie_quant._gemm is not built")
def test_the_stub_names_each_function_with_its_arguments():
    module = importlib.import_module("annie_quant._gemm")
    stub = ast.parse((ROOT / "annie_quant/_gemm.pyi").read_text())
    declared = {
        f.name: len(f.args.posonlyargs) for f in stub.body if isinstance(f, ast.FunctionDef)
    }
    documented = {}
    for name, value in vars(module).items():
        if isinstance(value, types.BuiltinFunctionType):
            arguments = re.match(rf"{name}\(([^)]*)\)", value.__doc__)[1]
            documented[name] = len([a for a in arguments.split(",") if a.strip()])
    assert declared == documented


def test_host_arrays_and_other_objects_are_refused_with_a_message():
    for array, message in [
        (np.zeros(4, np.float32), "host memory"),
        ([1, 2], "a list"),
        ("x", "a str"),
    ]:
        with pytest.raises(UsageError, match=message):
            arrays.view(array, "x")


def test_torch_operator_has_a_fake_kernel():
    torch = pytest.importorskip("torch")
    from annie_quant.gemm import torch_op

    torch_op.register()
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3, 64, dtype=torch.bfloat16, device="cuda")
        packed = torch.empty(1152, dtype=torch.uint8, device="cuda")
        out = torch.ops.annie_quant.nvfp4_linear(x, packed, torch.tensor(1.0, device="cpu"), 32)
    assert (tuple(out.shape), out.dtype) == ((2, 3, 32), torch.bfloat16)


@pytest.mark.skipif(not BUILT, reason="annie_quant._gemm is not built here (it needs nvcc)")
def test_module_imports_without_a_driver_and_loads_no_cuda_library():
    code = (
        "import annie_quant._gemm as g\n"
        "maps = open('/proc/self/maps').read() if __import__('os').path.exists('/proc/self/maps') else ''\n"
        "assert 'libcuda.so' not in maps\n"
        "assert g.packed_bytes(17, 48) == 2 * 1152 + 80\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


ALL = os.environ.get(
    "ANNIE_QUANT_CUDA_ALL"
)  # more architectures and kernels, for changes of the kernels: half a minute
GB10_BLOCK = 99 * 1024  # bytes of shared memory per block on a GB10
OMMA, HMMA = (
    0x47F,
    0x23C,
)  # SASS opcodes: the low 12 bits of an instruction's 16 bytes, as shown in cuobjdump's output


def cubin(source, arch):
    """Return the machine code of one file for one architecture, and ptxas' report, of an earlier run if no source changed."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    code = f"arch=compute_{arch},code=sm_{arch}"
    command = [
        nvcc,
        "-O3",
        "-std=c++17",
        "-Icsrc",
        "-gencode",
        code,
        "-Xptxas",
        "-v",
        "-cubin",
        source,
        "-o",
    ]
    version = subprocess.run([nvcc, "--version"], check=True, capture_output=True).stdout
    sources = [file.read_bytes() for file in sorted((ROOT / "csrc").rglob("*.[ch]*"))]

    def compile_source(folder):
        done = subprocess.run(
            [*command, folder / "code"], check=True, cwd=ROOT, capture_output=True, text=True
        )
        (folder / "report").write_text(done.stderr)

    inputs = b"\n".join([*sources, version, repr(command).encode()])
    folder = shared.stored(f"{Path(source).stem}_{arch}", inputs, compile_source)
    return folder / "code", (folder / "report").read_text()


def instructions(path):
    """Count the SASS opcodes in a cubin: an ELF file whose .text sections have 16 bytes per instruction."""
    data = path.read_bytes()
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<IIQQQQ", data, start + i * size) for i in range(count)]
    name_base = sections[names][4]
    result = Counter()
    for name, _, _, _, at, length in sections:
        if data.startswith(b".text.", name_base + name):
            result.update(
                struct.unpack_from("<H", data, i)[0] & 0xFFF for i in range(at, at + length, 16)
            )
    return result


@pytest.mark.parametrize(
    ("arch", "native"),
    [("121a", True), *([("90a", False), ("120a", True)] if ALL else [])],
)
def test_native_fp4_instruction_is_in_the_machine_code_of_sm_12x_only(arch, native):
    path, report = cubin("csrc/gemm/w4a4.cu", arch)
    result = instructions(path)
    assert sum(result.values()) > 5000
    assert (result[OMMA] > 0) == native
    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}
    tool = shutil.which("cuobjdump")
    if tool:  # some installations of nvcc have no disassembler; the count above needs none
        listing = subprocess.run(
            [tool, "--dump-sass", str(path)], capture_output=True, text=True
        ).stdout
        named = len(re.findall(r"\bOMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X\b", listing))
        assert not listing or named == result[OMMA]


@pytest.mark.parametrize("source", ["skinny", *(["tiled", "repack", "codec"] if ALL else [])])
def test_sm_121a_code_spills_nothing_within_what_a_gb10_has(source):
    path, report = cubin(f"csrc/gemm/{source}.cu", "121a")
    kernels = re.findall(
        r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?",
        report,
        re.DOTALL,
    )
    assert kernels
    for name, spilled, registers, memory in kernels:
        # tiles of 128 tokens need more shared memory than a GB10's block has, so the planner never chooses them there
        assert int(spilled) == 0 or "tiled_kernelILi8ELi1ELi2ELi16E" in name, (name, spilled)
        assert int(registers) <= 255
        assert int(memory or 0) <= GB10_BLOCK
    if source == "skinny":
        assert instructions(path)[HMMA] > 0
