"""A model folder's tokenizer as GGUF metadata, read from tokenizer.json without transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from annie_quant import documents
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError, need
from annie_quant.core.text import printable

if TYPE_CHECKING:
    from gguf import GGUFWriter

# Pre-tokenizer expressions that llama.cpp knows by name (src/llama-vocab.cpp,
# LLAMA_VOCAB_PRE_TYPE_*).
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
PRE_TOKENIZERS = {
    _HEAD + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL: "qwen35",
    _HEAD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL: "qwen2",
    _HEAD + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL: "llama-bpe",
}
# Tokenizers that name no expression: the types of their steps → llama.cpp's name. GPT-2's
# expression is part of ByteLevel.
STEP_KINDS = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
TOKENIZER_HINT = "copy the tokenizer's files from the source checkpoint"
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6


class AddedToken(msgspec.Struct):
    """One entry of added_tokens."""

    id: TokenId
    content: str
    special: bool = False


class PreTokenizer(msgspec.Struct):
    """A pre-tokenizer, or a sequence of them."""

    type: str = ""
    pattern: dict[str, str] = {}
    use_regex: bool = True
    individual_digits: bool = False
    pretokenizers: list[PreTokenizer] | None = None


class Bpe(msgspec.Struct):
    """The model of tokenizer.json.

    byte_fallback: whether it was a SentencePiece model, which has a token for each single byte.
    """

    vocab: dict[str, TokenId]
    byte_fallback: bool = False
    merges: list[str | list[str]] = []


class Tokenizer(msgspec.Struct):
    """The fields of tokenizer.json that are read here."""

    model: Bpe | None = None
    added_tokens: list[AddedToken] = []
    pre_tokenizer: PreTokenizer | None = None


def add(writer: GGUFWriter, folder: ModelFolder, vocab_size: int) -> None:
    """Add tokens, types, merges, special ids and the chat template.

    Raises ShardError where they cannot be read.
    """
    content = folder.json("tokenizer.json")
    if content is None:
        raise ShardError(
            "tokenizer_missing",
            f"{folder.path}: no tokenizer.json",
            "copy it from the source checkpoint",
        )
    tokenizer = documents.convert(
        Tokenizer, content, "tokenizer.json", error=CheckpointError, hint=TOKENIZER_HINT
    )
    tokens, types = tokens_and_types(tokenizer, vocab_size)
    scores = sentencepiece_scores(tokenizer, tokens)
    if scores is None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer))
    else:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores)
        writer.add_add_space_prefix("Prepend" in str(content.get("normalizer")))
        types = [
            BYTE if kind == NORMAL and BYTE_TOKEN.fullmatch(t) else kind
            for t, kind in zip(tokens, types, strict=True)
        ]
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special_vocab = need("gguf", "serve").SpecialVocab
    try:  # SpecialVocab reads the tokenizer's files again, and trusts their types
        special_vocab(
            Path(folder.path), load_merges=scores is None, n_vocab=vocab_size
        ).add_to_gguf(writer, quiet=True)
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}", 200)
        message = f"{folder.path}: its tokenizer cannot be stored ({reason})"
        raise ShardError("tokenizer_unknown", message, TOKENIZER_HINT) from None


def tokens_and_types(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[str], list[int]]:
    """Return tokens and their types by id.

    Ids without a token are padded, as llama.cpp's converter does.
    """
    if tokenizer.model is None:
        raise ShardError(
            "tokenizer_unknown", "tokenizer.json has no model with a vocabulary", TOKENIZER_HINT
        )
    by_id = {i: (token, NORMAL) for token, i in tokenizer.model.vocab.items()}
    for added in tokenizer.added_tokens:
        text = added.content
        control = added.special or (text.startswith("<|") and text.endswith("|>"))
        by_id[added.id] = (text, CONTROL if control else USER_DEFINED)
    if by_id and max(by_id) >= vocab_size:
        message = (
            f"tokenizer.json has token id {max(by_id)} and config.json a vocabulary of {vocab_size}"
        )
        raise ShardError(
            "vocab_size", message, "are the tokenizer and the model of one checkpoint?"
        )
    rows = [by_id.get(i, (f"[PAD{i}]", UNUSED)) for i in range(vocab_size)]
    return [t for t, _ in rows], [k for _, k in rows]


def sentencepiece_scores(tokenizer: Tokenizer, tokens: list[str]) -> list[float] | None:
    """Return a SentencePiece model's score of every token; None for a byte-level tokenizer.

    Merges are in the order of the scores, and llama.cpp joins the pair with the highest score
    first.
    """
    model = tokenizer.model
    # The tokens of a byte-level tokenizer stand for bytes, with or without fallback.
    byte_level = any(step.type == "ByteLevel" for step in _steps_of(tokenizer))
    if model is None or not model.byte_fallback or byte_level:
        return None
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model.merges):
        ranks.setdefault(
            merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge), rank
        )
    return [float(-ranks.get(token, len(model.merges) + i)) for i, token in enumerate(tokens)]


def _steps_of(tokenizer: Tokenizer) -> list[PreTokenizer]:
    """Return the steps that split text into pieces."""
    outer = tokenizer.pre_tokenizer or PreTokenizer()
    return [outer] if outer.pretokenizers is None else outer.pretokenizers


def pre_tokenizer_name(tokenizer: Tokenizer) -> str:
    """Return llama.cpp's name for the way this tokenizer splits text."""
    steps = _steps_of(tokenizer)
    expressions = [step.pattern.get("Regex", "") for step in steps if step.type == "Split"]
    if len(expressions) == 1 and expressions[0] in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[expressions[0]]
    kinds = tuple(step.type for step in steps)
    if (
        kinds in STEP_KINDS
        and steps[-1].use_regex
        and all(s.individual_digits for s in steps if s.type == "Digits")
    ):
        return STEP_KINDS[kinds]
    hint = f"expected the pre-tokenizer of {', '.join([*PRE_TOKENIZERS.values(), *STEP_KINDS.values()])}"
    raise ShardError(
        "tokenizer_unknown",
        "tokenizer.json splits text in a way that llama.cpp has no name for",
        hint,
    )
