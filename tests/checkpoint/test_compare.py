"""Forms of one model compared: the numbers agree with a second derivation, and with each other where formats do."""

from __future__ import annotations

import json

import checkpoint_zoo as zoo
import numpy as np
import pytest

import annie_quant as aq
from annie_quant.checkpoint.comparison import compare, labels
from annie_quant.core.errors import CheckpointError, UsageError

pytest.importorskip("annie_quant.nvfp4", reason="the C codec is not built")
pytest.importorskip("gguf", reason="the serve extra is not installed")
NAME = "model.layers.0.linear_attn.out_proj"


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    home = tmp_path_factory.mktemp("forms")
    source = zoo.bf16(home / "bf16")
    nvfp4 = zoo.nvfp4(home / "nvfp4", source)
    return source, {
        "nvfp4": nvfp4,
        "compressed-tensors": aq.checkpoint.convert(nvfp4, "compressed-tensors", home / "ct").path,
        "nvfp4 gguf": aq.checkpoint.convert(nvfp4, "gguf", home / "nvfp4.gguf").path,
        "q8_0 gguf": aq.checkpoint.convert(source, "gguf", home / "q8.gguf", type="Q8_0").path,
        "bf16 gguf": aq.checkpoint.convert(source, "gguf", home / "bf16.gguf").path,
    }


def test_errors_and_bits(forms, tmp_path):
    source, paths = forms
    result = compare(source, paths)
    rows = {(r.form, r.tensor): r for r in result.rows}
    folder = aq.checkpoint.ModelFolder(paths["nvfp4"])
    ours = aq.checkpoint.linears(folder)[NAME].dequantize(folder).astype(np.float64)
    theirs = aq.checkpoint.ModelFolder(source).tensor(f"{NAME}.weight").astype(np.float64)
    row = rows["nvfp4", f"{NAME}.weight"]
    assert row.rel_l2 == pytest.approx(
        np.sqrt(((ours - theirs) ** 2).sum() / (theirs**2).sum()), rel=1e-5
    )
    assert row.cosine == pytest.approx(
        (ours * theirs).sum() / np.sqrt((ours**2).sum() * (theirs**2).sum()), rel=1e-6
    )
    for form in (
        "compressed-tensors",
        "nvfp4 gguf",
    ):  # the same codes have the same error, whatever the order of the heads
        assert rows[form, f"{NAME}.weight"].rel_l2 == pytest.approx(row.rel_l2, rel=1e-4)
    s = result.summary
    assert s["bf16 gguf"].rel_l2 == 0 and s["q8_0 gguf"].rel_l2 < 0.01 < 0.05 < s["nvfp4"].rel_l2
    assert s["bf16 gguf"].bits_per_weight == pytest.approx(16, abs=0.1)  # its norms are float32
    assert s["q8_0 gguf"].bits_per_weight == pytest.approx(8.5, abs=0.1)
    assert s["nvfp4"].bits_per_weight == aq.checkpoint.audit(paths["nvfp4"]).summary.bits_per_weight
    assert rows["nvfp4", f"{NAME}.weight"].bits == pytest.approx(4.5, abs=0.01)
    json.dumps(result.to_dict())


def test_the_worst_tensor_is_found(forms, tmp_path):
    source, paths = forms
    bad = zoo.spoil(
        paths["nvfp4"],
        tmp_path / "bad",
        lambda t, c: t[f"{NAME}.weight"].__setitem__(slice(0, 128), 0),
    )
    result = compare(source, {"bad": bad})
    assert result.summary["bad"].worst == f"{NAME}.weight" and result.worst("bad")[0].rel_l2 > 0.5


def test_what_cannot_be_compared_is_refused(forms, tmp_path):
    source, paths = forms
    with pytest.raises(CheckpointError, match="is quantized itself"):
        compare(paths["nvfp4"], {"x": source})
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(CheckpointError, match="not a GGUF file that can be read"):
        compare(source, {"x": tmp_path / "x.gguf"})


def test_forms_of_one_name_are_labelled_with_their_folders():
    assert list(labels(["a/x.gguf", "b/x.gguf"])) == ["a/x.gguf", "b/x.gguf"]
    assert list(labels(["a/x", "a/y"])) == ["x", "y"]
    with pytest.raises(UsageError, match="given twice"):
        labels(["a/x", "a/x"])


def test_a_dictionary_names_the_worst_tensors(forms):
    result = compare(forms[0], {"nvfp4": forms[1]["nvfp4"]})
    assert result.to_dict(2)["worst"]["nvfp4"] == [r.tensor for r in result.worst("nvfp4", 2)]
