"""Let a model's tokenizer split tags that the model never learned, `<tool_call>` above all, into characters.

    python tests/real/split_tags.py DIR

Qwen2.5-Coder has the tokens <tool_call> and </tool_call>, and their rows of the embedding are those of tokens that no text
has: it answers in bare JSON, so that nobody can count its calls. Without these tokens it reads and writes the tags as text, and
its calls have Hermes' form. transformers' own reader of GGUF files leaves the tokens out, too, and gives the same ids. Every
server that takes the folder, or a GGUF file made of it, has the same tokenizer.

A token is untrained if its row has a cosine of more than LIKE with that of another added token. Only tokens that are not special
(no control tokens) are split. A folder without such tokens stays as it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from annie_quant.checkpoint.shards import ModelFolder, read_object
from annie_quant.core import files

LIKE = 0.99  # Qwen2.5-Coder-0.5B: 1.00000 for <tool_call>, .941 for <|im_start|> and <|im_end|>
EMBEDDING = "model.embed_tokens.weight"


def untrained(folder: Path, ids: list[int]) -> set[int]:
    """Return which of these tokens have the row of another one of them, nearly."""
    rows = ModelFolder(folder).tensor(EMBEDDING)[ids].astype(np.float32)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    cosines = rows @ rows.T
    np.fill_diagonal(cosines, 0)
    nearest = cosines.max(1)
    return {i for i, cosine in zip(ids, nearest.tolist(), strict=True) if cosine > LIKE}


def split_tags(folder: Path) -> list[str]:
    """Take the untrained tags out of every file of the tokenizer that adds them, tokenizer.json last, and return them."""
    file, settings, listed = (
        folder / name for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")
    )
    document = read_object(file) or {"added_tokens": []}
    added = document["added_tokens"]
    unknown = untrained(folder, [t["id"] for t in added])
    tags = [t for t in added if t["id"] in unknown and not t["special"]]
    names = [t["content"] for t in tags]
    if tags:
        if "added_tokens_decoder" in (own := read_object(settings) or {}):
            own["added_tokens_decoder"] = {
                i: t for i, t in own["added_tokens_decoder"].items() if t["content"] not in names
            }
            files.write_json(settings, own)
        if ids := read_object(listed):
            files.write_json(listed, {name: i for name, i in ids.items() if name not in names})
        files.write_json(file, document | {"added_tokens": [t for t in added if t not in tags]})
    return names


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    print("split:", ", ".join(split_tags(parser.parse_args().folder)) or "nothing")
