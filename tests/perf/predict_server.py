"""Does the offline evaluation predict the answers of real servers? The same prompts offline under each profile and in a server.

    python tests/perf/predict_server.py prompts --work build/predict --n 30
    python tests/perf/predict_server.py offline --work build/predict --n 30 naive mlp_only gptq      (--device cuda on a GPU)
    python tests/perf/predict_server.py llama.cpp --work build/predict --n 30 naive
    python tests/perf/predict_server.py vllm --python build/vllm/bin/python --work build/predict --n 30 naive
    python tests/perf/predict_server.py transformers --work build/predict --n 30 naive
    python tests/perf/predict_server.py table --work build/predict --n 30
    ... --model MODEL --workloads bfcl:simple_python,multiple,irrelevance --max-tokens 128      (another bf16 model, in every part)

Checkpoints are folders, or strategies with which `--model` (tiny-annie) is quantized into the work folder. Prompts and answers are
token ids of the model's own tokenizer, in servers too. For each:
  offline    the answers under every profile and those of its ensemble's members (--alone: without them; after the
             server, whose answers it then verifies, it takes a third of the time), and bf16's in two arithmetics
                                                                                                     WORK/offline/NAME.N.json
  servers    greedy answers to the same token prompts under two batch cuts                         WORK/served/NAME.SERVER.N.jsonl
             (transformers: its generate in bfloat16, W4A4, tool calls alone, one prompt at a time); each answer is stored
             at once. The bf16 model, if it is among the checkpoints, is what the table compares the others with
  table      A/A      the server with itself under another batch cut: no offline arithmetic can agree better
             offline  answers equal to the server's, under its profile and the members of its ensemble
             gates    how many answers pass in each of the server's runs, and the range over the ensemble
             bf16     against bf16 in the same server, by the workloads' gates as a benchmark has them: lost and won
             verdict  by the rule of docs/method.md, of the served answers (each run) and offline (all members), and how they
                      agree (agreement()); exit code 1 if one is reversed
             parts    where the answers that differ part: tokens before the first difference
             agreed   the answers that all members give alike, and how many of these the server gives
A GPU's answers come from tests/perf/vllm_gpu.sh. A finished part (offline: a profile) is not done again.
The table is in tests/perf/verdict.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from answer_log import AnswerLog, missing, read  # noqa: E402
from llama_cpp_answers import complete  # noqa: E402
from served_verdicts import Prompts, agreed, first_difference, verdicts  # noqa: E402

from annie_quant import judge  # noqa: E402
from annie_quant.core import files  # noqa: E402
from annie_quant.judge import Workload  # noqa: E402
from annie_quant.judge.statistics import wilson  # noqa: E402
from annie_quant.offline import ensemble  # noqa: E402
from annie_quant.offline.answers import AnswerOutcome  # noqa: E402
from annie_quant.offline.decoding import Completion  # noqa: E402
from annie_quant.offline.emulation import emulate  # noqa: E402
from annie_quant.offline.evaluation import evaluate_pair  # noqa: E402
from annie_quant.offline.loading import profiles_of  # noqa: E402
from annie_quant.offline.pair import EvaluationJob, ModelPair, open_pair  # noqa: E402
from annie_quant.offline.profiles import find_profile  # noqa: E402
from annie_quant.offline.prompts import Answered, OfflineRequest, Template  # noqa: E402

MODEL = ROOT / "annie_quant" / "assets" / "tiny-annie"
SERVERS = {  # the server's name in files → the profile that predicts it
    "llama.cpp-cpu": "llama.cpp-cpu",
    "vllm-cpu-w4a4": "vllm-cutlass",
    "vllm-cpu-w4a16": "vllm-marlin",
    "vllm-cpu-w4a4-float32": "w4a4",
    "vllm-cpu-w4a16-float32": "w4a16",
    "vllm-gpu-marlin": "vllm-marlin",
    "vllm-gpu-ours": "vllm-marlin",
    "vllm-gpu-exact": "vllm-cutlass",
    "vllm-gpu-emulation": "vllm-emulation",
    "transformers": "vllm-cutlass",
}
TOOLS = ("tool_memory", "tool_web")
PROFILES = tuple(dict.fromkeys(SERVERS.values()))


class Sample(NamedTuple):
    """Which prompts are asked. n: per gate. workloads: names; None: the default ones. max_tokens: cap on every answer."""

    n: int
    workloads: tuple[str, ...] | None = None
    max_tokens: int | None = None

    def prompts(self, template: Template) -> tuple[list[Workload], list[OfflineRequest]]:
        """Return the prompts of the single-turn workloads, and their requests."""
        loaded = judge.sample(judge.load_workloads(self.workloads), self.n)
        workloads = [self.capped(w) for w in loaded if not w.cases[0].turns]
        return workloads, [template.request(w, c) for w in workloads for c in w.cases]

    def capped(self, workload: Workload) -> Workload:
        if self.max_tokens is None:
            return workload
        cases = tuple(
            replace(c, max_tokens=min(self.max_tokens, workload.max_tokens_for(c)))
            for c in workload.cases
        )
        return replace(workload, cases=cases)


def write_prompts(path: Path, requests: Sequence[OfflineRequest], ends: Sequence[int]) -> None:
    rows = [
        {"prompt": list(r.prompt), "max_tokens": r.max_tokens, "ends": list(ends)} for r in requests
    ]
    files.write_json(path, rows)


def without_end(tokens: Sequence[int], stopped: bool, ends: Sequence[int]) -> Completion:
    tokens = list(tokens)
    return Completion(tokens[:-1] if stopped and tokens and tokens[-1] in ends else tokens, stopped)


def offline(
    work: Path,
    model: Path,
    folder: Path,
    sample: Sample,
    profiles: Sequence[str],
    device: str | None,
    alone: bool,
) -> None:
    """Compute and store the answers of the profiles that are not stored yet. alone: without the ensembles' further members."""
    output = work / "offline" / f"{folder.name}.{sample.n}.json"
    stored = (
        files.read_json(output)
        if output.exists()
        else {"members": {}, "noise": {}, "uncertain": {}, "seconds": 0}
    )
    missing = [name for name in profiles if name not in stored["members"]]
    if not missing:
        return
    job = EvaluationJob(
        checkpoint=folder, reference=model, cache=work / "cache", dtype="float32", device=device
    )
    with open_pair(job) as pair:
        missing = [name for name in missing if name in profiles_of(pair.model)]
        if not missing:
            return
        workloads, requests = sample.prompts(pair.template)
        write_prompts(work / f"prompts.{sample.n}.json", requests, pair.template.end_tokens)
        reference = pair.reference.answer(workloads)
        completions: dict[str, list[Completion]] = {}
        start = time.monotonic()
        if alone:
            for name in missing:
                guess = served_answers(work, folder.name, sample.n, name, pair.template.end_tokens)
                answered = (
                    [Answered(r, c) for (r, _), c in zip(reference, guess, strict=True)]
                    if guess
                    else reference
                )
                completions[name] = answers_alone(pair, name, answered)
        else:
            usual = ensemble.member_answers

            def recorded(*inputs: Any) -> list[AnswerOutcome]:
                outcomes = usual(*inputs)
                if (member := inputs[-1]).partition("+")[0] in missing:
                    completions[member] = [outcome.completion for outcome in outcomes]
                return outcomes

            ensemble.member_answers = recorded
            try:
                result = evaluate_pair(replace(pair, job=replace(job, numerics=missing)), workloads)
            finally:
                ensemble.member_answers = usual
            stored["noise"] |= {name: figures.noise for name, figures in result.ensemble.items()}
            stored["uncertain"] |= {
                name: figures.n_uncertain for name, figures in result.ensemble.items()
            }
        stored["members"] |= {
            key: [[c.tokens, c.finished] for c in own] for key, own in completions.items()
        }
        stored["seconds"] += time.monotonic() - start
        stored["device"] = pair.device
        stored["reference"] = [[c.tokens, c.finished] for _, c in reference]
        stored["floor"] = [
            [c.tokens, c.finished] for _, c in ensemble.second_answers(pair, reference)
        ]
        files.write_json(output, stored)


