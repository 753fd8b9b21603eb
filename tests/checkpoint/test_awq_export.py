"""ModelOpt's own AWQ export of Qwen3.5: the audit reports the norms that it folds wrongly, and repair restores them."""

from __future__ import annotations

from pathlib import Path

import checkpoint_zoo as zoo
import pytest

import annie_quant as aq

pytest.importorskip("annie_quant.nvfp4", reason="the C codec is not built")
pytest.importorskip("modelopt", reason="ModelOpt is not installed (the quantize extra)")


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, Path]:
    """A bf16 checkpoint with outlier channels, and its export by ModelOpt's NVFP4_AWQ_LITE_CFG."""
    import modelopt.torch.export as export
    import modelopt.torch.quantization as mtq
    import modelopt_backend
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    home = tmp_path_factory.mktemp("awq")
    tensors = zoo.weights(zoo.CONFIG)
    for name, t in tensors.items():
        if name.endswith("layernorm.weight"):
            t[::16] = 3.0  # outlier channels are what AWQ scales
    source = zoo.save(home / "bf16", tensors, zoo.CONFIG)
    model = Qwen3_5ForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    torch.manual_seed(0)
    ids = torch.randint(0, 1270, (2, 48))
    modelopt_backend.register()
    mtq.quantize(model, modelopt_backend.with_backend(mtq.NVFP4_AWQ_LITE_CFG), lambda m: m(ids))
    modelopt_backend.release(model)
    export.export_hf_checkpoint(model, export_dir=str(home / "awq"))
    for name in zoo.TOKENIZER:
        (home / "awq" / name).write_bytes((source / name).read_bytes())
    return source, home / "awq"


def test_the_norms_folded_as_w_over_s_are_reported(exported):
    source, awq = exported
    assert not {f.code for f in aq.checkpoint.audit(awq).findings} - {"pre_quant_scale"}
    audit = aq.checkpoint.audit(awq, source=source)
    assert {f.code for f in audit.findings} == {"pre_quant_scale", "fold_plus_one"}
    norms = {f.tensor for f in audit.findings if f.code == "fold_plus_one"}
    assert len(norms) >= 6 and all(n.endswith("layernorm.weight") for n in norms)
    assert any("vLLM: no, NVFP4_AWQ" in line for line in audit.summary.loads)


def test_repair_writes_plain_nvfp4_with_the_source_s_norms(exported, tmp_path):
    source, awq = exported
    result = aq.checkpoint.repair(awq, source, tmp_path / "repaired")
    assert result.remaining == []
    after, original = zoo.read(tmp_path / "repaired"), zoo.read(source)
    assert all(
        after[n].tobytes() == original[n].tobytes() for n in original if n.endswith("norm.weight")
    )
    summary = aq.checkpoint.audit(tmp_path / "repaired").summary
    assert summary.algorithm == "NVFP4" and "vLLM: yes" in summary.loads
