"""`annie-quant record` in a thread, the server behind it, and clients: all with exact bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time

from annie_quant.data.record_proxy import Recorder, RecorderSettings


class RawServer:
    """Sends scripted bytes: answer(head, body) yields pieces of a whole HTTP response; None cuts the connection, a float waits."""

    def __init__(self, answer):
        self.answer, self.requests = answer, []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection, contextlib.suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                if not (more := connection.recv(65536)):
                    return
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            size = next(
                (
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                ),
                0,
            )
            while len(body) < size:
                body += connection.recv(65536)
            self.requests.append((head, body))
            for piece in self.answer(head, body):
                if piece is None:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    return
                if isinstance(piece, float):
                    time.sleep(piece)
                else:
                    connection.sendall(piece)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.socket.close()


class Running:
    """A recorder in its own thread."""

    def __init__(self, upstream, output, **more):
        self.settings = RecorderSettings(upstream=upstream, output=output, port=0, **more)

    def __enter__(self):
        self.loop, ready = asyncio.new_event_loop(), threading.Event()
        self.recorder = Recorder(self.settings)

        def serve():
            asyncio.set_event_loop(self.loop)
            self.loop.run_until_complete(self.recorder.start())
            ready.set()
            self.loop.run_forever()

        self.thread = threading.Thread(target=serve, daemon=True)
        self.thread.start()
        assert ready.wait(10)
        self.url = self.recorder.url
        return self

    def __exit__(self, *exc):
        self.result = asyncio.run_coroutine_threadsafe(self.recorder.stop(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    @property
    def lines(self):
        return [json.loads(line) for line in self.settings.output.read_text().splitlines()]


def body_of(text, **more):
    return {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}],
        **more,
    }


def raw_call(url, head, body=b""):
    """Send a request as bytes; return all bytes of the answer."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head + body)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                answer += piece
    return answer


def chat(url, body, headers="", path="/v1/chat/completions"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    return raw_call(url, head.encode(), data)


def response(body, kind="application/json", extra="", status="200 OK"):
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    )
    return head.encode() + body


def completion(text="Hello there.", **more):
    message = {"role": "assistant", "content": text, **more}
    return json.dumps(
        {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    ).encode()
