"""Names across runtimes: what transformers from 5.2 and runtimes on 4.57 call the same Qwen3.5, and its tensors' prefix.

A text checkpoint is `Qwen3_5ForCausalLM` with `model.layers…`; a multimodal one is `Qwen3_5ForConditionalGeneration`
with the text settings in `text_config` and `model.language_model.layers…`, and its servers want a processor's settings
even when only text is served. Runtimes on transformers 4.57 know the second form alone, under older class names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import CheckpointError, UsageError
from annie_quant.files import write_json

TEXT, WRAPPED = "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"
TYPE_OF = {TEXT: "qwen3_5_text", WRAPPED: "qwen3_5"}
PREFIX, DEEPER = "model.", "model.language_model."
STYLES = ("old", "new")
# field → (transformers 4.57, transformers from 5.2)
SPELLINGS = {
    "tokenizer_class": ("Qwen2Tokenizer", "TokenizersBackend"),
    "processor_class": ("Qwen2VLProcessor", "Qwen3VLProcessor"),
    "image_processor_type": ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"),
    "video_processor_type": ("Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"),
}
SPELLED_FILES = (
    "tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
PREPROCESSOR = "preprocessor_config.json"
STUB = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
# Settings that a wrapped config.json keeps outside of text_config.
OUTER = ("quantization_config", "transformers_version", "tie_word_embeddings", "dtype", "torch_dtype", "vision_config",
         "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")  # fmt: skip


def architecture(config: dict[str, Any]) -> str:
    """The class that config.json names, or "" where it names none that is known here."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else ""
    return first if first in TYPE_OF else ""


def deeper(folder: ModelFolder) -> bool | None:
    """Whether the text tensors have the multimodal prefix; None where there is no layer to tell."""
    layers = [n for n in folder if ".layers." in n and not n.startswith(("mtp.", "model.visual."))]
    return any(n.startswith(DEEPER) for n in layers) if layers else None


def check(folder: ModelFolder, add: Callable[[str, str, str], None]) -> None:
    """The class, the model type and the tensors' names must be of one form."""
    config = folder.config
    named = architecture(config)
    if not named:
        return
    kind = config.get("model_type")
    if kind in TYPE_OF.values() and kind != TYPE_OF[named]:
        add("names_disagree", "config.json", f"config.json: model_type {kind!r} and architectures [{named!r}]")
        return
    has = deeper(folder)
    if has is not None and has != (named == WRAPPED):
        expected, seen = (DEEPER, PREFIX) if named == WRAPPED else (PREFIX, DEEPER)
        name = next(n for n in folder if ".layers." in n and not n.startswith("mtp."))
        add("prefix_disagrees", name, f"{name}: {named} looks for {expected}layers…, and the tensors are {seen}layers…")


def why_not_old(folder: ModelFolder) -> str:
    """What keeps a runtime on transformers 4.57 from loading a folder; "" for nothing."""
    config = folder.config
    if architecture(config) != WRAPPED:
        return f"model_type {config.get('model_type')!r}"
    if not (folder.path / PREPROCESSOR).is_file():
        return f"{PREPROCESSOR} is missing"
    for file in SPELLED_FILES:
        try:
            settings = folder.json(file) or {}
        except ShardError as error:
            return error.message
        for field, (_, new) in SPELLINGS.items():
            if settings.get(field) == new:
                return f"{field} {new!r} in {file}"
    return ""


class Renaming:
    """How a copy of a folder is to be named. style: "old", "new", or None to keep the form and mend what disagrees."""

    def __init__(self, folder: ModelFolder, style: str | None, source: ModelFolder | None) -> None:
        if style is not None and style not in STYLES:
            raise UsageError(f"there are no names called {style!r}", f"choose one of: {', '.join(STYLES)}")
        self.folder, self.style, self.source = folder, style, source
        self.actions: list[str] = []
        named = architecture(folder.config)
        self.wrapped = named == WRAPPED
        if style == "old" or (style == "new" and any("visual." in n for n in folder)):
            self.wrapped = True
        elif style == "new":
            self.wrapped = False
        elif named and folder.config.get("model_type") in set(TYPE_OF.values()) - {TYPE_OF[named]}:
            self.wrapped = bool(deeper(folder))  # the tensors decide between two claims
        self.known = bool(named)
        if style and not named:
            raise CheckpointError(
                f"{folder.path}: config.json names no Qwen3.5 class",
                f"expected architectures [{TEXT!r}] or [{WRAPPED!r}]",
            )

    def name(self, name: str) -> str:
        """A tensor's or module's name in the copy."""
        if not self.known or not name.startswith(PREFIX) or "visual." in name:
            return name
        short = name.removeprefix(DEEPER) if name.startswith(DEEPER) else name.removeprefix(PREFIX)
        return (DEEPER if self.wrapped else PREFIX) + short

    def config(self) -> dict[str, Any]:
        """config.json in the wanted form, without quantization_config."""
        config = {k: v for k, v in self.folder.config.items() if k != "quantization_config"}
        if not self.known:
            return config
        if any(self.name(n) != n for n in self.folder):
            self.actions.append(f"tensors renamed to {DEEPER if self.wrapped else PREFIX}…")
        named, kind = (WRAPPED, TYPE_OF[WRAPPED]) if self.wrapped else (TEXT, TYPE_OF[TEXT])
        inner = config.get("text_config") if isinstance(config.get("text_config"), dict) else None
        if self.wrapped and inner is None:
            inner = {k: v for k, v in config.items() if k not in (*OUTER, "architectures", "model_type")}
            outer = {k: v for k, v in config.items() if k in OUTER}
            vision = self.source.config.get("vision_config") if self.source else None
            outer |= {"vision_config": vision} if vision is not None else {}
            config = {**outer, "text_config": {**inner, "model_type": TYPE_OF[TEXT]}}
            self.actions.append("config.json: text settings moved into text_config")
        elif not self.wrapped and inner is not None:
            config = {k: v for k, v in config.items() if k in OUTER and k != "vision_config"} | inner
            self.actions.append("config.json: text_config's settings moved to the top")
        for field, new in (("model_type", kind), ("architectures", [named])):
            old = self.folder.config.get(field)
            if old != new:
                self.actions.append(f"config.json: {field} {old} → {new}")
            config[field] = new
        return config

    def small_files(self, target: Path) -> None:
        """Class names in the files that were carried over, and a processor's settings where a server wants them."""
        if self.wrapped and not (target / PREPROCESSOR).exists():
            given = self.source.json(PREPROCESSOR) if self.source else None
            write_json(target / PREPROCESSOR, given or STUB)
            self.actions.append(f"{PREPROCESSOR} {'taken from the source' if given else 'written as a stub for text'}")
        if self.style is None:
            return
        side = STYLES.index(self.style)
        for file in SPELLED_FILES:
            settings = ModelFolder.json_at(target / file)
            changed = dict(settings or {})
            for field, names in SPELLINGS.items():
                if changed.get(field) == names[1 - side]:
                    changed[field] = names[side]
                    self.actions.append(f"{file}: {field} {names[1 - side]} → {names[side]}")
            if settings is not None and changed != settings:
                write_json(target / file, changed)
