"""Check an installed annie-quant in a minute, without a checkout, torch or pytest: version, codec, client, commands.

    python tools/try_install.py            for any installation with libcurl
    python tools/try_install.py --wheel    also for a wheel: it contains its libraries and their licences

cibuildwheel runs it on every wheel. Run it by hand after an installation on a new kind of machine.
"""

from __future__ import annotations

import http.server
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np


class Server(http.server.BaseHTTPRequestHandler):
    """Three events of an OpenAI-compatible stream, 20 ms apart."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for text in ("Good", " morning", ""):
            delta = {"delta": {"content": text}, "finish_reason": None if text else "stop"}
            self.wfile.write(f"data: {json.dumps({'choices': [delta]})}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.02)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


def codec(aq) -> str:
    """All E2M1 values times their block's scale are recovered exactly, in all variants of this processor."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    row = np.concatenate([values, -values])  # a block whose amax is 6
    weight = np.stack([row * 2.0**k for k in range(-3, 4)] * 64)
    for name in aq.nvfp4.variants():
        aq.nvfp4.set_variant(name)
        unpacked = aq.nvfp4.unpack(aq.nvfp4.pack(weight, tensor_scale=1.0), dtype="float32")
        assert np.array_equal(unpacked, weight), f"{name}: values are not recovered"
        rows = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
        error = np.abs(aq.kquant.dequantize(aq.kquant.quantize(rows, "Q8_0"), "Q8_0") - rows).max()
        assert error < np.abs(rows).max() / 127, f"{name}: Q8_0 has an error of {error}"
    aq.nvfp4.set_variant("auto")
    return "codec: " + ", ".join(aq.nvfp4.variants())


def client(aq) -> str:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    request = aq.stream.chat(
        f"http://127.0.0.1:{server.server_port}", "m", [{"role": "user", "content": "hello"}]
    )
    (record,) = aq.stream.run([request]).records()
    server.shutdown()
    assert record["error"] is None and record["text"] == "Good morning", record
    assert 0 < record["first_content_ms"] < record["e2e_ms"], record
    return f"client: 3 events, the first after {record['first_content_ms']:.2f} ms"


def wheel(aq) -> str:
    package = Path(aq.__file__).parent
    libraries = sorted(f.name for f in (package.parent / "annie_quant.libs").iterdir())
    unknown = [name for name in libraries if not name.startswith("libcurl")]
    assert not unknown, f"in the wheel without a licence in csrc/licences: {unknown}"
    files = [str(f) for f in importlib.metadata.files("annie-quant") or ()]
    for licence in ("LICENSE", "README.txt", "curl.txt", "nghttp2.txt"):
        assert any(f.endswith(f"/{licence}") and ".dist-info/" in f for f in files), (
            f"no {licence} in the wheel"
        )
    return f"contains {', '.join(libraries)} and their licences"


def main() -> None:
    import annie_quant as aq

    large = [m for m in ("torch", "scipy", "click", "transformers") if m in sys.modules]
    assert not large, f"importing annie_quant imported {large}"
    command = [sys.executable, "-m", "annie_quant"]
    info = json.loads(
        subprocess.run(
            [*command, "--version", "--json"], capture_output=True, text=True, check=True
        ).stdout
    )
    assert info["version"] == importlib.metadata.version("annie-quant"), info["version"]
    print(
        subprocess.run(
            [*command, "--version", "--verbose"], capture_output=True, text=True, check=True
        ).stdout
    )
    if "free-threaded" in info["python"]:
        aq.nvfp4, aq.stream.run([])
        assert not sys._is_gil_enabled(), "a C module enabled the GIL"
    for check in (codec, client, *((wheel,) if "--wheel" in sys.argv[1:] else ())):
        print(check(aq))
    tiny = Path(aq.__file__).parent / "assets/tiny-annie"
    quantize = ["quantize", "--strategy", "direct", "--model", str(tiny), "--output"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, *quantize, f"{folder}/nvfp4"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        audited = subprocess.run(
            [*command, "audit", f"{folder}/nvfp4", "--source", str(tiny)],
            capture_output=True,
            text=True,
        )
        assert audited.returncode == 0, audited.stderr
    print("quantize direct and audit: " + done.stderr.strip().splitlines()[-1].split(": ", 1)[-1])
    print("ok")


if __name__ == "__main__":
    main()
