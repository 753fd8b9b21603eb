"""Names across runtimes.

Transformers from 5.2 and runtimes on transformers 4.57 have different names for the same Qwen3.5.

A text checkpoint has the text form's class and tensors named `model.layers...`. A multimodal
checkpoint has the multimodal form's class, the text settings in `text_config` and a longer prefix;
its servers read a processor's settings even for text only. Runtimes on transformers 4.57 know only
the multimodal form, under older class names. The family has the names (annie_quant.models).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from annie_quant import models
from annie_quant.checkpoint.checks import fault
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.shards import CLASS_FILES, ModelFolder, without_quantization
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import Finding
from annie_quant.models.family import MULTIMODAL_PREFIX, TEXT_PREFIX, Form

_STYLES = ("old", "new")
PREPROCESSOR = "preprocessor_config.json"
# Settings that a multimodal config.json keeps outside of text_config.
OUTER = (
    "quantization_config",
    "transformers_version",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)


def named_form(folder: ModelFolder) -> tuple[models.Family, Form] | None:
    """Return the form whose class config.json names, and its family.

    None unless the family has two forms.
    """
    names = folder.config.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    named = (
        (family, form) for family in models.families() if family.multimodal for form in family.forms
    )
    return next((pair for pair in named if pair[1].class_name == first), None)


def is_multimodal(folder: ModelFolder) -> bool:
    """Return whether config.json names a multimodal class that is known here."""
    named = named_form(folder)
    return named is not None and named[1] is named[0].multimodal


def tensors_multimodal(folder: ModelFolder) -> bool | None:
    """Return whether the decoder's tensors have the multimodal prefix, or None.

    None without any decoder layer.
    """
    layers = decoder_tensors(folder)
    return any(n.startswith(MULTIMODAL_PREFIX) for n in layers) if layers else None


def decoder_tensors(folder: ModelFolder) -> list[str]:
    """Return the tensors in the decoder's layers, in file order."""
    return [n for n in folder if folder.family.in_decoder(n)]


def check_names(folder: ModelFolder) -> Iterator[Finding]:
    """Check that the class, the model type and the tensors' names are of one form."""
    named = named_form(folder)
    if named is None:
        return
    family, form = named
    model_type = folder.config.get("model_type")
    if model_type in family.model_types and model_type != form.model_type:
        problem = f"model_type {model_type!r} and architectures [{form.class_name!r}]"
        yield fault("names_disagree", "config.json", problem)
        return
    multimodal = tensors_multimodal(folder)
    if multimodal is not None and multimodal != (form is family.multimodal):
        prefixes = (TEXT_PREFIX, MULTIMODAL_PREFIX)
        expected = prefixes[not multimodal]
        got = prefixes[multimodal]
        problem = f"{form.class_name} expects {expected}layers…, and the tensors are {got}layers…"
        yield fault("prefix_disagrees", decoder_tensors(folder)[0], problem)


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


@dataclass(frozen=True)
class Renaming:
    """The names of a copy of a folder.

    family: its family.
    forms: the family's forms; () for a class that is not of a family with two forms.
    multimodal: whether the copy has the multimodal form.
    config: config.json of the copy, without quantization_config.
    files: further JSON files to write.
    actions: what is changed, one sentence each.
    """

    family: models.Family
    forms: tuple[Form, ...]
    multimodal: bool
    config: JsonObject
    files: dict[str, JsonObject]
    actions: list[str]

    def name(self, name: str) -> str:
        """Return a tensor's or module's name in the copy."""
        return self.family.in_form(name, self.multimodal) if self.forms else name


def plan_renaming(folder: ModelFolder, style: str | None, source: ModelFolder | None) -> Renaming:
    """Plan the names of a copy.

    style: "old", "new", or None to keep the form and fix what disagrees.
    """
    if style is not None and style not in _STYLES:
        raise UsageError(
            f"there are no names called {style!r}", f"choose one of: {', '.join(_STYLES)}"
        )
    named = named_form(folder)
    family = folder.family
    if style and named is None:
        message = f"{folder.path}: config.json names no class of a family with two forms"
        raise CheckpointError(message, "expected architectures such as Qwen3_5ForCausalLM")
    multimodal = is_multimodal(folder)
    model_type = folder.config.get("model_type")
    if style == "old" or (style == "new" and any(family.in_vision(n) for n in folder)):
        multimodal = True
    elif style == "new":
        multimodal = False
    elif named and model_type in named[0].model_types and model_type != named[1].model_type:
        multimodal = bool(tensors_multimodal(folder))  # class and type disagree: the tensors decide
    config = without_quantization(folder.config)
    actions = list[str]()
    forms = named[0].forms if named else ()
    if forms:
        if any(family.in_form(n, multimodal) != n for n in folder):
            actions.append(
                f"tensors renamed to {MULTIMODAL_PREFIX if multimodal else TEXT_PREFIX}…"
            )
        config, changes = config_in_form(config, forms, multimodal, source)
        actions += changes
    files, changes = renamed_files(folder, multimodal, style, source)
    return Renaming(family, forms, multimodal, config, files, actions + changes)


def config_in_form(
    config: JsonObject, forms: tuple[Form, ...], multimodal: bool, source: ModelFolder | None
) -> tuple[JsonObject, list[str]]:
    """Return config.json in the form of the copy, and what was changed."""
    form = forms[multimodal]
    new = {"model_type": form.model_type, "architectures": [form.class_name]}
    changes = []
    for field, value in new.items():
        if config.get(field) != value:
            changes.append(f"config.json: {field} {config.get(field)} → {value}")
    actions = []
    inner = config.get("text_config")
    has_inner = isinstance(inner, dict)
    outer = {field: value for field, value in config.items() if field in OUTER}
    if multimodal and not has_inner:
        vision = source.config.get("vision_config") if source else None
        if vision is not None:
            outer["vision_config"] = vision
        inner = {field: value for field, value in config.items() if field not in (*OUTER, *new)}
        config = outer | {"text_config": inner | {"model_type": forms[0].model_type}}
        actions.append("config.json: text settings moved into text_config")
    elif not multimodal and isinstance(inner, dict):
        outer.pop("vision_config", None)
        config = outer | inner
        actions.append("config.json: text_config's settings moved to the top")
    return config | new, actions + changes


def renamed_files(
    folder: ModelFolder, multimodal: bool, style: str | None, source: ModelFolder | None
) -> tuple[dict[str, JsonObject], list[str]]:
    """Return the files with renamed classes, and the processor's settings of a multimodal form."""
    files: dict[str, JsonObject] = {}
    actions = []
    if multimodal and not (folder.path / PREPROCESSOR).exists():
        original = source.json(PREPROCESSOR) if source else None
        files[PREPROCESSOR] = original or dict(folder.family.preprocessor_stub)
        origin = "taken from the source" if original else "written as a stub for text"
        actions.append(f"{PREPROCESSOR} {origin}")
    if style is None:
        return files, actions
    for file in CLASS_FILES:
        settings = files.get(file) or folder.json(file) or {}
        for field, (old_name, new_name) in folder.family.renamed_classes.items():
            other, wanted = (new_name, old_name) if style == "old" else (old_name, new_name)
            if settings.get(field) == other:
                settings = settings | {field: wanted}
                files[file] = settings
                actions.append(f"{file}: {field} {other} → {wanted}")
    return files, actions
