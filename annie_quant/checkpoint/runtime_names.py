"""Names across runtimes: transformers from 5.2 and runtimes on 4.57 call the same Qwen3.5 differently.

A text checkpoint has the text form's class and tensors `model.layers...`; a multimodal one has the multimodal form's
class, the text settings in `text_config` and a longer prefix, and its servers read a processor's settings even when they
serve text only. Runtimes on transformers 4.57 know the multimodal form only, under older class
names. The names are the family's (annie_quant.models).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from annie_quant import models
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.shards import ModelFolder, read_object
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.files import write_json
from annie_quant.documents import Audit
from annie_quant.models.family import MULTIMODAL_PREFIX, TEXT_PREFIX, Form

STYLES = ("old", "new")
CLASS_FILES = (
    "tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
PREPROCESSOR = "preprocessor_config.json"
# Settings that a multimodal config.json keeps outside of text_config.
OUTER = ("quantization_config", "transformers_version", "tie_word_embeddings", "dtype", "torch_dtype", "vision_config",
         "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")  # fmt: skip


def named_form(folder: ModelFolder) -> tuple[models.Family, Form] | None:
    """Return the form whose class config.json names, and its family; None unless the family has two forms."""
    names = folder.config.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    named = ((family, form) for family in models.families() if family.multimodal for form in family.forms)
    return next((pair for pair in named if pair[1].class_name == first), None)


def is_multimodal(folder: ModelFolder) -> bool:
    """Return whether config.json names a multimodal class that is known here."""
    named = named_form(folder)
    return named is not None and named[1] is named[0].multimodal


def tensors_multimodal(folder: ModelFolder) -> bool | None:
    """Return whether the decoder's tensors have the multimodal prefix, or None without any decoder layer."""
    layers = decoder_tensors(folder)
    return any(n.startswith(MULTIMODAL_PREFIX) for n in layers) if layers else None


def decoder_tensors(folder: ModelFolder) -> list[str]:
    return [n for n in folder if ".layers." in n and not folder.family.is_auxiliary(n)]


def check(folder: ModelFolder, audit: Audit) -> None:
    """Check that the class, the model type and the tensors' names are of one form."""
    named = named_form(folder)
    if named is None:
        return
    family, form = named
    kind = folder.config.get("model_type")
    if kind in [f.model_type for f in family.forms] and kind != form.model_type:
        audit.fault("names_disagree", "config.json", f"model_type {kind!r} and architectures [{form.class_name!r}]")
        return
    multimodal = tensors_multimodal(folder)
    if multimodal is not None and multimodal != (form is family.multimodal):
        prefixes = (TEXT_PREFIX, MULTIMODAL_PREFIX)
        expected, got = prefixes[not multimodal], prefixes[multimodal]
        tensor = decoder_tensors(folder)[0]
        audit.fault(
            "prefix_disagrees", tensor, f"{form.class_name} expects {expected}layers…, and the tensors are {got}layers…"
        )


def obstacle_on_old_runtimes(folder: ModelFolder) -> str:
    """Return what keeps a runtime on transformers 4.57 from loading a folder, or ""."""
    if not is_multimodal(folder):
        return f"model_type {folder.config.get('model_type')!r}"
    if not (folder.path / PREPROCESSOR).is_file():
        return f"{PREPROCESSOR} is missing"
    for file in CLASS_FILES:
        try:
            settings = folder.json(file) or {}
        except ShardError as error:
            return error.message
        for field, (_, new) in folder.family.renamed_classes.items():
            if settings.get(field) == new:
                return f"{field} {new!r} in {file}"
    return ""


class Renaming:
    """The names of a copy of a folder. style: "old", "new", or None to keep the form and fix what disagrees.

    actions: what was changed, one sentence each.
    """

    def __init__(self, folder: ModelFolder, style: str | None, source: ModelFolder | None) -> None:
        if style is not None and style not in STYLES:
            raise UsageError(f"there are no names called {style!r}", f"choose one of: {', '.join(STYLES)}")
        self.folder, self.style, self.source = folder, style, source
        self.actions: list[str] = []
        named = named_form(folder)
        if style and named is None:
            raise CheckpointError(
                f"{folder.path}: config.json names no class of a family with two forms",
                "expected architectures such as Qwen3_5ForCausalLM",
            )
        self.forms = named[0].forms if named else ()
        self.multimodal = is_multimodal(folder)
        kind = folder.config.get("model_type")
        if style == "old" or (style == "new" and any(folder.family.vision in n for n in folder)):
            self.multimodal = True
        elif style == "new":
            self.multimodal = False
        elif named and kind in [f.model_type for f in self.forms if f.model_type != named[1].model_type]:
            self.multimodal = bool(tensors_multimodal(folder))  # class and type disagree: the tensors decide

    def name(self, name: str) -> str:
        """Return a tensor's or module's name in the copy."""
        return self.folder.family.in_form(name, self.multimodal) if self.forms else name

    def config(self) -> dict[str, Any]:
        """Return config.json in the form of the copy, without quantization_config."""
        config = {k: v for k, v in self.folder.config.items() if k != "quantization_config"}
        if not self.forms:
            return config
        if any(self.name(n) != n for n in self.folder):
            prefix = MULTIMODAL_PREFIX if self.multimodal else TEXT_PREFIX
            self.actions.append(f"tensors renamed to {prefix}…")
        text, form = self.forms[0], self.forms[self.multimodal]
        inner = config.get("text_config") if isinstance(config.get("text_config"), dict) else None
        if self.multimodal and inner is None:
            inner = {k: v for k, v in config.items() if k not in (*OUTER, "architectures", "model_type")}
            outer = {k: v for k, v in config.items() if k in OUTER}
            vision = self.source.config.get("vision_config") if self.source else None
            outer |= {"vision_config": vision} if vision is not None else {}
            config = {**outer, "text_config": {**inner, "model_type": text.model_type}}
            self.actions.append("config.json: text settings moved into text_config")
        elif not self.multimodal and inner is not None:
            config = {k: v for k, v in config.items() if k in OUTER and k != "vision_config"} | inner
            self.actions.append("config.json: text_config's settings moved to the top")
        for field, new in (("model_type", form.model_type), ("architectures", [form.class_name])):
            old = self.folder.config.get(field)
            if old != new:
                self.actions.append(f"config.json: {field} {old} → {new}")
            config[field] = new
        return config

    def write_small_files(self, target: Path) -> None:
        """Rename classes in the copied files, and write the processor's settings that a multimodal form needs."""
        if self.multimodal and not (target / PREPROCESSOR).exists():
            original = self.source.json(PREPROCESSOR) if self.source else None
            write_json(target / PREPROCESSOR, original or dict(self.folder.family.preprocessor_stub))
            origin = "taken from the source" if original else "written as a stub for text"
            self.actions.append(f"{PREPROCESSOR} {origin}")
        if self.style is None:
            return
        side = STYLES.index(self.style)
        for file in CLASS_FILES:
            settings = read_object(target / file)
            changed = dict(settings or {})
            for field, names in self.folder.family.renamed_classes.items():
                if changed.get(field) == names[1 - side]:
                    changed[field] = names[side]
                    self.actions.append(f"{file}: {field} {names[1 - side]} → {names[side]}")
            if settings is not None and changed != settings:
                write_json(target / file, changed)
