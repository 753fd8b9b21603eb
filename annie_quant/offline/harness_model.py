"""The model `annie_quant` of lm-eval (EleutherAI/lm-evaluation-harness): importing this module registers it there.

    annie-quant lm-eval --model annie_quant --model_args pretrained=DIR,profile=w4a4 --tasks ... --log_samples --output_path RUN

Arguments: pretrained (a folder), profile (docs/numerics.md; default: the first that the checkpoint supports), dtype
(float32 or bfloat16), max_length, max_gen_toks, add_bos_token, enable_thinking. Contexts and targets are tokenized as by
lm-eval's `hf` model, so both give the same log-likelihoods for a bf16 checkpoint, up to rounding. Generation is greedy.

lm-eval 0.4.13 has no plug-in mechanism, so its own command does not know models of other packages; the command above does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval.models  # noqa: F401  (lm-eval registers its own models only while the registry is empty)
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
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
MAX_GEN_TOKS = 256
LIMIT_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


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


@register_model("annie_quant")
class AnnieQuantLM(TemplateLM):
    """A checkpoint under a numerics profile. batch_size: rows per batch; 1, lm-eval's default, and "auto" mean ROWS."""

    def __init__(
        self,
        pretrained: str,
        profile: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        add_bos_token: bool | None = None,
        enable_thinking: bool = False,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        rows = max_batch_size or (int(batch_size) if str(batch_size).isdigit() and int(batch_size) > 1 else ROWS)
        self.scores = HarnessScores(
            pretrained, profile, int(rows), int(max_length) if max_length else None, dtype, device
        )
        self.tokenizer = self.scores.tokenizer
        self.max_gen_toks, self.add_bos_token, self.enable_thinking = int(max_gen_toks), add_bos_token, enable_thinking

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return self.scores.length

    @property
    def tokenizer_name(self) -> str:
        return str(self.scores.folder).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes into its results."""
        return {"model_name": str(self.scores.folder), "profile": self.scores.profile.name, "dtype": self.scores.dtype}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and self._begins_with_prefix(string):
            special = False
        return list(self.tokenizer.encode(string, **({} if special is None else {"add_special_tokens": special})))

    def _begins_with_prefix(self, string: str) -> bool:
        prefix = self.tokenizer.decode([self.prefix_token_id])
        return bool(prefix) and string.startswith(prefix)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        **options: Any,
    ) -> list[tuple[float, bool]]:
        with tqdm(total=len(requests), desc="log-likelihoods", disable=_is_silent(options)) as bar:
            results = self.scores.likelihoods([(context, target) for _, context, target in requests], bar.update)
        answers = [(r.value, r.is_greedy) for r in results]
        for (texts, *_rest), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], **options: Any) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (r.args for r in requests):
            own = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            before = len(windows)
            windows += [(None, *make_disjoint_window(window)) for window in own]
            counts.append(len(windows) - before)
        values = iter(self._loglikelihood_tokens(windows, **options))
        totals = [sum(next(values)[0] for _ in range(n)) for n in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], **options: Any) -> list[str]:
        contexts, settings = [r.args[0] for r in requests], [r.args[1] for r in requests]
        limits = [self._limit(own) for own in settings]
        stops = [stop_strings(own) for own in settings]
        with tqdm(total=len(requests), desc="answers", disable=_is_silent(options)) as bar:
            prompts = [self.tok_encode(c) or [self.prefix_token_id] for c in contexts]
            texts = self.scores.continuations(prompts, limits, stops, bar.update)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _limit(self, settings: Mapping[str, Any]) -> int:
        if settings.get("do_sample") or settings.get("temperature"):
            raise UsageError("the model annie_quant answers greedily", "--gen_kwargs do_sample=False,temperature=0")
        limit = next((int(settings[name]) for name in LIMIT_NAMES if settings.get(name) is not None), self.max_gen_toks)
        if not 0 < limit < self.max_length:
            raise UsageError(f"{limit} tokens to generate do not fit into the model's {self.max_length}")
        return limit

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if self.scores.template is None:
            raise UsageError(f"{self.scores.folder} has no chat template", "leave out --apply_chat_template")
        thinking = bool(self.enable_thinking)
        if add_generation_prompt:
            return self.scores.template.render(chat_history, None, True, enable_thinking=thinking)
        # lm-eval asks for an open last message: the text up to its end, without the template's end of turn
        whole = self.scores.template.render(chat_history, None, False, enable_thinking=thinking)
        last = chat_history[-1]["content"].rstrip()
        return whole[: whole.rindex(last) + len(last)]


def _is_silent(options: Mapping[str, Any]) -> bool:
    return bool(options.get("disable_tqdm"))


def stop_strings(settings: Mapping[str, Any]) -> list[str]:
    stops = settings.get("until") or []
    return [stops] if isinstance(stops, str) else [str(stop) for stop in stops]


def until(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    ends = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return text[: min(ends)] if ends else text
