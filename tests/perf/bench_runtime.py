"""Measurements of the runtime; the results are in runtime.md.

python tests/perf/bench_runtime.py linear                        NVFP4Linear at M = 1 on this CPU
python tests/perf/bench_runtime.py load [DIR]                    loading a checkpoint compared with reading its bytes
python tests/perf/bench_runtime.py verify DIR REFERENCE [N [NUMERICS...]]    verification compared with plain generation
python tests/perf/bench_runtime.py gpu DIR REFERENCE CONVERSATIONS    everything that needs a CUDA GPU
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))  # runtime_models

ROWS, COLUMNS = 12288, 4096
SHAPES = {  # one block of Qwen3.5-9B: out, in
    "mlp": [(12288, 4096), (12288, 4096), (4096, 12288)],
    "linear_attention": [(8192, 4096), (4096, 4096), (4096, 4096)],
    "full_attention": [(8192, 4096), (1024, 4096), (1024, 4096), (4096, 4096)],
}


def median_ms(run, n: int = 25) -> float:
    """Return the median wall time of n calls; the caller rotates its buffers so that weights come from memory."""
    run()
    times = []
    for _ in range(n):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def random_linear(n: int, k: int, device: str = "cpu", seed: int = 0):
    from annie_quant.offline.linears import NVFP4Linear

    generator = torch.Generator(device).manual_seed(seed)
    layer = NVFP4Linear(k, n, device=device)
    layer.codes.random_(0, 256, generator=generator)
    layer.block_scale.view(torch.uint8).random_(48, 72, generator=generator)
    layer.weight_scale_2.fill_(0.01)
    layer.input_scale.fill_(4 / 2688)
    layer.set_numerics("w4a16")
    return layer


@torch.inference_mode()
def linear() -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    layers = [random_linear(ROWS, COLUMNS, seed=i) for i in range(4)]
    dense = [layer.rows(0, ROWS, torch.bfloat16) for layer in layers]
    x, turn = torch.randn(1, COLUMNS, dtype=torch.bfloat16), [0]

    def rotated(call):
        def run():
            turn[0] += 1
            call(turn[0] % 4)

        return run

    def modelopt(i: int):
        packed = NVFP4QTensor(torch.Size((ROWS, COLUMNS)), torch.bfloat16, layers[i].codes)
        weight = packed.dequantize(
            dtype=torch.bfloat16,
            scale=layers[i].block_scale,
            double_scale=layers[i].weight_scale_2,
            block_sizes={-1: 16},
        )
        torch.nn.functional.linear(x, weight)

    bf16 = median_ms(rotated(lambda i: torch.nn.functional.linear(x, dense[i])))
    ours = median_ms(rotated(lambda i: layers[i](x)))
    theirs = median_ms(rotated(modelopt), 5)
    ratio = dense[0].nbytes / (layers[0].codes.nbytes + layers[0].block_scale.nbytes + 8)
    print(
        f"M = 1, {ROWS}x{COLUMNS}: bf16 {bf16:.2f} ms, packed {ours:.2f} ms ({bf16 / ours:.2f}x its speed,"
    )
    print(
        f"  {ratio:.2f}x less memory), ModelOpt's dequantize + matmul {theirs:.0f} ms ({theirs / ours:.0f}x ours)"
    )
    for rows in (2, 4, 8, 16):
        x = torch.randn(rows, COLUMNS, dtype=torch.bfloat16)
        bf16 = median_ms(rotated(lambda i, x=x: torch.nn.functional.linear(x, dense[i])))
        print(
            f"M = {rows}: bf16 {bf16:.2f} ms, packed {median_ms(rotated(lambda i, x=x: layers[i](x))):.2f} ms"
        )


def load(folder: str = "") -> None:
    """Loading and then reading every cache line of the model, compared with reading the files and then every line of them.

    Without a folder: eight layers with the 9B's width, made here. The files are in the page cache in both cases.
    """
    from annie_quant import runtime

    with tempfile.TemporaryDirectory() as built:
        files = sorted(Path(folder or wide_checkpoint(Path(built))).glob("*.safetensors"))
        size = sum(f.stat().st_size for f in files)

        def touch(arrays) -> None:
            for a in arrays:
                a[::64].max()

        def read() -> None:
            touch([np.fromfile(file, np.uint8) for file in files])

        def mapped() -> None:
            touch([np.memmap(file, np.uint8, "r") for file in files])

        def loaded():
            return runtime.load(files[0].parent)

        def load_and_touch() -> None:
            touch(
                [
                    p.data.contiguous().view(-1).view(torch.uint8).numpy()
                    for p in loaded().parameters()
                ]
            )

        times = {f.__name__: median_ms(f, 7) / 1e3 for f in (read, mapped, loaded, load_and_touch)}
    print(f"{size / 1e9:.2f} GB: {({k: round(v, 3) for k, v in times.items()})} s;"
          f" load_and_touch / read {times['load_and_touch'] / times['read']:.2f},"
          f" / mapped {times['load_and_touch'] / times['mapped']:.2f}")  # fmt: skip


def wide_checkpoint(folder: Path) -> Path:
    """Write a random NVFP4 checkpoint of eight layers with Qwen3.5-9B's width and a small vocabulary, in two shards."""
    import json

    from runtime_models import SERVED_AS_ONE
    from safetensors.torch import save_file
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=4096, hidden_size=4096, intermediate_size=12288, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4, head_dim=256, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_num_key_heads=16, linear_num_value_heads=32, full_attention_interval=4, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    packed = {part for names in SERVED_AS_ONE for part in names} | {
        "o_proj",
        "out_proj",
        "down_proj",
    }
    shards: list[dict] = [{}, {}]
    for name, value in model.state_dict().items():
        shard = shards[len(shards[0]) > 200]
        if name.split(".")[-2] not in packed:
            shard[name] = (torch.randn(value.shape) * 0.02).bfloat16()
            continue
        n, k = value.shape
        shard[name] = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
        shard[name + "_scale"] = torch.randint(48, 72, (n, k // 16), dtype=torch.uint8).view(
            torch.float8_e4m3fn
        )
        shard[name + "_scale_2"] = torch.tensor(0.01)
        shard[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.01)
    files = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {key: f for f, s in zip(files, shards, strict=True) for key in s},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    stored = sorted(
        {
            n.rpartition(".")[0]
            for n, m in model.named_modules()
            if n.endswith(("in_proj_a", "in_proj_b"))
        }
    )
    exclude = ["lm_head", *(f"{part}.in_proj_{x}" for part in stored for x in "ab"), "*conv1d*"]
    written = config.to_dict() | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": exclude,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def verify(folder: str, reference: str, count: str = "60", *chosen: str) -> None:
    """The same answers by verification and by transformers' generate, one request at a time."""
    from runtime_models import first_edge

    from annie_quant import judge, runtime
    from annie_quant.offline.answers import Reference, answer_from_differences, first_difference
    from annie_quant.offline.decoding import Completion
    from annie_quant.offline.engine import Engine, Row
    from annie_quant.offline.pair import EvaluationJob
    from annie_quant.offline.prompts import Template

    template, n = Template(reference), int(count)
    with tempfile.TemporaryDirectory() as cache:
        settings = EvaluationJob(
            checkpoint=Path(folder), reference=Path(reference), cache=Path(cache)
        )
        known = Reference(settings, template, "float32", "cpu", 128)
        answered = known.answer(
            judge.sample(
                [w for w in judge.load_workloads() if not w.cases[0].turns], max(12, n // 4)
            )
        )[:n]
    for numerics in chosen or ("w4a4", "w4a16"):
        model = runtime.load(folder, numerics, cache="float32", dtype=torch.float32)
        engine = Engine(model)
        list(
            engine.scores([Row(answered[0].request.prompt, [0])])
        )  # the first forward of a process pays for torch's setup
        start = time.perf_counter()
        rows = [Row(r.prompt, template.target(c)) for r, c in answered]
        differences = {
            i: first_difference(x.argmax(-1), rows[i].target, template.end_tokens)
            for i, x in engine.scores(rows)
        }
        outcomes = answer_from_differences(engine, template, answered, differences)
        by_verification = time.perf_counter() - start
        start, plain = time.perf_counter(), []
        for request, _ in answered:
            ids = torch.tensor([request.prompt])
            new = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_tokens, do_sample=False,
                pad_token_id=0, eos_token_id=template.end_tokens,
            )[0, len(request.prompt) :].tolist()  # fmt: skip
            stop = next((i for i, t in enumerate(new) if t in template.end_tokens), None)
            plain.append(Completion(new[:stop], stop is not None))
        generating = time.perf_counter() - start
        tables = [
            judge.gate_table(
                [judge.Judged(a.workload, a.case, template.answer(a, d)) for a, d in pairs]
            )
            for pairs in (
                [(o.request, o.completion) for o in outcomes],
                [(r, c) for (r, _), c in zip(answered, plain, strict=True)],
            )
        ]
        same = sum(o.completion == c for o, c in zip(outcomes, plain, strict=True))
        print(f"{numerics}: {len(answered)} answers ({sum(len(d.tokens) for d in plain)} tokens), verification"
              f" {by_verification:.1f} s, generate {generating:.1f} s ({generating / by_verification:.1f}x); {same} equal,"
              f" verdicts {'equal' if tables[0] == tables[1] else 'DIFFER'}", flush=True)  # fmt: skip
        for outcome, other in zip(outcomes, plain, strict=True):
            if outcome.completion != other:
                both = zip(outcome.completion.tokens, other.tokens, strict=False)
                agreed = next((i for i, (a, b) in enumerate(both) if a != b), len(other.tokens))
                print(f"  {outcome.request.name} differs after {agreed} tokens:", end=" ")
                print(first_edge(model, outcome.request.prompt, other.tokens[:agreed]), flush=True)


def gpu(folder: str, reference: str, conversations: str) -> None:
    from annie_quant.offline import codec

    print(torch.cuda.get_device_name(), "kernels:", codec.has_kernels(), flush=True)
    for step in (
        gpu_bits,
        lambda: gpu_modelopt(reference),
        lambda: gpu_eval(folder, reference, conversations),
        gpu_speed,
    ):
        start = time.perf_counter()
        try:
            step()
        except Exception as error:
            print(f"FAILED: {type(error).__name__}: {str(error)[:600]}")
        print(f"  [{time.perf_counter() - start:.0f} s]", flush=True)
        torch.cuda.empty_cache()


@torch.inference_mode()
def gpu_bits() -> None:
    """Fake quantization and products on the GPU compared with the C codec; one graph with torch.compile under w4a16."""
    from annie_quant.offline import codec

    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(512, 4096) * 10.0 ** torch.randint(-7, 2, (512, 256)).repeat_interleave(
            16, 1
        )
        x[0, 0], x[3, 77] = float("nan"), 0.0
        x = x.to(dtype)
        for scale in (0.00123, 2.0**-10, 3.1e-6, 1.0):
            scale = float(np.float32(scale))
            expected = codec.fake_quant(x, scale)
            for form in (codec.fake_quant_eager, codec.fake_quant_torch):
                actual = form(x.cuda(), scale, 16).cpu()
                assert torch.equal(bits(actual), bits(expected)), (dtype, scale, form.__name__)
    layer = random_linear(1024, 4096)
    on_gpu = copy.deepcopy(layer).cuda()
    for numerics in ("w4a16", "w4a4"):
        layer.set_numerics(numerics)
        on_gpu.set_numerics(numerics)
        on_gpu.prepare()
        for rows in (1, 7, 300):
            x = torch.randn(rows, 4096).bfloat16()
            inputs = codec.fake_quant(x, layer.scalars().input_scale) if numerics == "w4a4" else x
            exact = inputs.double() @ layer.rows(0, 1024, torch.float32).double().T
            actual = on_gpu(x.cuda())
            error = (actual.cpu().double() - exact).abs().max() / exact.abs().max()
            assert error < 2**-8, (numerics, rows, error)
            compiled = torch.compile(on_gpu, fullgraph=numerics == "w4a16")(x.cuda())
            assert torch.equal(compiled, actual), (numerics, rows)
            on_gpu.prepared, stored = None, on_gpu.prepared
            whole = torch.nn.functional.linear(inputs.cuda(), on_gpu.rows(0, 1024, torch.bfloat16))
            on_gpu.prepared = stored
            assert ((whole.cpu().double() - exact).abs().max() / exact.abs().max()) < 2**-6
    print(
        "fake_quant on the GPU is the C codec's, bit for bit; products within one bf16 rounding; w4a16 compiled in one graph"
    )


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.int32 if t.dtype == torch.float32 else torch.int16)


