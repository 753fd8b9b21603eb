"""A TLS server's certificate, made once per session."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a key and a certificate of localhost and 127.0.0.1."""
    if not shutil.which("openssl"):
        pytest.skip("the openssl command makes the test's certificate, and it is not installed")
    key, path = (tmp_path_factory.mktemp("tls") / name for name in ("key.pem", "both.pem"))
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        *names,
        "-keyout",
        key,
        "-out",
        path,
    ]
    subprocess.run(command, capture_output=True, check=True)
    path.write_text(path.read_text() + key.read_text())
    return path


@pytest.fixture(scope="session")
def tls_server(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context
