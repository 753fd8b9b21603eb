"""Mixtures of experts: merged and single names of the same bytes, and the faults of their checkpoints."""

from __future__ import annotations

from pathlib import Path

import expert_zoo
import numpy as np
import pytest

from annie_quant.checkpoint import ModelFolder, ShardError


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("experts")
    return {"merged": expert_zoo.merged(home / "merged"), "single": expert_zoo.per_expert(home / "single")}


def test_single_experts_are_read_from_merged_tensors(plain):
    """Every expert's linear can be read by its own name, and has the bytes that NumPy cuts from the merged tensor."""
    folder, single = ModelFolder(plain["merged"]), ModelFolder(plain["single"])
    assert len(folder.expert_parts) == 4 * 3 * expert_zoo.EXPERTS and not single.expert_parts
    for name in single:
        assert folder.find(name) == name and folder.info(name).shape == single.info(name).shape
        assert folder.tensor(name).tobytes() == single.tensor(name).tobytes()
        assert b"".join(p.tobytes() for p in folder.pieces(name)) == single.tensor(name).tobytes()
        folder.release(name)
    multimodal = f"model.language_model.layers.1.mlp.experts.{expert_zoo.EXPERTS - 1}.up_proj.weight"
    assert np.array_equal(folder.tensor(folder.find(multimodal)), single.tensor(single.find(multimodal)))
    assert set(folder) == set(expert_zoo.weights()), "iteration has the files' own names"
    with pytest.raises(ShardError, match="missing"):
        folder.info(f"model.layers.1.mlp.experts.{expert_zoo.EXPERTS}.up_proj.weight")
