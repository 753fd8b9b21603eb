"""NVFP4 experts of a mixture for vLLM on CPUs, where it has no class for them. vllm_plugin installs it.

W4A4 (activations rounded to NVFP4 with each expert's input scale) and W4A16, with the exact products of vllm_cpu_product, for the
tokens of one expert after the other; the weighted outputs are added in float32. The weights stay as the checkpoint has them.

The product that vLLM's linears and experts on a CPU are computed with (vllm_plugin, vllm_cpu).
"""

from __future__ import annotations

from typing import Any

from annie_quant.ops import vllm_experts

GROUP = 16


def multiply(x: Any, codes: Any, block_scale: Any, tensor_scale: float, input_scale: float) -> Any:
    """Multiply x [..., K] by the transpose of packed weights [N, K]. Returns [..., N] in x's dtype.

    Both sides are exact, sums are float32, and each sum is rounded once, for any number of rows: the arithmetic of CUTLASS's and
    Marlin's kernels. (Rounding dequantized values to bfloat16 first would make an answer depend on the batch that it is in.)

    input_scale: tensor scale that x is rounded with; 0: x is not rounded
    """
    import torch

    from annie_quant.offline import codec, nvfp4_linear

    rows = x.reshape(-1, x.shape[-1]).float().contiguous()
    if input_scale:
        rows = codec.fake_quant_eager(rows, input_scale, GROUP)
    n, k = codes.shape[0], rows.shape[1]
    if rows.shape[0] <= nvfp4_linear.FEW_ROWS:
        y = codec.packed_matmul(rows, codes, block_scale, tensor_scale, GROUP, divides=False)
    else:
        step = max(1, nvfp4_linear.BLOCK_BYTES // (k * rows.element_size()))
        spans = [slice(i, i + step) for i in range(0, n, step)]
        parts = (codec.dequantize(codes[s], block_scale[s], tensor_scale, GROUP, rows.dtype) for s in spans)
        y = torch.cat([rows @ part.t() for part in parts], -1)
    return y.reshape(*x.shape[:-1], n).to(x.dtype)


def install() -> None:
    """Let vLLM take our classes on a CPU. Raises what a vLLM with other names gives."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts

    ours = experts_classes()

    def converter(convert: Any) -> Any:
        def convert_or_keep(nvfp4_backend: Any, layer: Any, **tensors: Any) -> Any:
            if getattr(getattr(layer, "quant_method", None), "experts_cls", None) not in ours:
                return convert(nvfp4_backend=nvfp4_backend, layer=layer, **tensors)
            return vllm_experts.Converted(*(tensors[name] for name in vllm_experts.Converted._fields))

        return convert_or_keep

    vllm_experts.stand_for(MarlinExperts, ours, converter)


def experts_classes() -> list[type[Any]]:
    """Return the classes for W4A4 and W4A16, of which vLLM takes the one that fits a checkpoint."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static
    from vllm.platforms import current_platform

    class AnnieNvFp4Experts(modular_kernel.FusedMoEExpertsModular):
        """Activations rounded to NVFP4 with the checkpoint's input scales."""

        activation_key: Any = kNvfp4Dynamic

        @staticmethod
        def activation_format() -> Any:
            return modular_kernel.FusedMoEActivationFormat.Standard

        @staticmethod
        def _supports_current_device() -> bool:
            return bool(current_platform.is_cpu())

        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return False

        @classmethod
        def _supports_quant_scheme(cls, weight_key: Any, activation_key: Any) -> bool:
            return bool(weight_key == kNvfp4Static and activation_key == cls.activation_key)

        @staticmethod
        def _supports_activation(activation: Any) -> bool:
            return bool(activation.name == "SILU")

        @staticmethod
        def _supports_parallel_config(config: Any) -> bool:
            return True

        @property
        def expects_unquantized_inputs(self) -> bool:
            return True

        def process_weights_after_loading(self, layer: Any) -> None:
            _operator()  # must be defined before torch.compile traces the model
            import torch

            one = torch.zeros(len(layer.w2_weight))
            rounds = self.activation_key is not None
            self.input_scales = [
                scale.data.float().view(len(one), -1).amax(1) if rounds else one
                for scale in (layer.w13_input_scale, layer.w2_input_scale)
            ]

        def workspace_shapes(self, M: int, N: int, K: int, *unused: Any) -> Any:  # vLLM's names
            return (0,), (0,), (M, K)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def apply(
            self, *, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, expert_map: Any,
            **unused: Any,
        ) -> None:  # fmt: skip
            import torch

            chosen = topk_ids if expert_map is None else expert_map[topk_ids.long()]
            torch.ops.annie_quant.vllm_nvfp4_experts(
                output, hidden_states, topk_weights, chosen, w1, self.w1_scale, self.g1_alphas, self.input_scales[0],
                w2, self.w2_scale, self.g2_alphas, self.input_scales[1],
            )  # fmt: skip

    class AnnieNvFp4W4A16Experts(AnnieNvFp4Experts):
        """Unrounded activations, as Marlin does."""

        activation_key = None

    return [AnnieNvFp4Experts, AnnieNvFp4W4A16Experts]


def compute(
    out: Any,
    x: Any,
    weights: Any,
    chosen: Any,
    codes: Any,
    block_scale: Any,
    tensor_scales: Any,
    input_scales: Any,
    down_codes: Any,
    down_block_scale: Any,
    down_tensor_scales: Any,
    down_input_scales: Any,
) -> None:
    """Write the weighted sums of the experts' outputs into out [tokens, hidden].

    x: [tokens, hidden].  weights and chosen: of a token's experts [tokens, top_k]; -1: an expert of another rank.
    The rest has a row per expert: of gate and up [2 width, hidden], then of down. An input scale of 0: x is not rounded.
    """
    import torch

    total = torch.zeros(x.shape, dtype=torch.float32)
    for e in chosen.unique().tolist():
        if e < 0:
            continue
        rows, place = torch.where(chosen == e)
        both = multiply(x[rows], codes[e], block_scale[e], float(tensor_scales[e]), float(input_scales[e]))
        gate, up = both.chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        scales = float(down_tensor_scales[e]), float(down_input_scales[e])
        y = multiply(inner, down_codes[e], down_block_scale[e], *scales)
        total.index_add_(0, rows, y.float() * weights[rows, place, None].float())
    out.copy_(total)


def _operator() -> None:
    """Define torch.ops.annie_quant.vllm_nvfp4_experts once, so that torch.compile sees one opaque call."""
    import torch

    if hasattr(torch.ops.annie_quant, "vllm_nvfp4_experts"):
        return
    names = "weights chosen codes block_scale tensor_scales input_scales down_codes down_block_scale down_tensor_scales"
    tensors = ", ".join(f"Tensor {name}" for name in f"x {names} down_input_scales".split())
    schema = f"(Tensor(a!) out, {tensors}) -> ()"
    operator = torch.library.custom_op("annie_quant::vllm_nvfp4_experts", compute, mutates_args=("out",), schema=schema)
    operator.register_fake(lambda *arguments: None)
