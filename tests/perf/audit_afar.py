"""Audit 20 faulty checkpoints of published sizes from afar: is the fault named, how long does it take, what is transferred?

    python tests/perf/audit_afar.py [PART OF A FAULT'S NAME]

The checkpoints are sparse files with the tensors and settings of public releases (tests/helpers/published_models.py), each with
one fault. A server on this machine speaks the Hub's API; what it sends is counted there. The sound releases are the control.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import huggingface_hub.constants  # noqa: E402
import published_models  # noqa: E402
import sparse_checkpoints  # noqa: E402
from folder_hub import FolderHub  # noqa: E402
from published_models import Table  # noqa: E402

import annie_quant as aq  # noqa: E402
from annie_quant.checkpoint.checks import OF_VALUES  # noqa: E402

QWEN8, QWEN27 = "Qwen/Qwen3-8B", "Qwen/Qwen3.6-27B"
FP8 = "Qwen/Qwen3.6-35B-A3B-FP8"
NV27, NV35 = "nvidia/Qwen3.6-27B-NVFP4", "nvidia/Qwen3.6-35B-A3B-NVFP4"
NV122, NV235 = "nvidia/Qwen3.5-122B-A10B-NVFP4", "nvidia/Qwen3-235B-A22B-NVFP4"
CT27 = "unsloth/Qwen3.8-27B-NVFP4"
TableChange = Callable[[Table, dict], object]
FolderChange = Callable[[Path], object]


def first(table: Table, *parts: str) -> str:
    return next(name for name in table if all(part in name for part in parts))


def drop(*parts: str) -> TableChange:
    """Return a change that removes every tensor whose name has all parts."""
    return lambda t, c: [t.pop(name) for name in list(t) if all(part in name for part in parts)]


def layout(dtype: str, shape: tuple[int, ...] | None, *parts: str) -> TableChange:
    """Return a change of the first tensor whose name has all parts. shape: None: as it is."""

    def change(table: Table, config: dict) -> None:
        name = first(table, *parts)
        table[name] = (dtype, shape or table[name][1])

    return change


def settings(change: Callable[[dict], object]) -> TableChange:
    """Return a change of the text model's settings."""
    return lambda t, c: change(c.get("text_config", c))


def shard(change: Callable[[Path], object]) -> FolderChange:
    return lambda folder: change(sorted(folder.glob("*.safetensors"))[1])


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096)


def plain_up(table: Table, config: dict) -> None:
    """Store one linear of a layer in 16 bits, and leave the settings as they are."""
    module = first(table, "layers.7.mlp.up_proj.weight").partition(".weight")[0]
    drop(f"{module}.")(table, config)
    table[f"{module}.weight"] = ("BF16", (17408, 5120))


def add_token(folder: Path) -> None:
    (folder / "added_tokens.json").write_text(json.dumps({"<|late|>": 999_999}))


def lose_results(folder: Path) -> None:
    """Write a chat template that passes over the results of tools."""
    path = folder / "chat_template.jinja"
    template = path.read_text()
    shown = "(message.content|trim) + '\\n</tool_response>'"
    assert template.count(shown) == 1
    path.write_text(template.replace(shown, "'</tool_response>'"))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
