"""A Hugging Face Hub on this machine: repositories, LFS uploads in one part or several, commits, and transfers that break.

Only what huggingface_hub's large-folder upload asks of it; a file is in `committed` when a commit that names it arrived.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


def card_faults(text: str) -> list[str]:
    """What the Hub's documented rules for a model card's metadata find wrong."""
    import yaml

    parts = text.split("---\n")
    data = yaml.safe_load(parts[1]) if text.startswith("---\n") and len(parts) > 2 else None
    if not isinstance(data, dict):
        return ["no metadata block"]
    faults = []
    tags = data.get("tags")
    if not (isinstance(tags, list) and all(isinstance(t, str) and t for t in tags)):
        faults.append("tags must be a list of strings")
    for key in ("base_model", "license", "library_name", "pipeline_tag"):
        if key in data and not isinstance(data[key], str):
            faults.append(f"{key} must be a string")
    if data.get("base_model", "").count("/") != 1:
        faults.append("base_model must be OWNER/NAME")
    if data.get("base_model_relation", "quantized") not in (
        "adapter",
        "merge",
        "quantized",
        "finetune",
    ):
        faults.append("base_model_relation is unknown")
    for model in data.get("model-index") or ():
        for result in model["results"]:
            faults += [
                f"a result lacks {k}" for k in ("task", "dataset", "metrics") if k not in result
            ]
            faults += [
                "a metric lacks its value"
                for m in result["metrics"]
                if "value" not in m or "type" not in m
            ]
    return faults


class FakeHub:
    """Start with `with FakeHub() as hub`. `break_puts`: how many coming transfers are cut in the middle; -1: all of them.

    `requests`: (method, path) of everything asked. `stored`: LFS objects by SHA-256. `committed`: {repo: {path: bytes}}.
    """

    def __init__(self, part_bytes: int | None = None) -> None:
        self.part_bytes = part_bytes
        self.break_puts = 0
        self.status = 0  # answer everything with this status instead
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str] = set()
        self.put_bytes: dict[str, int] = {}
        self.stored: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.repos: dict[str, dict[str, Any]] = {}
        self.committed: dict[str, dict[str, bytes]] = {}
        self.lock = threading.Lock()

    def __enter__(self) -> FakeHub:
        self.server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self})
        )
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def puts(self) -> int:
        return sum(method == "PUT" for method, _ in self.requests)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        self.end_headers()
        self.wfile.write(content)

    def content(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def record_request(self) -> str:
        path = urlsplit(self.path).path
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
            self.hub.tokens.add(self.headers.get("authorization", ""))
        return path

    def do_GET(self) -> None:
        path = self.record_request()
        if self.hub.status:
            self.answer({"error": "no"}, self.hub.status)
        elif path.startswith("/api/models/"):
            repo = "/".join(path.split("/")[3:5])
            if repo not in self.hub.repos:
                self.answer({"error": "Repository not body"}, 404, {"X-Error-Code": "RepoNotFound"})
            elif "/commits/" in path:
                self.answer([])
            else:
                files = self.hub.committed[repo]
                self.answer(
                    {
                        "id": repo,
                        "private": self.hub.repos[repo]["private"],
                        "siblings": [{"rfilename": n, "size": len(c)} for n, c in files.items()],
                        "tags": [],
                        "downloads": 0,
                    }
                )
        else:
            self.answer({"error": f"unexpected {path}"}, 404)

    def do_POST(self) -> None:
        path, content = self.record_request(), self.content()
        if self.hub.status:
            self.answer({"error": "no"}, self.hub.status)
        elif path == "/api/repos/create":
            self.create(json.loads(content))
        elif path == "/api/validate-yaml":
            faults = card_faults(json.loads(content)["content"])
            self.answer(
                {"errors": [{"message": f} for f in faults], "warnings": []}, 400 if faults else 200
            )
        elif "/preupload/" in path:
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["size"] > 20_000 else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(content)["files"]
            ]
            self.answer({"files": modes})
        elif path.endswith("/info/lfs/objects/batch"):
            self.answer(
                {
                    "transfer": "basic",
                    "objects": [self.offer(o) for o in json.loads(content)["objects"]],
                }
            )
        elif path.startswith("/complete/"):
            oid = path.rsplit("/", 1)[1]
            whole = b"".join(v for (o, _), v in sorted(self.hub.parts.items()) if o == oid)
            self.keep(oid, whole)
            self.answer({})
        elif "/commit/" in path:
            self.commit(path, content)
        else:
            self.answer({"error": f"unexpected {path}"}, 404)

    def create(self, request: dict[str, Any]) -> None:
        repo = f"{request.get('organization') or 'me'}/{request['name']}"
        known = repo in self.hub.repos
        if not known:
            private = bool(request.get("private") or request.get("visibility") == "private")
            self.hub.repos[repo] = {"private": private}
            self.hub.committed[repo] = {}
        self.answer(
            {"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo}, 409 if known else 200
        )

    def offer(self, request: dict[str, Any]) -> dict[str, Any]:
        oid, size = request["oid"], request["size"]
        offered: dict[str, Any] = {"oid": oid, "size": size}
        if oid in self.hub.stored:
            return offered
        upload: dict[str, Any] = {"href": f"{self.hub.url}/put/{oid}"}
        step = self.hub.part_bytes
        if step and size > step:
            numbers = range(1, -(-size // step) + 1)
            upload["href"] = f"{self.hub.url}/complete/{oid}"
            urls = {f"{n:05d}": f"{self.hub.url}/put/{oid}?part={n}" for n in numbers}
            upload["header"] = {"chunk_size": str(step)} | urls
        return offered | {"actions": {"upload": upload}}

    def do_PUT(self) -> None:
        path = self.record_request()
        oid = path.rsplit("/", 1)[1]
        with self.hub.lock:
            broken = self.hub.break_puts != 0
            self.hub.break_puts -= self.hub.break_puts > 0
        if broken:
            self.rfile.read(min(1000, int(self.headers["Content-Length"])))
            self.connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )  # RST, not FIN
            self.close_connection = True
            self.connection.close()
            return
        content = self.content()
        with self.hub.lock:
            self.hub.put_bytes[oid] = self.hub.put_bytes.get(oid, 0) + len(content)
        part = parse_qs(urlsplit(self.path).query).get("part")
        if part:
            self.hub.parts[oid, int(part[0])] = content
        else:
            self.keep(oid, content)
        self.answer({}, headers={"ETag": '"x"'})

    def keep(self, oid: str, content: bytes) -> None:
        assert hashlib.sha256(content).hexdigest() == oid, "what arrived is not what was announced"
        self.hub.stored[oid] = content

    def commit(self, path: str, content: bytes) -> None:
        repo = "/".join(path.split("/")[3:5])
        for line in content.splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "file":
                self.hub.committed[repo][value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    self.answer({"error": "LFS pointer to nothing"}, 400)
                    return
                self.hub.committed[repo][value["path"]] = self.hub.stored[value["oid"]]
        digest = hashlib.sha1(content).hexdigest()
        self.answer(
            {
                "success": True,
                "commitUrl": f"{self.hub.url}/{repo}/commit/{digest}",
                "commitOid": digest,
            }
        )
