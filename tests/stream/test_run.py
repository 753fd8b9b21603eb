"""Running plans: closed and open loops, warm-up, connections, TLS, Unix sockets, HTTP/2, threads, recordings, tables."""

from __future__ import annotations

import ssl
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from stream_server import HELLO, RawServer, stream

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
