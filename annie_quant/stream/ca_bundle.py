"""Location of this system's trusted certificates. A wheel's libcurl was built on another system and cannot know it."""

from __future__ import annotations

import os
from pathlib import Path

# The package ca-certificates of each distribution installs its bundle at one of these paths.
PATHS = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, DGX OS, Arch, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL and its derivatives
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Fedora without its old links
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/ssl/cert.pem",  # macOS, the BSDs
)


def system_ca_file() -> str | None:
    """Return SSL_CERT_FILE (as OpenSSL and Python do), else the system's bundle, else None for libcurl's own default."""
    return os.environ.get("SSL_CERT_FILE") or next((path for path in PATHS if Path(path).is_file()), None)
