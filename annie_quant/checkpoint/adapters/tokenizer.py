"""Which tokenizer, chat template and generation settings a merged model has.

Trainers save the tokenizer and the template that they trained with into the adapter's folder, so
these are taken where they are there, and the base's otherwise.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from annie_quant.checkpoint import prompt_files, shards
from annie_quant.checkpoint.shards import ModelFolder, inside, read_object
from annie_quant.core.errors import CheckpointError
from annie_quant.core.files import write_text

# One tokenizer is several files; they are taken together.
TOKENIZER_FILES = (
    shards.TOKENIZER,
    shards.TOKENIZER_SETTINGS,
    *(name for name in shards.VOCABULARY_FILES if name != "chat_template.json"),
)
VOCABULARIES = (shards.TOKENIZER, "tokenizer.model", "vocab.json")
TEMPLATE_FILES = (shards.TEMPLATE, "chat_template.json")
_MAX_SHOWN_TOKENS = 3


@dataclass(frozen=True)
class PromptFiles:
    """Where the files that make prompts and end answers come from.

    tokenizer, template, generation: the folder of each; None where neither folder has it.
    notes: one sentence each.
    """

    adapter: Path
    tokenizer: Path | None
    template: Path | None
    generation: Path | None
    notes: list[str]

    @property
    def line(self) -> str:
        """One line that says which are the adapter's."""
        sources = {
            "tokenizer": self.tokenizer,
            "chat template": self.template,
            shards.GENERATION: self.generation,
        }
        own = [name for name, folder in sources.items() if folder == self.adapter]
        others = [name for name, folder in sources.items() if folder not in (self.adapter, None)]
        texts = []
        if own:
            texts.append(f"{', '.join(own)} from the adapter's folder")
        if others:
            texts.append(f"{', '.join(others)} from the base")
        return "; ".join(texts) or "neither folder has a tokenizer"

    def write(self, target: Path) -> None:
        """Write the files into a folder that has a copy of the base's small files."""
        for name in (*TOKENIZER_FILES, *TEMPLATE_FILES):
            (target / name).unlink(missing_ok=True)
        if self.tokenizer is not None:
            _copy(self.tokenizer, target, TOKENIZER_FILES)
        if self.template is not None and self.template == self.tokenizer:
            _copy(self.template, target, TEMPLATE_FILES)
        elif self.template is not None:
            write_text(target / shards.TEMPLATE, _template(self.template))
        if self.generation is not None:
            _copy(self.generation, target, (shards.GENERATION,))


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    for name in names:
        path = source / name
        if path.is_file():
            shutil.copyfile(inside(source, path), target / name)


def _template(folder: Path) -> str:
    return prompt_files.templates(folder).get("default", "")


def choose_prompt_files(
    adapter: Path, base: ModelFolder, rows: int, trained: set[int] | None
) -> PromptFiles:
    """Return where the files come from.

    rows: of the merged embedding.
    trained: tokens whose embedding the adapter changes; None: all.
    Raises CheckpointError where a token of the adapter's tokenizer has no row, or another id than
    in the base's.
    """
    try:
        return _choice(adapter, base.path, rows, trained)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{adapter.name}: fields of another type in its tokenizer's files, or in the base's "
            f"({type(error).__name__})",
            "copy the tokenizer's files from the base",
        ) from None


def _choice(adapter: Path, base: Path, rows: int, trained: set[int] | None) -> PromptFiles:
    folders = (adapter, base)
    tokenizer = next((f for f in folders if _has(f, VOCABULARIES)), None)
    template = next((f for f in folders if _template(f)), None)
    generation = next((f for f in folders if _has(f, (shards.GENERATION,))), None)
    notes = []
    if tokenizer == adapter:
        notes = _check_tokens(adapter, base, rows, trained)
    if template == adapter and _template(base) not in ("", _template(adapter)):
        notes.append("the adapter's chat template is not the base's: the adapter's is taken")
    return PromptFiles(adapter, tokenizer, template, generation, notes)


def _has(folder: Path, names: Sequence[str]) -> bool:
    return any((folder / name).is_file() for name in names)


def _check_tokens(adapter: Path, base: Path, rows: int, trained: set[int] | None) -> list[str]:
    """Return notes on added tokens.

    Raises CheckpointError for a token without a row, and for the vocabulary of another base.
    """
    own = prompt_files.vocabulary(read_object(adapter / shards.TOKENIZER) or {})
    known = prompt_files.vocabulary(read_object(base / shards.TOKENIZER) or {})
    beyond = sorted((number, token) for token, number in own.items() if number >= rows)
    if beyond:
        number, token = beyond[0]
        raise CheckpointError(
            f"{adapter.name}: token {token!r} has id {number}, and the merged embedding has "
            f"{rows} rows: an added token has no row",
            "save the adapter with save_embedding_layers=True, or with the base's tokenizer",
        )
    if not known:
        return []
    moved = [token for token, number in own.items() if known.get(token, number) != number]
    if moved:
        token = moved[0]
        raise CheckpointError(
            f"{adapter.name}: token {token!r} has id {own[token]} in its tokenizer and "
            f"{known[token]} in the base's: an adapter of another base",
            "give --model the base that it was trained on",
        )
    added = [token for token in own if token not in known]
    untrained = [token for token in added if trained is not None and own[token] not in trained]
    if not untrained:
        return []
    shown = ", ".join(map(repr, untrained[:_MAX_SHOWN_TOKENS]))
    return [
        f"{len(untrained)} added tokens have rows that the adapter does not train, such as {shown}"
    ]
