"""The streaming client in C (csrc/stream); annie_quant.stream is its face."""

from typing import Any, TypedDict, final

from typing_extensions import Buffer

class _Layout(TypedDict):
    names: list[str]
    formats: list[str]
    offsets: list[int]
    itemsize: int

CURL_VERSION: str
REQUEST_ROW: _Layout
EVENT_ROW: _Layout
READ_ROW: _Layout

@final
class Block(Buffer):
    """Memory of a run, read in place through the buffer protocol."""

    def __len__(self) -> int: ...

_Row = tuple[str, str, tuple[tuple[str, str], ...], bytes | None, int, int, int]

def run(
    requests: tuple[_Row, ...],
    concurrency: int,
    deadline_ns: int,
    max_event_bytes: int,
    max_answer_bytes: int,
    max_answer_events: int,
    cancel_fd: int,
    signal_fd: int,
    forward_fd: int,
    http: int,
    fresh_connections: bool,
    kernel_stamps: bool,
    realtime: bool,
    verify_tls: bool,
    unix_socket: bytes | None,
    proxy: str | None,
    ca_file: bytes | None,
    user_agent: str | None,
) -> tuple[Block, Block, Block, Block, Block, int, int, bool, bool, Any]: ...
def check(requests: tuple[_Row, ...], /) -> None: ...
def cut(
    reads: tuple[bytes, ...], max_event_bytes: int, lines: bool = False, /
) -> list[tuple[int, int, int, int, int, bytes]]: ...
def map_stamp(
    offset_ns: int, previous_ns: int, realtime_ns: int, not_before_ns: int, user_ns: int, /
) -> int: ...
