"""Checks of Docker for the serving recipes: the group, the NVIDIA runtime, images, and running servers."""

from __future__ import annotations

import json
from typing import Any

from annie_quant.doctor.probe import Finding, Probe, fault, note, ok
from annie_quant.serve.known_errors import PARSER_FLAGS
from annie_quant.serve.recipes import load_recipes

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


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
    info = _json_object(answer.text)
    findings = [ok("docker", str(info.get("ServerVersion") or "responds"))]
    if probe.which("nvidia-smi") and "nvidia" not in (info.get("Runtimes") or {}):
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
        inspected = _json_object(answer.text)
        digest = ((inspected.get("RepoDigests") or [""])[0].partition("@")[2] or "no digest")[:19]
        expected = ARCHITECTURES.get(probe.machine(), probe.machine())
        actual = inspected.get("Architecture") or expected
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


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


CHECKS = (check_docker,)
