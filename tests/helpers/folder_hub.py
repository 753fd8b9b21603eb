"""A server that offers folders as repositories of a Hugging Face Hub, and as plain HTTP folders; shards come from a second host.

It speaks what the Hub documents: /api/models/NAME/revision/REVISION?blobs=true, /NAME/resolve/COMMIT/FILE with ranges, a
redirect to another host for large files, and X-Error-Code. Files are read from disk, so sparse files cost no space.
"""

from __future__ import annotations

import html
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

PIECE = 1 << 16


class FolderHub:
    """Start with `with FolderHub() as hub`.

    commits: repository → commit → folder; heads: repository → its newest commit.
    folders: name → folder, at {url}/folder/NAME/.  lists: whether such a folder has a page with links.
    gated: repositories whose files need the token.  statuses: end of a path → the statuses of its next answers.
    cuts: end of a path → how many answers break after half of their bytes.  ranges: whether ranges are honoured.
    before: called with the path of every request.
    sent: path → bytes of content sent.  asked: (server, path, Authorization) of every request.
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Path]] = {}
        self.heads: dict[str, str] = {}
        self.folders: dict[str, Path] = {}
        self.lists = True
        self.gated: set[str] = set()
        self.gated_status = 401
        self.statuses: dict[str, list[int]] = {}
        self.cuts: Counter[str] = Counter()
        self.ranges = True
        self.before: Callable[[str], object] = lambda path: None
        self.sent: Counter[str] = Counter()
        self.asked: list[tuple[str, str, str]] = []
        self.lock = threading.Lock()

    def add(self, name: str, folder: Path, commit: str = "") -> str:
        """Add a commit to a repository, and return it."""
        commits = self.commits.setdefault(name, {})
        commit = commit or f"{len(commits):040x}"
        commits[commit] = folder
        self.heads[name] = commit
        return commit

    def __enter__(self) -> FolderHub:
        self.servers = {}
        for role, host in (("hub", "127.0.0.1"), ("store", "127.0.0.2")):
            handler = type("Handler", (_Handler,), {"hub": self, "role": role})
            server = ThreadingHTTPServer((host, 0), handler)
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            self.servers[role] = server
        self.url = f"http://127.0.0.1:{self.servers['hub'].server_port}"
        self.store_url = f"http://127.0.0.2:{self.servers['store'].server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers.values():
            server.shutdown()
            server.server_close()

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]


class _Handler(BaseHTTPRequestHandler):
    hub: FolderHub
    role: str
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        hub = self.hub
        with hub.lock:
            hub.asked.append((self.role, path, self.headers.get("Authorization", "")))
            waiting = [s for end, s in hub.statuses.items() if path.endswith(end) and s]
            status = waiting[0].pop(0) if waiting else 0
        hub.before(path)
        if status:
            self.answer(status, Retry_After="0")
        elif path.startswith("/api/models/"):
            self.describe(path.removeprefix("/api/models/"))
        elif path.startswith("/folder/"):
            name, _, file = path.removeprefix("/folder/").partition("/")
            self.offer(path, hub.folders.get(name), file)
        else:
            self.resolve(path)

    def describe(self, path: str) -> None:
        name, _, revision = path.partition("/revision/")
        commits = self.hub.commits.get(name)
        if commits is None:
            self.answer(401, X_Error_Code="RepoNotFound")
            return
        commit = self.hub.heads[name] if revision in ("", "main") else revision
        if commit not in commits:
            self.answer(404, X_Error_Code="RevisionNotFound")
            return
        folder = commits[commit]
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        siblings = [
            {"rfilename": file.relative_to(folder).as_posix(), "size": file.stat().st_size}
            for file in files
        ]
        content = json.dumps({"id": name, "sha": commit, "siblings": siblings, "tags": []})
        self.answer(200, content.encode(), Content_Type="application/json")

    def resolve(self, path: str) -> None:
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        name, commit, file = match.groups() if match else ("", "", "")
        commits = self.hub.commits.get(name, {})
        commit = self.hub.heads[name] if commit == "main" else commit
        if name in self.hub.gated and self.role == "hub" and not self.headers.get("Authorization"):
            self.answer(self.hub.gated_status, X_Error_Code="GatedRepo")
        elif commit not in commits:
            self.answer(404, X_Error_Code="RevisionNotFound")
        elif self.role == "hub" and file.endswith(".safetensors"):
            self.answer(302, Location=f"{self.hub.store_url}{quote(path)}")
        else:
            self.offer(path, commits[commit], file)

    def offer(self, path: str, folder: Path | None, file: str) -> None:
        """Send a file, a range of it, or a page of links."""
        target = folder / file if folder else None
        if target and target.is_dir() and self.hub.lists:
            names = [f.name + "/" * f.is_dir() for f in sorted(target.iterdir())]
            links = [f'<a href="{quote(name)}">{html.escape(name)}</a>' for name in ("../", *names)]
            self.answer(200, "\n".join(links).encode(), Content_Type="text/html")
        elif target is None or not target.is_file():
            self.answer(404, X_Error_Code="EntryNotFound")
        else:
            self.send(path, target)

    def send(self, path: str, file: Path) -> None:
        size = file.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = 0, size
        if wanted and self.hub.ranges:
            begin, end = int(wanted[1]), min(size, int(wanted[2]) + 1)
        if begin >= size > 0 or (wanted and self.hub.ranges and size == 0):
            self.answer(416, Content_Range=f"bytes */{size}")
            return
        self.send_response(206 if wanted and self.hub.ranges else 200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("ETag", f'"{file.stat().st_mtime_ns}-{size}"')
        if wanted and self.hub.ranges:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.end_headers()
        with self.hub.lock:
            cut = next((c for c in self.hub.cuts if path.endswith(c) and self.hub.cuts[c] > 0), "")
            self.hub.cuts[cut] -= 1 if cut else 0
        last = (begin + end) // 2 if cut else end
        with file.open("rb") as source:
            source.seek(begin)
            while begin < last:
                piece = source.read(min(PIECE, last - begin))
                try:
                    self.wfile.write(piece)
                except OSError:  # the reader has enough
                    self.close_connection = True
                    return
                begin += len(piece)
                with self.hub.lock:
                    self.hub.sent[path] += len(piece)
        if cut:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
