"""Greedy answers of M stacked models to the workloads, under several numerics, with the package's own gates."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import quant
import torch
from config import configuration
from data import BUCKETS, batch, tokenizer
from net import Cache, Net

from annie_quant.judge import load_workloads, parse_raw
from annie_quant.judge.gates import checks, tabulate
from annie_quant.judge.sample import sample

END = ("<|im_end|>", "<|endoftext|>")
NUMERICS = ("bf16", "naive w4a4", "naive w4a16", "mlp_only w4a4")
ROWS_AT_ONCE = 4096
PREFILL_TOKENS = 400_000


def ended(token: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Return bool [m, b] for token ids [m, b, 1]."""
    return torch.stack([token[:, :, 0] == e for e in ends]).any(0)


def generate(
    net: Net, m: int, prompts: list[list[int]], new: int, ends: list[int], graphs: bool = True
) -> list[list[list[int]]]:
    """Return greedy continuations: token ids [m][prompt], with the end token if there is one."""
    device = net.w["lm_head.weight"].device
    b, width = len(prompts), max(map(len, prompts))
    ids = torch.zeros(b, width, dtype=torch.long)
    keep = torch.zeros(b, width)
    for r, p in enumerate(prompts):
        ids[r, width - len(p) :] = torch.tensor(p)
        keep[r, width - len(p) :] = 1
    ids, keep = ids.to(device), keep.to(device)
    start = (width - keep.sum(1)).long()
    cache = Cache(width + new, start)
    tri = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    # A padding row must attend to something: the NaN of its softmax would spread.
    mask = ((tri[None] & (keep[:, None, :] > 0)) | torch.eye(width, dtype=torch.bool, device=device))[:, None]
    hidden = net.hidden(ids, m, cache=cache, keep=keep, mask=mask.repeat(m, 1, 1, 1))
    token = net.logits(hidden[:, :, -1:]).argmax(-1)
    out = torch.zeros(m, b, new, dtype=torch.long, device=device)
    out[:, :, 0] = token[:, :, 0]
    at = torch.full((1,), width, dtype=torch.long, device=device)
    slots = torch.arange(width + new, device=device)
    visible_from = start.repeat(m)[:, None, None, None]
    done = ended(token, ends)

    def step() -> None:
        visible = (slots <= at)[None, None, None] & (slots[None, None, None] >= visible_from)
        h = net.hidden(token, m, cache=cache, positions=at, mask=visible)
        token.copy_(net.logits(h).argmax(-1))
        out.index_copy_(2, at - (width - 1), token)
        done.logical_or_(ended(token, ends))
        at.add_(1)

    replay = step
    if graphs and device.type == "cuda" and new > 4:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        # Capture records without running, so only the first step has been taken.
        replay, taken = graph.replay, 2
    else:
        taken = 1
    for n in range(taken, new):
        if n % 8 == 0 and bool(done.all()):
            break
        replay()
    tokens = out.cpu().numpy()
    result = []
    for model in tokens:
        rows = []
        for row in model:
            stop = np.isin(row, ends).nonzero()[0]
            rows.append(row[: stop[0] + 1].tolist() if len(stop) else row.tolist())
        result.append(rows)
    return result


def answer_all(net: Net, m: int, prompts: list[list[int]], limits: list[int], ends: list[int]) -> list[list[list[int]]]:
    """Run generate over any number of prompts, grouped by length and limit, in batches that fit into memory."""
    order = sorted(range(len(prompts)), key=lambda i: (limits[i], len(prompts[i])))
    answers: list[list[list[int]]] = [[[] for _ in prompts] for _ in range(m)]
    while order:
        group = [order[0]]
        width = max(64, int(1.5 * len(prompts[order[0]])))
        for i in order[1:]:
            widest = max(len(prompts[i]), len(prompts[group[0]]))
            if limits[i] != limits[group[0]] or len(prompts[i]) > width or len(group) * m >= ROWS_AT_ONCE:
                break
            if (len(group) + 1) * m * widest > PREFILL_TOKENS:
                break
            group.append(i)
        order = order[len(group) :]
        group_answers = generate(net, m, [prompts[i] for i in group], limits[group[0]], ends)
        for j in range(m):
            for i, tokens in zip(group, group_answers[j], strict=True):
                answers[j][i] = tokens
    return answers


