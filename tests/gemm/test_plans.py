"""Launch plans without a GPU: the planner and the check of a plan are host code of annie_quant._gemm."""

import itertools

import pytest
from gemm_module import A100, DEVICES, module, needs_module

from annie_quant.gemm import SkinnyPlan, TiledPlan, WgmmaPlan
from annie_quant.gemm.plans import PATHS, TYPES, path_of

pytestmark = needs_module
SHAPES = [
    (8192, 8192),
    (81920, 8192),
    (248320, 4096),
    (17408, 5120),
    (4096, 4096),
    (272, 768),
    (1, 16),
    (40, 1008),
]
SKINNY = SkinnyPlan(blocks=16, cluster_size=1, warp_stages=1, step_tiles=2)
TILED = TiledPlan(tile_tokens=64, cluster_size=1, stages=2)
WGMMA = WgmmaPlan(
    tile_tokens=64,
    tile_rows=256,
    blocks=2,
    cluster_size=1,
    stages=2,
    stream_k_tiles=0,
    permute_first=1,
)


def needs(plan, m=8, n=512, k=1024, device="H200"):
    """Return (shared memory, workspace) of a plan; ValueError: what is wrong with it."""
    return module.plan_needs(m, n, k, path_of(plan), tuple(plan), DEVICES[device])


def test_fields_are_those_of_the_c_structs():
    assert set(module.PLAN_FIELDS) == set(TYPES)
    for name, fields in module.PLAN_FIELDS.items():
        assert list(TYPES[name]._fields) == fields.split()


@pytest.mark.parametrize("device", DEVICES)
def test_every_plan_of_the_planner_passes_the_check(device):
    sms, shared, *_ = DEVICES[device]
    for (n, k), m in itertools.product(SHAPES, (1, 7, 8, 9, 16, 17, 33, 64, 130, 1024, 4096)):
        for path in (
            "auto",
            "tiled",
            *(["skinny"] if m <= 16 else []),
            *(["wgmma"] if device == "H200" else []),
        ):
            try:
                name, fields = module.plan(m, n, k, path, DEVICES[device])
            except module.CudaError:
                # one block of the few-token kernel cannot have a whole LM head's partial sums on a small chip
                assert (device, path) == ("GB10", "skinny") or path == "wgmma", (m, n, k)
                continue
            plan = TYPES[name](*fields)
            smem, workspace = needs(plan, m, n, k, device)
            assert 0 < smem <= shared
            assert workspace >= 0
            if not isinstance(plan, TiledPlan):
                assert plan.blocks <= 16 * sms


# By N, K and M: the plans that were the fastest, or equal to the fastest, on an H200, and their workspaces (tests/perf/gemm.md).
MEASURED = {
    (17408, 5120, 32): (
        WgmmaPlan(32, 256, 132, 1, 4, 68, 1, 1),
        40 * 32 * 256 + 132 * 256 * 32 * 4 + 132 * 16 * 4,
    ),
    (17408, 5120, 64): (
        WgmmaPlan(64, 256, 132, 1, 6, 68, 1, 1),
        40 * 64 * 256 + 132 * 256 * 64 * 4 + 132 * 16 * 4,
    ),
    (24576, 4096, 128): (
        WgmmaPlan(128, 256, 132, 1, 4, 96, 1, 1),
        32 * 128 * 256 + 132 * 256 * 128 * 4 + 132 * 16 * 4,
    ),
    (24576, 4096, 256): (
        WgmmaPlan(128, 256, 132, 1, 4, 60, 1, 0),
        2 * 32 * 128 * 256 + 2 * 132 * 256 * 128 * 4,
    ),
    (8192, 8192, 256): (
        WgmmaPlan(128, 256, 128, 1, 4, 64, 1, 1),
        2 * 64 * 128 * 256 + 128 * 256 * 128 * 4 + 128 * 16 * 4,
    ),
    (5120, 17408, 1024): (WgmmaPlan(128, 256, 132, 1, 4, 28, 1, 0), 70254592),
    # About two unequal parts of 128 tokens, eight, four, about one, with the fix-up kernel: sums in the launch were not faster.
    (17408, 5120, 128): (
        WgmmaPlan(128, 256, 132, 1, 4, 68, 1, 0),
        40 * 128 * 256 + 2 * 132 * 256 * 128 * 4,
    ),
    (4096, 12288, 32): (WgmmaPlan(32, 256, 128, 1, 8, 16, 0, 0), 2 * 128 * 256 * 32 * 4),
    (4096, 12288, 64): (WgmmaPlan(64, 256, 128, 1, 4, 16, 0, 0), 2 * 128 * 256 * 64 * 4),
    (4096, 12288, 256): (
        WgmmaPlan(128, 256, 128, 1, 4, 32, 1, 0),
        2 * 96 * 128 * 256 + 2 * 128 * 256 * 128 * 4,
    ),
    (17408, 5120, 256): (
        WgmmaPlan(128, 256, 132, 1, 4, 136, 1, 0),
        2 * 40 * 128 * 256 + 2 * 132 * 256 * 128 * 4,
    ),
}


