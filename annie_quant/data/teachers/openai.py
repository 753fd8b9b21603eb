"""openai: any endpoint with OpenAI's chat completions, by the C client.

The key is read from the environment and never stored.

OPENAI_BASE_URL (or --url) is the endpoint, OPENAI_API_KEY its key; a local server needs none.
Without --teacher-model the first model in the endpoint's /v1/models is used.
"""

from __future__ import annotations

import os

from annie_quant.core.errors import EnvironmentFault, ServerError, UsageError
from annie_quant.core.secrets import refuse_secrets_in, safe_url
from annie_quant.core.untrusted import JsonObject, cost_usd, integer
from annie_quant.data.teachers import BatchFailed, ModelReply, Options, PromptedTeacher, RateLimited

NAME = "openai"
MAX_TOKENS_PER_TURN = 400
MODELS_TIMEOUT_S = 10.0
RATE_LIMITED = (429, 503, 529)


class OpenAi(PromptedTeacher):
    def __init__(self, url: str, key: str, options: Options) -> None:
        self.url = url
        self.options = options
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        model = options.model or self.first_model()
        if not model:
            raise UsageError(
                "--teacher openai needs the model's name: /v1/models names none",
                "--teacher-model NAME",
            )
        self.model = model
        self.batch_size = options.batch_size
        self.answered = False  # once a server has answered, a failure to connect is repeated

    def first_model(self) -> str | None:
        """Return the first model of /v1/models.

        Raises ServerError where nothing answers at the URL.
        """
        from annie_quant.stream.client import fetch, first_model

        root = self.url.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
        reply = fetch(
            f"{root}/v1/models",
            self.headers,
            timeout_s=min(MODELS_TIMEOUT_S, self.options.timeout_s),
        )
        if reply.status == 0:
            raise ServerError(
                f"nothing answers at {safe_url(self.url)}: {reply.fault}", "check --url"
            )
        return first_model(reply.body)

    def ask(self, prompt: str, schema: JsonObject) -> ModelReply:
        from annie_quant import stream

        turns = schema["properties"]["conversations"]["items"]["properties"]["turns"]["maxItems"]
        request = stream.chat(
            self.url,
            self.model,
            [{"role": "user", "content": prompt}],
            headers=self.headers,
            timeout_s=self.options.timeout_s,
            max_tokens=MAX_TOKENS_PER_TURN * turns * self.batch_size,
            temperature=1.0,
        )
        timings = stream.run([request])
        record = timings.records()[0]
        status = record["status"]
        if status in RATE_LIMITED:
            after = timings.headers(0).get("retry-after", "")
            wait_s = float(after) if after.isdecimal() and len(after) < 7 else None
            raise RateLimited(f"{status} from the endpoint", wait_s)
        if status in (401, 403):
            raise EnvironmentFault(
                f"the endpoint answers {status}: the key is missing or wrong", "set OPENAI_API_KEY"
            )
        if status in (400, 404, 422):
            raise ServerError(
                f"the endpoint answers {status}: {record['error']}",
                "check --url and --teacher-model",
            )
        usage = record["usage"] or {}
        tokens = integer(usage.get("total_tokens")) or 0
        cost = cost_usd(usage.get("cost"))
        if record["error"] and status == 0 and not self.answered:
            raise ServerError(
                f"nothing answers at {safe_url(self.url)}: {record['error']}", "check --url"
            )
        self.answered = True
        if record["error"]:
            raise BatchFailed(f"the endpoint: {record['error']}", cost, tokens)
        truncated = record["finish_reason"] == "length"
        return ModelReply(record["text"], truncated=truncated, cost_usd=cost, tokens=tokens)


def open_teacher(options: Options, split: str = "calibration") -> OpenAi:
    url = options.url or os.environ.get("OPENAI_BASE_URL")
    if not url:
        raise UsageError(
            "--teacher openai needs an endpoint", "--url http://HOST:PORT, or set OPENAI_BASE_URL"
        )
    refuse_secrets_in(url, "--teacher openai")
    return OpenAi(url, os.environ.get("OPENAI_API_KEY", ""), options)
