"""Running plans: closed and open loops, warm-up, connections, TLS, Unix sockets, HTTP/2, threads, recordings, tables."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from randomised import examples
from replay_server import ReplayServer
from stream_server import DONE, HEAD, HELLO, RawServer, chunk, event, stream

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

import annie_quant as aq  # noqa: E402


def Request(url: str, **fields) -> aq.stream.Request:
    """A request with a short timeout, so that it cannot block the test suite."""
    return aq.stream.Request(url, **{"timeout_s": 10, **fields})


def slow(seconds: float):
    def respond(connection, request) -> None:
        time.sleep(seconds)
        stream(HELLO)(connection, request)

    return respond


def test_a_closed_loop_keeps_its_concurrency_and_its_order() -> None:
    flying, most, lock = 0, 0, threading.Lock()

    def respond(connection, request) -> None:
        nonlocal flying, most
        with lock:
            flying += 1
            most = max(most, flying)
        time.sleep(0.02)
        with lock:
            flying -= 1
        stream(HELLO)(connection, request)

    with RawServer(respond) as server:
        timings = aq.stream.run(
            [Request(server.url, json={}, tag=i) for i in range(12)], concurrency=3
        )
        assert server.connections == 3, "connections are kept"
    assert most == 3
    records = timings.records()
    assert [r["tag"] for r in records] == list(range(12)) and all(
        r["wait_ms"] is None for r in records
    )
    assert [r["new_connection"] for r in records].count(True) == 3


def test_fresh_connections() -> None:
    with RawServer(stream(HELLO)) as server:
        records = aq.stream.run(
            [Request(server.url, json={})] * 5, fresh_connections=True
        ).records()
        assert server.connections == 5
    assert all(r["new_connection"] and r["connect_ms"] > 0 for r in records)


def test_an_open_loop_starts_on_time_with_a_slow_server() -> None:
    starts = [i / 100 for i in range(8)]
    with RawServer(slow(0.1)) as server:
        records = aq.stream.run([Request(server.url, json={}, start_s=s) for s in starts]).records()
    began = np.array([r["started_s"] for r in records])
    assert (began >= starts).all() and (began - starts < 0.05).all()
    assert all(r["wait_ms"] < 50 for r in records)


def test_waiting_for_the_concurrency_is_in_the_record() -> None:
    """Coordinated omission: with one request at a time, an open loop's records show how long each request waited."""
    with RawServer(slow(0.05)) as server:
        records = aq.stream.run(
            [Request(server.url, json={}, start_s=0) for _ in range(4)], concurrency=1
        ).records()
    waits = [r["wait_ms"] for r in records]
    assert waits == sorted(waits) and waits[3] > 140
    for r in records:
        assert r["scheduled_e2e_ms"] == pytest.approx(r["e2e_ms"] + r["wait_ms"])
        assert r["scheduled_first_content_ms"] == pytest.approx(
            r["first_content_ms"] + r["wait_ms"]
        )
    assert records[3]["e2e_ms"] < 140 < records[3]["scheduled_e2e_ms"]


def test_unordered_starts_run_in_time_and_return_in_the_plans_order() -> None:
    with RawServer(stream(HELLO)) as server:
        plan = [Request(server.url, json={}, start_s=s, tag=s) for s in (0.1, 0.0, 0.05)]
        records = aq.stream.run(plan).records()
    assert [r["tag"] for r in records] == [0.1, 0.0, 0.05]
    assert records[1]["started_s"] < records[2]["started_s"] < records[0]["started_s"]


def test_arrivals() -> None:
    assert aq.stream.trace([7, 5, 6], speed=2) == [1, 0, 0.5]
    assert aq.stream.trace([]) == []
    times = aq.stream.poisson(20000, 50, seed=1)
    gaps = np.diff([0, *times])
    assert times == aq.stream.poisson(20000, 50, seed=1) != aq.stream.poisson(20000, 50, seed=2)
    assert gaps.mean() == pytest.approx(0.02, rel=0.03) and gaps.std() == pytest.approx(
        0.02, rel=0.05
    )
    for bad in (
        lambda: aq.stream.poisson(1, 0),
        lambda: aq.stream.trace([1, np.nan]),
    ):
        with pytest.raises(aq.errors.UsageError):
            bad()


def test_warmup_is_not_in_the_result() -> None:
    with RawServer(stream(HELLO)) as server:
        timings = aq.stream.run(
            [Request(server.url, json={})], warmup=[Request(server.url, json={})] * 2
        )
        assert len(server.requests) == 3 and len(timings) == 1


