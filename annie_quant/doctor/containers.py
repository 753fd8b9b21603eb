"""Docker as the serving recipes need it: the group, the NVIDIA runtime, the image, its processor and its transformers."""

from __future__ import annotations

import json

from annie_quant.doctor.probe import Finding, Probe, finding
from annie_quant.files import read_json
from annie_quant.serve.recipes import RECIPES

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def check_docker(probe: Probe) -> list[Finding]:
    if probe.which("docker") is None:
        why = "vLLM and SGLang recipes run in containers; llama.cpp and `--use cpu` do not"
        return [finding("note", "docker", "not installed", why, "https://docs.docker.com/engine/install")]
    asked = probe.run("docker", "info", "--format", "{{json .}}")
    if asked.code != 0:
        said = (asked.text.splitlines() or ["no answer"])[0]
        if "permission denied" in asked.text.lower():
            mend = "sudo usermod -aG docker $USER, then log in again"
            return [finding("fault", "docker", "this user may not use docker", "recipes would need sudo", mend)]
        return [finding("note", "docker", said[:160], "no container can be started", "sudo systemctl start docker")]
    info = _json(asked.text)
    found = [finding("ok", "docker", str(info.get("ServerVersion") or "answers"))]
    if probe.which("nvidia-smi") and "nvidia" not in (info.get("Runtimes") or {}):
        found.append(
            finding(
                "fault",
                "docker's NVIDIA runtime",
                "not configured",
                "containers would not see the GPU",
                "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
            )
        )
    return [*found, *_images(probe), *_servers(probe)]


def _images(probe: Probe) -> list[Finding]:
    """Which of the recipes' images are here, for which processor, with which digest."""
    found = []
    wanted = {
        r["image"] for name in ("vllm", "sglang") for r in read_json(RECIPES / f"{name}.json").values() if "image" in r
    }
    for image in sorted(wanted):
        asked = probe.run("docker", "image", "inspect", image, "--format", "{{json .}}")
        if asked.code != 0:
            continue
        known = _json(asked.text)
        digest = ((known.get("RepoDigests") or [""])[0].partition("@")[2] or "no digest")[:19]
        own = ARCHITECTURES.get(probe.machine(), probe.machine())
        if known.get("Architecture") not in (None, own):
            seen = f"{image} is for {known['Architecture']}, this machine is {own}"
            found.append(
                finding("fault", "image", seen, "it would not start", f"docker pull --platform linux/{own} {image}")
            )
        else:
            found.append(finding("ok", "image", f"{image} {digest}"))
    return found


def _servers(probe: Probe) -> list[Finding]:
    """Running vLLM and SGLang containers without the parsers: tool calls would come back as HTTP 400 or as text."""
    asked = probe.run("docker", "ps", "--no-trunc", "--format", "{{.Names}}\t{{.Image}}\t{{.Command}}")
    found = []
    for line in asked.text.splitlines() if asked.code == 0 else ():
        name, image, command = [*line.split("\t"), "", ""][:3]
        if not any(word in image for word in ("vllm", "sglang")):
            continue
        wanted = ["--reasoning-parser", "--tool-call-parser"]
        wanted += ["--enable-auto-tool-choice"] if "vllm" in image else []
        missing = [flag for flag in wanted if flag not in command]
        if missing:
            found.append(
                finding(
                    "fault",
                    "parsers",
                    f"the server {name} runs without {', '.join(missing)}",
                    "tool calls fail with HTTP 400 or stand in the text, thinking leaks: not the model's fault",
                    "start it with --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder",
                )
            )
        else:
            found.append(finding("ok", "parsers", f"the server {name} has them"))
    return found


def _json(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


CHECKS = (check_docker,)
