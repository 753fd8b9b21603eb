"""Secrets of many forms stop an upload; checksums, prompts and addresses do not."""

from __future__ import annotations

import base64
import json
import struct

import pytest

from annie_quant.core.secrets import readings, secret_in

JWT = ".".join(
    base64.urlsafe_b64encode(part).decode().rstrip("=")
    for part in (b'{"alg":"HS256"}', b'{"sub":"1234567890"}', b"x" * 32)
)
# Put together here, so that no scanner takes this file for a leak.
SECRETS = {
    "Hugging Face": "hf_" + "a1B2" * 9,
    "private key": "-----BEGIN RSA PRIVATE" + " KEY-----",
    "API key": "sk-" + "proj-a1B2c3" * 3,
    "GitHub": "ghp_" + "a1B2" * 9,
    "AWS": "AKIA" + "ABCDEFGHIJKLMNOP",
    "authorization": "Authorization: Bearer " + "a1B2c3d4" * 3,
    "Google": "AIza" + "a1B2c3d" * 5,
    "Slack": "xoxb-" + "1234567890-abcdefghij",
    "NVIDIA": "nvapi-" + "a1B2c3d4_-" * 6,
    "GitLab": "glpat-" + "a1B2c3d4" * 3,
    "web token": JWT,
    "URL": "https://annie:" + "hunter22@example.com/v1",
}
HARMLESS = [
    "sha256 " + "0123456789abcdef" * 4, "https://example.com/v1?x=1", "mailto:a@b.c", "ask-me-anything-about-the-token", "http://[::1]:8000/v1",
    "user:pass is not a URL", "AIzawa is a town", "the password is hunter22", "http://a/b:c/d@e",
]  # fmt: skip


@pytest.mark.parametrize("kind", SECRETS)
@pytest.mark.parametrize(
    "form", ["utf-8", "utf-16", "utf-16-be", "odd utf-16", "escaped", "safetensors"]
)
def test_each_kind_in_each_form(tmp_path, kind, form):
    text = f'{{"a": "x", "b": "{SECRETS[kind]}", "c": 1}}'
    path = tmp_path / ("model.safetensors" if form == "safetensors" else "config.json")
    content = {
        "utf-8": text.encode(),
        "utf-16": text.encode("utf-16"),
        "utf-16-be": text.encode("utf-16-be"),
        "odd utf-16": b"x" + text.encode("utf-16-le"),
        "escaped": "".join(f"\\u{ord(c):04x}" if c.isalnum() else c for c in text).encode(),
        "safetensors": struct.pack("<Q", len(text)) + text.encode() + b"\0" * 100,
    }[form]
    path.write_bytes(content)
    assert secret_in(path)


def test_other_text_passes(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(json.dumps({"text": line}) for line in HARMLESS))
    assert secret_in(path) == ""
    path.write_bytes(bytes(range(256)) * 200)
    assert secret_in(path) == ""


def test_weights_are_not_text(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2) + b"{}" + SECRETS["Slack"].encode())
    assert secret_in(path) == ""


def test_escapes_are_decoded_once():
    assert list(readings(b"\\u0041\\u0042")) == ["\\u0041\\u0042", "AB"]


def test_the_kept_rule_set_is_used_where_it_is_installed(tmp_path):
    pytest.importorskip("detect_secrets", reason="the publish extra is not installed")
    path = tmp_path / "config.json"
    path.write_text(
        "SG." + "a1B2c3d4e5F6g7H8i9J0kl" + "." + "a1B2c3d4e5F6g7H8i9J0k1L2m3N4o5P6q7R8s9T0u1V"
    )
    assert "SendGrid" in secret_in(path)
