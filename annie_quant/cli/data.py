"""`annie-quant data`: make conversations with a teacher, or validate existing ones.

`annie-quant init`: a persona, gate prompts and calibration data from a system prompt, tools and logs.

`annie-quant record`: pass requests on to a server and record its chats for `annie-quant init`.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter, validators

from annie_quant.cli import options as opt
from annie_quant.cli.options import AsJson, keywords_of
from annie_quant.cli.terminal import console, emit, quiet_engines
from annie_quant.core.errors import UsageError
from annie_quant.core.untrusted import JsonObject, decode_json

FILE_OR_STDIN = Parameter(allow_leading_hyphen=True)  # - is stdin
_N_CONVERSATIONS = 500
EXISTING = Parameter(validator=validators.Path(exists=True))
MaskPersonal = Annotated[
    bool,
    Parameter(help="Mask email addresses, phone and card numbers, and names that users state."),
]
MaskWord = Annotated[tuple[str, ...], Parameter(help="Mask this text; repeatable.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options of `annie-quant data`.

    Attributes:
        persona: A built-in persona or a JSON file.
        teacher: Writer of the answers: claude-cli, openai, offline.
        n: Conversations, evenly over the persona's categories, or with --behaviour prompts of each. Default: 500, or 40.
        seed: Of the offline teacher's draws.
        split: Purpose of the conversations; prompts of gates are excluded from the other two splits.
        apart_from: A file whose prompts are excluded; repeatable.
        behaviour: Write prompts without answers, which the model gives before calibration: calls, "calls TOOL", "several
            calls", "answers from a result", declines, talk, thinks; repeatable.
        add_to: With --behaviour, the file whose conversations come first in --output.
        teacher_model: Model of the teacher. Default for claude-cli: claude-opus-4-6.
        url: Endpoint of --teacher openai. Default: OPENAI_BASE_URL.
        batch_size: Conversations per batch.
        timeout: Time limit of a batch, in seconds.
        max_budget_usd: Stop when this amount is spent, including resumed runs.
        output: JSON lines, one conversation per line.
        check: Only validate the conversations in --output.
        force: Replace a finished set, and discard an unfinished one.
    """

    persona: str = "annie"
    teacher: str = "offline"
    n: Annotated[int | None, opt.at_least(1)] = None
    seed: int = 0
    split: Literal["train", "calibration", "gate"] = "calibration"
    apart_from: Annotated[tuple[Path, ...], EXISTING] = ()
    behaviour: tuple[str, ...] = ()
    add_to: Annotated[Path | None, EXISTING] = None
    teacher_model: str | None = None
    url: str | None = None
    batch_size: int = 10
    timeout: float = 300.0
    max_budget_usd: float | None = None
    output: Path = Path("data/calibration/annie_calibration.jsonl")
    check: bool = False
    force: bool = False
    as_json: AsJson = False


def data(options: DataOptions = DataOptions()) -> None:
    """Make conversations with a teacher, or validate existing ones. Exit code 1 if they are too few or not valid."""
    from annie_quant import data as conversations

    if options.add_to is not None and not options.behaviour:
        raise UsageError("--add-to takes the prompts of --behaviour", "--behaviour declines")
    if options.behaviour:
        _add_prompts(options)
        return
    if options.check:
        who = conversations.load_persona(options.persona)
        rows = conversations.read_rows(options.output)
        conversations.check_prompt_hash(rows, options.persona)
        conversations.check_apart(
            rows, *options.apart_from, gates=options.split != "gate", persona=who
        )
        result: conversations.ValidatedRows = conversations.validate(rows, who)
    else:
        with console.task(f"conversations by {options.teacher}") as step:
            limits = (options.timeout, options.batch_size, options.max_budget_usd)
            result = conversations.generate(
                n=_N_CONVERSATIONS if options.n is None else options.n,
                progress=step,
                options=conversations.Options(options.teacher_model, options.url, *limits),
                **keywords_of(
                    options,
                    "persona",
                    "teacher",
                    "output",
                    "seed",
                    "split",
                    "apart_from",
                    "force",
                ),
            )
    emit(result) if options.as_json else console.print_mapping(
        str(options.output), msgspec.to_builtins(result)
    )
    sys.exit(0 if result.ok else 1)


