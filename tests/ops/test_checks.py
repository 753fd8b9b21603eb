"""The doctor on other machines: answers of nvidia-smi and docker, and memory, as public documents show them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from annie_quant.core import host
from annie_quant.core.errors import UsageError
from annie_quant.ops import doctor
from annie_quant.ops.doctor import Output, Probe

SPARK_MEMORY = host.Memory(125_513_064 << 10, 118_000_000 << 10, 9_000_000 << 10)
VLLM_IMAGE = "vllm/vllm-openai:cu130-nightly"
SERVER = (
    'annie\tvllm/vllm-openai:cu130-nightly\t"python3 -m vllm.entrypoints.openai.api_server --model /model '
    '--reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder"'
)


class Machine(Probe):
    """A machine with fixed answers. answers: {first words of a command: Output or text}."""

    def __init__(self, answers=None, **facts):
        self.answers = {
            k: v if isinstance(v, Output) else Output(0, v) for k, v in (answers or {}).items()
        }
        self.facts = facts
        self.home = facts.get("home", Path("/nowhere"))

    def run(self, *command, timeout_s=20.0):
        line = " ".join(command)
        known = [key for key in self.answers if key in line]
        return self.answers[max(known, key=len)] if known else Output(127, "")

    def which(self, program):
        return (
            f"/usr/bin/{program}"
            if any(key.split()[0] == program for key in self.answers)
            else None
        )

    def memory(self):
        return self.facts.get("memory", SPARK_MEMORY)

    def machine(self):
        return self.facts.get("machine", "aarch64")

    def python(self):
        return self.facts.get("python", (3, 12, 3))

    def in_venv(self):
        return self.facts.get("venv", True)

    def externally_managed(self):
        return self.facts.get("managed", True)

    def installed(self, module):
        return module not in self.facts.get("missing", ())

    def version(self, distribution):
        return "1.0"

    def disk_free(self, path="."):
        return self.facts.get("disk", 10**12)

    def writable(self, path):
        return self.facts.get("writable", True)

    def env(self, name):
        return {"HF_TOKEN": "hf_secret", "HF_HOME": str(self.home)}.get(name)

    def gpu_product(self):
        return self.facts.get("product", (220e9, (2400.0, 60.0, None)))

    def torch_cuda_version(self):
        return self.facts.get("cuda", "13.0")


def spark(**changes):
    answers = {
        "nvidia-smi --query-gpu=name,compute_cap": "NVIDIA GB10, 12.1, 580.95.05",
        "nvidia-smi --query-gpu=name --format": "NVIDIA GB10",
        "nvidia-smi --query-compute-apps": "",
        "nvcc --version": "Cuda compilation tools, release 13.0, V13.0.88",
        "validate-gpu": "{}",
        "docker info": json.dumps(
            {"ServerVersion": "28.3.3", "Runtimes": {"nvidia": {}, "runc": {}}}
        ),
        "docker ps": SERVER,
    }
    return Machine(answers | changes.pop("answers", {}), **changes)


def levels(findings, level):
    return {f.check: f for f in findings if f.level == level}


@pytest.mark.parametrize(
    ("product", "level", "text"),
    [
        ((220e9, (2400.0, 60.0, None)), "ok", "220 GB/s, 2400 MHz"),
        ((70e9, (2190.0, 60.0, None)), "note", "70 GB/s, 2190 MHz, 30% of a healthy NVIDIA GB10"),
        ((220e9, (890.0, 60.0, "software power cap")), "note", "limits the clock: software power"),
        ((200e9, (890.0, 60.0, None)), "note", "890 MHz, 86% of a healthy NVIDIA GB10"),
        (None, "note", "not checked, our kernel does not run here"),
    ],
)
def test_a_slow_gpu_is_named(product, level, text):
    (finding,) = doctor.check_speed(spark(product=product))
    assert finding.level == level and text in finding.message
    assert level == "ok" or finding.why or product is None


def test_without_a_gpu_the_speed_is_not_checked():
    (finding,) = doctor.check_speed(Machine())
    assert finding.level == "note" and "there is no GPU here" in finding.message
    assert doctor.Probe().gpu_product() is None or host.gpus()


@pytest.mark.parametrize(
    "machine",
    [
        spark(),
        Machine(machine="x86_64", memory=host.Memory(16 << 30, 9 << 30, 4 << 30)),
        Machine(
            machine="x86_64", managed=False, venv=False, missing=("annie_quant._gemm", "modelopt")
        ),
    ],
    ids=["spark", "laptop", "container"],
)
def test_no_false_alarm_on_a_healthy_machine(machine):
    assert levels(doctor.examine(probe=machine), "fault") == {}


def test_a_healthy_spark_needs_nothing():
    findings = doctor.examine(probe=spark())
    # Every driver of a GB10 so far has a known fault.
    findings = [finding for finding in findings if finding.check != "known versions"]
    assert levels(findings, "note") == {} and doctor.fix_plan(findings) == []
    assert "GB10" in levels(findings, "ok")["gpu"].message


def test_a_server_without_a_reasoning_parser_is_no_fault():
    """A model that does not think must not have one: its answers would be empty."""
    found = doctor.examine(
        probe=spark(answers={"docker ps": SERVER.replace("--reasoning-parser qwen3", "")})
    )
    assert "parsers" in levels(found, "note") and "parsers" not in levels(found, "fault")


@pytest.mark.parametrize(
    ("machine", "level", "check", "fix"),
    [
        (spark(answers={"nvidia-smi --query-gpu=name,compute_cap": "NVIDIA GB10, 12.1, 570.86"}), "fault", "driver", "580"),
        (spark(answers={"nvidia-smi --query-gpu=name,compute_cap": Output(9, "NVIDIA-SMI has failed")}), "fault", "gpu", "driver"),
        (spark(answers={"nvidia-smi --query-compute-apps": "4242, ollama, 9000 MiB"}), "note", "gpu processes", "stop"),
        (spark(answers={"nvcc --version": "release 12.8, V12.8.93"}), "note", "nvcc", "CUDA 13"),
        (spark(cuda=None), "note", "torch", "cu130"),
        (spark(cuda="12.8"), "note", "torch", "cu130"),
        (spark(answers={"validate-gpu": Output(1, "{}")}), "fault", "NVFP4 kernels", "--stack all"),
        (spark(answers={"docker info": Output(1, "permission denied while trying to connect")}), "fault", "docker", "usermod"),
        (spark(answers={"docker info": '{"Runtimes": {"runc": {}}}'}), "fault", "docker's NVIDIA runtime", "nvidia-ctk"),
        (spark(answers={"docker ps": SERVER.replace("--tool-call-parser qwen3_coder", "")}), "fault", "parsers", "serve DIR"),
        (spark(memory=replace(SPARK_MEMORY, cached_bytes=90_000_000 << 10)), "note", "page cache", "drop_caches"),
        (spark(memory=replace(SPARK_MEMORY, available_bytes=900_000 << 10)), "note", "memory", "stop"),
        (spark(disk=10**9), "fault", "disk", "disk"),
        (spark(python=(3, 9, 1)), "fault", "python", "3.10"),
        (spark(venv=False), "note", "environment", "venv"),
        (spark(missing=("annie_quant._nvfp4",)), "fault", "_nvfp4", "reinstall"),
        (spark(missing=("modelopt",)), "note", "extra quantize", "annie-quant[quantize]"),
    ],
)  # fmt: skip
def test_each_problem_is_reported_with_its_fix(machine, level, check, fix):
    findings = doctor.examine(probe=machine)
    assert check in levels(findings, level), findings
    assert fix in levels(findings, level)[check].fix
    assert levels(findings, level)[check].fix in doctor.fix_plan(findings)


def test_folders_owned_by_root_are_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    findings = [f for f in doctor.examine(probe=spark(writable=False)) if f.check == "ownership"]
    assert (
        findings[0].level == "fault"
        and "chown" in findings[0].fix
        and findings[0].message.startswith("runs")
    )


def test_the_token_itself_is_never_shown():
    assert "hf_secret" not in json.dumps([asdict(f) for f in doctor.examine(probe=spark())])


def test_a_log_is_compared_with_the_known_errors(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        "INFO fine\nRuntimeError: CUDA error: no kernel image is available for execution on the device\n"
    )
    finding = levels(doctor.examine(probe=spark(), log=log), "fault")["server log"]
    assert "no kernel image" in finding.message and "121a" in finding.fix
    log.write_text("INFO: Application startup complete.\n")
    assert "ready" in levels(doctor.examine(probe=spark(), log=log), "ok")["server log"].message
    with pytest.raises(UsageError):
        doctor.examine(probe=spark(), log=tmp_path / "none")


def test_this_machine_can_be_examined():
    findings = doctor.examine()
    assert {f.level for f in findings} <= {"ok", "note", "fault"}
    assert Probe().run("sh", "-c", "sleep 5", timeout_s=0.1).code == 124
    assert Probe().run("no-such-program").code == 127
