"""Checks of Docker for the serving recipes: the group, the NVIDIA runtime, and running servers."""

from __future__ import annotations

import msgspec

from annie_quant.doctor.probe import Finding, Probe, fault, note, ok
from annie_quant.schema import salvage_line
from annie_quant.serve.known_errors import PARSER_FLAGS


class DockerInfo(msgspec.Struct, rename="pascal"):
    """`docker info`."""

    server_version: str | None = None
    runtimes: dict[str, object] | None = None


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
    try:
        info = salvage_line(DockerInfo, answer.text.encode())
    except (ValueError, msgspec.MsgspecError):
        info = DockerInfo()
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
    return [*findings, *_check_servers(probe)]


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


CHECKS = (check_docker,)
