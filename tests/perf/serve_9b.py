"""Marlin and this package's kernel in the real vLLM at a 9B shape: engines side by side on one GPU, timed in turn.

    python tests/perf/serve_9b.py --output DIR --engines marlin,ours,ours-plain --seconds 280
    python tests/perf/serve_9b.py --output DIR --shape 35b-a3b --changes '{"num_hidden_layers": 20}' --seconds 280
    python tests/perf/serve_9b.py --output DIR --checkpoint NVFP4 --source BF16 --engines marlin,ours,bf16

Each engine is a process with vLLM's own engine core behind it (torch.compile and CUDA graphs; "plain": CUDA graphs without
torch.compile) and random NVFP4 weights of Qwen3.5-9B's shapes (32 layers, bf16 head of 248,320 rows), or of Qwen3.6-35B-A3B's (40
layers of 256 experts, of which a token uses 8, and a shared one; router and gates in bf16). All start at the same time;
when all are ready one at a time runs a load, in rounds whose order rotates: decoding with 1, 4, 16 and 64 streams (TPOT is a
request's (last - first token) / (tokens - 1), the mean over requests), and the time to the first token of one prompt of 2,048
tokens. At the end each engine's decoding is profiled, kernel by kernel. DIR gets a log per engine, results.jsonl as results come,
summary.json and profile.*.txt.

Engines: marlin, ours, humming, bf16, each also with "-plain"; "-head": the head is NVFP4, too ("ours-head-plain").
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOADS = (1, 4, 16, 64)
PROMPT, PREFILL = 128, 2048
HEADS = {
    "num_attention_heads": 16, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248320, "max_position_embeddings": 32768,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "9b": {
        **HEADS, "hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 4, "num_hidden_layers": 32,
    },
    "35b-a3b": {
        **HEADS, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
        "num_key_value_heads": 2, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
}  # fmt: skip
QUANTIZATION = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.47.0"},
}
GPU_OPTIONS: dict[
    str, Any
] = {  # of vLLM 0.26 where flash attention's and FlashInfer's extensions are missing
    "attention_backend": "TRITON_ATTN",
    "additional_config": {"gdn_prefill_backend": "triton"},
    "mamba_ssm_cache_dtype": "float32",  # as the configurations of Qwen3.5 define, and as a CPU stores it
}
T_95 = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
    10: 2.228,
}


def write_config(
    folder: Path, tiny: Path, quantized: bool, changes: dict[str, Any], *, head: bool = False
) -> Path:
    """Write a configuration and return its folder. tiny: a small dense model of the family, whose other fields are used.

    changes: fields of the configuration, one of SHAPES and what differs from it. head: the head is quantized, too
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((tiny / "config.json").read_text()) | changes
    layers = range(config["num_hidden_layers"])
    config["layer_types"] = ["full_attention" if i % 4 == 3 else "linear_attention" for i in layers]
    for key in ("mrope_section", "mrope_interleaved"):
        config["rope_parameters"].pop(key, None)
    config |= {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    if quantized:
        bf16 = [
            f"model.layers.{i}.linear_attn.{name}"
            for i in layers
            for name in ("conv1d", "in_proj_a", "in_proj_b")
        ]
        config["quantization_config"] = {**QUANTIZATION, "ignore": ["model.embed_tokens", *bf16]}
        if not head:
            config["quantization_config"]["ignore"].append("lm_head")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_weights() -> None:
    """Let vLLM's dummy loader make weights that are valid NVFP4 and of a trained model's size."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @torch.no_grad()
    def load_weights(self: Any, model: Any, *unused: Any) -> None:
        for name, p in model.state_dict().items():
            if p.dtype == torch.uint8:
                p.random_(0, 256)
            elif p.dtype == torch.float8_e4m3fn:
                p.view(torch.uint8).random_(0x30, 0x48)
            elif name.endswith(("weight_scale_2", "input_scale")):
                p.fill_(0.0035)
            elif torch.is_floating_point(p):
                p.normal_(0, 0.02)

    DummyModelLoader.load_weights = load_weights


def plugin() -> None:
    """What each of vLLM's processes needs, as vLLM's plug-in: random weights, and the text-only model where vLLM lacks it."""
    from vllm_answers import register_text_only

    random_weights()
    register_text_only(os.environ["SERVE_9B_FOLDER"])


def install_plugin(folder: Path, function: str) -> None:
    """Write a distribution with a plug-in ("module:function") into a folder of sys.path.

    A process that vLLM spawns inherits nothing else.
    """
    info = folder / "serve_9b-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: serve-9b\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nserve_9b = {function}\n")


def kernels_of(model: Any) -> dict[str, int]:
    """Return how many linears each NVFP4 kernel has. Runs in the engine's process."""
    counts: dict[str, int] = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        kernel = getattr(method, "kernel", None) or experts
        if kernel is not None:
            ours = (
                getattr(module, "annie_scale", 0)
                if experts is None
                else getattr(experts, "annie_width", 0)
            )
            name = type(kernel).__name__ + (" (on Marlin)" if ours is None else "")
            counts[name] = counts.get(name, 0) + 1
    return counts


def start_profiler(worker: Any) -> None:
    import torch

    worker.annie_profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    )
    worker.annie_profiler.__enter__()