@torch.inference_mode()
def gpu_modelopt(reference: str) -> None:
    """Logits compared with ModelOpt's simulation of its own checkpoint, including its Triton kernels; then with its weights.

    Why they differ before: tests/offline/test_gpu.py. The floor is the effect of another order of sums in the same model.
    """
    from modelopt.torch.export import export_hf_checkpoint
    from runtime_models import simulated

    from annie_quant import runtime
    from annie_quant.offline.linears import nvfp4_linears

    ids = torch.randint(0, 1000, (8, 128), generator=torch.Generator().manual_seed(0)).cuda()
    model, linears = simulated(Path(reference), ids)
    theirs = model(ids).logits.clone()
    weights = {n: m.weight_quantizer(m.weight) for n, m in linears.items()}
    with tempfile.TemporaryDirectory() as folder:
        export_hf_checkpoint(model, export_dir=folder)
        loaded = runtime.load(folder, "w4a4", cache="float32", dtype=torch.float32, device="cuda")
    ours = loaded(ids).logits.clone()
    floor = torch.cat([loaded(row[None]).logits for row in ids])
    moved = 0
    for name, linear in nvfp4_linears(loaded).items():
        moved += int((linear.dense != weights[name]).sum())
        linear.dense = weights[name]
    print(f"weights that ModelOpt's kernel rounds otherwise than its export: {moved}"
          f" of {sum(w.numel() for w in weights.values())}")  # fmt: skip
    for what, actual, expected in (
        ("the export against the simulation", ours, theirs),
        ("with the simulation's weights", loaded(ids).logits, theirs),
        ("the export, a row at a time against a batch", floor, ours),
    ):
        same = (actual.argmax(-1) == expected.argmax(-1)).double().mean()
        rel = (actual.double() - expected.double()).norm() / expected.double().norm()
        print(f"{what}, {ids.numel()} tokens: logits' relative L2 {rel:.2e}, same argmax {same:.4f},"
              f" {int((actual != expected).sum())} of {actual.numel()} logits differ")  # fmt: skip


