"""Does the offline evaluation predict the answers of real servers? The same prompts offline under each profile and in a server.

    python tests/perf/predict_server.py --work build/predict --vllm build/vllm/bin/python --n 30 naive mlp_only gptq direct

For each strategy: makes the checkpoint of tiny-annie, asks the server for greedy answers to token prompts, and compares
  A/A      the server with itself under another batch cut (16 sequences and 1): no offline arithmetic can agree better
  offline  the answers under the profile, and those of each member of its ensemble
  gates    how many answers pass, and the range over the ensemble
Servers: vLLM on a CPU (an environment that tests/integration/vllm_cpu.py makes; W4A4 and W4A16) and llama.cpp on a CPU (xllamacpp).
A finished part is not done again. The table is in docs/method.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from annie_quant import checkpoint, data, files, judge, quantize, serve  # noqa: E402
from annie_quant.evaluate.decoding import Completion  # noqa: E402
from annie_quant.evaluate.evaluation import evaluate_pair, judged  # noqa: E402
from annie_quant.evaluate.pair import ModelPair  # noqa: E402
from annie_quant.evaluate.prompts import Answered, Request, Template  # noqa: E402
from annie_quant.hf.profiles import find_profile  # noqa: E402
from annie_quant.judge import Workload  # noqa: E402
from annie_quant.pipeline.demo import MODEL  # noqa: E402

GATES = ("tool_call", "factual", "reasoning", "abstention", "no_markdown")
SERVERS = {"vllm-cutlass": "vllm", "vllm-marlin": "vllm", "llama.cpp-cpu": "llama.cpp"}
VLLM_PROGRAM = """
import json, os, sys
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1"); os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, prompts, output, sequences = sys.argv[1:5]
    rows = json.load(open(prompts))
    llm = LLM(folder, dtype="bfloat16", enforce_eager=True, max_model_len=2048, max_num_seqs=int(sequences),
              enable_prefix_caching=False, disable_log_stats=True, quantization="modelopt")
    sampling = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], stop_token_ids=r["ends"]) for r in rows]
    outputs = llm.generate([{"prompt_token_ids": r["prompt"]} for r in rows], sampling, use_tqdm=False)
    answers = [[list(o.outputs[0].token_ids), o.outputs[0].finish_reason == "stop"] for o in outputs]
    json.dump(answers, open(output, "w"))
"""


def prompts(template: Template, n: int) -> tuple[list[Workload], list[Request]]:
    """Return n prompts per gate of the single-turn workloads, and their requests."""
    workloads = [w for w in judge.sample(judge.load_workloads(), n) if not w.cases[0].turns]
    return workloads, [template.request(w, c) for w in workloads for c in w.cases]


def without_end(tokens: Sequence[int], stopped: bool, ends: Sequence[int]) -> Completion:
    tokens = list(tokens)
    return Completion(tokens[:-1] if stopped and tokens and tokens[-1] in ends else tokens, stopped)


def ask_vllm(
    python: Path, folder: Path, requests: Sequence[Request], ends: Sequence[int], sequences: int, output: Path
) -> None:
    rows = [{"prompt": r.prompt, "max_tokens": r.workload.max_tokens, "ends": list(ends)} for r in requests]
    inputs, program = output.with_suffix(".prompts.json"), output.with_suffix(".py")
    files.write_text(inputs, json.dumps(rows))
    files.write_text(program, VLLM_PROGRAM)
    with output.with_suffix(".log").open("w") as log:
        command = [python, program, folder, inputs, output, str(sequences)]
        subprocess.run(command, check=True, stdout=log, stderr=log)


def ask_llama_cpp(file: Path, requests: Sequence[Request], parallel: int, output: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with serve.start(file, parallel=parallel) as server:

        def ask(request: Request) -> list[Any]:
            body = {"prompt": list(request.prompt), "n_predict": request.workload.max_tokens, "temperature": 0,
                    "return_tokens": True, "cache_prompt": False}  # fmt: skip
            http = urllib.request.Request(
                server.url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(http, timeout=600) as reply:
                answer = json.loads(reply.read())
            return [answer["tokens"], answer["stop_type"] == "eos"]

        with ThreadPoolExecutor(parallel) as pool:
            answers = list(pool.map(ask, requests))
    files.write_json(output, answers)


def served(
    work: Path,
    name: str,
    profile: str,
    folder: Path,
    requests: Sequence[Request],
    ends: Sequence[int],
    python: Path | None,
    n: int,
) -> list[list[Completion]]:
    """Return the server's answers under two batch cuts (16 and 1 at a time)."""
    results = []
    for cut in (16, 1):
        output = work / f"{name}.{profile}.{n}.{cut}.json"
        if not output.exists():
            if SERVERS[profile] == "vllm":
                assert python is not None
                ask_vllm(python, folder, requests, ends, cut, output)
            else:
                file = work / f"{name}.gguf"
                if not file.exists():
                    checkpoint.convert(folder, to="gguf", output=file)
                ask_llama_cpp(file, requests, 8 if cut == 16 else 1, output)
        results.append([without_end(t, s, ends) for t, s in files.read_json(output)])
    return results