def answers_alone(pair: ModelPair, name: str, guess: Sequence[Answered]) -> list[Completion]:
    """Return the checkpoint's own answers under one profile, without the reference's logits.

    guess: answers that are verified in one forward; decoded is what follows the first token that the profile chooses otherwise.
    """
    everything = range(len(guess))
    with emulate(pair.model, find_profile(name)):
        choices = ensemble.score_choices(pair, pair.engine.scores, guess, everything, name)
        differences = ensemble.differences_of(choices)
        outcomes = ensemble.member_answers(pair, pair.engine, guess, differences, name)
    return [outcomes[i].completion for i in everything]


def served_answers(
    work: Path, name: str, n: int, profile: str, ends: Sequence[int]
) -> list[Completion]:
    """Return the stored answers of a server that the profile predicts, [] without one, or where it lacks some."""
    for server in (s for s, predicted in SERVERS.items() if predicted == profile):
        for run in served_runs(work, name, server, n, ends).values():
            return [run[i] for i in range(len(run))] if len(run) == max(run) + 1 else []
    return []


def served_path(work: Path, name: str, server: str, n: int) -> Path:
    return work / "served" / f"{name}.{server}.{n}.jsonl"


def served_runs(
    work: Path, name: str, server: str, n: int, ends: Sequence[int]
) -> dict[str, dict[int, Completion]]:
    """Return the stored answers of a server by cut and prompt."""
    cuts = read(served_path(work, name, server, n))
    return {
        cut: {i: without_end(a[0], a[1], ends) for i, a in sorted(own.items())}
        for cut, own in cuts.items()
    }