def gpu_eval(folder: str, reference: str, conversations: str) -> None:
    """All gates at n = 100, KL on the conversations, both numerics; the second run has the reference's answers."""
    from annie_quant import runtime

    with tempfile.TemporaryDirectory() as cache:
        for run in ("answers made", "answers kept"):
            start = time.perf_counter()
            result = runtime.evaluate(
                folder,
                reference,
                n_per_gate=100,
                conversations=conversations,
                n_conversations=500,
                cache=cache,
                rows=512,
            )
            print(f"eval, {run}: {time.perf_counter() - start:.1f} s, {result['n_answers']} answers,"
                  f" {result['n_conversation_answers']} of conversations, {result['dtype']};"
                  f" { {k: round(v['kl']['mean'], 5) for k, v in result['numerics'].items()} }", flush=True)  # fmt: skip


@torch.inference_mode()
def gpu_speed() -> None:
    """Batch 1: all linears of a 9B-shaped model, our kernels compared with bf16, as CUDA graphs; and generate as a whole."""
    from runtime_models import SERVED_AS_ONE
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    from annie_quant.offline.linears import nvfp4_linears

    shapes = [
        s
        for i in range(32)
        for s in (*SHAPES["full_attention" if i % 4 == 3 else "linear_attention"], *SHAPES["mlp"])
    ]
    times = {}
    for kind in ("bf16", "w4a16", "w4a4"):
        if kind == "bf16":
            layers = [
                torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
                for n, k in shapes
            ]
        else:
            layers = [random_linear(n, k, "cuda", i) for i, (n, k) in enumerate(shapes)]
            for layer in layers:
                layer.set_numerics(kind)
                layer.prepare()
        inputs = {k: torch.randn(1, k, device="cuda", dtype=torch.bfloat16) for k in (4096, 12288)}

        def run(layers=layers, inputs=inputs):
            for layer in layers:
                layer(inputs[layer.in_features])

        times[kind] = graph_ms(run)
        del layers
        torch.cuda.empty_cache()
    ratios = {k: round(times["bf16"] / v, 2) for k, v in times.items()}
    print(
        "linears of a 9B-shaped model, one token, ms:",
        {k: round(v, 3) for k, v in times.items()},
        "speed:",
        ratios,
    )
    config = Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=4, head_dim=256, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_num_key_heads=16, linear_num_value_heads=32, full_attention_interval=4, tie_word_embeddings=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3_5ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(0, 1000, (1, 64), device="cuda")

    def tokens_per_second() -> float:
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=48, min_new_tokens=48, do_sample=False, pad_token_id=0)
        torch.cuda.synchronize()
        return 48 / (time.perf_counter() - start)

    before = tokens_per_second()
    expected = {part for names in SERVED_AS_ONE for part in names} | {
        "o_proj",
        "out_proj",
        "down_proj",
    }
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in expected:
            new = random_linear(module.out_features, module.in_features, "cuda")
            new.prepare()
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], new)
    print(f"generate, batch 1, transformers' own loop: bf16 {before:.1f} tok/s, NVFP4 on {len(nvfp4_linears(model))}"
          f" linears {tokens_per_second():.1f} tok/s")  # fmt: skip


def graph_ms(run) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return float(np.median(times))


if __name__ == "__main__":
    kinds = {"linear": linear, "load": load, "verify": verify, "gpu": gpu}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", nargs="?", choices=kinds, default="linear")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    kinds[options.kind](*options.arguments)
