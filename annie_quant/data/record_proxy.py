"""A proxy in front of one OpenAI-compatible server that records its chat completions (aiohttp on both sides).

Every method and path is passed on, and every status, header and body is passed back; a stream is
written as it is read. So that a key reaches no other server, redirects are passed back and not
followed, the environment's proxies are not used, and cookies are not kept. A fault of recording
never stops the traffic.

Memory is limited to MAX_REQUEST_BYTES and MAX_ANSWER_BYTES per exchange, MAX_HELD_BYTES in all, and
MAX_CLIENTS requests at once; further requests get status 503, or replace one whose body is late.

Slow clients are ended: HEAD_S for a connection's first head, BODY_S and a minimum rate for a body,
WRITE_S for accepting a part of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from annie_quant.core.errors import EnvironmentFault, UsageError, need
from annie_quant.core.host import is_local
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.secrets import Redactor, refuse_secrets_in, secrets_of
from annie_quant.data import recorded_chat
from annie_quant.data.conversations import Unusable
from annie_quant.data.masking import Scanner
from annie_quant.data.recorded_chat import BodyCopy, HeldBytes, Recorded, forwarded, returned

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession, web

MAX_HELD_BYTES = 256_000_000
MAX_CLIENTS = 512
MAX_HEAD_BYTES = 64 << 10
UPSTREAM_CONNECT_S = 30.0
HEAD_S = 10.0
# A body may take 10 s plus 1 s per 10 kB; only the time of waiting for the client counts.
BODY_S = 10.0
BODY_BYTES_PER_S = 10_000
LATE_S = 1.0  # a request whose body is late by this time can be ended in favour of a new one
WRITE_S = 60.0
SHUTDOWN_S = 10.0  # for answers in flight when recording ends
PATH = "/chat/completions"


@dataclass(frozen=True)
class RecorderSettings:
    """How to record.

    upstream: http(s)://HOST[:PORT][/PATH]; a final /v1 is removed, because clients send it.
    host, port: where to listen.
    most_bytes: limit of the file.
    personal, words: what is masked besides secrets (see Scanner).
    duration_s: how long to record; None: until a signal.
    """

    upstream: str
    output: Path
    host: str = "127.0.0.1"
    port: int = 8100
    most_bytes: int = 1_000_000_000
    personal: bool = False
    words: tuple[str, ...] = ()
    duration_s: float | None = None


def checked_upstream(settings: RecorderSettings) -> str:
    """Return the upstream without a last / or /v1.

    Raises UsageError for an address that cannot be used.
    """
    url = settings.upstream
    refuse_secrets_in(url, "--upstream")
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise UsageError("--upstream: the port is not a number up to 65535") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment:
        raise UsageError(
            f"--upstream {url} is not an HTTP URL", "write it as http://127.0.0.1:8000"
        )
    if is_local(parts.hostname) and port == settings.port:
        raise UsageError(
            f"--upstream {url} is the address that annie-quant listens at", "choose another --port"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Recorder:
    """The proxy. start, then stop, in one event loop; `url` is the address for clients."""

    def __init__(self, settings: RecorderSettings, progress: Progress = SILENT) -> None:
        need("aiohttp", "record")
        self.settings = settings
        self.progress = progress
        self.upstream = checked_upstream(settings)
        self.log = recorded_chat.ChatLog(settings.output, settings.most_bytes)
        self.result = Recorded(output=str(settings.output))
        self.url = ""
        self._left_out: Counter[str] = Counter()
        self._scanner = Scanner(settings.personal, settings.words)
        self._held = HeldBytes(MAX_HELD_BYTES)
        self._passed: dict[_Exchange, None] = {}  # the requests in flight, the oldest first
        # connection → when it was accepted, until its first head is complete
        self._silent: dict[Any, float] = {}
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="annie-quant-record")
        self._session: ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen. Raises EnvironmentFault where the port is taken."""
        import aiohttp
        from aiohttp import web

        self._session = aiohttp.ClientSession(
            # A new connection per request: one that the server closes while it is used again would
            # fail a request.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),  # a jar would send one client's cookies for another
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=UPSTREAM_CONNECT_S),
            auto_decompress=False,
            trust_env=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
        )
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_quiet(),  # aiohttp logs the bytes of requests that it cannot parse
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_S,
            lingering_time=LATE_S,
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
        )
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._accept, self.settings.host, self.settings.port, backlog=128
            )
        except OSError as error:
            raise EnvironmentFault(
                f"cannot listen at {self.settings.host}:{self.settings.port}: {error.strerror}",
                "choose another --port",
            ) from error
        self._sweeper = asyncio.create_task(self._close_silent())
        port = self._listener.sockets[0].getsockname()[1]
        host = f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host
        self.url = f"http://{host}:{port}"

    def _accept(self) -> asyncio.BaseProtocol:
        assert self._runner is not None and self._runner.server is not None
        connection = self._runner.server()
        self._silent[connection] = asyncio.get_running_loop().time()
        return connection

    async def _close_silent(self) -> None:
        while True:
            await asyncio.sleep(LATE_S)
            before = asyncio.get_running_loop().time() - HEAD_S
            for connection in [c for c, since in self._silent.items() if since < before]:
                del self._silent[connection]
                connection.force_close()

    async def stop(self) -> Recorded:
        """Let answers in flight finish, for SHUTDOWN_S at most, then close the file."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._listener is not None:
            self._listener.close()
        for connection in self._silent:
            connection.force_close()
        for passed in [p for p in self._passed if not p.is_received]:
            passed.abort()
        if self._runner is not None:
            await self._runner.cleanup()
        for _ in range(int(LATE_S / 0.02)):  # handlers whose client has left are ending
            if not self._passed:
                break
            await asyncio.sleep(0.02)
        if self._session is not None:
            await self._session.close()
        await asyncio.get_running_loop().run_in_executor(
            None, functools.partial(self._writer.shutdown, wait=True)
        )
        self.log.close()
        self.result.left_out = dict(self._left_out)
        self.result.masked = {kind: n for kind, n in self._scanner.counts.items() if n}
        self.result.size_bytes = self.log.size_bytes
        self.result.stopped = self.log.stopped
        return self.result

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self._silent.pop(request.protocol, None)
        if len(self._passed) >= MAX_CLIENTS and not self._drop_a_late_one():
            return _error_page(503, f"more than {MAX_CLIENTS} requests at once")
        if not request.raw_path.startswith("/"):
            return _error_page(400, "the path must begin with /")
        self.result.requests += 1
        is_chat = request.method == "POST" and request.path.rstrip("/").endswith(PATH)
        # Of other requests nothing is copied.
        most_asked = recorded_chat.MAX_REQUEST_BYTES if is_chat else 0
        most_answered = recorded_chat.MAX_ANSWER_BYTES if is_chat else 0
        question = BodyCopy(self._held, most_asked, "a request")
        answer = BodyCopy(self._held, most_answered, "an answer")
        passed = _Exchange(request, question, answer)
        self._passed[passed] = None
        try:
            return await passed.forward(self._session, self.upstream)
        finally:
            self._passed.pop(passed, None)
            if is_chat:
                self._keep(passed)

    def _drop_a_late_one(self) -> bool:
        """End the request whose body the proxy has waited for longest.

        Return False where none is late.
        """
        late = max(self._passed, key=_Exchange.waiting_s, default=None)
        if late is None or late.waiting_s() < LATE_S:
            return False
        late.abort()
        self._passed.pop(late, None)
        return True

    def _keep(self, passed: _Exchange) -> None:
        """Hand a chat to the writer's thread. Its bytes count as held until it is written."""
        fault = passed.fault or passed.answer.fault
        size = passed.question.size + passed.answer.size
        refused = passed.refused or passed.question.fault
        if not refused and self.log.stopped:
            refused = "the file's limit"
        if refused:
            self._left_out[refused] += 1
            self._held.now -= size
            return
        exchange = recorded_chat.CopiedExchange(
            request=passed.question.body(),
            answer=None if fault else passed.answer.body(),
            is_stream=passed.is_stream,
            coding=passed.coding,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            secrets=Redactor(secrets_of(str(passed.request.rel_url), passed.request.headers)),
        )
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._writer, self._write, exchange, fault)
        work.add_done_callback(lambda _: setattr(self._held, "now", self._held.now - size))

    def _write(self, exchange: recorded_chat.CopiedExchange, fault: str) -> None:
        """Write one chat; in the writer's thread."""
        try:
            line = recorded_chat.line_of(exchange, self._scanner)
        except Exception as error:  # also a record that no rule expects must not end the recording
            reason = f"a chat that cannot be read ({type(error).__name__})"
            self._left_out[str(error) if isinstance(error, Unusable) else reason] += 1
            return
        if not self.log.keep(line.data):
            self._left_out["the file's limit"] += 1
            self.progress.message(f"recording has stopped, traffic goes on: {self.log.stopped}")
            return
        self.result.lines += 1
        self.result.with_answer += line.has_answer
        if fault or line.fault:
            self._left_out[f"answer left out: {fault or line.fault}"] += 1
        self.progress.update(self.result.lines, None, f"{self.result.lines:,} chats recorded")


