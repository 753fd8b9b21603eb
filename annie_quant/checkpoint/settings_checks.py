"""Checks of an audit on the quantization settings: against the tensors on disk, and against each other."""

from __future__ import annotations

from types import ModuleType

from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import FP8_BLOCK, FP8_DYNAMIC, Linear, QuantConfig, covering_pattern, plain_linears
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.schema import Audit

ALGORITHMS = ("", "NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "FP8", FP8_DYNAMIC, FP8_BLOCK, "MIXED_PRECISION")
#  "": the settings name none


def check_method(folder: ModelFolder, audit: Audit) -> bool:
    """Return whether quantization_config, where there is one, names a layout that is read here."""
    quant = folder.config.get("quantization_config")
    method = quant.get("quant_method") if isinstance(quant, dict) else None
    if not method:
        return True
    audit.add(
        "method_unknown",
        "config.json",
        f"quant_method {str(method)[:40]!r} is not read here; modelopt, compressed-tensors and fp8 in blocks are",
    )
    return False


def check_settings(
    folder: ModelFolder, dialect: ModuleType | None, linears: dict[str, Linear], config: QuantConfig, audit: Audit
) -> None:
    """Compare the settings with what is on disk, and the two files of ModelOpt's settings with each other."""
    if dialect is None:
        return
    inline = folder.config.get("quantization_config")
    if not isinstance(inline, dict):
        audit.fault(
            "config_missing", "config.json", "no quantization_config; a server would read the folder as plain weights"
        )
    try:
        second = modelopt.read_file(folder)
    except ShardError as error:
        audit.add(error.code, error.tensor, error.message)
        second = None
    plain = sorted(n for n in plain_linears(folder) if n not in linears)
    if isinstance(inline, dict) and second is not None and dialect is modelopt:
        check_agreement(config, second, [*linears, *plain], audit)
    if config.algo not in ALGORITHMS:
        audit.add(
            "algorithm_unknown",
            "config.json",
            f"quant_algo {config.algo[:40]!r} is not known here, expected one of {', '.join(ALGORITHMS[1:])}",
        )
    if not linears:
        audit.add(
            "nothing_quantized",
            "config.json",
            f"the configuration names {config.algo or config.method}, and no tensor is quantized",
        )
        return
    for entry in sorted({e.rpartition(".")[2]: e for e in config.excluded}.items()):
        if parts := folder.family.fused.get(entry[0]):
            on_disk = ", ".join(p.rpartition(".")[2] for p in parts)
            audit.fault("excluded_fused_name", entry[1], f"excluded by its fused name, and on disk it is {on_disk}")
    for name in sorted(linears):
        if pattern := covering_pattern(name, config.excluded):
            audit.fault("excluded_but_quantized", name, f"listed as excluded (by {pattern!r}) and quantized on disk")
        elif config.layers and not config.algo_of(name):
            audit.fault("not_listed", name, "quantized on disk and not in quantized_layers or a group's targets")
        elif config.layers and ("FP8" in config.algo_of(name)) != (linears[name].format == "fp8"):
            audit.fault("format_disagrees", name, f"listed as {config.algo_of(name)}, on disk {linears[name].format}")
    for name in plain:
        if config.layers:
            excluded = covering_pattern(name, config.excluded) or folder.family.is_auxiliary(name)
            if name in config.layers or (config.algo_of(name) and not excluded):
                audit.fault("listed_but_plain", name, "listed to be quantized, and not quantized on disk")
        elif not covering_pattern(name, config.excluded) and not folder.family.is_auxiliary(name):
            audit.fault("not_excluded", name, "not quantized on disk and not listed as excluded")


def check_agreement(inline: QuantConfig, second: QuantConfig, modules: list[str], audit: Audit) -> None:
    """Compare config.json's settings with those of hf_quant_config.json, module by module."""
    file = modelopt.HF_QUANT_CONFIG
    if inline.algo != second.algo:
        audit.add(
            "config_disagrees",
            file,
            f"{file} has quant_algo {second.algo or 'none'}, config.json has {inline.algo or 'none'}",
        )
        return
    if inline.group and second.group and inline.group != second.group:
        audit.fault("config_disagrees", file, f"group_size {second.group}, config.json: {inline.group}")
    for name in sorted(modules):
        if bool(covering_pattern(name, inline.excluded)) != bool(covering_pattern(name, second.excluded)):
            audit.fault("config_disagrees", name, f"excluded in one of {file} and config.json and not in the other")
    if inline.layers != second.layers:
        name = sorted(set(inline.layers.items()) ^ set(second.layers.items()))[0][0]
        audit.fault("config_disagrees", name, f"{file} and config.json list it differently in quantized_layers")
