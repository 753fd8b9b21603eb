"""Checks of Docker for the serving recipes: the group, the NVIDIA runtime, images, and running servers."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from annie_quant.doctor.probe import Finding, Probe, fault, note, ok
from annie_quant.schema import salvage_line
from annie_quant.serve.known_errors import PARSER_FLAGS
from annie_quant.serve.recipes import load_recipes

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class DockerInfo(msgspec.Struct, rename="pascal"):
    """`docker info`."""

    server_version: str | None = None
    runtimes: dict[str, object] | None = None


class Image(msgspec.Struct, rename="pascal"):
    """`docker image inspect`."""

    repo_digests: list[str] | None = None
    architecture: str | None = None


T = TypeVar("T")


def check_docker(probe: Probe) -> list[Finding]:
    if probe.which("docker") is None:
        why = "vLLM and SGLang recipes run in containers; llama.cpp and the recipe `cpu` do not"
        return [note("docker", "not installed", why, "https://docs.docker.com/engine/install")]
    answer = probe.run("docker", "info", "--format", "{{json .}}")
    if answer.code != 0:
        if "permission denied" in answer.text.lower():
            fix = "sudo usermod -aG docker $USER, then log in again"
            return [fault("docker", "this user may not use docker", "recipes would need sudo", fix)]
        message = (answer.first_line or "no answer")[:160]
        return [note("docker", message, "no container can be started", "sudo systemctl start docker")]
    info = _decode(DockerInfo, answer.text)
    findings = [ok("docker", info.server_version or "responds")]
    if probe.which("nvidia-smi") and "nvidia" not in (info.runtimes or ()):
        findings.append(
            fault(
                "docker's NVIDIA runtime",
                "not configured",
                "containers would not have the GPU",
                "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
            )
        )
    return [*findings, *_check_images(probe), *_check_servers(probe)]


def _check_images(probe: Probe) -> list[Finding]:
    """Local copies of the recipes' images: their processor and digest."""
    findings = []
    recipes = [recipe for runtime in ("vllm", "sglang") for recipe in load_recipes(runtime).values()]
    for image in sorted({recipe.image for recipe in recipes if recipe.image}):
        answer = probe.run("docker", "image", "inspect", image, "--format", "{{json .}}")
        if answer.code != 0:
            continue
        inspected = _decode(Image, answer.text)
        digest = ((inspected.repo_digests or [""])[0].partition("@")[2] or "no digest")[:19]
        expected = ARCHITECTURES.get(probe.machine(), probe.machine())
        actual = inspected.architecture or expected
        if actual != expected:
            message = f"{image} is for {actual}, this machine is {expected}"
            fix = f"docker pull --platform linux/{expected} {image}"
            findings.append(fault("image", message, "it would not start", fix))
        else:
            findings.append(ok("image", f"{image} {digest}"))
    return findings


def _check_servers(probe: Probe) -> list[Finding]:
    """Running vLLM and SGLang containers: without parsers, tool calls fail with HTTP 400 or are returned as text."""
    answer = probe.run("docker", "ps", "--no-trunc", "--format", "{{.Names}}\t{{.Image}}\t{{.Command}}")
    findings = []
    for line in answer.text.splitlines() if answer.code == 0 else ():
        name, image, command = [*line.split("\t"), "", ""][:3]
        if not any(server in image for server in ("vllm", "sglang")):
            continue
        flags = ["--reasoning-parser", "--tool-call-parser"]
        flags += ["--enable-auto-tool-choice"] if "vllm" in image else []
        missing = [flag for flag in flags if flag not in command]
        if missing:
            message = f"the server {name} runs without {', '.join(missing)}"
            why = "tool calls fail with HTTP 400 or are in the text, thinking leaks: a fault of the server, not of the model"
            findings.append(fault("parsers", message, why, f"start it with {PARSER_FLAGS}"))
        else:
            findings.append(ok("parsers", f"the server {name} has them"))
    return findings


def _decode(kind: type[T], text: str) -> T:
    """Return the program's JSON output, or kind() for any other output."""
    try:
        return salvage_line(kind, text.encode())
    except (ValueError, msgspec.MsgspecError):
        return kind()


CHECKS = (check_docker,)
