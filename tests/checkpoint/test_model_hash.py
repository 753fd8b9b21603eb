"""The hash of a model covers every file that determines its answers; hashes of older versions stay comparable."""

from __future__ import annotations

import hashlib
import shutil

import pytest
from paths import TINY_ANNIE

from annie_quant.checkpoint.shards import is_model, model_sha256

FIRST = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
)
ADDED = (
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "hf_quant_config.json",
)


@pytest.fixture
def folder(tmp_path):
    for name in (*FIRST, "model.safetensors"):
        if (TINY_ANNIE / name).is_file():
            shutil.copy(TINY_ANNIE / name, tmp_path / name)
    for name in ADDED:
        (tmp_path / name).write_text(f"content of {name}")
    return tmp_path


@pytest.mark.parametrize("name", [*FIRST, *ADDED, "model.safetensors"])
def test_a_change_of_any_file_changes_the_hash(folder, name):
    before = model_sha256(folder)
    with (folder / name).open("ab") as file:
        file.write(b" ")
    changed = model_sha256(folder)
    (folder / name).unlink()
    assert len({before, changed, model_sha256(folder)}) == 3


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "annie_quant.json"])
def test_other_files_do_not(folder, name):
    before = model_sha256(folder)
    (folder / name).write_text("text")
    assert model_sha256(folder) == before


def test_a_hash_of_version_0_2_is_still_that_of_its_folder(folder):
    """Its definition: name, size and content of five files and of the weights, in this order."""
    digest = hashlib.sha256()
    for name in (*FIRST, "model.safetensors"):
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            digest.update(f"{name}:{len(content)}\n".encode() + content)
    old = digest.hexdigest()
    assert (
        is_model(folder, old)
        and is_model(folder, model_sha256(folder))
        and old != model_sha256(folder)
    )
    (folder / "vocab.json").write_text("another vocabulary, which the older hash does not cover")
    assert is_model(folder, old)
    (folder / "config.json").write_text("{}")
    assert not is_model(folder, old)
    for name in ADDED:
        (folder / name).unlink()
    assert model_sha256(folder) == model_sha256(folder, FIRST)
