"""The client in a simulated kernel (tests/simulate): a few seconds of schedules, one of them again from its seed.

Planted faults are each found. `make simulate SCHEDULES=1000000` runs more.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import shared
from paths import ROOT

pytestmark = pytest.mark.skipif(
    not shutil.which("gcc"), reason="the simulation is compiled here, and gcc is not"
)

STREAM = ROOT / "csrc/stream"
FLAGS = ("-std=c11", "-O1", f"-I{ROOT}/csrc")
SCHEDULES = 4000  # of each planted fault, which is found in fewer


def build(folder: Path, objects: list[Path], sources: list[Path]) -> None:
    own = [folder / f"{source.stem}.o" for source in sources]
    for source, target in zip(sources, own, strict=True):
        subprocess.run(
            ["gcc", *FLAGS, f"-I{STREAM}", "-c", str(source), "-o", str(target)], check=True
        )
    subprocess.run(
        ["gcc", *map(str, own), *map(str, objects), "-lcurl", "-o", str(folder / "simulate")],
        check=True,
    )


def inputs(*own: str) -> bytes:
    return b"\n".join(
        [
            shared.c_sources("csrc/common", "csrc/stream", "tests/simulate"),
            repr((FLAGS, own)).encode(),
        ]
    )


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder with the program and the object file of each of its sources."""
    parts = [p for p in sorted(STREAM.glob("*.c")) if p.stem != "module"]
    sources = [*sorted((ROOT / "tests/simulate").glob("*.c")), *parts]
    return shared.stored("simulate", inputs(), lambda made: build(made, [], sources))


def simulate(program: Path | str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, errors="replace")


def test_no_schedule_violates_a_property(folder: Path) -> None:
    process = simulate(folder / "simulate", 3000)
    assert process.returncode == 0, process.stderr
    figures = re.findall(r"([a-zA-Z][a-zA-Z ]*) (\d+)[,\n]", process.stdout.split("violated\n")[1])
    assert len(figures) == 22
    assert [name for name, count in figures if int(count) < 20] == [], (
        "everything happens in these schedules"
    )


def test_a_seed_gives_the_same_schedule_again(folder: Path) -> None:
    digests = [
        re.search(r"digest \w+", simulate(folder / "simulate", 1, 77).stdout)[0] for _ in range(2)
    ]
    traces = [simulate(folder / "simulate", "--replay", 77) for _ in range(2)]
    assert digests[0] == digests[1] and digests[0] in traces[0].stdout
    assert traces[0].stderr == traces[1].stderr and "connect(" in traces[0].stderr


@pytest.mark.parametrize("seed", [30038730, 101450900])
def test_schedules_that_found_a_fault(seed: int, folder: Path) -> None:
    """Unasked bytes arrive between the look at a connection and the first sent byte: with a reset, and with a full socket."""
    process = simulate(folder / "simulate", 1, seed)
    assert process.returncode == 0, process.stderr