def ask_llama_cpp(
    file: Path,
    rows: Sequence[Mapping[str, Any]],
    cuts: str,
    output: Path,
    threads: int,
    again: int | None,
    reuse: bool,
) -> None:
    """Store llama.cpp's answers with each of these numbers of slots. cuts, again: as in vllm_answers.py."""
    from concurrent.futures import ThreadPoolExecutor

    from annie_quant.ops import serving

    log = AnswerLog(output)
    for slots, indices in missing(output, cuts, len(rows), again).items():
        if not indices:
            continue
        begin = time.monotonic()
        with (
            serving.start(file, parallel=int(slots), threads=threads) as server,
            ThreadPoolExecutor(int(slots)) as pool,
        ):

            def ask(i: int, slots: str = slots, url: str = server.url) -> None:
                row = rows[i]
                answer = complete(
                    url, row["prompt"], row["max_tokens"], timeout_s=600, cache_prompt=reuse
                )
                log.add(slots, i, [answer["tokens"], answer["stop_type"] == "eos"])

            list(pool.map(ask, indices))
        log.write(cut=slots, answered=len(indices), seconds=round(time.monotonic() - begin, 1))


def serve_llama_cpp(
    work: Path, folder: Path, n: int, cuts: str, threads: int, again: int | None, reuse: bool
) -> None:
    """Store the answers of llama.cpp with these numbers of slots."""
    from annie_quant import checkpoint

    file = work / f"{folder.name}.gguf"
    if not file.exists():
        checkpoint.convert(as_llama(folder, work), to="gguf", output=file, force=True)
    output = served_path(work, folder.name, "llama.cpp-cpu", n)
    ask_llama_cpp(
        file, files.read_json(work / f"prompts.{n}.json"), cuts, output, threads, again, reuse
    )


def as_llama(folder: Path, work: Path) -> Path:
    """Return a checkpoint of Qwen2 as the same checkpoint of Llama, whose NVFP4 llama.cpp computes; others as they are."""
    document = files.read_json(folder / "config.json")
    if document["model_type"] != "qwen2":
        return folder
    target = work / f"{folder.name}-llama"
    shutil.copytree(folder, target, dirs_exist_ok=True)  # a link that leaves its folder is refused
    changes = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True}
    files.write_json(target / "config.json", document | changes)
    return target


