"""The strategy modelopt: names of configurations, and ModelOpt's own results with the same text."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from dense_models import make
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import CALIBRATION, TINY_ANNIE

from annie_quant import checkpoint, quantize
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.quantize import external, strategies
from annie_quant.quantize.strategies import modelopt

torch = pytest.importorskip(
    "torch", reason="ModelOpt runs on torch: pip install annie-quant[quantize]"
)
mtq = pytest.importorskip(
    "modelopt.torch.quantization",
    reason="ModelOpt is not installed: pip install annie-quant[quantize]",
)
import modelopt_backend  # noqa: E402  needs torch
import transformers  # noqa: E402

ROWS = 6
ON_CPU = not torch.cuda.is_available()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("source") / "qwen2", "qwen2")


def run(config: str, source: Path, output: Path, **options: Any) -> quantize.QuantizeResult:
    return quantize.run(
        "modelopt",
        source,
        output,
        calib_data=CALIBRATION,
        calib_samples=ROWS,
        answers="given",
        config=config,
        **options,
    )


def linears(folder: Path) -> set[str]:
    return set(checkpoint.dialects.linears(ModelFolder(folder)))


# ---- names


def test_a_configuration_has_the_name_of_a_constant_a_recipe_or_a_file(tmp_path: Path) -> None:
    constant = modelopt.find_configuration("NVFP4_AWQ_LITE_CFG", "qwen2")
    assert constant.quantize == mtq.NVFP4_AWQ_LITE_CFG
    assert constant.quantize is not mtq.NVFP4_AWQ_LITE_CFG
    listed = modelopt.find_configuration("general/ptq/nvfp4_default-kv_fp8", "qwen2")
    assert listed.is_max_only and not listed.rounds_to_nvfp4
    alone = modelopt.find_configuration("w4a16_nvfp4-fp8_attn-kv_fp8_cast", "qwen3_5_text")
    enabled = {e["quantizer_name"] for e in alone.quantize["quant_cfg"] if e.get("cfg")}
    assert "*lm_head*weight_quantizer" in enabled and "*mlp*up_proj*weight_quantizer*" in enabled
    file = modelopt.recipe_library() / "general/ptq/nvfp4_mlp_only-kv_fp8.yaml"
    own = Path(shutil.copyfile(file, tmp_path / "mine.yaml"))
    mine = modelopt.find_configuration(str(own), "qwen2")
    library = modelopt.find_configuration("nvfp4_mlp_only-kv_fp8", "qwen2")
    assert mine.quantize == library.quantize
    search = modelopt.find_configuration("general/auto_quantize/nvfp4_fp8_at_5p4bits", "qwen2")
    assert search.search.constraints.effective_bits == 5.4 and search.rounds_to_nvfp4


def test_a_name_that_is_wrong_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no configuration called 'NVFP4_DEFAULT'") as refused:
        modelopt.find_configuration("NVFP4_DEFAULT", "qwen2")
    assert "NVFP4_DEFAULT_CFG" in refused.value.hint
    with pytest.raises(UsageError, match="2 recipes called") as refused:
        modelopt.find_configuration("w4a16_nvfp4-fp8_attn-kv_fp8_cast", "qwen2")
    assert "qwen3_5/ptq/" in refused.value.hint and "qwen3_5_moe/ptq/" in refused.value.hint
    with pytest.raises(UsageError, match="runs one configuration"):
        modelopt.find_configuration("", "qwen2")
    broken = tmp_path / "broken.yaml"
    broken.write_text("metadata: {recipe_type: ptq}\nquantize: {algorithm: max, quant_cfg: 7}\n")
    with pytest.raises(UsageError, match="refuses the recipe") as refused:
        modelopt.find_configuration(str(broken), "qwen2")
    assert "\n" not in refused.value.message
    with pytest.raises(UsageError, match="does not quantize"):
        modelopt.find_configuration("general/speculative_decoding/eagle3", "qwen2")


def test_the_engine_of_a_strategy_is_modelopts_configuration_of_its_recipe() -> None:
    chosen, options = strategies.engine_of("auto_mixed", "modelopt", {"bits": "5.5"})
    assert chosen.name == "modelopt" and options["bits"] == 5.5
    assert "kl_div" in str(options["config"])
    assert strategies.engine_of("gptq", "own", {})[0].name == "gptq"
    with pytest.raises(UsageError, match="no configuration of the strategy 'gptq'") as refused:
        strategies.engine_of("gptq", "modelopt", {})
    assert "naive" in refused.value.hint


# ---- the text


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=60), min_size=1, max_size=30))
def test_batches_hold_every_row_once_and_repeat_only_its_own_tokens(rows: list[list[int]]) -> None:
    batches = external.text_batches(rows, "cpu", seed=3)
    held = []
    for batch in batches:
        for ids, labels in zip(batch.ids.tolist(), batch.labels.tolist(), strict=True):
            length = sum(label != external.IGNORED_LABEL for label in labels)
            held.append(ids[:length])
            assert labels == ids[:length] + [external.IGNORED_LABEL] * (len(ids) - length)
            assert ids == [ids[i % length] for i in range(len(ids))]
    assert sorted(held) == sorted(rows)


# ---- results


@pytest.mark.parametrize(("strategy", "config"), [("naive", "NVFP4_DEFAULT_CFG")])
def test_both_engines_write_the_same_weights(
    source: Path, tmp_path: Path, strategy: str, config: str
) -> None:
    """Input scales differ by bf16, in which ModelOpt computes and the own engine does not (test_max_calibration.py)."""
    text = {"calib_data": CALIBRATION, "calib_samples": ROWS}
    quantize.run(strategy, source, tmp_path / "own", **text)
    result = quantize.run(strategy, source, tmp_path / "theirs", engine="modelopt", **text)
    assert result.strategy == "modelopt" and any(config in note for note in result.notes)
    assert result.expected_bytes == pytest.approx(result.size_bytes, rel=0.02)
    ours, theirs = ModelFolder(tmp_path / "own"), ModelFolder(tmp_path / "theirs")
    assert set(ours) == set(theirs)
    for name in ours:
        if name.endswith("input_scale"):
            assert ours.scalar(name) == pytest.approx(theirs.scalar(name), rel=2.0**-6)
        else:
            assert ours.tensor(name).tobytes() == theirs.tensor(name).tobytes(), name
    recipe = json.loads((tmp_path / "theirs/annie_quant.json").read_text())
    assert recipe["options"]["config"] == config and recipe["calibration"]["conversations"] == ROWS


def test_the_bytes_are_those_of_a_plain_modelopt_script(source: Path, tmp_path: Path) -> None:
    """Input scales and scales of the KV cache, too: batches have the same tokens."""
    from annie_quant.data.rows import read_conversations
    from annie_quant.quantize.calibration_text import longest_per_row, text_of_rows

    config = "general/ptq/nvfp4_default-kv_fp8"
    run(config, source, tmp_path / "ours")
    text = text_of_rows(source, read_conversations(CALIBRATION, ROWS), whole=True)
    rows = list(longest_per_row(text.samples).values())
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()

    def forward_loop(model: Any) -> None:
        for row in rows:
            model(torch.tensor([row]))

    from modelopt.recipe import load_recipe
    from modelopt.torch.export import export_hf_checkpoint

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        mtq.quantize(model, load_recipe(config).quantize.model_dump(), forward_loop)
        export_hf_checkpoint(model, export_dir=tmp_path / "plain")
    ours, plain = ModelFolder(tmp_path / "ours"), ModelFolder(tmp_path / "plain")
    assert set(ours) == set(plain)
    scales = [name for name in plain if name.endswith(("input_scale", "k_scale", "v_scale"))]
    assert len(scales) == 2 * (7 + 2)
    for name in plain:
        if name not in scales:
            assert ours.tensor(name).tobytes() == plain.tensor(name).tobytes(), name
        else:  # one row at a time and several at once round their sums differently
            assert ours.scalar(name) == pytest.approx(plain.scalar(name), rel=2.0**-6), name
    audit = checkpoint.audit(tmp_path / "ours", source=source)
    assert audit.ok, [f.message for f in audit.findings]


def test_excluded_layers_stay(source: Path, tmp_path: Path) -> None:
    run("NVFP4_DEFAULT_CFG", source, tmp_path / "out", exclude="layers.0,*self_attn*")
    assert linears(tmp_path / "out") == {
        f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")
    }
    assert checkpoint.audit(tmp_path / "out", source=source).ok
    with pytest.raises(UsageError, match="matches none"):
        run("NVFP4_DEFAULT_CFG", source, tmp_path / "none", exclude="layer.7")
    assert not (tmp_path / "none").exists()


def test_qwen35_in_two_formats_is_sound(tmp_path: Path) -> None:
    run("w4a16_nvfp4-fp8_attn-kv_fp8_cast", TINY_ANNIE, tmp_path / "out")
    audit = checkpoint.audit(tmp_path / "out", source=TINY_ANNIE)
    assert audit.ok and audit.summary.algorithm == "MIXED_PRECISION"
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert "lm_head" not in config["ignore"]


@pytest.mark.skipif(not ON_CPU, reason="a GPU runs it")
@pytest.mark.parametrize(
    "config", ["NVFP4_AWQ_LITE_CFG", "nvfp4_fp8_kl_div_at_5p4bits", "NVFP4_FOUR_OVER_SIX_CFG"]
)
def test_what_takes_a_gpu_says_so_before_anything_is_computed(
    source: Path, tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelopt, "ModelOptRun", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(EnvironmentFault, match=f"{config}.*on a CUDA device only"):
        run(config, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_options_of_another_strategy_are_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="chooses no formats"):
        run("NVFP4_DEFAULT_CFG", source, tmp_path / "out", bits=5)
    with pytest.raises(UsageError, match="--scale and --kv-cache are not for it"):
        run("NVFP4_DEFAULT_CFG", source, tmp_path / "out", kv_cache="fp8")


# ---- what ModelOpt computes on a GPU, through the fake quantizer of tests/helpers


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ModelOpt's rounding to NVFP4 run without a GPU."""
    modelopt_backend.register()
    find = modelopt.find_configuration
    dumped = modelopt.dumped
    export = modelopt.ModelOptRun.export

    def with_backend(config: dict[str, Any]) -> dict[str, Any]:
        return modelopt_backend.with_backend(config) if "quant_cfg" in config else config

    def find_on_cpu(name: str, model_type: str) -> modelopt.Configuration:
        found = find(name, model_type)
        fixed = found.quantize and with_backend(found.quantize)
        return modelopt.Configuration(found.name, fixed, found.search)

    def released(run: modelopt.ModelOptRun, output: Path) -> None:
        modelopt_backend.release(run.model)
        export(run, output)

    monkeypatch.setattr(modelopt, "find_configuration", find_on_cpu)
    monkeypatch.setattr(modelopt, "dumped", lambda value: with_backend(dumped(value)))
    monkeypatch.setattr(modelopt, "check_machine", lambda _: None)
    monkeypatch.setattr(modelopt.ModelOptRun, "export", released)


