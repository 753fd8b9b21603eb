"""Notes of an evaluation: a reference that is not the source, and exports that the audit finds broken."""

from __future__ import annotations

import checkpoint_zoo as zoo
import pytest
from checkpoint_faults import FAULTS, folded

from annie_quant.checkpoint.inspection import export_notes


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("zoo")
    source = zoo.bf16(root / "bf16")
    return {
        "bf16": source,
        "other": zoo.bf16(root / "other", seed=7),
        "nvfp4": zoo.nvfp4(root / "nvfp4", source),
    }


def test_a_sound_checkpoint_has_no_notes(sound):
    assert export_notes(sound["nvfp4"], sound["bf16"]) == []
    assert export_notes(sound["bf16"], sound["bf16"]) == []


def test_a_reference_that_is_another_model_is_named_once(sound):
    notes = export_notes(sound["nvfp4"], sound["other"])
    assert len(notes) == 1 and notes[0].startswith("THE REFERENCE IS NOT ITS SOURCE")


def test_a_fine_tune_of_the_same_base_is_not_the_source(sound, tmp_path):
    """Weights that differ by 30 % of their size are another fine-tune; quantization changes them by 10 %."""
    import numpy as np

    rng = np.random.default_rng(3)

    def change(t, c):
        for name, value in t.items():
            if value.ndim == 2:
                noise = (
                    rng.standard_normal(value.shape) * 0.3 * float(np.std(value.astype(np.float32)))
                )
                t[name] = (value.astype(np.float32) + noise).astype(value.dtype)

    other = zoo.spoil(sound["bf16"], tmp_path / "tuned", change)
    assert "NOT ITS SOURCE" in export_notes(sound["nvfp4"], other)[0]


@pytest.mark.parametrize("others", [0, 12])
def test_a_close_fine_tune_is_not_the_source(sound, tmp_path, others):
    """Weights that differ by 3 % hide under quantization; each linear that was not quantized was called a broken export.

    others: equal linears outside of the layers, as of a vision tower that nobody trained; they do not count.
    """
    import numpy as np

    rng = np.random.default_rng(5)

    def add_tower(t, c):
        t |= {f"visual.merger.{i}.weight": np.ones((16, 16), zoo.BF16) for i in range(others)}

    checkpoint = zoo.spoil(sound["nvfp4"], tmp_path / "nvfp4", add_tower)
    source = zoo.spoil(sound["bf16"], tmp_path / "bf16", add_tower)

    def change(t, c):
        for name, value in t.items():
            if value.ndim == 2 and "layers." in name:
                noise = (
                    rng.standard_normal(value.shape)
                    * 0.03
                    * float(np.std(value.astype(np.float32)))
                )
                t[name] = (value.astype(np.float32) + noise).astype(value.dtype)

    notes = export_notes(checkpoint, zoo.spoil(source, tmp_path / "close", change))
    assert len(notes) == 1 and "NOT ITS SOURCE" in notes[0] and "not quantized" in notes[0]


def test_a_wrong_fold_is_a_broken_export(sound, tmp_path):
    change, norm = folded(sound["bf16"], right=False)
    notes = export_notes(zoo.spoil(sound["nvfp4"], tmp_path / "folded", change), sound["bf16"])
    assert any("BROKEN EXPORT" in note and norm in note and "fold" in note for note in notes)
    assert not any("NOT ITS SOURCE" in note for note in notes)


def test_a_left_over_activation_scale_is_a_broken_export(sound, tmp_path):
    change = FAULTS["activation scale left over"][0]
    notes = export_notes(zoo.spoil(sound["nvfp4"], tmp_path / "awq", change), sound["bf16"])
    assert any("pre_quant_scale" in note and "annie-quant audit" in note for note in notes)