FAULTS = {
    "plain": {
        "reuses without a look": ("if (is_silent(connection))", "if (connection)"),
        "takes EINTR of a read for an error": ("if (got < 0 && errno == EINTR)", "if (got < -1)"),
        "takes EINTR of a message for an error": ("if (sent < 0 && errno == EINTR)", "if (sent < -1)"),
        "forgets that a socket is not empty": ("    watch(c, EPOLL_CTL_MOD, t->fd);", "    (void)0;"),
        "reads once per change": ("if (got < READ_BYTES && !ending)", "if (got)"),
        "does not read to the end": (
            "bool ending = events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);",
            "bool ending = events & EPOLLERR;",
        ),
        "does not watch for space": ("EPOLLIN | EPOLLOUT |", "EPOLLIN |"),
        "sends the rest from the beginning": ("t->unsent -= (size_t)sent;", "t->unsent -= sent == 1 ? 1 : t->unsent;"),
        "keeps a connection after other bytes": ("if (used < size || ending)", "if (ending)"),
        "keeps a connection with an unsent request": ("t->unsent || !t->reader.keep", "!t->reader.keep"),
        "sends again what began to be answered": ("if (!t->reused || t->reader.began)", "if (!t->reused)"),
        "does not send again": ("if (!t->reused || t->reader.began)", "if (t->reused || !t->reused)"),
        "sends again without end": ("    t->reused = false;\n", ""),
        "forgets the error of a message": ("if (errno != EPIPE)", "if (errno == EPIPE)"),
        "closes twice": ("    close(connection->fd);\n", "    close(connection->fd);\n    close(connection->fd);\n"),
        "loses a connection": ("    drop_connection(t);\n    t->reused", "    t->connection = NULL;\n    t->reused"),
        "gives an answer to another origin": ("if (strcmp(connection->origin, origin) != 0)", "if (!origin[0])"),
    },
    "client": {
        "ends at EINTR": ("return errno == EINTR && !was_interrupted(c);", "return false;"),
        "ignores a cancel": ("        } else if (fd == c->plan->cancel_fd) {\n            return false;\n", ""),
        "reads the cancel": (
            "        } else if (fd == c->plan->cancel_fd) {\n",
            "        } else if (fd == c->plan->cancel_fd && read(fd, events, 1)) {\n",
        ),
        "continues after a cancel": (
            "    while (c->active)\n        transfer_finish(c->active, CURLE_OK, cause);",
            "    while (c->active) {\n        transfer_finish(c->active, CURLE_OK, cause);\n"
            "        if (c->next < c->plan->count && cause == CAUSE_CANCELLED)\n            start_next(c);\n    }",
        ),
        "begins a cancelled run": ("if (is_cancelled(c)) {", "if (is_cancelled(c) && c->in_flight) {"),
        "forgets the next limit": ("            if (due < c->check_due_ns)\n                c->check_due_ns = due;\n", ""),
        "starts one request too many": (">= c->plan->concurrency)", "> c->plan->concurrency)"),
        "leaves idle connections open": ("    plain_close_idle(&c);\n", ""),
    },
    "handle": {
        "closes a connection that is in use": ("if (socket && socket->connection)", "if (!context)"),
        "forgets to clear a closed socket": ("        memset(socket, 0, sizeof *socket);", "        socket->stamped = false;"),
    },
    "clock": {
        "stamps with the wrong offset": ("realtime_ns - pair->offset_ns;", "realtime_ns - pair->offset_ns - 5 * NS_PER_US;"),
    },
    "http1": {
        "loses the beginning of a line": ("if (lf && h->pending.size == 0)", "if (lf)"),
        "ignores the remaining length": ("size > h->left ?", "size > SIZE_MAX - 1 ?"),
    },
    "libcurl": {
        "accepts half a head": ("if (code == CURLE_OK && !whole_head)", "if (code == CURLE_OK && !t->began)"),
    },
    "transfer": {
        "counts the end before the rest is framed": ("    answer_end(t);\n", ""),
    },
}  # fmt: skip
CASES = [(part, *change) for part, changes in FAULTS.items() for change in changes.values()]


@pytest.mark.parametrize(
    ("part", "right", "wrong"), CASES, ids=[n for changes in FAULTS.values() for n in changes]
)
def test_planted_faults_are_found(part: str, right: str, wrong: str, folder: Path) -> None:
    source = (STREAM / f"{part}.c").read_text()
    assert source.count(right) == 1

    def compile_faulty(made: Path) -> None:
        (made / f"{part}.c").write_text(source.replace(right, wrong))
        build(made, [o for o in sorted(folder.glob("*.o")) if o.stem != part], [made / f"{part}.c"])

    made = shared.stored("simulate", inputs(part, right, wrong), compile_faulty)
    process = simulate(made / "simulate", SCHEDULES)
    assert process.returncode != 0, process.stdout
    assert "violated" in process.stderr or process.returncode < 0
