"""Read a checkpoint on a Hugging Face Hub, or in any HTTP folder, without its weights.

The small files and the headers of the shards are stored in a temporary folder, in which a shard is
a hole of its real size behind its header. ModelFolder reads such a folder like any other, and the
safetensors library checks its headers.

The repository's commit is asked once, and every file is read at it. The token is sent to the hub
only: httpx removes it from a request that is redirected to another host.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, unquote, urlsplit

from annie_quant.checkpoint.header import PREFIX_BYTES, ShardError
from annie_quant.checkpoint.shards import COMPANIONS, INDEX, MAX_JSON_BYTES, SINGLE, TOKENIZER
from annie_quant.core.errors import (
    AnnieError,
    CheckpointError,
    EnvironmentFault,
    ServerError,
    UsageError,
    need,
)
from annie_quant.core.secrets import refuse_secrets_in
from annie_quant.core.untrusted import decode_json
from annie_quant.documents import RemoteRead

if TYPE_CHECKING:
    import httpx

_Result = TypeVar("_Result")
HUB_SCHEME = "hf:"
WEB_SCHEMES = ("http://", "https://")
# The headers of most shards are shorter, as huggingface_hub's authors counted.
FIRST_BYTES = 100_000
MAX_HEADER_BYTES = 100_000_000  # safetensors refuses longer ones
MAX_SMALL_BYTES = 4_000_000  # of a file that no check needs; the vocabulary and the index are read
MAX_FILES = 10_000
MAX_LISTING_BYTES = 1_000_000
READERS = 8  # files that are read at once
_TIMEOUT_S = 10.0
ATTEMPTS = 5
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 20.0
TRANSIENT_STATUS = (408, 429, 500, 502, 503, 504)
ABSENT_STATUS = (403, 404, 410)  # object stores answer 403 where they do not list their files
SUBFOLDER = "additional_chat_templates"  # the only one with files that are read
READ_ENDS = (".json", ".jinja")
NOT_READ = ("vocab.json",)  # large, and tokenizer.json has the same
# Of a folder whose server lists no files.
EXPECTED_FILES = (
    "config.json",
    "hf_quant_config.json",
    "annie_quant.json",
    *(name for name in COMPANIONS if name.endswith(READ_ENDS) and name not in NOT_READ),
)


@dataclass(frozen=True)
class OpenedFolder:
    """A folder that a checkpoint can be read from.

    address: what the user gave, with the commit of a repository.
    remote: what was read, for a checkpoint that is not on this machine.
    """

    path: Path
    address: str
    remote: RemoteRead | None = None


@contextlib.contextmanager
def opened(place: str | os.PathLike[str]) -> Iterator[OpenedFolder]:
    """Yield the folder of a checkpoint: its own, or a temporary one for an address.

    place: a path, hf:OWNER/NAME[@REVISION], or the URL of a folder.

    Raises UsageError for an address that cannot be read, CheckpointError where there is no such
    checkpoint or it may not be read, and ServerError where the server fails.
    """
    address = os.fspath(place)
    if not is_address(address):
        yield OpenedFolder(Path(address), address)
        return
    with tempfile.TemporaryDirectory(prefix="annie-quant-") as home:
        with _explained(address):
            files = list_files(address)
            folder = Path(home) / re.sub(r"[^\w.-]", "_", files.name or "checkpoint")
            folder.mkdir()
            size_bytes = _fetch(files, folder)
        remote = RemoteRead(files.commit, size_bytes, files.client.received_bytes)
        yield OpenedFolder(folder, files.address, remote)


def is_address(place: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint is given by an address, and not by a path."""
    return str(place).startswith((HUB_SCHEME, *WEB_SCHEMES))


# ---- which files there are


@dataclass(frozen=True)
class RemoteFiles:
    """The files of a remote checkpoint.

    name: of its folder.
    url_of: file → its URL.
    sizes: file → its bytes, as far as the server lists them.
    subfolders: names of folders in it.
    is_listed: whether the server lists its files; if not, they are those that a checkpoint may have.
    """

    address: str
    name: str
    client: Client
    url_of: Callable[[str], str]
    sizes: dict[str, int | None]
    commit: str = ""
    subfolders: set[str] = field(default_factory=set)
    is_listed: bool = True


