"""The demo and the search: what they can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from annie_quant.cli import options as opt
from annie_quant.cli.options import AllowMismatch, AsJson, PerGate, PersonaName, WorkloadNames


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """What a search tries, and on what. `persona` and `workloads` are as for data/workloads.py.

    Attributes:
        model: Folder of the bf16 checkpoint.
        calib_data: JSON lines of conversations.
        output: Run directory; finished steps are not repeated.
        every: Evaluate every strategy on all prompts, also after one that keeps.
        strategies: Names in the order to try; best@1.5: at most 1.5 GB per token; modelopt:NVFP4_AWQ_LITE_CFG,
            llmcompressor:gptq, autoround:light: another library's recipe. Default: best, also under budgets.
        max_ttft_ms: Milliseconds to the first token at most, as predicted for a GB10: of every checkpoint, and the
            limit under which best chooses formats.
        required: Numerics that a checkpoint must allow, and with which all gates must keep. Default: those that it allows.
        seeds: Calibration draws in which a strategy must keep.
        samples: Conversations to calibrate with.
        calib_tokens: Tokens of a conversation at most; longer ones are left out. Default: the model's context.
        answers: own: the model answers the conversations' prompts itself, once for all strategies; given: the file's answers.
        anyway: Continue with a model that lacks the manners in bf16.
        dry_run: Print the time and memory of each strategy and their sum, and stop.
    """

    model: Path
    calib_data: Path
    output: Path
    n: PerGate = 100
    persona: PersonaName = None
    workloads: WorkloadNames = None
    # Without the early look, and a failed smoke question is reported only.
    every: Annotated[bool, Parameter(name="--all")] = False
    strategies: Annotated[tuple[str, ...] | None, opt.COMMA_SEPARATED] = None
    required: Annotated[
        tuple[str, ...],
        opt.COMMA_SEPARATED,
        Parameter(name="--require"),
    ] = ()
    seeds: Annotated[int, opt.at_least(1)] = 1
    samples: Annotated[int, opt.at_least(1), Parameter(name="--calib-samples")] = 128
    calib_tokens: Annotated[int | None, opt.at_least(1)] = None
    answers: Literal["own", "given"] = "own"
    max_ttft_ms: Annotated[float | None, opt.POSITIVE] = None
    prompt_tokens: opt.PromptTokens = None
    cached_tokens: opt.CachedTokens = 0
    allow_prompt_mismatch: AllowMismatch = False
    anyway: bool = False
    dry_run: bool = False
    as_json: AsJson = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The demo's run directory and prompts: one answer of 88 and two of 120 may be lost (docs/method.md).

    Attributes:
        output: Run directory; finished stages are not repeated.
        n_offline: Prompts per gate in the offline evaluation, and all tool prompts.
        n_served: Prompts per gate on the servers.
    """

    output: Path = Path("runs/demo")
    n_offline: Annotated[int, opt.at_least(1)] = 120
    n_served: Annotated[int, opt.at_least(1)] = 88
    persona: PersonaName = None
    workloads: WorkloadNames = None