def ask(net: Net, m: int, workloads: list[Any], cap: int = 240) -> list[list[tuple[Any, Any, Any, str]]]:
    """Return m lists of (workload, case, answer, raw text). Conversations go turn by turn with each model's own answers."""
    t = tokenizer()
    ends = [t.convert_tokens_to_ids(e) for e in END]
    jobs = [(w, c) for w in workloads for c in w.cases]
    messages: list[list[list[dict]]] = [[[] for _ in jobs] for _ in range(m)]
    answered: list[list[tuple]] = [[] for _ in range(m)]
    for turn in range(5):
        live = [i for i, (_, c) in enumerate(jobs) if c.n_turns > turn]
        if not live:
            break
        texts = []
        for i in live:
            w, c = jobs[i]
            per_model = [w.messages(c, turn, messages[j][i]) for j in range(m)] if turn else [w.messages(c)] * 1
            texts.append(
                [
                    t.apply_chat_template(
                        x, tools=w.tools_for(c), tokenize=False, add_generation_prompt=True, enable_thinking=w.thinking
                    )
                    for x in per_model
                ]
            )
        limits = [min(cap, jobs[i][0].max_tokens) for i in live]
        if turn == 0:
            prompts = [t(x[0], add_special_tokens=False)["input_ids"] for x in texts]
            answers = answer_all(net, m, prompts, limits, ends)
        else:
            # Each model has its own history: one batch has the prompts of all models, and each model uses its own rows.
            answers = [[[] for _ in live] for _ in range(m)]
            flat = [t(x[j], add_special_tokens=False)["input_ids"] for x in texts for j in range(m)]
            uniques = sorted(set(map(tuple, flat)))
            unique_answers = answer_all(net, m, [list(u) for u in uniques], [limits[0]] * len(uniques), ends)
            index = {u: i for i, u in enumerate(uniques)}
            for n in range(len(live)):
                for j in range(m):
                    answers[j][n] = unique_answers[j][index[tuple(flat[n * m + j])]]
        for j in range(m):
            for n, i in enumerate(live):
                w, c = jobs[i]
                raw = t.decode(answers[j][n])
                stopped = answers[j][n][-1:] and answers[j][n][-1] in ends
                answer = parse_raw(raw, w.thinking, w.tools_for(c), None if stopped else "length", len(answers[j][n]))
                messages[j][i].append({"role": "assistant", "content": answer.text})
                answered[j].append((w, c.at_turn(turn), answer, raw))
    return answered


def calibrate(
    net_of: Any, m: int, rows: list[list], device: str, n: int = 96, seed: int = 5
) -> dict[str, torch.Tensor]:
    """Return the largest input of each linear over rows of Annie's style."""
    peaks, rng = quant.Peaks(), np.random.default_rng(seed)
    net = net_of(peaks)
    for bucket, (longest, *_rest) in zip(rows, BUCKETS, strict=True):
        if not bucket:
            continue
        ids, mask = batch(bucket, max(1, n * 192 // longest), rng, whole=1.0)
        # The mask ends one before the last token; the rest is padding and must not count.
        peaks.keep = torch.from_numpy(mask > 0).to(device)
        net.hidden(torch.from_numpy(ids).to(device), m)
    return peaks.peak


@torch.no_grad()
def evaluate(
    merged: dict[str, torch.Tensor],
    m: int,
    calibration: list[list],
    device: str,
    numerics: tuple[str, ...] = NUMERICS,
    per_gate: int | None = 100,
    seed: int = 0,
    log: Any = print,
) -> list[dict[str, Any]]:
    """Return m dicts {numerics: {"gates": table, "by_workload": {...}, "raw": [...]}}."""
    config = configuration()
    workloads = load_workloads()
    if per_gate is not None:
        workloads = sample(workloads, per_gate, seed)
    peaks = calibrate(lambda hook: Net(config, merged, hook), m, calibration, device)
    results: list[dict[str, Any]] = [{} for _ in range(m)]
    for kind in numerics:
        strategy, _, bits = kind.partition(" ")
        w = merged if kind == "bf16" else quant.weights(merged, strategy)
        hook = quant.Activations(peaks, strategy) if bits == "w4a4" else None
        for j, answers in enumerate(ask(Net(config, w, hook), m, workloads)):
            by: dict[str, dict[str, list[int]]] = {}
            checked = []
            for load, case, answer, _ in answers:
                passed = checks(answer, case, load)
                checked.append(passed)
                for gate, ok in passed.items():
                    cell = by.setdefault(load.name, {}).setdefault(gate, [0, 0])
                    cell[0] += ok
                    cell[1] += 1
            results[j][kind] = {
                "gates": msgspec.to_builtins(tabulate(checked)),
                "by_workload": by,
                "raw": [[load.name, case.id, raw] for load, case, _, raw in answers],
            }
        log(f"evaluated {kind}")
    return results


def failures(result: dict[str, Any], n: int = 8, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    raw = list(result["raw"])
    rng.shuffle(raw)
    return [f"{w} {c}: {text[:200]!r}" for w, c, text in raw[:n]]