def _add_prompts(options: DataOptions) -> None:
    from annie_quant.data.behaviour_prompts import ADDED_PROMPTS, add_prompts

    result = add_prompts(
        options.persona,
        options.behaviour,
        n=ADDED_PROMPTS if options.n is None else options.n,
        **keywords_of(options, "output", "add_to", "apart_from", "seed", "force"),
    )
    if options.as_json:
        emit(result)
        return
    console.print_mapping(result.output, {"rows": result.rows, **result.added})
    for name in result.short:
        console.note(f"{name}: there are only {result.added[name]} new prompts")
    console.note("their answers are missing: quantize and search let the model give them")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Options of `annie-quant init`.

    Attributes:
        prompt: System prompt: a text file; - is stdin.
        tools: OpenAI function tools: a JSON file; - is stdin.
        logs: Chat logs: JSON lines, server logs, Parquet, or a folder; repeatable.
        name: The assistant's name. Default: Assistant.
        fill: Also make prompts and conversations where there are logs.
        model: Your bf16 model: it writes conversations, reads 30 rows back against the prompt and counts tokens.
        teacher: Who writes conversations instead: claude-cli, openai, offline (calls alone).
        teacher_model: Model of the teacher.
        url: Endpoint of --teacher openai. Default: OPENAI_BASE_URL.
        max_budget_usd: Stop the teacher when this amount is spent.
        rows: Conversations to make.
        max_tokens: Limit of an answer to a gate prompt. Default: twice the usual answer.
        seed: Of the sample of the logs, and of generated prompts.
        output: Folder to write.
        force: Replace a folder that init has made.
    """

    prompt: Annotated[Path | None, FILE_OR_STDIN] = None
    tools: Annotated[Path | None, FILE_OR_STDIN] = None
    logs: tuple[Path, ...] = ()
    name: str = ""
    fill: bool = False
    model: Path | None = None
    teacher: Literal["claude-cli", "openai", "offline"] | None = None
    teacher_model: str | None = None
    url: str | None = None
    max_budget_usd: float | None = None
    rows: Annotated[int, opt.at_least(1)] = 400
    max_tokens: Annotated[int | None, opt.at_least(1)] = None
    mask_personal: MaskPersonal = False
    mask_word: MaskWord = ()
    seed: int = 0
    output: Path
    force: bool = False
    as_json: AsJson = False


def init(options: InitOptions) -> None:
    """Make persona.json, workloads/ and calibration.jsonl from a system prompt, tools and logs.

    Secrets in logs are masked. README.md in the folder states where everything comes from.
    """
    from annie_quant.data.init_folder import Sources, initialize
    from annie_quant.data.teachers import Options

    if options.prompt == options.tools == Path("-"):
        raise UsageError("--prompt - and --tools - cannot both read stdin")
    output = options.output
    sources = Sources(
        prompt=read_text(options.prompt) if options.prompt else None,
        tools=read_tools(options.tools) if options.tools else None,
        personal=options.mask_personal,
        words=options.mask_word,
        n_rows=options.rows,
        teacher=options.teacher or "",
        options=Options(options.teacher_model, options.url, max_usd=options.max_budget_usd),
        **keywords_of(options, "logs", "name", "seed", "fill", "max_tokens"),
    )
    with console.task("init") as step, contextlib.ExitStack() as stack:
        if options.model is not None:
            quiet_engines()
            from annie_quant.offline.model_answers import ModelAnswers

            model = stack.enter_context(contextlib.closing(ModelAnswers(options.model, step)))
            sources = replace(sources, model=model)
        result = initialize(sources, output, options.force, step)
    if options.as_json:
        emit(result)
        return
    console.print_mapping(
        str(output), without(result, "lines", "output", "examples", "read_back", "next")
    )
    for line in (*result.examples, *result.lines, result.next):
        console.note(line)


def without(result: msgspec.Struct, *names: str) -> JsonObject:
    """Return a result's fields for a table, without some of them."""
    return {name: value for name, value in msgspec.to_builtins(result).items() if name not in names}


