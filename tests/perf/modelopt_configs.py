"""ModelOpt's configurations by `quantize --strategy modelopt` and by a plain ModelOpt script with the same batches.

    python tests/perf/modelopt_configs.py --models DIR,DIR --calib-data rows.jsonl --held-out gate.jsonl --output runs/modelopt
    python tests/perf/modelopt_configs.py --output runs/modelopt --table

Per model and configuration: seconds of both (from before the model is loaded to the written folder, each in a process of its own),
how many tensors have equal bytes, the audit's findings of both exports, and of ours the mean KL and the flips on held-out answers.
--samples: calibration conversations. --configs: names, separated by semicolons. A finished line of runs.jsonl is not made again.

A machine without a network gets ModelOpt and what it imports as wheels, next to torch, scipy, safetensors, ninja, PyYAML, regex,
rich, tqdm and nvidia-ml-py, which are there. For Python 3.12:

    pip download --no-deps --only-binary :all: --python-version 3.12 --platform manylinux2014_x86_64 --platform any -d wheels \
        nvidia-modelopt==0.47.0 omegaconf==2.4.0 pulp==3.3.2 pydantic==2.14.4 pydantic_core==2.50.5 annotated-types \
        typing-inspection transformers==5.14.1 tokenizers==0.22.2
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from annie_quant import checkpoint
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import SILENT

CONFIGS = (
    "NVFP4_DEFAULT_CFG",
    "NVFP4_MLP_ONLY_CFG",
    "W4A16_NVFP4_CFG",
    "NVFP4_AWQ_LITE_CFG",
    "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG",
    "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG",
    "NVFP4_FOUR_OVER_SIX_CFG",
    "general/ptq/nvfp4_default-kv_fp8",
    "general/ptq/nvfp4_act_headroom-kv_fp8_cast",
    "general/ptq/nvfp4_default-kv_none-gptq",
    "general/auto_quantize/nvfp4_fp8_at_5p4bits",
    "general/auto_quantize/nvfp4_fp8_kl_div_at_5p4bits",
    "huggingface/qwen3_5/ptq/w4a16_nvfp4-fp8_attn-kv_fp8_cast",
    "general/qad/nvfp4_lsq-mse_init-fp8_kv",
)
SIDES = ("ours", "plain")
HELD_OUT_ANSWERS = 100


def calibration_batches(model: Path, config: str, data: Path, samples: int, work: Path) -> Any:
    """Return the configuration and the batches that our command gives ModelOpt."""
    import torch

    from annie_quant.quantize import external
    from annie_quant.quantize.calibration_text import read_answers, read_whole_conversations
    from annie_quant.quantize.strategies import modelopt
    from annie_quant.quantize.strategy import Job

    model_type = str(ModelFolder(model).config["model_type"])
    found = modelopt.find_configuration(config, model_type)
    job = Job(model, work, data, samples, answers="given", work=work)
    read = read_whole_conversations if found.is_max_only else read_answers
    rows = external.rows_of(read(job, SILENT))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return found, external.text_batches(rows, device, seed=0)


def by_plain_script(
    model_folder: Path, config: str, data: Path, samples: int, output: Path
) -> float:
    """Let ModelOpt quantize with its own functions alone, and return the seconds."""
    import modelopt.torch.quantization as mtq
    import torch
    import transformers
    from modelopt.torch.export import export_hf_checkpoint

    work = output.with_name(f"{output.name}-text")
    found, texts = calibration_batches(model_folder, config, data, samples, work)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.monotonic()
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto").to(device)
    batches = [
        {"input_ids": torch.from_numpy(b.ids).to(device), "labels": torch.from_numpy(b.labels)}
        for b in texts
    ]

    def forward_loop(model: Any) -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch["input_ids"], use_cache=False)

    def loss_step(model: Any, batch: Any) -> Any:
        labels = batch["labels"].to(device)
        return model(input_ids=batch["input_ids"], labels=labels, use_cache=False)

    def logits_step(model: Any, batch: Any) -> Any:
        return model(input_ids=batch["input_ids"], use_cache=False).logits

    if found.search is None:
        mtq.quantize(model, found.quantize, forward_loop)
    else:
        section = found.search
        constraints = section.constraints.model_dump(exclude_none=True)
        constraints["cost"] = {"excluded_module_name_patterns": list(section.cost_excluded_layers)}
        rows = 0
        steps = 0
        while steps < len(batches) and rows < section.score_size:
            rows += len(batches[steps]["input_ids"])
            steps += 1
        model, _ = mtq.auto_quantize(
            model,
            constraints=constraints,
            quantization_formats=[
                c.model_dump(exclude_none=True) for c in section.candidate_formats
            ],
            data_loader=batches,
            forward_step=loss_step if section.auto_quantize_method == "gradient" else logits_step,
            loss_func=lambda output, batch: output.loss,
            disabled_layers=list(section.disabled_layers),
            num_calib_steps=len(batches),
            num_score_steps=steps,
            method=section.auto_quantize_method,
        )
    with torch.no_grad():
        export_hf_checkpoint(model, export_dir=output)
    seconds = time.monotonic() - start
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (model_folder / name).is_file():
            shutil.copyfile(model_folder / name, output / name)
    return seconds


def by_our_command(model: Path, config: str, data: Path, samples: int, output: Path) -> float:
    """Run `quantize --strategy modelopt`, and return its seconds and notes."""
    import transformers  # noqa: F401  imported before the time starts, as in the plain script
    from modelopt.torch import export, quantization  # noqa: F401

    from annie_quant import quantize

    result = quantize.run(
        "modelopt",
        model,
        output,
        calib_data=data,
        calib_samples=samples,
        answers="given",
        config=config,
        force=True,
    )
    print(json.dumps(result.notes))
    return result.seconds


def equal_tensors(ours: Path, plain: Path) -> dict[str, Any]:
    """Return how many tensors have equal bytes, and the kinds of those that do not."""
    a = ModelFolder(ours)
    b = ModelFolder(plain)
    different = [n for n in a if n in b and a.tensor(n).tobytes() != b.tensor(n).tobytes()]
    ours_alone = set(a) - set(b)
    kinds = Counter(".".join(n.split(".")[-2:]) for n in [*different, *(set(a) ^ set(b))])
    total = len(set(a))
    return {"tensors": total, "equal": total - len(different) - len(ours_alone), "not": kinds}


def held_out_kl(model: Path, folder: Path, answers: Path) -> dict[str, float]:
    """Return mean KL in nats and flips of the answers' tokens, by numerics."""
    import torch

    from annie_quant.data.rows import read_conversations
    from annie_quant.offline.engine import Engine, Row
    from annie_quant.offline.loading import load
    from annie_quant.quantize.calibration_text import samples_of_rows
    from annie_quant.quantize.kl_trial import in_turn_by_category

    device = "cuda" if torch.cuda.is_available() else "cpu"
    samples = list(in_turn_by_category(samples_of_rows(model, read_conversations(answers))))
    rows = [Row(s.prompt, s.answer) for s in samples[:HELD_OUT_ANSWERS]]
    source = load(model, dtype=torch.float32, device=device)
    expected = {i: torch.log_softmax(x, -1).cpu() for i, x in Engine(source).scores(rows)}
    tokens = sum(len(row.target) for row in rows)
    figures: dict[str, float] = {"tokens": tokens}
    for numerics in ("w4a4", "w4a16"):
        try:
            quantized = load(folder, numerics, cache="float32", dtype=torch.float32, device=device)
        except UsageError:  # weights alone have no scale for 4-bit inputs
            continue
        kl = 0.0
        flips = 0
        for i, logits in Engine(quantized).scores(rows):
            p = expected[i].to(logits.device)
            q = torch.log_softmax(logits, -1)
            kl += float((p.exp() * (p - q)).sum(-1).clamp_min(0).double().sum())
            flips += int((p.argmax(-1) != q.argmax(-1)).sum())
        del quantized
        figures[f"{numerics}_kl"] = kl / tokens
        figures[f"{numerics}_flips"] = flips
    return figures