def test_tls(certificate: Path, tls_server: ssl.SSLContext) -> None:
    with RawServer(stream(HELLO), tls=tls_server) as server:
        request = Request(server.url, json={}, timeout_s=5)
        assert aq.stream.run([request]).records()[0]["cause"] == "tls", (
            "an unknown certificate is refused"
        )
        trusted = aq.stream.run([request] * 2, ca_file=certificate).records()
        unchecked = aq.stream.run([request], verify_tls=False).records()[0]
    assert [r["text"] for r in (*trusted, unchecked)] == ["Hello there."] * 3
    assert trusted[0]["tls_ms"] > 0 and not trusted[1]["new_connection"]


def test_unix_socket(tmp_path) -> None:
    with RawServer(stream(HELLO), path=str(tmp_path / "s")) as server:
        record = aq.stream.run(
            [Request(server.url, json={})], unix_socket=tmp_path / "s"
        ).records()[0]
    assert (record["text"], record["error"], record["clock"]) == ("Hello there.", None, "user")


def test_http_2_falls_back_if_the_server_does_not_support_it(tls_server: ssl.SSLContext) -> None:
    with RawServer(stream(HELLO), tls=tls_server) as server:
        record = aq.stream.run(
            [Request(server.url, json={})], http="2", verify_tls=False
        ).records()[0]
    assert (record["text"], record["http_version"]) == ("Hello there.", "1.1")


