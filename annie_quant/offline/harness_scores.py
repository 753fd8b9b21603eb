"""What an evaluation harness asks of a model: log-likelihoods of token sequences, and greedy text up to a stop string.

Any checkpoint that annie-quant loads, NVFP4 on any machine, under a numerics profile. lm-eval's adapter is harness_model.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from annie_quant.checkpoint.chat_template import ChatTemplate
from annie_quant.checkpoint.remote_code import loading_tokenizer
from annie_quant.core.errors import UsageError
from annie_quant.offline.decoding import generate
from annie_quant.offline.emulation import emulate
from annie_quant.offline.engine import Engine, Row
from annie_quant.offline.loading import load, profiles_of
from annie_quant.offline.pair import working_dtype
from annie_quant.offline.profiles import find_profile, is_supported
from annie_quant.offline.prompts import end_tokens

DEFAULT_LENGTH = 2048  # tokens, where config.json has no max_position_embeddings
ROWS = 64


class Likelihood(NamedTuple):
    """value: natural logarithm of the target's probability. is_greedy: each of its tokens is the most probable one."""

    value: float
    is_greedy: bool


class HarnessScores:
    """A model folder under one profile.

    profile: a numerics profile (docs/numerics.md); default: the first that the checkpoint supports. length: most tokens of a
    forward. Raises UsageError for a profile that the checkpoint does not support.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        profile: str | None = None,
        rows: int = ROWS,
        length: int | None = None,
        dtype: str | None = None,
        device: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        if not torch.cuda.is_available():
            device = "cpu"  # lm-eval's default is "cuda", also where there is none
        device = device or "cuda"
        self.dtype = dtype or working_dtype([self.folder], device)
        if self.dtype not in ("float32", "bfloat16"):
            raise UsageError(f"dtype is float32 or bfloat16, got {self.dtype}")
        cache = "float32" if self.dtype == "float32" else "bf16"
        self.model = load(self.folder, cache=cache, dtype=getattr(torch, self.dtype), device=device)
        supported = profiles_of(self.model)
        self.profile = find_profile(profile or supported[0])
        if not is_supported(self.profile.name, supported):
            raise UsageError(f"{self.folder} does not support {profile}", f"it supports: {', '.join(supported)}")
        self.engine = Engine(self.model, rows=rows)
        config = self.model.config.get_text_config()
        self.length = length or int(getattr(config, "max_position_embeddings", 0) or DEFAULT_LENGTH)
        with loading_tokenizer(self.folder):
            self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        self.template = ChatTemplate(self.tokenizer, str(folder)) if self.tokenizer.chat_template else None

    def likelihoods(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        on_finished: Callable[[int], object] = lambda n: None,
    ) -> list[Likelihood]:
        """Return the log-likelihood of each target after its context (tokens), in order.

        A context that is too long loses its first tokens. Raises UsageError for an empty context, or an empty or too long target.
        """
        rows = []
        for context, target in pairs:
            if not context or not 0 < len(target) <= self.length:
                raise UsageError(
                    f"a context of {len(context)} and a target of {len(target)} tokens cannot be scored; the model has "
                    f"{self.length}"
                )
            tokens = [*context, *target][-(self.length + 1) :]
            rows.append(Row(tokens[: len(tokens) - len(target)], list(target)))
        results: list[Likelihood | None] = [None] * len(rows)
        with emulate(self.model, self.profile):
            for i, logits in self.engine.scores(rows):
                expected = torch.tensor(rows[i].target, device=logits.device)
                chosen = torch.log_softmax(logits, -1).gather(-1, expected[:, None])
                greedy = torch.equal(logits.argmax(-1), expected)
                results[i] = Likelihood(float(chosen.double().sum()), greedy)
                on_finished(1)
        return [r for r in results if r is not None]

    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        stops: Sequence[Sequence[str]],
        on_finished: Callable[[int], Any] = lambda n: None,
    ) -> list[str]:
        """Return greedy continuations up to, and without, the first stop string. limits: most tokens of each."""
        ends = end_tokens(self.folder, self.tokenizer)
        contexts = [list(p[-max(1, self.length - limit) :]) for p, limit in zip(prompts, limits, strict=True)]
        with emulate(self.model, self.profile):
            completions = generate(self.engine, contexts, limits, ends, on_finished)
        texts = self.tokenizer.batch_decode([c.tokens for c in completions], skip_special_tokens=True)
        return [until(text, own) for text, own in zip(texts, stops, strict=True)]


def until(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    ends = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return text[: min(ends)] if ends else text