def list_files(address: str) -> RemoteFiles:
    """Return the files of a repository or folder."""
    if not address.startswith(HUB_SCHEME):
        refuse_secrets_in(address, "audit")
        endpoint = need("huggingface_hub.constants", "publish").ENDPOINT
        repository = _repository_of(address, endpoint)
        if repository is None:
            return _folder_files(address)
        address = repository
    name, _, revision = address.removeprefix(HUB_SCHEME).partition("@")
    return _hub_files(name, revision or None)


def _repository_of(url: str, endpoint: str) -> str | None:
    """Return the address of the repository that a page of the hub shows, or None."""
    if not url.startswith(f"{endpoint.rstrip('/')}/"):
        return None
    parts = url.removeprefix(f"{endpoint.rstrip('/')}/").strip("/").split("/")
    is_tree = len(parts) > 3 and parts[2] == "tree"
    if len(parts) != 2 and not is_tree:
        return None
    revision = f"@{unquote('/'.join(parts[3:]))}" if is_tree else ""
    return f"{HUB_SCHEME}{parts[0]}/{parts[1]}{revision}"


def _hub_files(name: str, revision: str | None) -> RemoteFiles:
    hub = need("huggingface_hub", "publish")
    build_headers = need("huggingface_hub.utils", "publish").build_hf_headers
    api = hub.HfApi()
    info = _retried(
        lambda: api.model_info(name, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    )
    sizes: dict[str, int | None] = {}
    subfolders = set()
    for sibling in (info.siblings or ())[:MAX_FILES]:
        path = _checked(sibling.rfilename)
        if len(path.parts) > 1:
            subfolders.add(path.parts[0])
        if _is_readable(path):
            sizes[str(path)] = sibling.size
    return RemoteFiles(
        address=f"{HUB_SCHEME}{name}@{info.sha}",
        name=name.rpartition("/")[2],
        client=Client(build_headers(token=api.token)),
        url_of=lambda file: hub.hf_hub_url(name, file, revision=info.sha, endpoint=api.endpoint),
        sizes=sizes,
        commit=info.sha,
        subfolders=subfolders,
    )


def _folder_files(url: str) -> RemoteFiles:
    build_headers = need("huggingface_hub.utils", "publish").build_hf_headers
    base = f"{url.rstrip('/')}/"
    client = Client(build_headers(token=False))
    names = client.links(base)
    is_listed = any(name == "config.json" or name.endswith(".safetensors") for name in names)
    subfolders = {name.rstrip("/") for name in names if name.endswith("/")}
    if not is_listed:
        names = [*EXPECTED_FILES, *_expected_weights(client, base)]
    elif SUBFOLDER in subfolders:
        names += [f"{SUBFOLDER}/{name}" for name in client.links(f"{base}{SUBFOLDER}/")]
    paths = [_checked(name) for name in names[:MAX_FILES] if not name.endswith("/")]
    return RemoteFiles(
        address=url,
        name=unquote(urlsplit(base).path.strip("/").rpartition("/")[2]),
        client=client,
        url_of=lambda file: base + quote(file),
        sizes={str(path): None for path in paths if _is_readable(path)},
        subfolders=subfolders,
        is_listed=is_listed,
    )


def _expected_weights(client: Client, base: str) -> list[str]:
    """Return the index and the shards that it names, or the one shard of a folder without it."""
    index = client.whole(base + INDEX, MAX_JSON_BYTES)
    if index is None:
        return [SINGLE]
    with contextlib.suppress(ValueError, AttributeError):
        shards = set(map(str, (decode_json(index).get("weight_map") or {}).values()))
        plain = [name for name in sorted(shards) if PurePosixPath(name).name == name]
        return [INDEX, *plain]
    return [INDEX]


def _checked(name: str) -> PurePosixPath:
    """Return the path of a file inside the folder. Raises ShardError for any other path."""
    path = PurePosixPath(name)
    is_plain = name.isprintable() and "\\" not in name and len(name) < 512
    if not is_plain or path.is_absolute() or not path.parts or ".." in path.parts:
        message = f"{name[:120]!r} is not the name of a file in the folder"
        raise ShardError("path_escapes", message, "do not trust this folder")
    return path


def _is_readable(path: PurePosixPath) -> bool:
    """Return whether a file is in the folder itself, or a chat template in the one below it."""
    return len(path.parts) == 1 or (len(path.parts) == 2 and path.parts[0] == SUBFOLDER)


class _Links(HTMLParser):
    """The names that a server's page about a folder links to. Those of folders end in "/"."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = unquote(dict(attrs).get("href") or "").removeprefix("./")
        is_name = "/" not in target.rstrip("/") and not target.startswith((".", "?", "#", "/"))
        if tag == "a" and is_name and target.strip("/") and "?" not in target:
            self.names.append(target)


# ---- reading them


@dataclass(frozen=True)
class _Part:
    """Bytes of a file.

    total: size of the file.
    version: the server's tag of its content; "" where it gives none.
    """

    content: bytes
    total: int
    version: str


class Client:
    """Reads files and parts of files from one server, and counts what it receives."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = {**headers, "Accept-Encoding": "identity"}
        self.received_bytes = 0
        self._lock = threading.Lock()

    def part(self, url: str, begin: int, count: int) -> _Part:
        """Return up to `count` bytes of a file from `begin` on."""
        return _retried(lambda: self._part(url, begin, count))

    def _part(self, url: str, begin: int, count: int) -> _Part:
        hub = need("huggingface_hub.utils", "publish")
        headers = {**self.headers, "Range": f"bytes={begin}-{begin + count - 1}"}
        with hub.get_session().stream(
            "GET", url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True
        ) as response:
            content = bytearray()
            if response.status_code == 416:  # an empty file has no range
                return _Part(b"", 0, "")
            try:
                hub.hf_raise_for_status(response)
                skipped = begin if response.status_code == 200 else 0  # 200: ranges are ignored
                for piece in response.iter_raw():
                    content += piece
                    if len(content) > skipped + count:
                        break
            finally:
                with self._lock:
                    self.received_bytes += response.num_bytes_downloaded
            return _Part(
                bytes(content[skipped : skipped + count]),
                _total_size(response),
                response.headers.get("etag") or response.headers.get("last-modified", ""),
            )

    def needed(self, url: str, length_of: Callable[[_Part], int]) -> _Part:
        """Return as many of a file's first bytes as its beginning shows to be needed.

        length_of: returns the number of bytes, from the first FIRST_BYTES.
        """
        first = self.part(url, 0, FIRST_BYTES)
        length = length_of(first)
        if length <= len(first.content):
            return _Part(first.content[:length], first.total, first.version)
        rest = self.part(url, len(first.content), length - len(first.content))
        content = first.content + rest.content
        if (rest.total, rest.version) != (first.total, first.version) or len(content) < length:
            raise _changed(url)
        return _Part(content, first.total, first.version)

    def whole(self, url: str, limit: int) -> bytes | None:
        """Return a file, or None where there is none or it has more than `limit` bytes."""
        part = self.if_present(url, lambda first: first.total if first.total <= limit else 0)
        return part.content if part and part.total <= limit else None

    def if_present(self, url: str, length_of: Callable[[_Part], int]) -> _Part | None:
        """Return `needed`, or None where the server has no such file."""
        try:
            return self.needed(url, length_of)
        except need("huggingface_hub.errors", "publish").HfHubHTTPError as error:
            if error.response is None or error.response.status_code not in ABSENT_STATUS:
                raise
            if error.response.headers.get("x-error-code") not in (None, "EntryNotFound"):
                raise  # the hub's reason, such as a gated repository
            return None

    def links(self, url: str) -> list[str]:
        """Return the names that a folder's page links to; [] where the server has no such page."""
        page = self.whole(url, MAX_LISTING_BYTES)
        return _Links(page.decode(errors="replace")).names if page else []


def _total_size(response: httpx.Response) -> int:
    """Return the size of a file that was read whole or in part."""
    total = response.headers.get("content-range", "").rpartition("/")[2]
    text = total if response.status_code == 206 else response.headers.get("content-length", "")
    encoding = response.headers.get("content-encoding", "identity")
    if not text.isdecimal() or encoding != "identity":
        raise ServerError(
            f"{response.url}: the server does not report the size of the file",
            "download the checkpoint, and audit the folder",
        )
    return int(text)


def _fetch(files: RemoteFiles, folder: Path) -> int:
    """Store the small files and the headers in `folder`. Return the size of the remote files."""
    for name in files.subfolders:
        (folder / _checked(name)).mkdir(exist_ok=True)
    with ThreadPoolExecutor(READERS) as pool:
        fetched = [pool.submit(_fetch_file, files, name, folder) for name in files.sizes]
        try:
            sizes = [future.result() for future in fetched]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if not files.is_listed and not any(folder.glob("*.json")) and not (folder / SINGLE).exists():
        raise ShardError(
            "no_folder",
            f"{files.address}: no config.json there, expected a model folder",
            "give the address of the folder that has config.json",
        )
    return sum(sizes)


def _fetch_file(files: RemoteFiles, name: str, folder: Path) -> int:
    """Store what is needed of one file, with a hole for the rest. Return the file's size."""
    listed = files.sizes[name]
    if not name.endswith((*READ_ENDS, ".safetensors")) or name in NOT_READ:
        part: _Part | None = _Part(b"", listed or 0, "")
    else:
        part = files.client.if_present(files.url_of(name), lambda first: _length(name, first))
    if part is None and files.is_listed:
        raise _changed(files.address)
    if part is None:
        return 0
    path = folder / name
    try:
        path.write_bytes(part.content)
        os.truncate(path, max(part.total, len(part.content)))
    except OSError as error:
        raise EnvironmentFault(
            f"{name}: no file of {part.total} bytes can be made here ({error.strerror})",
            "set TMPDIR to a disk with sparse files",
        ) from None
    return part.total


def _length(name: str, first: _Part) -> int:
    """Return how many bytes of a file are needed: a header, a whole small file, or none."""
    if not name.endswith(".safetensors"):
        limit = MAX_JSON_BYTES if name in (TOKENIZER, INDEX) else MAX_SMALL_BYTES
        return first.total if first.total <= limit else 0
    end = PREFIX_BYTES + int.from_bytes(first.content[:PREFIX_BYTES], "little")
    return end if end <= min(first.total, MAX_HEADER_BYTES) else len(first.content)


# ---- what goes wrong


def _retried(call: Callable[[], _Result]) -> _Result:
    """Return what `call` returns; call again where the server or the network fails for a moment."""
    httpx = need("httpx", "publish")
    errors = need("huggingface_hub.errors", "publish")
    wait_s = FIRST_WAIT_S
    for _ in range(ATTEMPTS - 1):
        try:
            return call()
        except httpx.TransportError:
            asked_s = 0.0
        except errors.HfHubHTTPError as error:
            if error.response is None or error.response.status_code not in TRANSIENT_STATUS:
                raise
            asked = error.response.headers.get("retry-after", "")
            asked_s = float(asked) if asked.isdecimal() else 0.0
        time.sleep(min(MAX_WAIT_S, max(wait_s, asked_s)))
        wait_s *= 2
    return call()


def _changed(address: str) -> ServerError:
    return ServerError(f"{address}: it changed while it was read", "run the same command again")


@contextlib.contextmanager
def _explained(address: str) -> Iterator[None]:
    """Raise AnnieErrors in place of those of huggingface_hub and httpx."""
    try:
        yield
    except AnnieError:
        raise
    except Exception as error:
        explained = _explain(address, error)
        if explained is None:
            raise
        raise explained from error


def _explain(address: str, error: Exception) -> AnnieError | None:
    """Return the AnnieError for an exception of huggingface_hub or httpx; None for any other."""
    hub = need("huggingface_hub.errors", "publish")
    httpx = need("httpx", "publish")
    log_in = "hf auth login, or set HF_TOKEN"
    known: list[tuple[type[Exception], type[AnnieError], str, str]] = [
        (
            hub.OfflineModeIsEnabled,
            EnvironmentFault,
            "HF_HUB_OFFLINE is set, so nothing can be read",
            "unset HF_HUB_OFFLINE",
        ),
        (
            hub.HFValidationError,
            UsageError,
            "not the name of a repository",
            "write it as hf:OWNER/NAME[@REVISION]",
        ),
        (
            hub.GatedRepoError,
            CheckpointError,
            "gated, and its owner did not give you access",
            f"ask for it on the repository's page, then {log_in}",
        ),
        (
            hub.RepositoryNotFoundError,
            CheckpointError,
            "no such repository, or a private one",
            f"check the name; for a private one {log_in}",
        ),
        (
            hub.RevisionNotFoundError,
            CheckpointError,
            "the repository has no such revision, or no longer",
            "check the revision, and run the command again",
        ),
        (httpx.InvalidURL, UsageError, "not a URL", "write it as https://HOST/FOLDER"),
    ]
    for kind, explained, problem, hint in known:
        if isinstance(error, kind):
            return explained(f"{address}: {problem}", hint)
    if isinstance(error, hub.HfHubHTTPError):
        status = error.response.status_code if error.response is not None else "an error"
        return ServerError(f"{address}: the server answers {status}", "try again later")
    if isinstance(error, httpx.HTTPError):
        reason = str(error).partition("\n")[0] or type(error).__name__
        return ServerError(f"{address}: cannot be read ({reason})", "check the address")
    return None