def stop_profiler(worker: Any) -> list[tuple[str, int, float]]:
    """Return (kernel, launches, microseconds in all), longest first."""
    profiler = worker.annie_profiler
    profiler.__exit__(None, None, None)
    rows = [(e.key, e.count, e.self_device_time_total) for e in profiler.key_averages()]
    return sorted((r for r in rows if r[2] > 0), key=lambda r: -r[2])[:60]


class Engine:
    """vLLM's engine of one kernel, and the loads."""

    def __init__(self, name: str, folder: str, on_cpu: bool, depth: int) -> None:
        kernel, *kinds = name.split("-")
        plain = "plain" in kinds
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions for the engine's process
        os.environ["ANNIE_QUANT_VLLM_KERNEL"] = os.environ["ANNIE_QUANT_VLLM_EXPERTS"] = (
            "1" if kernel == "ours" else "0"
        )
        self.begin = time.monotonic()
        sys.path.insert(0, str(HERE))
        from vllm import LLM, SamplingParams
        from vllm_answers import register_text_only

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
            "1"  # as a server; vllm_answers switches it off
        )
        self.parameters, self.number, self.random = SamplingParams, 0, 12345
        self.imported_s = time.monotonic() - self.begin
        os.environ["SERVE_9B_FOLDER"] = folder
        options: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": list(LOADS)}}
        if plain:
            options["compilation_config"] |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        if kernel == "humming":
            options["linear_backend"] = "humming"
        if on_cpu:
            options = {"enforce_eager": plain}
        else:
            options |= {
                "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 6 << 30, **GPU_OPTIONS,
            }  # fmt: skip
        self.llm = LLM(
            register_text_only(folder), dtype="bfloat16", skip_tokenizer_init=True,
            load_format="auto" if any(Path(folder).glob("*.safetensors")) else "dummy", max_model_len=max(4096, depth + 512),
            max_num_seqs=LOADS[-1], max_num_batched_tokens=8192, enable_prefix_caching=False, disable_log_stats=True, **options,
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.ready_s = time.monotonic() - self.begin

    def about(self) -> dict[str, Any]:
        row: dict[str, Any] = {"ready_s": self.ready_s, "imported_s": self.imported_s}
        try:
            row["kernels"] = self.llm.apply_model(kernels_of)[0]
        except Exception as error:
            row["kernels"] = f"{type(error).__name__}: {error}"[:300]
        return row

    def run(self, streams: int, prompt: int, tokens: int) -> dict[str, float]:
        """Run `streams` requests that start together. Returns times in ms."""
        vocabulary = 1000
        sampling = self.parameters(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        for _ in range(streams):
            ids = []
            for _ in range(prompt):
                self.random = (self.random * 1103515245 + 12345) % (1 << 31)
                ids.append(2 + (self.random >> 8) % vocabulary)
            self.number += 1
            begin = time.perf_counter() if streams == 1 else begin
            self.engine.add_request(str(self.number), {"prompt_token_ids": ids}, sampling)
        first: dict[str, tuple[float, int]] = {}
        last: dict[str, tuple[float, int]] = {}
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                state = (now, len(output.outputs[0].token_ids))
                first.setdefault(output.request_id, state)
                last[output.request_id] = state
        row = {
            "ttft_ms": statistics.mean(1e3 * (at - begin) for at, _ in first.values()),
            "seconds": time.perf_counter() - begin,
        }
        if tokens > 1:
            spans = [(last[i][0] - first[i][0], last[i][1] - first[i][1]) for i in first]
            row["tpot_ms"] = statistics.mean(1e3 * t / max(1, count) for t, count in spans)
        return row

    def profile(self, streams: int) -> list[Any]:
        self.llm.collective_rpc(start_profiler)
        self.run(streams, PROMPT, 17)
        return self.llm.collective_rpc(stop_profiler)[0]


def energy_mj() -> float | None:
    """Return the GPU's energy counter in millijoules, None without one."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return float(
            pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0))
        )
    return None


def worker(name: str, folder: str, answers: Path, on_cpu: bool, depth: int) -> None:
    """Start an engine, then run one job per line of the standard input; append one JSON line per job to `answers`."""

    def reply(row: dict[str, Any]) -> None:
        with answers.open("a") as f:
            f.write(json.dumps({"engine": name, **row}) + "\n")

    engine = Engine(name, folder, on_cpu, depth)
    reply({"job": "start", **engine.about()})
    for line in sys.stdin:
        job = json.loads(line)
        try:
            before = energy_mj()
            if job["job"] == "profile":
                row: dict[str, Any] = {"kernels": engine.profile(job["streams"])}
            elif job["job"] == "prefill":
                runs = [engine.run(1, job["prompt"], 1)["ttft_ms"] for _ in range(job["repeats"])]
                row = {"ttft_ms": statistics.median(runs), "runs": runs}
            else:
                row = engine.run(job["streams"], job["prompt"], job["tokens"])
            after = energy_mj()
            if before is not None and after is not None:
                row["joules"] = (after - before) / 1e3
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"[:500]}
        reply({**job, **row})


def kill_session(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads a session, and the processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Child:
    """An engine's process."""

    def __init__(self, name: str, folder: Path, output: Path, on_cpu: bool, depth: int) -> None:
        self.name, self.answers = name, output / f"answers.{name}.jsonl"
        self.answers.unlink(missing_ok=True)
        self.read = 0
        # Imported, not run as a script: functions for the engine's process are found by their module's name.
        argv = [
            sys.executable,
            "-c",
            "import serve_9b; serve_9b.main()",
            "--worker",
            name,
            "--folder",
            str(folder),
            "--output",
            str(self.answers),
            "--depth",
            str(depth),
        ]
        argv += ["--cpu"] if on_cpu else []
        paths = os.pathsep.join(
            [str(HERE), str(output / "plugin"), os.environ.get("PYTHONPATH", "")]
        )
        with (output / f"log.{name}.txt").open("w") as log:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                env={**os.environ, "PYTHONPATH": paths, "TORCHDYNAMO_DISABLE": "0"},  # vllm_answers.py has another default
            )  # fmt: skip

    def wait(self, until: float) -> dict[str, Any] | None:
        """Return the next answer, or None at the time `until` or if the process has ended."""
        while time.monotonic() < until:
            lines = self.answers.read_text().splitlines() if self.answers.exists() else []
            if len(lines) > self.read:
                self.read += 1
                return json.loads(lines[self.read - 1])
            if self.process.poll() is not None:
                return None
            time.sleep(0.01)
        return None

    def ask(self, job: dict[str, Any], until: float) -> dict[str, Any] | None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except OSError:
            return None
        return self.wait(until)

    def stop(self) -> None:
        kill_session(self.process)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % t-interval."""
    if len(values) < 2:
        return statistics.mean(values), math.nan
    t = T_95[min(len(values) - 1, max(T_95))]  # of fewer values where there are more: wider
    return statistics.mean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def summarize(rows: list[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Return one line per engine and load: mean, half interval, n, and the ratio to the baseline over the rounds of both."""
    cells: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if row.get("round", -1) < 0 or "error" in row:
            continue
        what = f"TTFT ms, {row['prompt']} tokens"
        if row["job"] == "decode":
            what = f"TPOT ms, {row['streams']} streams" + (
                f" at {row['prompt']}" if row["prompt"] != PROMPT else ""
            )
        value = row["tpot_ms"] if row["job"] == "decode" else row["ttft_ms"]
        cells.setdefault((what, row["engine"]), {})[row["round"]] = value
    result = []
    for (what, engine), values in sorted(cells.items(), key=lambda c: (len(c[0][0]), c[0])):
        mean, half = interval(list(values.values()))
        line: dict[str, Any] = {
            "what": what,
            "engine": engine,
            "mean": round(mean, 4),
            "half": round(half, 4),
            "n": len(values),
        }
        base = cells.get((what, baseline), {})
        ratios = [v / base[r] for r, v in values.items() if r in base]
        if ratios and engine != baseline:
            line["ratio"], line["ratio_half"] = (round(v, 4) for v in interval(ratios))
        result.append(line)
    return result


def kernel_class(name: str) -> str:
    """Return a short name for a group of kernels."""
    groups = (
        ("our GEMM", "skinny_kernel|tiled_kernel|wgmma_kernel|permute_kernel|fixup_kernel"),
        ("Marlin", "[Mm]arlin"),
        ("humming", "humming"),
        ("cuBLAS", "nvjet|cublas|gemm|gemv|cutlass|splitK"),
        ("attention and DeltaNet", "attention|attn|delta|gdn|chunk|recurrent|conv1d|unified"),
        ("sampling", "argmax|sampl|topk|softmax"),
        ("memory", "[Mm]emcpy|[Mm]emset"),
        ("torch.compile", "triton_"),
    )
    return next((label for label, pattern in groups if re.search(pattern, name)), "other")


def coordinate(args: argparse.Namespace) -> None:
    end = time.monotonic() + args.seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines end, too
    output = args.output
    output.mkdir(parents=True, exist_ok=True)
    install_plugin(output / "plugin", "serve_9b:plugin")
    changes = SHAPES[args.shape] | json.loads(args.changes)
    names = args.engines.split(",")
    children = []
    for name in names:
        quantized, head = not name.startswith("bf16"), "-head" in name
        folder = args.checkpoint if quantized else args.source
        if folder is None:
            folder = output / f"shape.{'nvfp4' if quantized else 'bf16'}{'-head' if head else ''}"
            write_config(folder, args.tiny, quantized, changes, head=head)
        children.append(Child(name, folder, output, args.cpu, args.depth))
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any] | None) -> None:
        if row is not None:
            rows.append(row)
            with (output / "results.jsonl").open("a") as f:
                f.write(json.dumps(row) + "\n")

    try:
        ready = []
        start_end = min(end, time.monotonic() + args.start_seconds)
        for child in children:
            row = child.wait(start_end)
            keep(row)
            report = (
                "not ready"
                if row is None
                else f"ready after {row['ready_s']:.1f} s, {row['kernels']}"
            )
            print(f"{child.name}: {report}", flush=True)
            if row is not None:
                ready.append(child)
        if args.go:  # others may still use the GPU
            while not args.go.exists() and time.monotonic() < end:
                time.sleep(0.1)
        for child in ready:
            for streams in (1, LOADS[-1]):
                child.ask(
                    {
                        "job": "decode",
                        "streams": streams,
                        "prompt": PROMPT,
                        "tokens": 16,
                        "round": -1,
                    },
                    end,
                )
            keep(child.ask({"job": "prefill", "prompt": PREFILL, "repeats": 3, "round": -1}, end))
        spare = args.profile_seconds * len(ready)
        for number in range(args.rounds):
            order = ready[number % len(ready) :] + ready[: number % len(ready)] if ready else []
            if number >= 2:  # two rounds of "plain" suffice where the compiled engine is measured
                with_both = {c.name for c in ready}
                order = [
                    c
                    for c in order
                    if c.name.removesuffix("-plain") == c.name
                    or c.name.removesuffix("-plain") not in with_both
                ]
            jobs: list[dict[str, Any]] = [
                {"job": "decode", "streams": n, "prompt": PROMPT, "tokens": args.tokens}
                for n in LOADS
            ]
            jobs += [{"job": "prefill", "prompt": PREFILL, "repeats": 5}]
            jobs += (
                [{"job": "decode", "streams": 1, "prompt": args.depth, "tokens": 64}]
                if args.depth
                else []
            )
            for job in jobs:
                for child in order:
                    if time.monotonic() > end - spare:
                        break
                    keep(child.ask({**job, "round": number}, end))
            lines = summarize(rows, names[0])
            (output / "summary.json").write_text(json.dumps(lines, indent=1))
        for line in summarize(rows, names[0]):
            ratio = (
                f"  x {line['ratio']:.3f} +- {line['ratio_half']:.3f} of {names[0]}"
                if "ratio" in line
                else ""
            )
            print(
                f"{line['what']:22} {line['engine']:12} {line['mean']:9.3f} +- {line['half']:.3f} (n = {line['n']}){ratio}",
                flush=True,
            )
        for child in ready:
            for streams in (1, 64):
                row = child.ask(
                    {"job": "profile", "streams": streams},
                    min(end, time.monotonic() + args.profile_seconds),
                )
                if row is None or "error" in row:
                    print(f"{child.name}: no profile: {row and row['error']}", flush=True)
                    continue
                keep(row)
                total = sum(us for _, _, us in row["kernels"])
                groups: dict[str, float] = {}
                for kernel, _, us in row["kernels"]:
                    groups[kernel_class(kernel)] = groups.get(kernel_class(kernel), 0.0) + us
                parts = ", ".join(
                    f"{g} {us / 16e3:.3f}" for g, us in sorted(groups.items(), key=lambda g: -g[1])
                )
                print(
                    f"profile {child.name} {streams} streams, ms per token step: {total / 16e3:.3f}: {parts}",
                    flush=True,
                )
                text = "\n".join(
                    f"{us:10.1f} us {count:6d} {kernel[:160]}"
                    for kernel, count, us in row["kernels"]
                )
                (output / f"profile.{child.name}.{streams}.txt").write_text(text + "\n")
    finally:
        for child in children:
            child.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--engines", default="marlin,ours")
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument(
        "--start-seconds", type=float, default=200, help="for the engines to become ready"
    )
    parser.add_argument("--profile-seconds", type=float, default=6, help="per engine and load")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--depth", type=int, default=0, help="also time one stream after a prompt of so many tokens"
    )
    parser.add_argument("--shape", choices=SHAPES, default="9b")
    parser.add_argument(
        "--changes",
        default="{}",
        help="JSON of fields of the configuration that differ from the shape",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="a real NVFP4 checkpoint instead of a shape; --source: its bf16 model",
    )
    parser.add_argument("--source", type=Path)
    parser.add_argument(
        "--tiny", type=Path, default=HERE.parent.parent / "annie_quant/assets/tiny-annie"
    )
    parser.add_argument("--go", type=Path, help="a file for whose appearance the timing waits")
    parser.add_argument("--cpu", action="store_true", help="try the script on a CPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.folder, args.output, args.cpu, args.depth)
    else:
        coordinate(args)


if __name__ == "__main__":
    main()