def ask_vllm(
    python: Path,
    folder: Path,
    prompts: Path,
    output: Path,
    cuts: str,
    dtype: str = "bfloat16",
    again: int | None = None,
) -> None:
    """Store vLLM's answers on this CPU (vllm_answers.py) and its log. cuts: numbers of prompts at a time."""
    n_prompts = len(files.read_json(prompts))
    if not any(missing(output, cuts, n_prompts, again).values()):
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    program = Path(__file__).with_name("vllm_answers.py")
    command: list[str | Path] = [
        python,
        program,
        folder,
        prompts,
        output,
        "--cuts",
        cuts,
        "--dtype",
        dtype,
    ]
    command += [] if again is None else ["--again", str(again)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with output.with_suffix(".log").open("a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)


def serve_vllm(
    work: Path,
    folder: Path,
    n: int,
    python: Path,
    kinds: Sequence[str],
    cuts: str,
    again: int | None,
) -> None:
    """Store the answers of vLLM on this CPU: the checkpoint's W4A4, and the same declared W4A16; the bf16 model is W4A16."""
    has_scales = quantizes_activations(folder)
    for kind in kinds:
        numerics, _, dtype = kind.partition("-")
        if numerics == "w4a4" and not has_scales:
            continue
        if numerics == "w4a16" and has_mixed_formats(folder):
            print(
                f"{folder.name}: one declaration of W4A16 does not cover its FP8 linears; left out",
                flush=True,
            )
            continue
        source = weight_only(folder, work) if numerics == "w4a16" and has_scales else folder
        output = served_path(work, folder.name, f"vllm-cpu-{kind}", n)
        ask_vllm(
            python, source, work / f"prompts.{n}.json", output, cuts, dtype or "bfloat16", again
        )


def serve_transformers(work: Path, folder: Path, template: Template, sample: Sample) -> None:
    """Store the answers of transformers' generate to the tool prompts."""
    import torch

    from annie_quant.offline import load

    output = served_path(work, folder.name, "transformers", sample.n)
    requests = sample.prompts(template)[1]
    indices = [
        i for i in missing(output, "1", len(requests))["1"] if requests[i].workload.name in TOOLS
    ]
    if not indices:
        return
    log = AnswerLog(output)
    model: Any = load(folder, cache="bf16", dtype=torch.bfloat16)
    for i in indices:
        request = requests[i]
        ids = torch.tensor([list(request.prompt)])
        generated = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=list(template.end_tokens),
            max_new_tokens=request.max_tokens,
        )[0, ids.shape[1]:].tolist()  # fmt: skip
        log.add("1", i, [generated, bool(generated) and generated[-1] in template.end_tokens])


def quantizes_activations(folder: Path) -> bool:
    from annie_quant import checkpoint

    return "input_scale" in str(list(checkpoint.ModelFolder(folder)))


def has_mixed_formats(folder: Path) -> bool:
    settings = files.read_json(folder / "config.json").get("quantization_config") or {}
    return settings.get("quant_algo") == "MIXED_PRECISION"


def weight_only(folder: Path, work: Path) -> Path:
    """Return the same checkpoint declared W4A16, without input scales: what vLLM serves with Marlin."""
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


def compare(
    work: Path, template: Template, sample: Sample, name: str, server: str, source: str
) -> dict[str, Any]:
    """Return the row of one checkpoint in one server. source: the bf16 model's name."""
    n = sample.n
    computed = files.read_json(work / "offline" / f"{name}.{n}.json")
    runs = served_runs(work, name, server, n, template.end_tokens)
    cut, first = next(iter(runs.items()))
    profile, indices = SERVERS[server], list(first)

    def chosen(rows: Sequence[Any]) -> list[Completion]:
        return [Completion(*rows[i]) for i in indices]

    by_profile = {key: chosen(own) for key, own in computed["members"].items()}
    members = {k: v for k, v in by_profile.items() if k.partition("+")[0] == profile}
    reference = chosen(computed["reference"])
    floor = chosen(computed["floor"]) if "floor" in computed else None
    requests = sample.prompts(template)[1]
    asked, answers = [requests[i] for i in indices], list(first.values())
    whole = {c: [run[i] for i in indices] for c, run in runs.items() if run.keys() >= first.keys()}
    everything = Prompts(template, asked, reference, floor)
    parted = [
        first_difference(a, b) for a, b in zip(members[profile], answers, strict=True) if a != b
    ]
    row = {
        "checkpoint": name,
        "server": server,
        "profile": profile,
        "n": len(answers),
        "a_a": [[sum(first[i] == run[i] for i in run.keys() & first.keys()), len(run.keys() & first.keys())]
                for c, run in runs.items() if c != cut],
        "agree": {key: sum(a == b for a, b in zip(own, answers, strict=True)) for key, own in by_profile.items()},
        "agreed": agreed(list(members.values()), answers),
        "reference_gates": everything.counts(reference),
        "served_gates": [everything.counts(run) for run in whole.values()],
        "offline_gates": {key: everything.counts(own) for key, own in members.items()},
        **verdicts(everything, whole, members, profile),
        "parted": sorted(parted),
        "parted_cases": [
            [i, r.name, first_difference(a, b)]
            for i, r, a, b in zip(indices, everything.requests, members[profile], answers, strict=True)
            if a != b
        ],
    }  # fmt: skip
    plain = next(
        iter(served_runs(work, source, server_of_bf16(server), n, template.end_tokens).values()), {}
    )
    if plain.keys() >= first.keys():
        same_server = Prompts(template, asked, [plain[i] for i in indices], compares=False)
        offline_side = Prompts(template, asked, reference, compares=False)
        row["bf16"] = {
            "served": same_server.changes(answers),
            "offline": {key: offline_side.changes(own) for key, own in members.items()},
            "equal": sum(a == plain[i] for i, a in first.items()),
            **verdicts(offline_side, whole, members, profile, same_server),
        }
    return row


def server_of_bf16(server: str) -> str:
    """Return the name under which the answers of the bf16 model in the same server are stored."""
    return server.replace("w4a4", "w4a16")


def share(k: int, n: int) -> str:
    """Return a count with its share and 95 % interval."""
    low, high = wilson(k, n)
    return f"{k} ({100 * k / n:.1f} %, {100 * low:.0f}–{100 * high:.0f})" if n else "–"


def line(row: Mapping[str, Any]) -> str:
    """Return one Markdown row of the table."""
    own = row["agree"][row["profile"]]
    rest = [v for k, v in row["agree"].items() if k.startswith(row["profile"] + "+")]
    gates = []
    for gate, n_passed in row["reference_gates"].items():
        offline_counts = [counts.get(gate, 0) for counts in row["offline_gates"].values()]
        served_counts = [counts.get(gate, 0) for counts in row["served_gates"]]
        low, high = min(offline_counts), max(offline_counts)
        inside = "" if low <= min(served_counts) and max(served_counts) <= high else " **outside**"
        span = f"{low}" if low == high else f"{low}–{high}"
        gates.append(
            f"{gate} {'/'.join(map(str, served_counts))} ({span}; bf16 {n_passed}){inside}"
        )
    cells = [
        row["checkpoint"],
        row["server"],
        str(row["n"]),
        ", ".join(share(*pair) for pair in row["a_a"]) or "–",
        f"{share(own, row['n'])}; {min(rest, default=own)}–{max(rest, default=own)}",
        "; ".join(gates),
        verdict_cell(row),
        f"{sum(p < 10 for p in row['parted'])} of {len(row['parted'])}",
        f"{row['agreed'][1]} of {row['agreed'][0]}",
    ]
    if bf16 := row.get("bf16"):
        offline = bf16["offline"][row["profile"]]
        lost = (
            f"{gate} {n}: −{lost} +{won} (−{offline.get(gate, (0, 0, 0))[1]} +{offline.get(gate, (0, 0, 0))[2]})"
            for gate, (n, lost, won) in bf16["served"].items()
        )
        cells += ["; ".join(lost), verdict_cell(bf16)]
    return "| " + " | ".join(cells) + " |"


def verdict_cell(row: Mapping[str, Any]) -> str:
    members = ", ".join(dict.fromkeys(row["member_verdicts"].values()))
    return f"{'/'.join(row['served_verdicts'])}; {row['offline_verdict']} ({members}); {'/'.join(row['agreement'])}"


HEADER = (
    "checkpoint", "server", "answers", "A/A", "equal offline; other members", "gates: served (offline; bf16)",
    "verdict served; offline (members); agreement", "part early", "members alike, right",
    "against bf16 in the server: lost, won (offline)", "verdict of that, by the workloads' gates",
)  # fmt: skip


def checkpoint_of(strategy: str, work: Path, model: Path, samples: int) -> Path:
    """Return the model quantized with a strategy and so many calibration conversations; an existing one is reused."""
    from annie_quant import data, quantize

    rows, folder = work / "calibration.jsonl", work / strategy
    if folder.exists():
        return folder
    if not rows.exists():
        data.generate("annie", teacher="offline", n=500, output=rows, seed=0)
    quantize.run(strategy, model, folder, calib_data=rows, calib_samples=samples)
    return folder


def print_table(work: Path, model: Path, sample: Sample) -> int:
    """Print a row per checkpoint and server that both have answers; return how many verdicts are reversed."""
    template, n, n_reversed = (
        Template(model),
        sample.n,
        0,
    )  # the checkpoints' own bf16 models have this template
    print("| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER), sep="\n")
    for path in sorted((work / "served").glob(f"*.{n}.jsonl")):
        name, server = next(
            (path.name[: -len(f".{s}.{n}.jsonl")], s) for s in SERVERS if f".{s}.{n}." in path.name
        )
        computed = work / "offline" / f"{name}.{n}.json"
        if (
            not computed.exists()
            or SERVERS[server] not in files.read_json(computed)["members"]
            or not read(path)
        ):
            continue
        row = compare(work, template, sample, name, server, model.name)
        files.write_json(work / "rows" / f"{name}.{server}.{n}.json", row)
        print(line(row), flush=True)
        n_reversed += [*row["agreement"], *row.get("bf16", {}).get("agreement", ())].count(
            "reversed"
        )
    return n_reversed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", choices=("prompts", "offline", "llama.cpp", "vllm", "transformers", "table")
    )
    parser.add_argument("checkpoints", nargs="*", help="strategies, or folders of checkpoints")
    parser.add_argument("--work", type=Path, default=Path("build/predict"))
    parser.add_argument("--model", type=Path, default=MODEL, help="the bf16 model")
    parser.add_argument(
        "--python",
        type=Path,
        help="the python of vLLM's environment (tests/integration/vllm_cpu.py)",
    )
    parser.add_argument("--n", type=int, default=30, help="prompts per gate")
    parser.add_argument(
        "--workloads", nargs="+", help="default: all single-turn ones of this package"
    )
    parser.add_argument("--max-tokens", type=int, help="cap on every answer, of all parts")
    parser.add_argument(
        "--alone", action="store_true", help="offline: the profiles without their ensembles"
    )
    parser.add_argument(
        "--kinds",
        default="w4a4,w4a16",
        help="of the checkpoint in vLLM on a CPU, also w4a4-float32 and w4a16-float32",
    )
    parser.add_argument("--threads", type=int, default=0, help="of llama.cpp; 0: its default")
    parser.add_argument("--reuse-prefixes", action="store_true", help="of prompts, by llama.cpp")
    parser.add_argument(
        "--cuts", help="sequences at a time; default: 8,1 in llama.cpp, 16,1 in vLLM on a CPU"
    )
    parser.add_argument(
        "--again", type=int, help="prompts that are asked again under the second cut; default: all"
    )
    parser.add_argument("--profiles", default=",".join(PROFILES))
    parser.add_argument(
        "--calib-samples", type=int, default=128, help="conversations, for strategies"
    )
    parser.add_argument("--device", default=None, help="of the offline evaluation")
    arguments = parser.parse_intermixed_args()
    work, n = arguments.work.resolve(), arguments.n
    sample = Sample(
        n, tuple(arguments.workloads) if arguments.workloads else None, arguments.max_tokens
    )
    work.mkdir(parents=True, exist_ok=True)
    if arguments.part == "prompts":
        template = Template(arguments.model)
        write_prompts(work / f"prompts.{n}.json", sample.prompts(template)[1], template.end_tokens)
    if arguments.part == "table":
        sys.exit(1 if print_table(work, arguments.model, sample) else 0)
    for item in arguments.checkpoints:
        folder = Path(item).resolve()
        if not folder.is_dir():
            folder = checkpoint_of(item, work, arguments.model, arguments.calib_samples)
        if arguments.part == "offline":
            profiles = arguments.profiles.split(",")
            offline(
                work, arguments.model, folder, sample, profiles, arguments.device, arguments.alone
            )
        elif arguments.part == "llama.cpp":
            cuts = arguments.cuts or "8,1"
            serve_llama_cpp(
                work, folder, n, cuts, arguments.threads, arguments.again, arguments.reuse_prefixes
            )
        elif arguments.part == "transformers":
            serve_transformers(work, folder, Template(arguments.model), sample)
        else:
            serve_vllm(
                work,
                folder,
                n,
                arguments.python,
                arguments.kinds.split(","),
                arguments.cuts or "16,1",
                arguments.again,
            )
        print(folder.name, arguments.part, "done", flush=True)


if __name__ == "__main__":
    main()
