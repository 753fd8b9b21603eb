"""The codes of an audit's findings and of ShardError, with what each means and what to do: `annie-quant explain CODE`.

tests/checkpoint/test_codes.py checks that each code in this package is here, and each one here is in the package.
"""

from __future__ import annotations

from typing import NamedTuple

COPY = "Copy or download the file again, and compare its checksum."
REPAIR = "annie-quant audit DIR --repair"
FROM_SOURCE = "annie-quant audit DIR --repair --source BF16"
EXPORT = "Quantize again: annie-quant quantize --model BF16 --output DIR"
OTHER_FOLDER = "Do not trust this folder; get it from another place."


class Explanation(NamedTuple):
    """meaning: what is wrong, and what it does to a server or a conversion. fix: the command or change that removes it."""

    meaning: str
    fix: str


CODES = {
    # files
    "no_folder": Explanation("The path is not a folder with a checkpoint.", "Give the folder that has config.json."),
    "no_weights": Explanation(
        "The folder has no safetensors file.", "Give a checkpoint that was saved as safetensors."
    ),
    "config_missing": Explanation(
        "config.json is missing, or it is a quantized checkpoint's and has no quantization_config; a server would read "
        "the codes as plain weights.",
        f"Copy config.json from the source, or {REPAIR}",
    ),
    "config_unreadable": Explanation(
        "A JSON file of the folder is not JSON, too large, not an object, or its main field is missing or of another type.",
        f"Restore the file, or for quantization settings: {REPAIR}",
    ),
    "shard_missing": Explanation("A file of weights that the index or the file names count is not there.", COPY),
    "shard_unreadable": Explanation(
        "The operating system cannot read a file of weights: its owner, its mode, a broken link, or the disk.",
        "Check the file's owner and mode; the message has the system's reason.",
    ),
    "shard_truncated": Explanation("A file of weights is shorter than its header states.", COPY),
    "not_safetensors": Explanation("A file of weights has no valid safetensors header.", COPY),
    "invalid_header": Explanation(
        "A header's entry is invalid: a name, a type, a shape, or offsets that overlap, leave gaps or do not fit the shape.",
        COPY,
    ),
    "index_mismatch": Explanation(
        "model.safetensors.index.json does not map tensor names to file names, or does not list a tensor of a file.",
        COPY,
    ),
    "tensor_missing": Explanation("A tensor that the index lists, or that this command needs, is in no file.", COPY),
    "duplicate_tensor": Explanation(
        "Two files hold a tensor of the same name; servers differ in which one they use.", COPY
    ),
    "decoder_incomplete": Explanation(
        "A layer that config.json counts, a tensor of a layer, the embedding or the head is missing; not every loader "
        "reports it, and transformers uses random values instead.",
        f"{COPY} Or quantize again: annie-quant quantize --model BF16 --output DIR",
    ),
    "path_escapes": Explanation(
        "A file name has a folder in it, or a link leaves the checkpoint's folder.", OTHER_FOLDER
    ),
    # codes and block scales
    "weight_shape": Explanation("A weight is not a matrix, or its codes do not fit its scales.", FROM_SOURCE),
    "scale_shape": Explanation("A scale's shape does not fit its weight.", FROM_SOURCE),
    "scale_dtype": Explanation(
        "A scale has another type than its format requires (block scales: F8_E4M3).", FROM_SOURCE
    ),
    "group_size": Explanation(
        "The number of columns per block scale is not a multiple of 16, or not the one of the settings.", FROM_SOURCE
    ),
    "block_scale_missing": Explanation("A weight is packed, and its block scales are missing.", FROM_SOURCE),
    "block_scale_nan": Explanation("A block scale is NaN: every product with that row becomes NaN.", FROM_SOURCE),
    "block_scale_negative": Explanation("A block scale is negative; kernels that clear the sign differ.", FROM_SOURCE),
    "block_scale_zero": Explanation("A block's scale is 0 and its codes are not: its weights are lost.", FROM_SOURCE),
    "block_scale_underflow": Explanation(
        "More than 1 % of the block scales are below 2^-6, which vLLM's Marlin kernels read as 0; often the tensor scale is "
        "too large.",
        FROM_SOURCE,
    ),
    "columns_per_rank": Explanation(
        "A weight's columns are not a multiple of 32, and vLLM reads wrong block scales (vllm #48898).",
        "Exclude the linear: annie-quant quantize --exclude-layers NAME",
    ),
    "orphan_scale": Explanation("A scale is there, and its weight's other tensors are not.", FROM_SOURCE),
    "all_zero": Explanation("Every value of a weight is 0.", FROM_SOURCE),
    "not_finite": Explanation("A tensor that is not quantized holds NaN or infinity.", FROM_SOURCE),
    "pre_quant_scale": Explanation(
        "The activation scales of NVFP4_AWQ; vLLM does not load them and other servers ignore them (vllm #45333).",
        f"{FROM_SOURCE} (writes plain NVFP4)",
    ),
    # tensor and input scales
    "tensor_scale_missing": Explanation("An NVFP4 weight has no tensor scale.", FROM_SOURCE),
    "tensor_scale_bad": Explanation("A tensor scale is 0, negative, NaN or infinite.", FROM_SOURCE),
    "tensor_scale_inverted": Explanation(
        "A tensor scale is too large for a multiplier: it is probably stored as a divisor.", FROM_SOURCE
    ),
    "input_scale_missing": Explanation(
        "The settings quantize activations, and a linear has no input scale.", f"{REPAIR}, or calibrate again"
    ),
    "input_scale_bad": Explanation("An input scale is 0, negative, NaN or infinite.", f"{REPAIR}, or calibrate again"),
    "input_scale_inverted": Explanation(
        "An input scale is too large for a multiplier: it is probably stored as a divisor.",
        f"{REPAIR}, or calibrate again",
    ),
    "fused_mixed": Explanation(
        "Linears that servers run as one matrix (such as gate and up) have different formats.",
        f"{FROM_SOURCE}, or exclude all of them",
    ),
    "fused_tensor_scale": Explanation(
        "Linears that servers run as one matrix have different tensor scales; tokens become wrong (vllm #54974).",
        FROM_SOURCE,
    ),
    "fused_input_scale": Explanation(
        "Linears that servers run as one matrix have different input scales; tokens become wrong (vllm #54150).", REPAIR
    ),
    # FP8
    "fp8_scale_missing": Explanation("An FP8 weight has no scale.", FROM_SOURCE),
    "fp8_scale_bad": Explanation("A scale of an FP8 weight is not a positive number.", FROM_SOURCE),
    "fp8_code_nan": Explanation("Codes of an FP8 weight are NaN.", FROM_SOURCE),
    # KV cache
    "kv_scale_bad": Explanation("A scale of the KV cache is not a positive number.", EXPORT),
    "kv_scale_default": Explanation(
        "All scales of the KV cache are 1.0, as before calibration; ModelOpt's fp8_cast writes the same.",
        "Calibrate the KV cache, or serve without its scales.",
    ),
    "kv_scale_missing": Explanation(
        "Scales of the KV cache are stored for some layers, or for keys alone, or the settings promise them and none is "
        "stored; servers use 1.0 instead, and vLLM cannot compute them for hybrid models.",
        "Calibrate the KV cache again: annie-quant quantize --kv-cache fp8 --calib-data F",
    ),
    "kv_cache_nvfp4": Explanation(
        "The settings ask for a KV cache in NVFP4, with which answers with thinking and tools repeat their first token.",
        "Serve with an FP8 cache: quantize again with --kv-cache fp8",
    ),
    # mixtures of experts
    "expert_count": Explanation("A layer has fewer or more experts than the configuration states.", COPY),
    "experts_mixed": Explanation("The experts of one layer have different formats; servers run them together.", EXPORT),
    "experts_unquantized": Explanation(
        "Merged experts are not quantized and not excluded; ModelOpt leaves them out without a message.",
        "Exclude them in the settings, or quantize them with a strategy that supports merged experts.",
    ),
    "expert_scales_missing": Explanation(
        "Merged experts are packed, and their scales are missing or do not fit.", EXPORT
    ),
    "expert_scale_range": Explanation(
        "An expert's scale is far from those of the layer's others: it saw no token in calibration, or its weights are 0.",
        "Calibrate with more text, so that each expert is used.",
    ),
    "router_quantized": Explanation(
        "The router of a mixture of experts is quantized; it chooses other experts.", EXPORT
    ),
    # head for multi-token prediction, vision tower
    "mtp_missing": Explanation(
        "The configuration or the source has an MTP head, and tensors of it are missing.", FROM_SOURCE
    ),
    "mtp_shape": Explanation("A tensor of the MTP head does not fit the model.", FROM_SOURCE),
    "mtp_quantized": Explanation("The MTP head is in NVFP4; drafts of such a head are not accepted.", FROM_SOURCE),
    "vision_missing": Explanation("Tensors of the source's vision tower are missing.", FROM_SOURCE),
    "vision_differs": Explanation("The vision tower does not have the source's bytes.", FROM_SOURCE),
    # settings
    "method_unknown": Explanation(
        "config.json names a quantization method that is not read here.",
        "annie-quant convert, from ModelOpt or compressed-tensors",
    ),
    "algorithm_unknown": Explanation("quant_algo names an algorithm that is not known here.", REPAIR),
    "config_disagrees": Explanation(
        "hf_quant_config.json and config.json differ; servers read one or the other.", REPAIR
    ),
    "nothing_quantized": Explanation("The settings name an algorithm, and no tensor is quantized.", EXPORT),
    "excluded_but_quantized": Explanation("A linear is listed as excluded, and it is quantized.", REPAIR),
    "excluded_fused_name": Explanation(
        "A linear is excluded by its fused name; servers look for the parts' names, so the entry has no effect.",
        REPAIR,
    ),
    "not_excluded": Explanation("A linear is not quantized and not listed as excluded; servers expect codes.", REPAIR),
    "not_listed": Explanation("A linear is quantized and not listed in quantized_layers or a group's targets.", REPAIR),
    "listed_but_plain": Explanation("A linear is listed to be quantized, and it is not.", REPAIR),
    "format_disagrees": Explanation("A linear has another format than the settings list.", REPAIR),
    "names_disagree": Explanation(
        "model_type and architectures of config.json are of different forms of the model.", REPAIR
    ),
    "prefix_disagrees": Explanation(
        "The class in config.json expects tensor names with another beginning (prefix).",
        REPAIR,
    ),
    # against the source
    "not_in_source": Explanation(
        "A quantized linear is not in the source.", "Give the checkpoint that it was made from."
    ),
    "source_shape": Explanation(
        "A weight has another shape than the source's.", "Give the checkpoint that it was made from."
    ),
    "large_error": Explanation(
        "A weight's relative error is larger than NVFP4's rounding explains: the codes or scales are of another weight.",
        FROM_SOURCE,
    ),
    "differs_from_source": Explanation("A tensor that is not quantized differs from the source's.", FROM_SOURCE),
    "fold_plus_one": Explanation(
        "A folded norm was divided as w/s, and this model's norm computes (1 + w): (1 + w)/s - 1 is right.", FROM_SOURCE
    ),
    "fold_mismatch": Explanation("Scales that were folded into a norm or a linear do not cancel.", FROM_SOURCE),
    "tokenizer_differs": Explanation(
        "tokenizer.json is not the source's: other ids of tokens, merges, added tokens, or another way to split text; the model "
        "reads other tokens than it was trained on.",
        "Copy tokenizer.json and tokenizer_config.json from the source.",
    ),
    "template_differs": Explanation(
        "The chat template renders system prompts, tools, calls or answers differently from the source's, or is missing.",
        "Copy chat_template.jinja (or chat_template of tokenizer_config.json) from the source.",
    ),
    "end_tokens_differ": Explanation(
        "Answers begin or end with other tokens than the source's: they never end, or end at once.",
        "Copy generation_config.json and tokenizer_config.json from the source.",
    ),
    "sampling_differs": Explanation(
        "generation_config.json has other sampling settings (temperature, top_p, ...) than the source's; servers use them as "
        "default.",
        "Copy generation_config.json from the source.",
    ),
    # writing a GGUF file
    "tokenizer_missing": Explanation(
        "tokenizer.json, which a GGUF file needs, is missing.", "Copy it from the source."
    ),
    "tokenizer_unknown": Explanation(
        "The tokenizer has no vocabulary, or splits text in a way that llama.cpp has no name for.",
        "Use Qwen3.5's tokenizer.json.",
    ),
    "vocab_size": Explanation(
        "tokenizer.json has a token beyond the vocabulary of config.json.", "Copy both from one checkpoint."
    ),
}
