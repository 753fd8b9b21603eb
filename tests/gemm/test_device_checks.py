"""The checks of a GPU without one: which builds have SM12x code."""

from __future__ import annotations

import importlib

import pytest
from gemm_module import DEVICES, needs_module

from annie_quant.gemm.arrays import native

validate = importlib.import_module(
    "annie_quant.gemm.validate"
)  # the package's `validate` is its function


@pytest.mark.parametrize(
    ("built", "capability", "expected"),
    [
        ("80,89,90a,120a,121a,90-virtual", "12.1", True),
        ("80,90a,120a", "12.1", False),  # sm_120a code does not run on sm_121
        ("80,120f", "12.1", True),
        ("80,90a", "12.0", False),
        ("80,90a,121a", "9.0", None),
    ],
)
def test_native_code_is_found_by_architecture(
    built: str, capability: str, expected: bool | None
) -> None:
    present, detail = validate.machine_code(built, capability)
    assert present is expected and ("not run" in detail) == (expected is None)


class OfDevice:
    """The compiled module as on a GPU with these limits."""

    def __init__(self, limits: tuple, built: str) -> None:
        self.limits, self.ARCHS = (lambda: limits), built

    def __getattr__(self, name: str) -> object:
        return getattr(native(), name)


@needs_module
@pytest.mark.parametrize(
    ("gpu", "capability", "expected"),
    [
        ("GB10", (12, 1), {"machine code for 12.1": True}),
        ("H200", (9, 0), {}),
    ],
)
def test_checks_of_a_gpu(
    gpu: str, capability: tuple[int, int], expected: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = dict(zip(("major", "minor"), capability, strict=True))
    module = OfDevice(DEVICES[gpu], "90a,121a")
    monkeypatch.setattr(validate, "native", lambda: module)
    assert {c.name: c.ok for c in validate.device_checks(info)} == expected
    module.ARCHS = "90a,120a"
    assert all(c.ok for c in validate.device_checks(info)) == (gpu == "H200")
