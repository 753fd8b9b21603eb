"""Small Qwen3.5 models with random weights and their NVFP4 exports, for the runtime's tests."""

from __future__ import annotations

import copy
import inspect
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import shared
from nvfp4_cases import MIDPOINTS
from paths import TINY_ANNIE

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def save_reference(folder: Path, seed: int = 0, gain: float = 4.0, layers: int = 4) -> Path:
    """Save a small bf16 Qwen3.5 with tiny-annie's tokenizer; its layers are DeltaNet, the last one is attention.

    gain: factor on the linears' initial weights; it makes the answers varied.
    layers: two where a test only needs one of each kind, which halves the time of its evaluations.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    tokenizer = AutoTokenizer.from_pretrained(TINY_ANNIE)
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, linear_key_head_dim=32, linear_value_head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_conv_kernel_dim=4, full_attention_interval=layers,
        max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(gain)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(TINY_ANNIE / name, folder / name)
    return folder


def save_with_conversations(home: Path) -> Path:
    """Write `home`/model, whose layers have some effect, and ten conversations to calibrate it with, `home`/calib.jsonl."""
    from annie_quant import data

    save_reference(home / "model", gain=2.0)
    data.generate("annie", teacher="offline", n=10, output=home / "calib.jsonl", seed=1)
    return home


def save_mixture(
    folder: Path, seed: int = 0, gain: float = 4.0, experts: int = 8, unused: int | None = None
) -> Path:
    """Save a bf16 Qwen3.5 MoE of four layers with merged experts, top 2, a shared expert, and tiny-annie's tokenizer.

    gain: as for save_reference.  unused: an expert that no layer's router ever chooses.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    tokenizer = AutoTokenizer.from_pretrained(TINY_ANNIE)
    torch.manual_seed(seed)
    config = Qwen3_5MoeTextConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=64, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, num_experts=experts, num_experts_per_tok=2, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, linear_key_head_dim=32, linear_value_head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_conv_kernel_dim=4, full_attention_interval=4,
        max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen3_5MoeForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(gain)
            if name.endswith("mlp.gate.weight"):
                weight.normal_(0, 0.3)
                if unused is not None:
                    weight[unused] = 0
        if unused is not None:
            for layer in model.model.layers:
                rows = layer.mlp.gate.weight
                # Two of these four logits are always positive, and the unused expert's is 0.
                others = [i for i in range(experts) if i != unused][:4]
                rows[others[1]], rows[others[3]] = -rows[others[0]], -rows[others[2]]
    model.to(torch.bfloat16).save_pretrained(folder)
    # save_pretrained stores a name per expert; published checkpoints have the modules' own, merged names.
    save_file(
        {n: t.clone() for n, t in model.state_dict().items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    for name in TOKENIZER_FILES:
        shutil.copyfile(TINY_ANNIE / name, folder / name)
    return folder


def single_names(source: Path, folder: Path) -> Path:
    """Copy a checkpoint of save_mixture with a name per expert, cut by torch."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    (folder / "model.safetensors").unlink()
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        base, _, kind = name.rpartition(".")
        if not base.endswith(".experts"):
            tensors[name] = tensor
            continue
        for i, matrix in enumerate(tensor):
            halves = (
                zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
                if "gate" in kind
                else [(kind, matrix)]
            )
            tensors |= {f"{base}.{i}.{k}.weight": m.clone() for k, m in halves}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def export_nvfp4(
    source: Path, folder: Path, config: str = "NVFP4_DEFAULT_CFG", tokens: int = 64
) -> Path:
    """Export the model in `source` with ModelOpt, calibrated with `max` on random tokens, on a CPU.

    An export of the same files by the same program is copied, also from an earlier run: ModelOpt's import alone takes four
    seconds of the processor.
    """
    inputs = shared.modelopt_inputs(source, config, tokens, inspect.getsource(export_anew))
    made = shared.stored(config, inputs, lambda made: export_anew(source, made, config, tokens))
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder


def export_anew(source: Path, folder: Path, config: str, tokens: int) -> None:
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        ids = torch.randint(
            0, model.config.vocab_size, (4, tokens), generator=torch.Generator().manual_seed(1)
        )
        mtq.quantize(model, copy.deepcopy(getattr(mtq, config)), lambda m: m(ids))
        export_hf_checkpoint(model, export_dir=folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, folder / name)


SERVED_AS_ONE = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
)


def simulated(source: Path, ids, config: dict | None = None):
    """Return ModelOpt's W4A4 simulation of the model in `source`, and its quantized linears by name.

    It is float32 on the device of `ids` and calibrated on them. Linears that are served as one matrix share their amax, as in
    ModelOpt's export.
    """
    import modelopt.torch.quantization as mtq
    import torch
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, device_map=str(ids.device)
        ).eval()
        mtq.quantize(model, copy.deepcopy(config or mtq.NVFP4_DEFAULT_CFG), lambda m: m(ids))
    for module in model.modules():
        for names in SERVED_AS_ONE:
            parts = [getattr(module, name) for name in names if hasattr(module, name)]
            for side in ("weight_quantizer", "input_quantizer"):
                amax = [getattr(p, side)._amax for p in parts if getattr(p, side).is_enabled]
                for value in amax:
                    value.copy_(torch.stack(amax).max(0).values)
    linears = {
        n: m
        for n, m in model.named_modules()
        if hasattr(m, "weight_quantizer") and m.weight_quantizer.is_enabled
    }
    return model, linears


def dequantized(folder: Path, kind: str = "bfloat16") -> dict:
    """Return the state dict of an export with every NVFP4 weight dequantized to a dtype by ModelOpt."""
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from safetensors.torch import load_file

    raw = load_file(folder / "model.safetensors")
    out = {}
    for name, tensor in raw.items():
        if name.endswith(("weight_scale", "weight_scale_2", "input_scale")):
            continue
        if tensor.dtype == torch.uint8:
            scale, scale_2 = raw[f"{name}_scale"], raw[f"{name}_scale_2"]
            shape = torch.Size((tensor.shape[0], tensor.shape[1] * 2))
            block = shape[1] // scale.shape[1]
            dtype = getattr(torch, kind)
            tensor = NVFP4QTensor(shape, dtype, tensor).dequantize(
                dtype=dtype, scale=scale, double_scale=scale_2, block_sizes={-1: block}
            )
        out[name] = tensor
    return out


class Edge(NamedTuple):
    """The first linear in which a decode step and a batch round an activation to different codes.

    apart: largest difference of its unrounded inputs, relative to the largest input. moved: number of values with another
    code. from_middle: the largest relative distance of such a value from a midpoint between two codes (of E2M1, or of E4M3
    for its block's scale).
    """

    linear: str
    apart: float
    moved: int
    from_middle: float


def first_edge(model, prompt: Sequence[int], history: Sequence[int]) -> Edge | None:
    """Return the first NVFP4 linear whose rounded inputs differ between computing prompt and history token by token, as plain
    generation does, and in one batch, as verification does; None if all are equal."""
    import torch

    from annie_quant.offline import codec
    from annie_quant.offline.engine import Engine, Row

    def step_by_step() -> None:
        cache = model(torch.tensor([list(prompt)]), use_cache=True).past_key_values
        for token in history:
            cache = model(
                torch.tensor([[token]]), past_key_values=cache, use_cache=True
            ).past_key_values

    steps = inputs_of_linears(model, step_by_step)
    batch = inputs_of_linears(
        model, lambda: list(Engine(model, rows=5).scores([Row(prompt, [*history, 0])]))
    )
    e4m3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    for name, a in steps.items():
        b, scale = batch[name], model.get_submodule(name).scalars().input_scale
        moved = (codec.fake_quant(a, scale) != codec.fake_quant(b, scale)).nonzero().tolist()
        if not moved:
            continue
        farthest = 0.0
        for row, column in moved:
            block = a[row, column // 16 * 16 :][:16].double().abs()
            ideal = float(block.max()) / (6 * scale)
            step = float(torch.tensor(ideal).to(torch.float8_e4m3fn)) * scale
            middles = torch.tensor(MIDPOINTS, dtype=torch.float64)
            of_value = (block[column % 16] / step / middles - 1).abs().min()
            of_scale = ((e4m3[1:] + e4m3[:-1]) / 2 / ideal - 1).abs().min()
            farthest = max(farthest, float(torch.minimum(of_value, of_scale)))
        return Edge(name, float((a - b).abs().max() / a.abs().max()), len(moved), farthest)
    return None


def inputs_of_linears(model, forward: Callable[[], object]) -> dict:
    """Return the inputs, float32 [tokens, K], of each NVFP4 linear while `forward` runs, in the model's order."""
    import torch

    from annie_quant.offline.linears import nvfp4_linears

    inputs: dict[str, list] = {}
    hooks = [
        linear.register_forward_pre_hook(
            lambda _, args, name=name: inputs.setdefault(name, []).append(args[0].flatten(0, -2))
        )
        for name, linear in nvfp4_linears(model).items()
    ]
    try:
        with torch.inference_mode():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat(parts) for name, parts in inputs.items()}