def weight_only(folder: Path, work: Path) -> Path:
    """Return the same checkpoint declared W4A16, without input scales: what vLLM serves with Marlin."""
    import shutil

    from safetensors.torch import load_file, save_file

    target = work / f"{folder.name}-w4a16"
    if not target.exists():
        shutil.copytree(folder, target)
        tensors = load_file(folder / "model.safetensors")
        weights_only = {k: v for k, v in tensors.items() if not k.endswith("input_scale")}
        save_file(weights_only, target / "model.safetensors", metadata={"format": "pt"})
        for path in (target / "config.json", target / "hf_quant_config.json"):
            files.write_text(path, declared_weight_only(path.read_text()))
    return target


def declared_weight_only(text: str) -> str:
    document = json.loads(text)
    settings = document.get("quantization_config") or document["quantization"]
    settings["quant_algo"] = "W4A16_NVFP4"
    for group in settings.get("config_groups", {}).values():
        group.pop("input_activations", None)
    return json.dumps(document, indent=2)


def gate_counts(pair: ModelPair, requests: Sequence[Request], completions: Sequence[Completion]) -> dict[str, int]:
    table = judge.gate_table(
        judged(pair.template, [Answered(r, c) for r, c in zip(requests, completions, strict=True)])
    )
    return {gate: row.passes for gate, row in table.items() if gate in GATES}


def compare(
    work: Path, name: str, folder: Path, profile: str, answers: list[list[Completion]], n: int
) -> Mapping[str, Any]:
    """Return the row of one checkpoint under one profile."""
    with ModelPair(folder, MODEL, cache=work / "cache") as pair:
        workloads, requests = prompts(pair.template, n)
        completions: dict[str, list[Completion]] = {}
        result = evaluate_pair(pair, workloads, [profile], on_outcomes=lambda key, own: completions.update({key: own}))
        counts = {key: gate_counts(pair, requests, own) for key, own in completions.items()}
        first, second = answers
        agree = {key: sum(a == b for a, b in zip(own, first, strict=True)) for key, own in completions.items()}
        return {
            "checkpoint": name,
            "profile": profile,
            "served_by": find_profile(profile).served_by,
            "n": len(requests),
            "a_a": sum(a == b for a, b in zip(first, second, strict=True)),
            "agree": agree,
            "served_gates": [gate_counts(pair, requests, a) for a in answers],
            "offline_gates": counts,
            "gate_n": {g: r.n for g, r in result.reference_gates.items() if g in GATES},
            "reference_gates": {g: r.passes for g, r in result.reference_gates.items() if g in GATES},
            "noise": result.ensemble[profile].noise,
        }


def line(row: Mapping[str, Any]) -> str:
    """Return one Markdown row of the table."""
    agree = row["agree"]
    rest = [v for k, v in agree.items() if k != row["profile"]]
    gates = []
    for gate in row["offline_gates"][row["profile"]]:
        offline = [counts.get(gate, 0) for counts in row["offline_gates"].values()]
        own = [counts.get(gate, 0) for counts in row["served_gates"]]
        low, high = min(offline), max(offline)
        span = f"{low}" if low == high else f"{low}–{high}"
        gates.append(f"{gate} {'/'.join(map(str, own))} ({span})")
    return (
        f"| {row['checkpoint']} | {row['profile']} | {row['a_a']}/{row['n']} | {agree[row['profile']]}/{row['n']} "
        f"({min(rest)}–{max(rest)}) | {'; '.join(gates)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", help="strategies, or folders of checkpoints of tiny-annie")
    parser.add_argument("--work", type=Path, default=Path("build/predict"))
    parser.add_argument(
        "--vllm", type=Path, help="the python of vLLM's environment; without it only llama.cpp is compared"
    )
    parser.add_argument("--n", type=int, default=30, help="prompts per gate")
    parser.add_argument("--profiles", default=",".join(SERVERS))
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    template = Template(MODEL)
    _, requests = prompts(template, arguments.n)
    for item in arguments.checkpoints:
        folder = Path(item).resolve() if Path(item).is_dir() else checkpoint_of(item, work)
        for profile in arguments.profiles.split(","):
            if SERVERS[profile] == "vllm" and arguments.vllm is None:
                continue
            output = work / f"{folder.name}.{profile}.{arguments.n}.row.json"
            if not output.exists():
                has_scales = "input_scale" in str(list(checkpoint.ModelFolder(folder)))
                if profile == "vllm-cutlass" and not has_scales:
                    continue
                source = weight_only(folder, work) if profile == "vllm-marlin" and has_scales else folder
                answers = served(
                    work, folder.name, profile, source, requests, template.end_tokens, arguments.vllm, arguments.n
                )
                files.write_json(output, compare(work, folder.name, folder, profile, answers, arguments.n))
            print(line(files.read_json(output)), flush=True)


def checkpoint_of(strategy: str, work: Path) -> Path:
    """Return tiny-annie quantized with a strategy; an existing one is reused."""
    rows, folder = work / "calibration.jsonl", work / strategy
    if not rows.exists():
        data.generate("annie", teacher="offline", n=500, output=rows, seed=0)
    if not folder.exists():
        quantize.run(strategy, MODEL, folder, calib_data=rows, calib_samples=48)
    return folder


if __name__ == "__main__":
    main()
