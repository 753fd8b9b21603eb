"""The SentencePiece tokenizer of a Gemma GGUF file, of which transformers' reader loses merges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from annie_quant.checkpoint.gguf.reader import gguf_value
from annie_quant.checkpoint.gguf.vocabulary import CONTROL, NORMAL, USER_DEFINED
from annie_quant.core.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

SPACE = "▁"  # SentencePiece's mark of a space
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def merges_of(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece's scores stand for: of each token its divisions into two tokens, best token first."""
    numbers = {token: i for i, token in enumerate(tokens)}
    normal = [i for i, kind in enumerate(kinds) if kind == NORMAL and len(tokens[i]) > 1]
    merges = []
    for i in sorted(normal, key=lambda i: (-scores[i], i)):
        token = tokens[i]
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(a, b) for a, b in pairs if a in numbers and b in numbers]
        merges += sorted(known, key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
    return merges


def gemma_tokenizer(path: object, reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a file whose tokenizer.ggml.model is "llama".

    Raises CheckpointError where its lists differ in length.
    """
    tokens = gguf_value(reader, "tokenizer.ggml.tokens", [])
    kinds = gguf_value(reader, "tokenizer.ggml.token_type", [])
    scores = gguf_value(reader, "tokenizer.ggml.scores", [])
    if not tokens or not len(tokens) == len(kinds) == len(scores):
        raise CheckpointError(
            f"{path}: {len(tokens)} tokens, {len(kinds)} types and {len(scores)} scores",
            "download the file again",
        )
    names = {}
    for role, key in ROLES.items():
        number = gguf_value(reader, f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            names[f"{role}_token"] = tokens[number]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = BPE(
        vocabulary,
        merges_of(tokens, kinds, scores),
        unk_token=names.get("unk_token"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        whole = [t for t, k in zip(tokens, kinds, strict=True) if k == kind]
        tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t in whole])
    begin = names.get("bos_token")
    if begin is not None and gguf_value(reader, "tokenizer.ggml.add_bos_token", False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