@dataclass(eq=False)
class _Exchange:
    """One request that is passed on.

    refused: why it is not recorded at all.
    fault: why its answer is not recorded.
    is_received: whether its body is complete.
    waiting_since: since when the proxy waits for the client's next bytes; None while it does not.
    """

    request: web.Request
    question: BodyCopy
    answer: BodyCopy
    refused: str = ""
    fault: str = ""
    is_stream: bool = False
    coding: str = ""
    is_received: bool = False
    waiting_since: float | None = None

    def waiting_s(self) -> float:
        if self.waiting_since is None:
            return 0.0
        return asyncio.get_running_loop().time() - self.waiting_since

    def abort(self) -> None:
        """End the client's connection at once."""
        if self.request.transport is not None:
            self.request.transport.abort()

    async def forward(self, session: ClientSession | None, upstream: str) -> web.StreamResponse:
        import aiohttp
        from yarl import URL

        assert session is not None
        request = self.request
        self.is_received = not request.body_exists
        if request.headers.get("Content-Encoding", "identity") != "identity":
            self.refused = "a compressed request"
        try:
            answer = await session.request(
                request.method,
                URL(upstream + request.raw_path, encoded=True),
                headers=forwarded(request.headers),
                data=self._body() if request.body_exists else None,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            self.refused = self.refused or "the server could not be reached"
            return _error_page(
                502, f"the server behind annie-quant record cannot be used ({type(error).__name__})"
            )
        except asyncio.CancelledError:
            self.fault = "the client left"
            raise
        try:
            return await self._return(answer)
        finally:
            answer.close()

    async def _body(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        waited = 0.0
        size = 0
        while not self.is_received:
            self.waiting_since = loop.time()
            try:
                left = BODY_S + size / BODY_BYTES_PER_S - waited
                piece = await asyncio.wait_for(self.request.content.readany(), max(0.0, left))
            except asyncio.TimeoutError:
                self.refused = "the client was too slow"
                self.abort()
                raise
            finally:
                waited += self.waiting_s()
                self.waiting_since = None
            self.is_received = not piece
            if piece:
                size += len(piece)
                self.question.add(piece)
                yield piece

    async def _in_time(self, writing: Awaitable[None]) -> None:
        timer = asyncio.get_running_loop().call_later(WRITE_S, self.abort)
        try:
            await writing
        finally:
            timer.cancel()

    async def _return(self, answer: ClientResponse) -> web.StreamResponse:
        import aiohttp
        from aiohttp import web

        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        self.is_stream = kind == "text/event-stream"
        self.coding = answer.headers.get("Content-Encoding", "")
        if answer.status != 200:
            self.refused = f"status {answer.status}"
        _fail_when_closed(answer)
        response = web.StreamResponse(status=answer.status, reason=answer.reason)
        for name, value in returned(answer.headers):
            response.headers.add(name, value)
        source = answer.content.iter_any()
        is_complete = False
        try:
            await response.prepare(self.request)
            while not is_complete:
                try:
                    piece = await anext(source, b"")
                except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
                    # The client must see what it would have seen without a proxy: an answer that is
                    # cut off.
                    self.fault = "the server ended it early"
                    self.abort()
                    return response
                is_complete = not piece
                if piece:
                    self.answer.add(piece)
                    await self._in_time(response.write(piece))
            await self._in_time(response.write_eof())
        except (asyncio.CancelledError, ConnectionError, aiohttp.ClientConnectionError):
            self.fault = self.fault or ("" if is_complete else "the client left")
            raise
        return response


def _fail_when_closed(answer: ClientResponse) -> None:
    """Make reading an answer fail when its connection is closed.

    aiohttp's parser does not after an invalid chunk size.
    """
    import aiohttp

    def fail(_: object) -> None:
        if not answer.content.is_eof() and answer.content.exception() is None:
            answer.content.set_exception(aiohttp.ClientPayloadError("the answer is not complete"))

    closed = getattr(getattr(answer.connection, "protocol", None), "closed", None)
    if closed is not None:
        closed.add_done_callback(fail)


def _error_page(status: int, message: str) -> web.Response:
    """Return an error in OpenAI's form."""
    from aiohttp import web

    return web.json_response(
        {"error": {"message": message, "type": "proxy_error", "code": status}}, status=status
    )


def _quiet() -> logging.Logger:
    logger = logging.getLogger("annie_quant.data.record_proxy.server")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger


def record(
    settings: RecorderSettings,
    progress: Progress = SILENT,
    on_ready: Callable[[str], object] = lambda url: None,
) -> Recorded:
    """Record until SIGINT or SIGTERM, or for settings.duration_s.

    on_ready: called with the address for clients.
    """
    return asyncio.run(_record(settings, progress, on_ready))


async def _record(
    settings: RecorderSettings, progress: Progress, on_ready: Callable[[str], object]
) -> Recorded:
    recorder = Recorder(settings, progress)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    in_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if in_main else ()
    previous = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if previous[number] != signal.SIG_IGN:
            loop.add_signal_handler(number, ended.set)
    try:
        await recorder.start()
        on_ready(recorder.url)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), settings.duration_s)
    finally:
        result = await recorder.stop()
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    return result