def release_gpu_memory() -> None:
    """Give torch's unused memory back, for the processes of the next configuration."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def measure(model: Path, config: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one configuration on both sides, and compare."""
    line: dict[str, Any] = {"model": model.name, "config": config, "samples": arguments.samples}
    folders = {}
    for side in SIDES:
        folder = arguments.output / f"{model.name}-{config.replace('/', '_')}-{side}"
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, __file__, "--side", side, "--models", str(model)]
        command += ["--configs", config, "--calib-data", str(arguments.calib_data)]
        command += ["--samples", str(arguments.samples), "--output", str(folder)]
        environment = os.environ | {"TQDM_DISABLE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            error = done.stderr.strip().splitlines() or ["no message"]
            line[f"{side}_error"] = error[-1][:300]
            continue
        line[f"{side}_s"] = float(done.stdout.strip().splitlines()[-1])
        folders[side] = folder
        audit = checkpoint.audit(folder, source=model)
        line[f"{side}_findings"] = Counter(finding.code for finding in audit.findings)
        line[f"{side}_algorithm"] = audit.summary.algorithm
    if len(folders) == len(SIDES):
        line["bytes"] = equal_tensors(folders["ours"], folders["plain"])
    if "ours" in folders and arguments.held_out:
        line |= held_out_kl(model, folders["ours"], arguments.held_out)
        release_gpu_memory()
    if not arguments.keep:
        for folder in folders.values():
            shutil.rmtree(folder)
    return line


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        "| model | configuration | algorithm | ours, s | plain, s | ratio | equal tensors | not equal | findings: ours; plain | "
        "KL W4A4, W4A16 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        same = line.get("bytes", {})
        seconds = [line.get("ours_s"), line.get("plain_s")]
        ratio = f"{seconds[0] / seconds[1]:.2f}" if all(seconds) else "–"
        findings = "; ".join(
            line.get(f"{side}_error") or ", ".join(line[f"{side}_findings"]) or "none"
            for side in SIDES
        )
        kinds = ", ".join(f"{n} {kind}" for kind, n in same.get("not", {}).items())
        kl = ", ".join(
            f"{1e3 * line[f'{n}_kl']:.2f}e-3" for n in ("w4a4", "w4a16") if f"{n}_kl" in line
        )
        cells = [line["model"], line["config"], line.get("ours_algorithm", "–")]
        cells += [f"{s:.1f}" if s else "–" for s in seconds]
        cells += [ratio, f"{same.get('equal', '–')} of {same.get('tensors', '–')}", kinds or "–"]
        rows.append(f"| {' | '.join([*cells, findings, kl or '–'])} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="")
    parser.add_argument("--configs", default=";".join(CONFIGS))
    parser.add_argument("--calib-data", type=Path)
    parser.add_argument("--held-out", type=Path, help="conversations whose answers give the KL")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = [Path(model) for model in arguments.models.split(",") if model]
    if arguments.side:
        run = by_our_command if arguments.side == "ours" else by_plain_script
        config = arguments.configs
        print(run(models[0], config, arguments.calib_data, arguments.samples, arguments.output))
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "runs.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    finished = {(line["model"], line["config"], line["samples"]) for line in lines}
    for model in [] if arguments.table else models:
        for config in arguments.configs.split(";"):
            if (model.name, config, arguments.samples) not in finished:
                lines.append(measure(model, config, arguments))
                file.open("a").write(json.dumps(lines[-1]) + "\n")
                print(json.dumps(lines[-1]), flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
