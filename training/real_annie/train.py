"""Fine-tune an instruction model into an Annie: a LoRA on all linears of the layers (peft), merged into a bf16 folder.

    cd training/real_annie
    python train.py --model MODEL --rows DIR --output OUT [--rank 16] [--steps 500] [--lr 2e-4] [--seed 1]
    python train.py --model MODEL --rows DIR --output OUT --steps 0                         # the report of MODEL itself
    python train.py --model MODEL --rows DIR --adapter OUT --output OUT2 --merged FOLDER    # merge, and report again

--rows is the folder of conversations.py. The loss is on the assistant's tokens alone, through the model's own chat template with
tools. Needs torch, transformers and peft, nothing of annie_quant, and no network. OUT has adapter-N.safetensors (bfloat16, at most
--shard-mb each) and report.json; the merged model, which the report is about, is written with --merged only.

report.json: settings, seconds, loss, and per group of held-out prompts n, correct (tool_call: the one expected call, equal name
and arguments; no_tool and talk: an answer in text without a call), markdown, thinking (answers with either), unfinished (no end
token), and the answers that are not correct.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
MARKDOWN = re.compile(r"\*\*|`|^\s{0,3}#{1,6} |^\s*[-*+] |^\s*\d+[.)] ", re.MULTILINE)
THINKING = re.compile(r"</?think|^\s*(thinking process|analysis|reasoning)\b", re.IGNORECASE)
WARM_UP = 0.05  # of the steps

Sample = tuple[list[int], list[bool]]  # token ids, and which of them are learned


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sample_of(tokenizer: Any, row: dict[str, Any]) -> Sample:
    """Return a conversation's tokens; learned: those of the assistant's messages with their end token."""
    messages, tools = row["messages"], row["tools"]

    def text(count: int, **options: Any) -> str:
        return tokenizer.apply_chat_template(
            messages[:count], tools=tools, tokenize=False, **options
        )

    whole, spans = text(len(messages)), []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            head, end = text(i, add_generation_prompt=True), text(i + 1).rstrip("\n")
            if not (whole.startswith(head) and whole.startswith(end)):
                raise SystemExit(
                    "the chat template changes earlier messages: its prompt is not the beginning of the conversation"
                )
            spans.append((len(head), len(end)))
            names = [c["function"]["name"] for c in message.get("tool_calls") or ()]
            if any(name not in whole[len(head) : len(end)] for name in names):
                raise SystemExit(
                    "the chat template does not write tool calls: give one that does with --chat-template FILE"
                )
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    learned = [any(a <= begin < b for a, b in spans) for begin, _ in encoded["offset_mapping"]]
    return encoded["input_ids"], learned


def never_learned(model: Any, tokenizer: Any, samples: list[Sample]) -> list[str]:
    """Return the added tokens of the answers whose row of the embedding is that of another added token, nearly.

    The model's own training had none of them. An overlay on linears does not change the rows, so it cannot teach the model to
    write one of them and not the other. (The rule of tests/real/split_tags.py, on a loaded model and without annie_quant.)
    """
    learned = {
        token
        for ids, on in samples
        for token, is_learned in zip(ids, on, strict=True)
        if is_learned
    }
    added = tokenizer.get_added_vocab()
    rows = torch.nn.functional.normalize(
        model.get_input_embeddings().weight[list(added.values())].float(), dim=1
    )
    nearest = (rows @ rows.T).fill_diagonal_(0).amax(1).tolist()
    return [
        name
        for (name, i), cosine in zip(added.items(), nearest, strict=True)
        if i in learned and cosine > 0.99
    ]


def padded(rows: list[list[int]], value: int, left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor(
        [[value] * (width - len(r)) + r if left else r + [value] * (width - len(r)) for r in rows]
    )


def batches(samples: list[Sample], tokens: int, rng: random.Random) -> Iterator[list[Sample]]:
    """Yield batches for ever, of rows of similar lengths, in a shuffled order, of at most `tokens` tokens with padding."""
    while True:
        order = sorted(samples, key=lambda s: (len(s[0]), rng.random()))
        drawn: list[list[Sample]] = [[]]
        for s in order:  # the longest so far is the batch's width
            if drawn[-1] and (len(drawn[-1]) + 1) * len(s[0]) > tokens:
                drawn.append([])
            drawn[-1].append(s)
        rng.shuffle(drawn)
        yield from drawn


def train(model: Any, samples: list[Sample], a: argparse.Namespace) -> list[float]:
    """Train the overlay's weights, and return the loss of each step in nats per learned token."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=a.lr, weight_decay=0.0)
    warm_up = max(1, round(WARM_UP * a.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min(1.0, (i + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * i / a.steps)),
    )
    drawn, losses, began = batches(samples, a.tokens, random.Random(a.seed)), [], time.monotonic()
    model.train()
    for step in range(a.steps):
        batch = next(drawn)
        # Padding is on the right, where causal attention hides it from every token that is learned: no mask is needed.
        ids = padded([s[0] for s in batch], 0).to(a.device)
        labels = padded(
            [[t if on else -100 for t, on in zip(*s, strict=True)] for s in batch], -100
        ).to(a.device)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        if not torch.nn.utils.clip_grad_norm_(weights, 1.0).isfinite():
            raise SystemExit(
                f"step {step + 1}: loss {loss.item()}, a gradient is not finite: lower --lr or change --seed"
            )
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(round(loss.item(), 5))
        if step % 10 == 0 or step == a.steps - 1:
            print(
                f"step {step + 1} of {a.steps}, loss {losses[-1]:.4f}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    model.eval()
    return losses


def calls_of(text: str) -> list[Any]:
    """Return the calls of an answer as [name, arguments]; None for one that cannot be read."""
    calls: list[Any] = []
    for body in CALL.findall(text):
        try:
            call = json.loads(body)
            calls.append([call["name"], call["arguments"]])
        except (ValueError, KeyError, TypeError):
            calls.append(None)
    return calls


def judged(case: dict[str, Any], text: str, finished: bool) -> dict[str, bool]:
    """Return what an answer is. Equal arguments: equal JSON values, where 1 is not true."""
    calls = calls_of(text)
    if case["group"] == "tool_call":
        expected = [[case["expect"]["tool"], case["expect"]["arguments"]]]
        correct = json.dumps(calls, sort_keys=True) == json.dumps(expected, sort_keys=True)
    else:
        correct = "<tool_call>" not in text and bool(text.strip())
    prose = CALL.sub("", text)
    return {
        "correct": correct and finished,
        "markdown": bool(MARKDOWN.search(prose)),
        "thinking": bool(THINKING.search(prose)),
        "unfinished": not finished,
    }


@torch.inference_mode()
def answers(
    model: Any, tokenizer: Any, cases: list[dict[str, Any]], size: int, device: str
) -> Iterator[tuple[dict, str, bool]]:
    """Yield (case, greedy answer, whether it ended), in the order of the prompts' lengths."""
    prompts = []
    for case in cases:
        text = tokenizer.apply_chat_template(
            case["messages"], tools=case["tools"], tokenize=False, add_generation_prompt=True
        )
        prompts.append((tokenizer(text, add_special_tokens=False)["input_ids"], case))
    prompts.sort(key=lambda p: len(p[0]))
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    for i in range(0, len(prompts), size):
        part = prompts[i : i + size]
        ids = padded([p for p, _ in part], 0, left=True).to(device)
        mask = padded([[1] * len(p) for p, _ in part], 0, left=True).to(device)
        limit = max(c["max_tokens"] for _, c in part)
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=limit,
            do_sample=False,
            pad_token_id=ends[0],
        )
        for (_, case), row in zip(part, out[:, ids.shape[1] :].tolist(), strict=True):
            end = next((n for n, t in enumerate(row) if t in ends), None)
            yield (
                case,
                tokenizer.decode(row[:end], clean_up_tokenization_spaces=False),
                end is not None,
            )


def held_out(
    model: Any, tokenizer: Any, cases: list[dict[str, Any]], size: int, device: str
) -> dict[str, Any]:
    """Return, per group, the counts of the held-out prompts' answers and the answers that are not correct."""
    groups: dict[str, Any] = {}
    for case, text, finished in answers(model, tokenizer, cases, size, device):
        group = groups.setdefault(
            case["group"],
            {"n": 0, "correct": 0, "markdown": 0, "thinking": 0, "unfinished": 0, "wrong": []},
        )
        verdict = judged(case, text, finished)
        group["n"] += 1
        for name, value in verdict.items():
            group[name] += value
        if not verdict["correct"] or verdict["markdown"] or verdict["thinking"]:
            group["wrong"].append(
                {"id": case["id"], "expect": case["expect"], "answer": text[:400]}
            )
    return groups


def overlay_on(model: Any, rank: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=LINEARS, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def save_adapter(model: Any, folder: Path, shard_bytes: int) -> None:
    """Write the overlay as bfloat16, in files of at most `shard_bytes` bytes."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in get_peft_model_state_dict(model).items():
        stored = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        if shards[-1] and size + 2 * stored.numel() > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += 2 * stored.numel() + len(name) + 100  # the header's entry
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"adapter-{i + 1}.safetensors")


def load_adapter(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the rank and the tensors that save_adapter wrote."""
    files = sorted(folder.glob("adapter-*.safetensors"))
    if not files:
        raise SystemExit(
            f"{folder} has no adapter-*.safetensors: run train.py without --adapter first"
        )
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return next(t.shape[0] for name, t in tensors.items() if "lora_A" in name), tensors


def save_merged(model: Any, tokenizer: Any, source: Path, folder: Path) -> None:
    """Write the model with its tokenizer; the source's template and generation config as they are."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in ("generation_config.json", "chat_template.jinja"):
        if (source / name).exists() and not (
            name == "chat_template.jinja" and (folder / name).exists()
        ):
            shutil.copyfile(source / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="a bf16 folder of Qwen2, Llama or Qwen3"
    )
    parser.add_argument(
        "--rows", type=Path, required=True, help="the folder with train.jsonl and held_out.jsonl"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="the folder of the adapter and report.json"
    )
    parser.add_argument("--merged", type=Path, help="write the merged model here too")
    parser.add_argument("--adapter", type=Path, help="take this overlay instead of training one")
    parser.add_argument(
        "--chat-template", type=Path, help="use this template instead of the model's"
    )
    parser.add_argument("--rank", type=int, default=16, help="of the overlay; 2 for a thin model")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--tokens", type=int, default=8192, help="per step, at most")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the overlay's start and of the batches"
    )
    parser.add_argument(
        "--held-out", type=int, default=0, help="held-out prompts, evenly over the file (0: all)"
    )
    parser.add_argument("--batch", type=int, default=64, help="prompts answered at once")
    parser.add_argument("--shard-mb", type=float, default=15.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    a.output.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(a.model, trust_remote_code=False)
    if a.chat_template:
        tokenizer.chat_template = a.chat_template.read_text(encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(
        a.model, dtype=torch.bfloat16, trust_remote_code=False
    ).to(a.device)
    began, losses, n_tokens = time.monotonic(), [], 0
    if a.adapter:
        a.rank, tensors = load_adapter(a.adapter)
        model = overlay_on(model, a.rank, a.seed)
        set_peft_model_state_dict(model, tensors)
        model = model.merge_and_unload()
    elif a.steps:
        samples = [sample_of(tokenizer, row) for row in read(a.rows / "train.jsonl")]
        if names := never_learned(model, tokenizer, samples):
            raise SystemExit(
                f"{a.model} never learned {', '.join(names)}, and an overlay on linears cannot teach it to write them:"
                " run tests/real/split_tags.py on a copy of it"
            )
        n_tokens = sum(sum(on) for _, on in samples)
        print(
            f"{len(samples)} conversations, {sum(len(i) for i, _ in samples)} tokens, {n_tokens} learned",
            flush=True,
        )
        began, model = time.monotonic(), overlay_on(model, a.rank, a.seed)
        losses = train(model, samples, a)
        save_adapter(model, a.output, int(a.shard_mb * 2**20))
        # The merged model has the weights that were written, not the float32 ones that were trained.
        set_peft_model_state_dict(model, load_adapter(a.output)[1])
        model = model.merge_and_unload()
    trained_s = time.monotonic() - began
    model.eval()
    if a.merged:
        save_merged(model, tokenizer, a.model, a.merged)
    cases = read(a.rows / "held_out.jsonl")
    count = min(a.held_out or len(cases), len(cases))
    groups = held_out(
        model, tokenizer, [cases[i * len(cases) // count] for i in range(count)], a.batch, a.device
    )
    machine = (
        torch.cuda.get_device_name()
        if a.device.startswith("cuda")
        else platform.processor() or platform.machine()
    )
    report = {
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()},
        "versions": {"torch": torch.__version__, "machine": machine},
        "learned_tokens": n_tokens,
        "trained_s": round(trained_s, 1),
        "held_out_s": round(time.monotonic() - began - trained_s, 1),
        "losses": losses,
        "held_out": groups,
    }
    (a.output / "report.json").write_text(
        json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    for name, group in sorted(groups.items()):
        print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in group.items() if k != "wrong"))


if __name__ == "__main__":
    main()
