"""The question about two images: answers of servers that see them, do not see them, and refuse them."""

from __future__ import annotations

import base64
import io
import json

import pytest
from command_line import annie_quant
from fake_server import FakeServer, Script, words

from annie_quant.core.errors import ServerError, UsageError
from annie_quant.ops.server_checks import check_images

Image = pytest.importorskip("PIL.Image", reason="Pillow decodes the PNG: pip install pillow")


def picture(body: dict):
    """Return the request's image, decoded by Pillow; None for a message of text."""
    content = body["messages"][0]["content"]
    if isinstance(content, str):
        return None
    kinds = {part["type"]: part for part in content}
    url = kinds["image_url"]["image_url"]["url"]
    assert kinds["text"]["text"] and url.startswith("data:image/png;base64,")
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def sees(body: dict) -> Script:
    image = picture(body)
    if image is None:
        return words("yes")
    image.load()
    assert image.size == (64, 64) and image.mode == "RGB"
    colours = image.getcolors()
    assert len(colours) == 1
    return words({(255, 0, 0): "Red.", (0, 0, 255): "It is blue"}[colours[0][1]])


def refuses(body: dict) -> Script:
    if picture(body) is None:
        return words("yes")
    return Script(status=400, error="At most 0 image(s) may be provided in one prompt.")


# what the server does → (answer, level, a part of the message)
SERVERS = {
    "sees": (sees, "ok", "names the colours of two images"),
    "refuses": (refuses, "note", "refuses a message with an image: HTTP 400: At most 0 image"),
    "the same answer": (lambda body: words("red"), "fault", "the answer is the same for two images"),
    "no answer": (lambda body: words(""), "fault", "the answer is the same for two images"),
    "the other colour": (
        lambda body: words("Blue" if sees(body).content[0] == "Red." else "Red"), "fault", "another colour than an image has",
    ),
    "every colour": (
        lambda body: words("red or blue") if sees(body).content[0] == "Red." else words("blue or red"), "fault",
        "another colour than an image has",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("style", ["llama.cpp", "vllm"])
def test_each_server_gets_its_finding(name: str, style: str) -> None:
    answer, level, message = SERVERS[name]
    with FakeServer(answer, style=style) as server:
        finding = check_images(f"{server.url}/v1")
    assert (finding.check, finding.level) == ("images", level), finding
    assert message in finding.message
    assert len(server.bodies) == 3 and all(b["model"] == "fake" for b in server.bodies)


def test_a_server_that_fails_without_images_too_is_not_blamed_on_them() -> None:
    failing = FakeServer(lambda body: Script(status=500, error="out of memory"))
    with failing as server, pytest.raises(ServerError, match="without an image: HTTP 500"):
        check_images(server.url)
    with pytest.raises(ServerError, match="does not answer"):
        check_images(server.url)
    with pytest.raises(UsageError, match="not an HTTP URL"):
        check_images("file:///etc/passwd")


def test_the_command_prints_the_finding_and_its_exit_code() -> None:
    for name, code in (("sees", 0), ("refuses", 0), ("the same answer", 3)):
        with FakeServer(SERVERS[name][0]) as server:
            done = annie_quant("doctor", "--server", server.url, "--images", "--json")
        assert done.returncode == code, done.stderr
        assert json.loads(done.stdout)["findings"][0]["level"] == SERVERS[name][1]
    alone = annie_quant("doctor", "--images")
    assert alone.returncode == 2 and "--images needs --server" in alone.stderr
