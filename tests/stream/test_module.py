"""The extension module's life cycle: repeated imports, several interpreters, reference counts of what `run` returns and refuses."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import pytest
from stream_server import HELLO, RawServer, stream

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

IMPORT = """
    import importlib.util, sys
    def load():
        spec = importlib.util.spec_from_file_location("annie_quant._stream", sys.argv[1])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
"""
AGAIN = """
    import gc
    first = load()
    block = first.run((), concurrency=1, deadline_ns=0, max_event_bytes=9, max_answer_bytes=9, max_answer_events=9,
                      cancel_fd=-1, signal_fd=-1, forward_fd=-1, http=0, fresh_connections=False,
                      kernel_stamps=False, realtime=False, verify_tls=False, unix_socket=None, proxy=None,
                      ca_file=None, user_agent=None)[0]
    def kb():
        return int(open("/proc/self/statm").read().split()[1]) * 4
    for i in range(2000):
        module = load()
        assert module.Block is not first.Block and module.cut((b"data: a\\n\\n",), 99)[0][-1] == b"data: a\\n\\n"
        del module
        if i == 200:
            gc.collect()
            before = kb()
    del first
    gc.collect()
    assert len(block) == 0  # its type lives as long as it does
    print(kb() - before)
"""
INTERPRETERS = """
    try:
        from concurrent import interpreters  # 3.14
        def run(code):
            interpreter = interpreters.create()
            interpreter.exec(code)
            interpreter.close()
    except ImportError:
        try:
            import _interpreters as low  # 3.13
        except ImportError:
            import _xxsubinterpreters as low
        def run(code):
            interpreter = low.create()
            failed = low.run_string(interpreter, code)
            assert not failed, failed
            low.destroy(interpreter)
    for _ in range(5):
        run("import sys; sys.argv = " + repr(sys.argv[:3]) + "\\n" + sys.argv[3])
    print("done")
"""
WORK = """
    module = load()
    request = ("http://127.0.0.1:" + sys.argv[2] + "/", "GET", (), None, -1, 10**10, 10**10)
    result = module.run((request,), concurrency=1, deadline_ns=0,
        max_event_bytes=10**6, max_answer_bytes=10**6, max_answer_events=99, cancel_fd=-1, signal_fd=-1, forward_fd=-1,
        http=0, fresh_connections=False, kernel_stamps=True, realtime=False, verify_tls=False, unix_socket=None,
        proxy=None, ca_file=None, user_agent=None)
    assert b"Hello" in bytes(result[3]), bytes(result[4])
    try:
        module.check((("http://h/", "G T", (), None, -1, 1, 1),))
    except ValueError:
        pass
    else:
        raise AssertionError
"""


def python(code: str, *arguments: str) -> str:
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(IMPORT) + textwrap.dedent(code),
        _stream.__file__,
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_module_can_be_loaded_again_and_is_freed() -> None:
    grown_kb = int(python(AGAIN))
    assert grown_kb < 2000, "1800 modules leak"


def test_a_run_in_other_interpreters() -> None:
    work = textwrap.dedent(IMPORT) + textwrap.dedent(WORK)
    with RawServer(stream(HELLO)) as server:
        assert python(INTERPRETERS, str(server.port), work) == "done\n"
        assert len(server.requests) == 5


@pytest.mark.parametrize(
    "rows",
    [
        [],
        ((),),
        ([],),
        (("http://h/", "GET", [], None, -1, 1, 1),),
        (("http://h/", "GET", ("A: b",), None, -1, 1, 1),),
        (("http://h/", "GET", (("A",),), None, -1, 1, 1),),
        (("http://h/", "GET", (("A", b"b"),), None, -1, 1, 1),),
        ((b"http://h/", "GET", (), None, -1, 1, 1),),
        (("http://h/", "GET", (), "text", -1, 1, 1 << 70),),
    ],
)
def test_arguments_of_another_type(rows) -> None:
    with pytest.raises((TypeError, OverflowError)):
        _stream.check(rows)


def test_refusals_do_not_leak() -> None:
    rows = (
        ("http://h/", "GET", (("X-A", "b"),), b"x", -1, 1, 1),
        ("http://h/", "G T", (("X-A", "b"),), None, -1, 1, 1),
    )
    headers, before = rows[0][2], []
    for _ in range(2):
        for _ in range(1000):
            with pytest.raises(ValueError, match="request 1: method 'G T'"):
                _stream.check(rows)
        gc.collect()
        before.append(
            (sys.getrefcount(rows), sys.getrefcount(headers), sys.getrefcount(rows[1][0]))
        )
    assert before[0] == before[1]