def test_http_2_with_a_server_that_supports_it(certificate: Path) -> None:
    """The frames of RFC 9113 written by hand: settings, headers and data of two streams on one connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.set_alpn_protocols(["h2"])

    def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
        return (
            len(payload).to_bytes(3, "big")
            + bytes([kind, flags])
            + number.to_bytes(4, "big")
            + payload
        )

    def take(connection, size: int) -> bytes:
        held = b""
        while len(held) < size:
            got = connection.recv(size - len(held))
            if not got:
                raise ConnectionError
            held += got
        return held

    # :status 200 from the static table; content-type: text/event-stream as a literal (RFC 7541, index 31)
    headers = b"\x88" + b"\x0f\x10" + bytes([17]) + b"text/event-stream"

    class H2(RawServer):
        def _serve(self, connection) -> None:
            with connection, self.tls.wrap_socket(connection, server_side=True) as secure:
                take(secure, 24)
                secure.sendall(frame(4, 0, 0))
                while True:
                    try:
                        head = take(secure, 9)
                        take(secure, int.from_bytes(head[:3], "big"))
                    except OSError:
                        return
                    number = int.from_bytes(head[5:], "big")
                    if head[3] == 4 and not head[4] & 1:
                        secure.sendall(frame(4, 1, 0))
                    if head[3] in (0, 1) and head[4] & 1:  # the end of a request
                        secure.sendall(frame(1, 4, number, headers))
                        for piece in HELLO:
                            secure.sendall(frame(0, 0, number, piece))
                        secure.sendall(frame(0, 1, number))

    with H2(None, tls=context) as server:
        records = aq.stream.run(
            [Request(server.url, json={})] * 4, 2, http="2", verify_tls=False
        ).records()
        assert server.connections <= 2
    assert [(r["text"], r["error"], r["http_version"]) for r in records] == [
        ("Hello there.", None, "2")
    ] * 4


def test_environment_proxies_are_not_used(monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with RawServer(stream(HELLO)) as server:
        assert aq.stream.run([Request(server.url, json={})]).records()[0]["error"] is None
        proxied = aq.stream.run(
            [Request("http://no-such.invalid/x", json={})], proxy=server.url
        ).records()[0]
    assert (
        proxied["text"] == "Hello there."
        and b"POST http://no-such.invalid/x" in server.requests[-1]
    )


def test_two_plans_in_two_threads() -> None:
    results: dict[int, aq.stream.Timings] = {}

    def work(number: int, url: str) -> None:
        results[number] = aq.stream.run(
            [Request(url, json={}, tag=(number, i)) for i in range(200)], concurrency=8
        )

    with RawServer(stream(HELLO)) as server:
        threads = [threading.Thread(target=work, args=(n, server.url)) for n in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for number, timings in results.items():
        records = timings.records()
        assert [r["tag"] for r in records] == [(number, i) for i in range(200)]
        assert {(r["text"], r["error"]) for r in records} == {("Hello there.", None)}


def test_the_gil_is_free_during_a_run() -> None:
    """Python counts in another thread while the run waits, and does not delay the stamps."""
    count, stop = 0, threading.Event()

    def spin() -> None:
        nonlocal count
        while not stop.is_set():
            count += 1

    with RawServer(slow(0.3)) as server:
        thread = threading.Thread(target=spin)
        thread.start()
        before = count
        aq.stream.run([Request(server.url, json={})])
        stop.set()
        thread.join()
    assert count - before > 100_000


def test_save_and_load_give_the_same(tmp_path) -> None:
    def respond(connection, request) -> None:
        if b'"bad"' in request:
            connection.sendall(
                b"HTTP/1.1 404 No\r\nContent-Length: 22\r\n\r\n" + b'{"error":"no such one"}'[:22]
            )
        else:
            stream(HELLO)(connection, request)

    with RawServer(respond) as server:
        timings = aq.stream.run(
            [Request(server.url, json={"k": k}, tag=k) for k in ("good", "bad", "good")],
            concurrency=2,
        )
    timings.save(tmp_path / "run")
    loaded = aq.stream.Timings.load(tmp_path / "run")
    for clock in ("kernel", "user"):
        assert loaded.records(clock) == timings.records(clock)
    assert loaded.body(0) == b"".join(HELLO) and loaded.headers(0) == timings.headers(0)
    assert (loaded.events == timings.events).all() and (loaded.reads == timings.reads).all()
    (tmp_path / "run" / "timings.npz").write_bytes(b"PK nonsense")
    with pytest.raises(aq.errors.EnvironmentFault, match="not a recording"):
        aq.stream.Timings.load(tmp_path / "run")


def dropped(rows: np.ndarray, column: str) -> np.ndarray:
    return rows[[name for name in rows.dtype.names if name != column]]


def changed(rows: np.ndarray, column: str, value: int) -> np.ndarray:
    rows = rows.copy()
    rows[column][-1] = value
    return rows


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("requests", lambda a: a[:0], "0 requests, expected 2"),
        ("requests", lambda a: dropped(a, "status"), "requests has no column status"),
        ("events", lambda a: changed(a, "offset", 1 << 63), "beyond the frames"),
        ("events", lambda a: changed(a, "size", 1 << 31), "beyond the frames"),
        ("events", lambda a: changed(a, "request", 2), "events of no request"),
        ("events", lambda a: a.reshape(-1, 1), "2 dimensions"),
        ("frames", lambda a: a.astype(np.float64), "frames is not bytes"),
        ("reads", lambda a: a["size"], "reads has no column user_ns"),
    ],
)
def test_a_damaged_recording_is_refused(name: str, change, words: str, tmp_path) -> None:
    with RawServer(stream(HELLO)) as server:
        saved = aq.stream.run([Request(server.url, json={})] * 2).save(tmp_path)
    with np.load(saved) as held:
        arrays = dict(held)
    np.savez(saved, **{**arrays, name: change(arrays[name])})
    with pytest.raises(aq.errors.EnvironmentFault, match=words):
        aq.stream.Timings.load(tmp_path)


def test_replay_gives_the_same_records_at_the_same_pace() -> None:
    def respond(connection, request) -> None:
        connection.sendall(HEAD)
        for i, piece in enumerate(HELLO):
            time.sleep(0.03 if i < 3 else 0)
            connection.sendall(chunk(piece))
        connection.sendall(b"0\r\n\r\n")

    with RawServer(respond) as server:
        recorded = aq.stream.run([Request(server.url, json={})] * 2)
    with ReplayServer(recorded) as replay:
        again = aq.stream.run([Request(replay.url, json={})] * 2)
    for first, second in zip(recorded.records(), again.records(), strict=True):
        for same in ("text", "usage", "finish_reason", "status", "error"):
            assert second[same] == first[same]
        assert second["first_content_ms"] > first["first_content_ms"] - 25, (
            "not earlier; later on a busy machine"
        )
    assert again.body(0) == recorded.body(0)
    with ReplayServer(recorded, speed=100) as replay:
        fast = aq.stream.run([Request(replay.url, json={})]).records()[0]
    assert fast["e2e_ms"] < 60 and fast["text"] == "Hello there."


def test_replay_repeats_a_fault() -> None:
    def respond(connection, request) -> None:
        connection.sendall(HEAD + chunk(event({"content": "Hi"})))
        connection.close()

    with RawServer(respond) as server:
        recorded = aq.stream.run([Request(server.url, json={})])
    with ReplayServer(recorded) as replay:
        record = aq.stream.run([Request(replay.url, json={})]).records()[0]
    assert (
        record["cause"] == recorded.records()[0]["cause"] == "truncated" and record["text"] == "Hi"
    )


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_frames_joined_are_the_body(data: st.DataObject) -> None:
    """However a server splits its data, the frames joined are its bytes and the reads add up to them."""
    alphabet = st.sampled_from(
        [b"data: x\n\n", b": ping\r\n\r\n", b"\n", b"\r", b"data: [DONE]\n\n", b"\xff\0", *HELLO]
    )
    bodies = data.draw(st.lists(st.lists(alphabet, min_size=1, max_size=6), min_size=1, max_size=4))
    queue = iter(bodies)
    with RawServer(lambda c, r: stream(next(queue))(c, r)) as server:
        timings = aq.stream.run([Request(server.url, json={})] * len(bodies))
    timings.records()
    for i, pieces in enumerate(bodies):
        assert timings.body(i) == b"".join(pieces)
        assert int(timings.reads["size"][timings.reads["request"] == i].sum()) == len(
            b"".join(pieces)
        )


def test_arrays_are_read_only_views_of_c_memory() -> None:
    with RawServer(stream(HELLO)) as server:
        timings = aq.stream.run([Request(server.url, json={})])
    for array in (timings.requests, timings.events, timings.reads, timings.frames, timings.notes):
        assert isinstance(array.base, _stream.Block) or isinstance(array.base.obj, _stream.Block)
        assert not array.flags.writeable
    assert timings.events.dtype.itemsize == 48
    assert (
        timings.events["offset"].tolist() == np.cumsum([0, *timings.events["size"][:-1]]).tolist()
    )
    del array
    stored = timings.events["user_ns"]
    del timings
    assert stored[0] > 0  # the view keeps its memory alive


def test_pandas_uses_the_same_memory() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    with RawServer(stream(HELLO)) as server:
        timings = aq.stream.run([Request(server.url, json={})])
    frame = timings.to_pandas()
    assert np.shares_memory(frame["user_ns"].to_numpy(), timings.events)
    assert list(timings.to_pandas("records")["text"]) == ["Hello there."]


LEAK = """
    import os, resource, sys
    import annie_quant as aq
    def rss_kb():
        return int(open("/proc/self/statm").read().split()[1]) * 4
    def thousand():
        aq.stream.run([aq.stream.Request(sys.argv[1], body=b"{}") for _ in range(1000)], concurrency=16)
    thousand()
    before, fds = rss_kb(), len(os.listdir("/proc/self/fd"))
    for _ in range(int(sys.argv[2]) // 1000 - 1):
        thousand()
    print(rss_kb() - before, len(os.listdir("/proc/self/fd")) - fds)
"""


def test_nothing_leaks() -> None:
    """Ten thousand requests, or ANNIE_QUANT_LEAK: memory and descriptors do not grow after the first thousand."""
    count = int(os.environ.get("ANNIE_QUANT_LEAK", "10000"))
    with RawServer(stream([event({"content": "a"}, "stop") + DONE])) as server:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(LEAK), server.url, str(count)],
            capture_output=True,
            text=True,
            timeout=80 + count // 200,
        )
    assert done.returncode == 0, done.stderr
    grown_kb, fds = map(int, done.stdout.split())
    print(f"{count} requests: {grown_kb} kB more, {fds} descriptors more")
    assert grown_kb < 1500 and fds == 0, (grown_kb, fds)


POLICY = """
    import os, sys, threading
    import annie_quant as aq
    during, done = set(), threading.Event()
    def watch():
        while not done.is_set():
            during.update(os.sched_getscheduler(int(t)) & ~os.SCHED_RESET_ON_FORK for t in os.listdir("/proc/self/task"))
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    timings = aq.stream.run([aq.stream.Request(sys.argv[1])])
    done.set()
    watcher.join()
    asked_not = aq.stream.run([aq.stream.Request(sys.argv[1])], realtime=False)
    print(timings.realtime, timings.records()[0]["realtime"], asked_not.realtime, os.SCHED_FIFO in during,
          os.sched_getscheduler(0) == os.SCHED_OTHER, timings.records()[0]["text"])
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="root gives and takes the right to it"
)
@pytest.mark.parametrize("who", ["allowed", "not allowed"])
def test_the_loop_uses_a_real_time_priority_and_reports_it(who: str) -> None:
    def respond(connection, request) -> None:
        time.sleep(0.05)
        stream(HELLO)(connection, request)

    with RawServer(respond) as server:
        command = [sys.executable, "-c", textwrap.dedent(POLICY), server.url]
        if who == "not allowed":
            command = ["setpriv", "--bounding-set=-sys_nice", "prlimit", "--rtprio=0", *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    had = str(who == "allowed" and may_be_realtime())
    assert done.stdout.split(None, 5) == [had, had, "False", had, "True", "Hello there.\n"]


def may_be_realtime() -> bool:
    """Containers may not permit it, even for root."""
    ask = "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True).returncode == 0