# release, fault, change of the tables or None, change of the folder or None, expected code
CASES: list[tuple[str, str, TableChange | None, FolderChange | None, str]] = [
    (
        NV27,
        "block scales of a linear lost",
        drop("layers.5.mlp.up_proj.weight_scale"),
        None,
        "block_scale_missing",
    ),
    (NV27, "one of two merged linears in 16 bits, not listed", plain_up, None, "fused_mixed"),
    (NV27, "head lost", drop("lm_head"), None, "decoder_incomplete"),
    (NV27, "drafting head lost", drop("mtp."), None, "mtp_missing"),
    (
        NV27,
        "drafting head of another size",
        layout("BF16", (5120, 5120), "mtp.fc.weight"),
        None,
        "mtp_shape",
    ),
    (
        NV27,
        "a git-lfs pointer as a shard",
        None,
        shard(lambda p: p.write_bytes(LFS)),
        "lfs_pointer",
    ),
    (
        NV27,
        "a linear missing in the list of layers",
        lambda t, c: c["quantization_config"]["quantized_layers"].popitem(),
        None,
        "not_listed",
    ),
    (
        CT27,
        "scales of the KV cache of one layer lost",
        drop("layers.3.self_attn.k_scale"),
        None,
        "kv_scale_missing",
    ),
    (
        CT27,
        "block scales in another type",
        layout("U8", None, "layers.9.mlp.up_proj.weight_scale"),
        None,
        "scale_dtype",
    ),
    (
        CT27,
        "block scales of another shape",
        layout("F8_E4M3", (17408, 100), "layers.9.mlp.up_proj.weight_scale"),
        None,
        "scale_shape",
    ),
    (CT27, "a layer lost", drop("layers.20."), None, "decoder_incomplete"),
    (QWEN8, "a shard not uploaded", None, shard(Path.unlink), "shard_missing"),
    (QWEN8, "a shard cut off", None, shard(truncate), "shard_truncated"),
    (
        QWEN27,
        "another method in the settings",
        lambda t, c: c.update(quantization_config={"quant_method": "gptq"}),
        None,
        "method_unknown",
    ),
    (QWEN27, "a token beyond the embedding", None, add_token, "vocab_size"),
    (
        QWEN27,
        "class and model type of two forms",
        lambda t, c: c.update(architectures=["Qwen3_5ForCausalLM"]),
        None,
        "names_disagree",
    ),
    (NV35, "an expert lost", drop("layers.2.mlp.experts.7."), None, "expert_count"),
    (
        FP8,
        "scales of a linear lost",
        drop("layers.4.mlp.shared_expert.up_proj.weight_scale_inv"),
        None,
        "fp8_scale_missing",
    ),
    (
        NV235,
        "scales of the KV cache of one layer lost",
        drop("layers.9.self_attn.v_proj.v_scale"),
        None,
        "kv_scale_missing",
    ),
    (
        NV27,
        "results of tools lost in the chat template",
        None,
        lose_results,
        "template_result_lost",
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("fault", nargs="*", help="part of a fault's name; default: all rows")
    asked = " ".join(parser.parse_args().fault)
    with tempfile.TemporaryDirectory() as home, FolderHub() as hub:
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        huggingface_hub.constants.ENDPOINT = hub.url
        huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE = template
        print("| release, size | fault | findings | wall s | CPU s | MB sent | share |")
        print("|---|---|---|---|---|---|---|")
        sound = [(name, "none (control)", None, None, "") for name in published_models.RELEASES]
        for number, (release, fault, of_table, of_folder, code) in enumerate([*CASES, *sound]):
            if asked not in fault:
                continue
            table = dict(published_models.table(release))
            config = json.loads(json.dumps(published_models.config(release)))
            if of_table:
                of_table(table, config)
            folder = sparse_checkpoints.write(Path(home) / str(number), table, config)
            size = sum(path.stat().st_size for path in folder.iterdir())
            if of_folder:
                of_folder(folder)
            name = f"public/{number}"
            hub.add(name, folder)
            hub.sent.clear()
            wall, cpu = time.perf_counter(), time.process_time()
            audit = aq.checkpoint.audit(f"hf:{name}")
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            faults = [*audit.findings, *(audit.template.faults if audit.template else ())]
            codes = sorted({finding.code for finding in faults})
            assert code in codes if code else not codes, (release, fault, code, faults[:3])
            assert not set(codes) & OF_VALUES, codes
            sent = sum(hub.sent.values())
            print(
                f"| {release}, {size / 1e9:.0f} GB | {fault} | {', '.join(codes)} | {wall:.2f} | {cpu:.2f} "
                f"| {sent / 1e6:.1f} | {100 * sent / size:.3f} % |"
            )


if __name__ == "__main__":
    main()