def read_text(path: Path) -> str:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        return text.removeprefix("\N{BYTE ORDER MARK}")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"{path} cannot be read: {reason}", "give a UTF-8 text file, or - for stdin"
        ) from None


def read_tools(path: Path) -> list[JsonObject]:
    """Return the tools in a file: OpenAI's list, an object with `tools`, or bare function definitions."""
    from annie_quant.data.tool_forms import tools_of

    try:
        document = decode_json(read_text(path), lenient=True)
    except ValueError as error:
        raise UsageError(f"{path} is {error}", "give a list of OpenAI function tools") from None
    tools, faults = tools_of(document)
    if faults:
        raise UsageError(
            f"{path} is not a list of tools: {faults[0]}",
            '[{"type": "function", "function": {"name": ..., "parameters": {...}}}]',
        )
    return tools


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Options of `annie-quant record`.

    Attributes:
        upstream: The OpenAI-compatible server to pass requests on to.
        output: JSON lines; an existing file grows.
        port: 0: any free port.
        host: Address to listen at; others than this machine's are noted.
        minutes: Stop after this time. Default: at Ctrl-C.
        max_mb: Limit of the file's size.
    """

    upstream: str
    output: Path = Path("recorded.jsonl")
    port: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))] = 8100
    host: str = "127.0.0.1"
    minutes: Annotated[float | None, opt.POSITIVE] = None
    max_mb: Annotated[float, opt.POSITIVE] = 1000
    mask_personal: MaskPersonal = False
    mask_word: MaskWord = ()
    as_json: AsJson = False


ANSWER_LEFT_OUT = "answer left out: "  # the begin of such a reason of Recorded.left_out


def record_command(options: RecordOptions) -> None:
    """Record real chats: a proxy between your clients and an OpenAI-compatible server.

    Point the clients at the printed address. Requests and answers are passed on unchanged, streams too. Keys and headers
    are never written, secrets in messages are masked. Ctrl-C ends it; `annie-quant init --logs FILE` reads the file.
    """
    from annie_quant.core.host import is_local
    from annie_quant.data.record_proxy import RecorderSettings, record

    settings = RecorderSettings(
        most_bytes=int(options.max_mb * 1e6),
        personal=options.mask_personal,
        words=options.mask_word,
        duration_s=60 * options.minutes if options.minutes else None,
        **keywords_of(options, "upstream", "output", "host", "port"),
    )

    def ready(url: str) -> None:
        console.note(f"recording: set your clients' base URL to {url}/v1   (Ctrl-C ends it)")
        if not is_local(options.host):
            console.note(
                f"{options.host} is not this machine's own address: everyone who reaches it reaches the server behind it"
            )

    with console.task("record") as step:
        result = record(settings, step, ready)
    if options.as_json:
        emit(result)
    else:
        console.print_mapping(str(options.output), without(result, "output", "left_out", "masked"))
        for reason, n in sorted(result.left_out.items(), key=lambda item: -item[1]):
            unit = "answers" if reason.startswith(ANSWER_LEFT_OUT) else "chats"
            console.note(f"left out: {n:,} {unit} ({reason.removeprefix(ANSWER_LEFT_OUT)})")
        for kind, n in sorted(result.masked.items()):
            console.note(f"masked: {n} × {kind}")
        if result.lines:
            console.note(f"next: annie-quant init --logs {options.output} --output mine")
    sys.exit(3 if result.stopped and "--max-mb" not in result.stopped else 0)
