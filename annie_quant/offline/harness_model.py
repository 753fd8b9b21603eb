"""The model `annie_quant` of lm-eval (EleutherAI/lm-evaluation-harness): importing this module registers it there.

    annie-quant lm-eval --model annie_quant --model_args pretrained=DIR,profile=w4a4 --tasks ... --log_samples --output_path RUN

Arguments: pretrained (a folder), profile (docs/numerics.md; default: the first that the checkpoint supports), dtype
(float32 or bfloat16), max_length, max_gen_toks, add_bos_token, enable_thinking. Contexts and targets are tokenized as by
lm-eval's `hf` model, so both give the same log-likelihoods for a bf16 checkpoint, up to rounding. Generation is greedy.

lm-eval 0.4.13 has no plug-in mechanism, so its own command does not know models of other packages; the command above does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval.models  # noqa: F401  (lm-eval registers its own models only while the registry is empty)
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import AutoTokenizer

from annie_quant.checkpoint.chat_template import ChatTemplate, loading_tokenizer
from annie_quant.core.errors import UsageError
from annie_quant.offline.decoding import generate
from annie_quant.offline.emulation import emulate
from annie_quant.offline.engine import Engine, Row
from annie_quant.offline.loading import load, profiles_of
from annie_quant.offline.pair import working_dtype
from annie_quant.offline.profiles import find_profile, is_supported
from annie_quant.offline.prompts import end_tokens

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

DEFAULT_LENGTH = 2048  # tokens, where config.json has no max_position_embeddings
ROWS = 64
MAX_GEN_TOKS = 256
LIMIT_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("annie_quant")
class AnnieQuantLM(TemplateLM):
    """A checkpoint under a numerics profile.

    batch_size: rows per batch; 1, lm-eval's default, and "auto" mean ROWS. Raises UsageError for a profile that the checkpoint does
    not support.
    """

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
        self.folder = Path(pretrained)
        # lm-eval's default is "cuda", also where there is none
        device = (device or "cuda") if torch.cuda.is_available() else "cpu"
        self.dtype = dtype or working_dtype([self.folder], device)
        if self.dtype not in ("float32", "bfloat16"):
            raise UsageError(f"dtype is float32 or bfloat16, got {self.dtype}")
        cache = "float32" if self.dtype == "float32" else "bf16"
        self.model = load(self.folder, cache=cache, dtype=getattr(torch, self.dtype), device=device)
        supported = profiles_of(self.model)
        self.profile = find_profile(profile or supported[0])
        if not is_supported(self.profile.name, supported):
            raise UsageError(
                f"{self.folder} does not support {profile}", f"it supports: {', '.join(supported)}"
            )
        rows = max_batch_size or (
            int(batch_size) if str(batch_size).isdigit() and int(batch_size) > 1 else ROWS
        )
        self.engine = Engine(self.model, rows=int(rows))
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", 0)
        self.length = int(max_length or positions or DEFAULT_LENGTH)
        with loading_tokenizer(self.folder):
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                self.folder, trust_remote_code=False
            )
        self.template = (
            ChatTemplate(self.tokenizer, str(self.folder)) if self.tokenizer.chat_template else None
        )
        self.max_gen_toks, self.add_bos_token, self.enable_thinking = (
            int(max_gen_toks),
            add_bos_token,
            enable_thinking,
        )

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return self.length

    @property
    def tokenizer_name(self) -> str:
        return str(self.folder).replace("/", "__")

    def get_model_info(self) -> dict[str, str]:
        """Return what lm-eval writes into its results."""
        return {"model_name": str(self.folder), "profile": self.profile.name, "dtype": self.dtype}

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and self._begins_with_prefix(string):
            special = False
        return list(
            self.tokenizer.encode(
                string, **({} if special is None else {"add_special_tokens": special})
            )
        )

    def _begins_with_prefix(self, string: str) -> bool:
        prefix = self.tokenizer.decode([self.prefix_token_id])
        return bool(prefix) and string.startswith(prefix)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        **options: object,
    ) -> list[tuple[float, bool]]:
        rows = []
        for _, context, target in requests:
            if not context or not 0 < len(target) <= self.length:
                raise UsageError(
                    f"a context of {len(context)} and a target of {len(target)} tokens cannot be scored; the model has "
                    f"{self.length}"
                )
            tokens = [*context, *target][
                -(self.length + 1) :
            ]  # a context that is too long loses its first tokens
            rows.append(Row(tokens[: len(tokens) - len(target)], list(target)))
        found: dict[int, tuple[float, bool]] = {}
        with (
            progress_bar(len(rows), "log-likelihoods", options) as bar,
            emulate(self.model, self.profile),
        ):
            for i, logits in self.engine.scores(rows):
                expected = torch.tensor(rows[i].target, device=logits.device)
                chosen = torch.log_softmax(logits, -1).gather(-1, expected[:, None])
                found[i] = float(chosen.double().sum()), torch.equal(logits.argmax(-1), expected)
                bar.update()
        answers = [found[i] for i in range(len(rows))]
        for (texts, *_rest), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], **options: object) -> list[float]:
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

    def generate_until(self, requests: Sequence[Instance], **options: object) -> list[str]:
        contexts, settings = [r.args[0] for r in requests], [r.args[1] for r in requests]
        limits = [self._limit(own) for own in settings]
        stops = [stop_strings(own) for own in settings]
        prompts = [self.tok_encode(c) or [self.prefix_token_id] for c in contexts]
        prompts = [
            p[-max(1, self.length - limit) :] for p, limit in zip(prompts, limits, strict=True)
        ]
        ends = end_tokens(self.folder, self.tokenizer)
        with (
            progress_bar(len(requests), "answers", options) as bar,
            emulate(self.model, self.profile),
        ):
            completions = generate(self.engine, prompts, limits, ends, bar.update)
        decoded = self.tokenizer.batch_decode(
            [c.tokens for c in completions], skip_special_tokens=True
        )
        texts = [until(text, own) for text, own in zip(decoded, stops, strict=True)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _limit(self, settings: Mapping[str, Any]) -> int:
        if settings.get("do_sample") or settings.get("temperature"):
            raise UsageError(
                "the model annie_quant answers greedily",
                "--gen_kwargs do_sample=False,temperature=0",
            )
        limit = next(
            (int(settings[name]) for name in LIMIT_NAMES if settings.get(name) is not None),
            self.max_gen_toks,
        )
        if not 0 < limit < self.max_length:
            raise UsageError(
                f"{limit} tokens to generate do not fit into the model's {self.max_length}"
            )
        return limit

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if self.template is None:
            raise UsageError(
                f"{self.folder} has no chat template", "leave out --apply_chat_template"
            )
        thinking = bool(self.enable_thinking)
        if add_generation_prompt:
            return self.template.render(chat_history, None, True, enable_thinking=thinking)
        # lm-eval asks for an open last message: the text up to its end, without the template's end of turn
        whole = self.template.render(chat_history, None, False, enable_thinking=thinking)
        last = chat_history[-1]["content"].rstrip()
        return whole[: whole.rindex(last) + len(last)]


def progress_bar(total: int, title: str, options: Mapping[str, object]) -> tqdm:
    return tqdm(total=total, desc=title, disable=bool(options.get("disable_tqdm")))


def stop_strings(settings: Mapping[str, Any]) -> list[str]:
    stops = settings.get("until") or []
    return [stops] if isinstance(stops, str) else [str(stop) for stop in stops]


def until(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    ends = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return text[: min(ends)] if ends else text
