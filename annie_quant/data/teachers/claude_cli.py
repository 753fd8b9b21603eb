"""claude-cli: the `claude` program in print mode.

The prompt is written to stdin; the command is a list, never a shell line.

The supported flags are read from its --help: a program without the required flags is refused,
optional flags are used where they exist. It runs in an empty folder, so that no project's notes get
into the data.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from typing import Any

import msgspec

from annie_quant.core.errors import EnvironmentFault
from annie_quant.core.secrets import without_secrets
from annie_quant.core.untrusted import JsonObject, cost_usd, integer
from annie_quant.data.teachers import BatchFailed, ModelReply, Options, PromptedTeacher, RateLimited
from annie_quant.documents import salvage_value

NAME = "claude_cli"
DEFAULT_MODEL = "claude-opus-4-6"
REQUIRED_FLAGS = ("--print", "--model", "--output-format")
HELP_TIMEOUT_S = 60.0
_LIMIT = re.compile(
    r"rate.?limit|usage limit|limit reached|overloaded|too many requests|\b(?:429|529)\b",
    re.IGNORECASE,
)
_RESET = re.compile(r"limit reached\s*\|\s*(\d{9,11})", re.IGNORECASE)
_LOGIN = re.compile(
    r"invalid api key|please run /login|not logged in|authentication_error|\b401\b",
    re.IGNORECASE,
)


class Usage(msgspec.Struct):
    output_tokens: Any = None


class _Envelope(msgspec.Struct):
    """The result object of --output-format json.

    is_error: any value but false is an error.
    total_cost_usd, output_tokens: unknown where they are not an amount or a count.
    """

    result: str | None = None
    subtype: str | None = None
    is_error: Any = False
    stop_reason: str | None = None
    structured_output: Any = None
    total_cost_usd: Any = None
    usage: Usage | None = None


class ClaudeCli(PromptedTeacher):
    def __init__(self, program: str, flags: frozenset[str], options: Options) -> None:
        self.program = program
        self.flags = flags
        self.options = options
        self.model = options.model or DEFAULT_MODEL
        self.batch_size = options.batch_size

    def command(self, schema: JsonObject) -> list[str]:
        """Return the argument list of one batch."""
        argv = [self.program, "-p", "--model", self.model, "--output-format", "json"]
        takes_schema = "--json-schema" in self.flags
        optional = {
            "--max-turns": ["3" if takes_schema else "1"],
            "--json-schema": [json.dumps(schema)],
            "--no-session-persistence": [],
        }
        for flag, values in optional.items():
            if flag in self.flags:
                argv += [flag, *values]
        return argv

    def ask(self, prompt: str, schema: JsonObject) -> ModelReply:
        code, out, err = run_program(self.command(schema), prompt, self.options.timeout_s)
        result = envelope(out)
        text = (result.result if result else None) or ""
        if code == 0 and result and not result.is_error:
            return ModelReply(
                text=text,
                value=result.structured_output,
                truncated=result.stop_reason == "max_tokens",
                cost_usd=cost_usd(result.total_cost_usd),
                tokens=(integer(result.usage.output_tokens) if result.usage else None) or 0,
            )
        message = text or (result.subtype if result else None) or err.strip() or out.strip()
        raise self.failure(code, message, result)

    def failure(self, code: int, message: str, result: _Envelope | None) -> Exception:
        """Return the exception for a failed call: a wait, the end of the run, or a retry."""
        message = without_secrets(message, os.environ)
        line = message.splitlines()[0][:200] if message else "no output"
        reset = _RESET.search(message)
        if reset:
            return RateLimited(f"claude: {line}", max(0.0, int(reset[1]) - time.time()))
        if _LOGIN.search(message):
            return EnvironmentFault(
                f"claude is not logged in: {line}", "run `claude` once and log in"
            )
        if _LIMIT.search(message):
            return RateLimited(f"claude: {line}")
        if code in (126, 127):
            return EnvironmentFault(
                f"claude cannot be run (exit code {code}): {line}", "run `claude --version`"
            )
        if code == 0 and result is None:
            return BatchFailed(f"claude's answer is not JSON: {line}")
        return BatchFailed(
            f"claude ended with exit code {code}: {line}",
            cost_usd(result.total_cost_usd) if result else None,
        )


def open_teacher(options: Options, split: str = "calibration") -> ClaudeCli:
    """Find the program and check in its --help that it has the required flags."""
    program = shutil.which("claude")
    if program is None:
        raise EnvironmentFault(
            "the program `claude` is not on the PATH",
            "npm install -g @anthropic-ai/claude-code; or choose --teacher openai or offline",
        )
    try:
        code, out, err = run_program([program, "--help"], "", HELP_TIMEOUT_S)
    except BatchFailed as error:
        raise EnvironmentFault(f"`claude --help`: {error}", "run `claude update`") from error
    flags = frozenset(re.findall(r"(?<![\w-])--[a-z][a-z-]+", out + err))
    missing = [flag for flag in REQUIRED_FLAGS if flag not in flags]
    if code or missing:
        reason = f"has no {', '.join(missing)}" if missing else f"ended with exit code {code}"
        raise EnvironmentFault(f"{program} --help: {reason}", "run `claude update`")
    return ClaudeCli(program, flags, options)


def run_program(argv: list[str], stdin: str, timeout_s: float) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr.

    After the timeout the process group is killed and BatchFailed is raised.
    """
    with tempfile.TemporaryDirectory(prefix="annie-quant-") as empty:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            cwd=empty,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise BatchFailed(f"claude did not answer within {timeout_s:.0f} s") from None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return process.returncode, out, err


def envelope(out: str) -> _Envelope | None:
    """Return the result object, or None for output that is not a JSON object.

    With `verbose` in the user's settings it is the last of a list. Fields of another type count as
    missing.
    """
    try:
        value = json.loads(out)
        if isinstance(value, list):
            value = next(
                (e for e in reversed(value) if isinstance(e, dict) and e.get("type") == "result"),
                None,
            )
    except (ValueError, RecursionError):
        return None
    return salvage_value(_Envelope, value)
