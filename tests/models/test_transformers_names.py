"""The families' tensor names against transformers' own classes: the pinned version, and the newest one by a stored file."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import pytest
from paths import ROOT

from annie_quant import models
from annie_quant.models import Family, Form

pytest.importorskip("torch", reason="the classes are built on torch's meta device")
pytest.importorskip("transformers", reason="the classes are transformers' own")

NEWEST = json.loads((ROOT / "tests/data/transformers_names.json").read_text())
FORMS = []
for each in models.families():
    FORMS += [pytest.param(each, form, id=form.class_name) for form in each.forms]


@pytest.fixture(scope="module")
def make_names() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_names", ROOT / "tools/make_names.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_newest_version_is_newer_than_the_pinned_one() -> None:
    (pinned,) = (
        line.strip().removeprefix("transformers==")
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if line.startswith("transformers==")
    )
    newest = NEWEST["transformers"]
    assert [int(n) for n in newest.split(".")] >= [int(n) for n in pinned.split(".")]


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_the_pinned_version_has_the_parameters_of_the_newest(
    make_names: ModuleType, family: Family, form: Form
) -> None:
    assert make_names.parameters(family, form) == NEWEST["classes"][form.class_name]


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_the_family_describes_the_newest_class(family: Family, form: Form) -> None:
    """Every parameter is known; linears that share an input or a fused matrix exist and have the same number of columns."""
    shapes = NEWEST["classes"][form.class_name]
    for name in shapes:
        assert family.has_tensor(name.replace("layers.", "layers.0.")), name
    for site in family.inputs:
        columns = {shapes[f"layers.{linear}.weight"][1] for linear in present(site.linears, shapes)}
        assert len(columns) <= 1, site
        if columns:
            assert f"layers.{site.producer}.weight" in shapes, site
    for fused, linears in family.fused.items():
        there = present(linears, shapes)
        assert there in ((), linears), fused
    if family.experts is None:
        used = [linear for site in family.inputs for linear in site.linears]
        assert present(tuple(used), shapes) == tuple(used)
        return
    module = family.experts.module
    experts = {name for name in shapes if name.startswith(f"layers.{module}.")}
    assert experts == {f"layers.{module}.{merged}" for merged in family.experts.merged}
    assert f"layers.{family.experts.router}.weight" in shapes


def present(linears: tuple[str, ...], shapes: dict[str, list[int]]) -> tuple[str, ...]:
    return tuple(linear for linear in linears if f"layers.{linear}.weight" in shapes)
