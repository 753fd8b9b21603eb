"""Where this system keeps the certificates that it trusts: a wheel's libcurl was built on another one, and cannot know."""

from __future__ import annotations

import os
from pathlib import Path

# The systems' own packages (ca-certificates) put their bundle at one of these.
PLACES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, DGX OS, Arch, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL and those that are built from it
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Fedora without its old links
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/ssl/cert.pem",  # macOS, the BSDs
)


def system_ca_file() -> str | None:
    """SSL_CERT_FILE where it is set, as for OpenSSL and Python; else the system's bundle; else None: libcurl's own choice."""
    named = os.environ.get("SSL_CERT_FILE")
    return named or next((place for place in PLACES if Path(place).is_file()), None)