def test_awq_is_exported_so_that_servers_load_it(
    source: Path, tmp_path: Path, on_cpu: None
) -> None:
    result = run("NVFP4_AWQ_LITE_CFG", source, tmp_path / "awq")
    audit = checkpoint.audit(tmp_path / "awq", source=source)
    assert audit.ok, [f.message for f in audit.findings]
    assert audit.summary.algorithm == "NVFP4" and "vLLM: yes" in audit.summary.loads
    ours, original = ModelFolder(tmp_path / "awq"), ModelFolder(source)
    norms = [name for name in original if name.endswith("layernorm.weight")]
    assert all(ours.tensor(n).tobytes() != original.tensor(n).tobytes() for n in norms)
    assert not any("pre_quant_scale" in name for name in ours)
    assert "quantized again" not in " ".join(result.notes)


def test_awq_of_norms_that_add_one_is_folded_rightly(tmp_path: Path, on_cpu: None) -> None:
    """ModelOpt alone writes w / s for Qwen3.5, and no s for in_proj_a and in_proj_b (tests/checkpoint/test_awq_export.py)."""
    result = run("NVFP4_AWQ_LITE_CFG", TINY_ANNIE, tmp_path / "awq")
    assert "quantized again" not in " ".join(result.notes)
    audit = checkpoint.audit(tmp_path / "awq", source=TINY_ANNIE)
    assert audit.ok, [f.message for f in audit.findings]
    assert audit.summary.algorithm == "NVFP4"


def test_a_search_keeps_its_bits(source: Path, tmp_path: Path, on_cpu: None) -> None:
    """At fewer bits more linears are in NVFP4; excluded ones are in neither format."""
    counts = {}
    name = "general/auto_quantize/nvfp4_fp8_kl_div_at_5p4bits"
    for bits in (7.0, 10.0):
        folder = tmp_path / f"{bits}"
        run(name, source, folder, bits=bits, exclude="layers.0.mlp.down_proj")
        audit = checkpoint.audit(folder, source=source)
        assert audit.ok, [f.message for f in audit.findings]
        formats = [x.format for x in checkpoint.dialects.linears(ModelFolder(folder)).values()]
        assert "model.layers.0.mlp.down_proj" not in linears(folder)
        counts[bits] = formats.count("nvfp4")
    assert counts[7.0] > counts[10.0]