@pytest.mark.parametrize(("n", "k", "m"), MEASURED)
def test_the_planner_has_the_measured_plan(n, k, m):
    plan, workspace = MEASURED[n, k, m]
    assert module.plan(m, n, k, "auto", DEVICES["H200"]) == ("wgmma", tuple(plan))
    smem, needed = needs(plan, m, n, k)
    assert (smem <= DEVICES["H200"][1], needed) == (True, workspace)


def test_sums_in_the_launch_are_planned_for_few_parts_on_hopper_only():
    shapes = (*SHAPES, *((n, k) for n, k, _ in MEASURED))
    for (n, k), m, device in itertools.product(
        shapes, (1, 16, 17, 32, 64, 128, 256, 257, 1024, 4096), DEVICES.values()
    ):
        name, fields = module.plan(m, n, k, "auto", device)
        if name == "wgmma" and (plan := WgmmaPlan(*fields)).add_in_launch:
            assert device == DEVICES["H200"]
            assert plan.stream_k_tiles <= plan.blocks <= min(132, 2.5 * plan.stream_k_tiles)


@pytest.mark.parametrize("tokens", [32, 64, 128])
@pytest.mark.parametrize("m", [17, 32, 64, 128, 256, 4096])
@pytest.mark.parametrize(
    ("n", "k"),
    [(17408, 5120), (24576, 4096), (8192, 8192), (5120, 17408), (4096, 12288), (8192, 4096)],
)
def test_parts_and_flags_are_in_the_workspace_of_sums_in_the_launch(n, k, m, tokens):
    """The addresses of add_parts and Producer in csrc/gemm/wgmma.cuh, and those that permute_kernel writes."""
    m_tiles, chunks, warps = -(-m // tokens), -(-k // 128), 16
    tiles = -(-n // 256) * m_tiles
    for blocks, stream_k_tiles in {(132, min(tiles, 132)), (128, min(tiles, 68)), (120, tiles)}:
        plan = WgmmaPlan(tokens, 256, blocks, 1, 2, stream_k_tiles, 1, 1)
        workspace = needs(plan, m, n, k)[1]
        image_end = (
            (m_tiles - 1) * chunks + chunks - 1
        ) * tokens * 256 + tokens * 256  # of the last copy
        warp_bytes = tokens // 2 * 32 * 4  # a warp's part: tokens / 2 floats per lane
        last_part = image_end + (blocks - 1) * warps * warp_bytes + (warps - 1) * warp_bytes
        last_float4 = last_part + (tokens // 2 - 4) * 8 * 16 + 31 * 16
        flags = image_end + blocks * tokens // 2 * 32 * warps * 4
        assert last_float4 + 16 == flags and flags % 128 == 0
        assert flags + ((blocks - 1) * warps + warps - 1) * 4 + 4 == workspace


def test_bits_do_not_depend_on_the_number_of_tokens():
    for (n, k), device in itertools.product(SHAPES, DEVICES.values()):
        for group in (range(1, 9), range(9, 17)):
            assert len({module.plan(m, n, k, "skinny", device) for m in group}) == 1


def test_a_good_plan_of_each_path_is_accepted():
    assert needs(SKINNY) == (16 * (2304 + 8) + (1 + 16) * 8 * 36 * 4, 0)
    assert needs(TILED) == (1024 + 2 * (18432 + 64 * 272), 0)
    assert needs(WGMMA) == (9216 + 2 * (18432 + 64 * 256), 8 * 64 * 256)
    stream_k = WGMMA._replace(blocks=6, stream_k_tiles=2, permute_first=0)
    assert needs(stream_k)[1] == 2 * 6 * 256 * 64 * 4
    in_launch = stream_k._replace(permute_first=1, add_in_launch=1)
    assert needs(in_launch)[1] == 8 * 64 * 256 + 6 * 256 * 64 * 4 + 6 * 16 * 4


@pytest.mark.parametrize(
    ("plan", "change", "message"),
    [
        (SKINNY, {"blocks": 0}, "blocks"),
        (SKINNY, {"blocks": -16}, "blocks"),
        (SKINNY, {"blocks": 17}, "blocks is larger"),
        (SKINNY, {"blocks": 15, "cluster_size": 2}, "multiple of cluster_size"),
        (SKINNY, {"cluster_size": 0}, "cluster_size"),
        (SKINNY, {"cluster_size": 3}, "cluster_size"),
        (SKINNY, {"cluster_size": 16}, "cluster_size"),
        (SKINNY, {"warp_stages": 3}, "warp_stages"),
        (SKINNY, {"warp_stages": 0}, "warp_stages"),
        (SKINNY, {"step_tiles": 1}, "step_tiles"),
        (SKINNY, {"step_tiles": 8}, "step_tiles"),
        (TILED, {"tile_tokens": 0}, "tile_tokens"),
        (TILED, {"tile_tokens": 24}, "tile_tokens"),
        (TILED, {"cluster_size": 16}, "cluster_size"),
        (TILED, {"stages": 1}, "stages"),
        (TILED, {"stages": 7}, "shared memory"),
        (TILED, {"stages": 1 << 30}, "stages"),
        (WGMMA, {"tile_tokens": 0}, "tile_tokens"),
        (WGMMA, {"tile_tokens": 128, "permute_first": 0}, "permute_first"),
        (WGMMA, {"tile_rows": 64}, "tile_rows"),
        (WGMMA, {"tile_rows": 128}, "cluster_size 2"),
        (WGMMA, {"tile_rows": 192, "stream_k_tiles": 1}, "tile_rows 192"),
        (WGMMA, {"cluster_size": 4}, "cluster_size"),
        (WGMMA, {"cluster_size": 2}, "stream_k_tiles equal"),
        (WGMMA, {"cluster_size": 2, "stream_k_tiles": 2, "blocks": 2}, "twice as many blocks"),
        (WGMMA, {"add_in_launch": 1}, "add_in_launch needs"),
        (WGMMA, {"add_in_launch": 2}, "0 or 1"),
        (
            WGMMA,
            {"add_in_launch": 1, "stream_k_tiles": 2, "permute_first": 0},
            "add_in_launch needs",
        ),
        (
            WGMMA,
            {"add_in_launch": 1, "stream_k_tiles": 2, "tile_tokens": 16},
            "add_in_launch needs",
        ),
        (WGMMA, {"blocks": 0}, "blocks"),
        (WGMMA, {"stream_k_tiles": 3}, "stream_k_tiles"),
        (WGMMA, {"stream_k_tiles": -1}, "stream_k_tiles"),
        (WGMMA, {"stream_k_tiles": 2, "blocks": 17}, "blocks must be at most"),
        (WGMMA, {"stages": 1}, "stages"),
        (WGMMA, {"stages": 17}, "stages"),
        (WGMMA, {"stages": 16}, "shared memory"),
        (WGMMA, {"permute_first": 2}, "permute_first"),
    ],
)
def test_a_plan_that_would_fail_or_write_elsewhere_is_refused(plan, change, message):
    with pytest.raises(ValueError, match=message):
        needs(plan._replace(**change))


def test_a_plan_is_refused_for_a_product_that_it_cannot_compute():
    with pytest.raises(ValueError, match="more than 16 tokens"):
        needs(SKINNY, m=17)
    with pytest.raises(ValueError, match="warp_stages must be 1 for more"):
        needs(SKINNY._replace(warp_stages=2), m=9)
    with pytest.raises(ValueError, match="not a multiple of 128"):
        needs(SKINNY._replace(step_tiles=4), k=1008)
    with pytest.raises(ValueError, match="even number"):
        halves = WGMMA._replace(tile_rows=128, cluster_size=2, stream_k_tiles=4, blocks=8)
        needs(halves, k=1152)
    with pytest.raises(ValueError, match="no wgmma"):
        needs(WGMMA, device="GB10")
    with pytest.raises(ValueError, match=r"compute capability 9\.0"):
        module.plan_needs(8, 512, 1024, "skinny", tuple(SKINNY), A100)
    with pytest.raises(module.CudaError, match=r"compute capability 9\.0"):
        module.plan(8, 512, 1024, "auto", A100)
    with pytest.raises(ValueError, match="too small"):
        needs(SKINNY._replace(blocks=1), n=248320, k=4096)
    for shape in ({"m": 0}, {"n": -1}, {"k": 24}, {"n": 1 << 40}):
        with pytest.raises(ValueError, match="shape"):
            needs(TILED, **shape)


@pytest.mark.parametrize("path", PATHS)
def test_the_planner_refuses_shapes_that_no_product_has(path):
    for m, n, k in (
        (0, 512, 1024),
        (-1, 512, 1024),
        (8, 0, 1024),
        (8, -16, 1024),
        (8, 512, 0),
        (8, 512, 24),
        (1 << 40, 512, 1024),
    ):
        with pytest.raises(module.CudaError, match="no kernel"):
            module.plan(m, n, k, path, DEVICES["H200"])
        with pytest.raises(ValueError, match="shape"):
            module.plan_needs(m, n, k, path_of(TILED), tuple(TILED), DEVICES["H200"])
    none = (0, *DEVICES["H200"][1:])
    with pytest.raises(module.CudaError, match="no kernel"):
        module.plan(8, 512, 1024, path, none)
    for shape in (
        (0, 8, 2, 256, 512),
        (64, 0, 2, 256, 512),
        (64, 8, 2, 0, 512),
        (64, 8, 2, 256, 0),
        (64, 8, 0, 256, 512),
    ):
        with pytest.raises(module.CudaError, match="no kernel"):
            module.plan_grouped(shape, 0, DEVICES["H200"])


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([1, 2, 3, True, False], "limits is a list, expected None or a tuple of five"),
        ("H200", "limits is a str"),
        ((1, 2), "limits must be"),
    ],
)
def test_limits_of_another_type_are_a_type_error(limits, message):
    """PyArg_ParseTuple of another object raises SystemError."""
    for call in (
        lambda: module.plan(8, 512, 1024, "auto", limits),
        lambda: module.plan_needs(8, 512, 1024, "skinny", tuple(SKINNY), limits),
        lambda: module.plan_grouped((64, 8, 2, 256, 512), 0, limits),
        lambda: module.grouped_needs((64, 8, 2, 256, 512), (16, 1, 1, 2), limits),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_a_packed_weight_has_its_k():
    """K was rounded up to 128 columns, so a product with another K of that chunk was computed."""
    for n in (1, 32, 528):
        sizes = [module.packed_bytes(n, k) for k in range(16, 2049, 16)]
        assert len(set(sizes)) == len(sizes)
        assert all(size % 16 == 0 for size in sizes), "where the next expert's weight starts"
    size = module.packed_bytes(64, 1008)
    with pytest.raises(module.CudaError, match="another shape"):
        module.linear(0, 1024, 0, size, 1.0, 0, 0, 0, 1, 64, 1024, 2, 0)
    shape = (4, 2, 1, 64, 1024)
    with pytest.raises(module.CudaError, match="another shape"):
        module.grouped(0, 1024, 0, 2 * size, 0, 0, 0, 0, 1, 0, shape, 2, (8, 1, 1, 2), 0, 0)


def test_another_tuple_is_refused_as_a_plan():
    with pytest.raises(TypeError, match="SkinnyPlan"):
        path_of((3, 64, 1, 2, 2, 50000, 0, 256, 1, 0))
    for call in (
        lambda: module.plan_needs(1, 32, 64, "wide", (1,), DEVICES["H200"]),
        lambda: module.plan(1, 32, 64, "wide"),
    ):
        with pytest.raises(ValueError, match="no path wide"):
            call()
    with pytest.raises(ValueError, match="no path auto"):
        module.plan_needs(1, 32, 64, "auto", tuple(SKINNY), DEVICES["H200"])
    with pytest.raises(TypeError, match="skinny has 4 fields, got 2"):
        module.plan_needs(1, 32, 64, "skinny", (1, 2), DEVICES["H200"])
    with pytest.raises(ValueError, match="blocks"):
        module.plan_needs(1, 32, 64, "skinny", (1 << 40, 1, 1, 2), DEVICES["H200"])
