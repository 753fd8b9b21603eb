"""Triton kernels of quantization on a GPU: the gated delta rule and its convolution in calibration, and GPTQ's block columns.

The delta rule of offline/deltanet.py: `prepare_chunks` makes the parts of every chunk at once, `scan_forward` passes a state
[Dk, Dv] through the chunks of a head, and `conv_forward` is the causal convolution. In torch operations a chunk of the scan takes 7
launches, and the parts write and read each value some ten times. Nothing here has gradients.

`round_rows` is the arithmetic of gptq.round_block and the choice of the scale: a program holds 32 rows of a block of 16
columns in registers and tries the candidates one after the other. In torch operations a block column takes some 300 launches.

Importing this module needs Triton, which torch for CUDA brings.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from annie_quant.offline import deltanet

if TYPE_CHECKING:
    from annie_quant.quantize.gptq import Sweep

CHUNK_STEPS = 64  # steps
MAX_STATE_COLUMNS = 64  # most columns of a state in one program
HEAD_SIZES = (16, 32, 64, 128, 256)  # widths of a head that the kernels take
CONV_STEPS = 32
CONV_CHANNELS = 64
ROWS = 32  # of one program of round_rows, one per thread
TO_INTEGER = tl.constexpr(
    12582912.0
)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer, ties to even


@triton.jit
def prepare_chunks(
    query,
    key,
    value,
    log_decay,
    beta,
    q_out,
    w_out,
    u_out,
    within_out,
    k_out,
    decay_out,
    steps,
    heads,
    chunks,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    g_b,
    g_t,
    g_h,
    b_b,
    b_t,
    b_h,
    root,
    norm: tl.constexpr,
    size: tl.constexpr,
    dk: tl.constexpr,
    dv: tl.constexpr,
    precision: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    b = row // heads
    h = row % heads
    i = tl.arange(0, size)
    columns = tl.arange(0, dk)
    t = chunk * size + i
    live = t < steps
    k = tl.load(
        key + b * k_b + h * k_h + t[:, None] * k_t + columns[None, :], mask=live[:, None], other=0.0
    ).to(tl.float32)
    if norm:
        k = k * (1.0 / tl.sqrt(tl.sum(k * k, 1) + 1e-6))[:, None]
    log = tl.cumsum(
        tl.load(log_decay + b * g_b + h * g_h + t * g_t, mask=live, other=0.0).to(tl.float32), 0
    )
    strength = tl.load(beta + b * b_b + h * b_h + t * b_t, mask=live, other=0.0).to(tl.float32)
    # Transposed: [j, i] holds what step i reads of step j before it.
    before = i[:, None] < i[None, :]
    between = tl.exp(tl.where(before, log[None, :] - log[:, None], 0.0))
    lower = tl.dot(k, tl.trans(k * strength[:, None]), input_precision="ieee") * between
    lower = tl.where(before, lower, 0.0)
    # (I + lower^T)^-1: the diagonal's blocks of 16 by forward substitution, all at once (row r of a block is e_r - sum over
    # j < r of lower[j, r] * row j); then with D of these blocks, N = D * the other blocks and N^4 = 0, (I - N) (I + N^2) D.
    eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    same = i[:, None] // 16 == i[None, :] // 16
    diagonal = eye
    for r in range(1, 16):
        factors = tl.sum(tl.where(i[None, :] == i[:, None] // 16 * 16 + r, lower, 0.0), 1)
        change = tl.sum(factors[:, None] * diagonal, 0)
        diagonal = tl.where(same & (i[:, None] % 16 == r), diagonal - change[None, :], diagonal)
    other = tl.dot(diagonal, tl.trans(tl.where(same, 0.0, lower)), input_precision="ieee")
    inverse = tl.dot(
        eye - other, eye + tl.dot(other, other, input_precision="ieee"), input_precision="ieee"
    )
    inverse = tl.dot(inverse, diagonal, input_precision="ieee")
    place = row * chunks + chunk
    keys = place * size * dk + i[:, None] * dk + columns[None, :]
    growth = tl.exp(log)
    last = tl.sum(tl.where(i == size - 1, log, 0.0), 0)
    tl.store(decay_out + place, tl.exp(last))
    tl.store(
        w_out + keys, tl.dot(inverse, k * (growth * strength)[:, None], input_precision=precision)
    )
    tl.store(k_out + keys, k * tl.exp(last - log)[:, None])
    wide = tl.arange(0, dv)
    v = tl.load(
        value + b * v_b + h * v_h + t[:, None] * v_t + wide[None, :], mask=live[:, None], other=0.0
    ).to(tl.float32)
    u = tl.dot(inverse, v * strength[:, None], input_precision=precision)
    tl.store(u_out + place * size * dv + i[:, None] * dv + wide[None, :], u)
    q = tl.load(
        query + b * q_b + h * q_h + t[:, None] * q_t + columns[None, :],
        mask=live[:, None],
        other=0.0,
    ).to(tl.float32)
    if norm:
        q = q * (1.0 / tl.sqrt(tl.sum(q * q, 1) + 1e-6))[:, None]
    q = q * root
    tl.store(q_out + keys, q * growth[:, None])
    upto = i[:, None] >= i[None, :]
    reach = tl.exp(tl.where(upto, log[:, None] - log[None, :], 0.0))
    within = tl.where(upto, tl.dot(q, tl.trans(k), input_precision=precision) * reach, 0.0)
    tl.store(within_out + place * size * size + i[:, None] * size + i[None, :], within)


@triton.jit
def scan_forward(
    q_in,
    w_in,
    u_in,
    within_in,
    k_in,
    decay_in,
    state_in,
    state_out,
    out,
    steps,
    heads,
    chunks,
    o_b,
    o_t,
    o_h,
    size: tl.constexpr,
    dk: tl.constexpr,
    dv: tl.constexpr,
    part: tl.constexpr,
    precision: tl.constexpr,
    continues: tl.constexpr,
    keeps: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = row // heads
    h = row % heads
    i = tl.arange(0, size)
    columns = tl.arange(0, dk)
    wide = tl.program_id(1) * part + tl.arange(0, part)
    places = row * dk * dv + columns[:, None] * dv + wide[None, :]
    if continues:
        state = tl.load(state_in + places)
    else:
        state = tl.zeros((dk, part), tl.float32)
    for chunk in range(0, chunks):
        place = row * chunks + chunk
        keys = place * size * dk + i[:, None] * dk + columns[None, :]
        values = place * size * dv + i[:, None] * dv + wide[None, :]
        new = tl.load(u_in + values) - tl.dot(
            tl.load(w_in + keys), state, input_precision=precision
        )
        within = tl.load(within_in + place * size * size + i[:, None] * size + i[None, :])
        result = tl.dot(tl.load(q_in + keys), state, input_precision=precision)
        result += tl.dot(within, new, input_precision=precision)
        t = chunk * size + i
        target = out + b * o_b + h * o_h + t[:, None] * o_t + wide[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=(t < steps)[:, None])
        state = state * tl.load(decay_in + place) + tl.dot(
            tl.trans(tl.load(k_in + keys)), new, input_precision=precision
        )
    if keeps:
        tl.store(state_out + places, state)


def rows_of_one(x: torch.Tensor) -> torch.Tensor:
    """Return x with a last dimension that is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute deltanet.gated_delta_rule.

    Inputs in bfloat16 are multiplied in TF32, which is finer than the bfloat16 operands of servers' kernels; inverses, decays and
    sums are float32.
    """
    batch, steps, heads, dk = key.shape
    dv = value.shape[-1]
    if dk not in HEAD_SIZES or dv not in HEAD_SIZES:
        return deltanet.gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
    query, key, value = (rows_of_one(part) for part in (query, key, value))
    chunks = triton.cdiv(steps, CHUNK_STEPS)
    rows = batch * heads
    q, w, k = (key.new_empty(rows, chunks, CHUNK_STEPS, dk, dtype=torch.float32) for _ in range(3))
    u = key.new_empty(rows, chunks, CHUNK_STEPS, dv, dtype=torch.float32)
    within = key.new_empty(rows, chunks, CHUNK_STEPS, CHUNK_STEPS, dtype=torch.float32)
    decay = key.new_empty(rows, chunks, dtype=torch.float32)
    precision = "tf32" if query.dtype == torch.bfloat16 else "ieee"
    strides = [s for part in (query, key, value, g, beta) for s in part.stride()[:3]]
    prepare_chunks[(chunks, rows)](
        query,
        key,
        value,
        g,
        beta,
        q,
        w,
        u,
        within,
        k,
        decay,
        steps,
        heads,
        chunks,
        *strides,
        dk**-0.5,
        norm=use_qk_l2norm_in_kernel,
        size=CHUNK_STEPS,
        dk=dk,
        dv=dv,
        precision=precision,
        num_warps=8,
        num_stages=1,
    )
    out = torch.empty(batch, steps, heads, dv, dtype=query.dtype, device=query.device)
    part = min(MAX_STATE_COLUMNS, dv)
    before = key.new_empty(1, dtype=torch.float32)
    if initial_state is not None:
        before = initial_state.to(torch.float32, memory_format=torch.contiguous_format)
    after = key.new_empty(batch, heads, dk, dv, dtype=torch.float32)
    scan_forward[(rows, dv // part)](
        q,
        w,
        u,
        within,
        k,
        decay,
        before,
        after,
        out,
        steps,
        heads,
        chunks,
        out.stride(0),
        out.stride(1),
        out.stride(2),
        size=CHUNK_STEPS,
        dk=dk,
        dv=dv,
        part=part,
        precision=precision,
        continues=initial_state is not None,
        keeps=output_final_state,
        num_warps=8,
        num_stages=1,
    )
    return out, after if output_final_state else None


@triton.jit
def conv_forward(
    x,
    weight,
    bias,
    out,
    steps,
    channels,
    x_b,
    x_c,
    x_t,
    o_b,
    o_c,
    o_t,
    w_c,
    width: tl.constexpr,
    has_bias: tl.constexpr,
    silu: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * rows + tl.arange(0, rows)
    c = tl.program_id(1) * columns + tl.arange(0, columns)
    total = tl.zeros((rows, columns), tl.float32)
    if has_bias:
        total += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(width):
        source = t - (width - 1) + i
        mask = ((source >= 0) & (source < steps))[:, None] & (c < channels)[None, :]
        value = tl.load(
            x + b * x_b + source[:, None] * x_t + c[None, :] * x_c, mask=mask, other=0.0
        ).to(tl.float32)
        total += (
            value
            * tl.load(weight + c * w_c + i, mask=c < channels, other=0.0).to(tl.float32)[None, :]
        )
    if silu:
        total = total / (1 + tl.exp(-total))
    mask = (t < steps)[:, None] & (c < channels)[None, :]
    tl.store(
        out + b * o_b + t[:, None] * o_t + c[None, :] * o_c,
        total.to(out.dtype.element_ty),
        mask=mask,
    )


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    **_: object,
) -> torch.Tensor:
    """deltanet.causal_conv, summed in float32. cuDNN's depthwise convolution of bfloat16 takes far longer."""
    out, weight = torch.empty_like(x), rows_of_one(weight)
    batch, channels, steps = x.shape
    grid = (triton.cdiv(steps, CONV_STEPS), triton.cdiv(channels, CONV_CHANNELS), batch)
    conv_forward[grid](
        x,
        weight,
        bias,
        out,
        steps,
        channels,
        *x.stride(),
        *out.stride(),
        weight.stride(0),
        width=weight.shape[-1],
        has_bias=bias is not None,
        silu=activation in ("silu", "swish"),
        rows=CONV_STEPS,
        columns=CONV_CHANNELS,
    )
    return out


@triton.jit
def nearest_e2m1(x):
    """codec.to_e2m1."""
    a = tl.minimum(tl.abs(x), 8.0)
    fine = ((a * 2 + TO_INTEGER) - TO_INTEGER) * 0.5
    whole = (a + TO_INTEGER) - TO_INTEGER
    coarse = ((a * 0.5 + TO_INTEGER) - TO_INTEGER) * 2
    nearest = tl.minimum(tl.where(a < 2, fine, tl.where(a < 4, whole, coarse)), 6.0)
    return tl.where(x < 0, -nearest, nearest)


@triton.jit
def e4m3_code(x):
    """Return the code of the nearest E4M3 value, ties to even, for x of 2^-9 to 448."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = ((x * 512 + TO_INTEGER) - TO_INTEGER).to(tl.int32)
    return tl.where(x < 0.015625, small, normal)


@triton.jit
def e4m3_value(code):
    """Return the value of an E4M3 code of 1 to 126."""
    normal = ((((code >> 3) + 120) << 23) | ((code & 7) << 20)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def round_rows(
    w,
    upper,
    tensor_scale,
    errors,
    codes,
    chosen,
    steps,
    loss,
    start,
    rows,
    w_stride,
    errors_stride,
    upper_stride,
    low,
    count: tl.constexpr,
    rows_of_program: tl.constexpr,
):
    row = (tl.program_id(0) * rows_of_program + tl.arange(0, rows_of_program)).to(tl.int64)
    live = row < rows
    column = tl.arange(0, 16)
    at = row[:, None] * w_stride + start + column[None, :]
    block = tl.load(w + at, mask=live[:, None], other=0.0)
    scale = tl.load(tensor_scale + row, mask=live, other=1.0)
    corner = upper + start * upper_stride + start
    top = tl.div_rn(tl.max(tl.abs(block), 1), scale * 6.0)
    nearest = e4m3_code(tl.minimum(tl.maximum(top, 0.001953125), 448.0))
    least = tl.full((rows_of_program,), float("inf"), tl.float32)
    best_code = nearest
    best_step = e4m3_value(nearest) * scale
    best_q = tl.zeros((rows_of_program, 16), tl.float32)
    best_error = tl.zeros((rows_of_program, 16), tl.float32)
    for candidate in range(0, count):
        code = tl.minimum(tl.maximum(nearest + low + candidate, 1), 126)
        step = e4m3_value(code) * scale
        work = block
        q_all = tl.zeros((rows_of_program, 16), tl.float32)
        error_all = tl.zeros((rows_of_program, 16), tl.float32)
        total = tl.zeros((rows_of_program,), tl.float32)
        for i in range(16):
            here = column == i
            x = tl.sum(tl.where(here[None, :], work, 0.0), 1)
            q = nearest_e2m1(tl.div_rn(x, step))
            error = tl.div_rn(x - q * step, tl.load(corner + i * upper_stride + i))
            total += error * error
            factors = tl.load(corner + i * upper_stride + column)
            work = tl.where((column > i)[None, :], work - factors[None, :] * error[:, None], work)
            q_all = tl.where(here[None, :], q[:, None], q_all)
            error_all = tl.where(here[None, :], error[:, None], error_all)
        better = total < least
        least = tl.where(better, total, least)
        best_code = tl.where(better, code, best_code)
        best_step = tl.where(better, step, best_step)
        best_q = tl.where(better[:, None], q_all, best_q)
        best_error = tl.where(better[:, None], error_all, best_error)
    tl.store(codes + at, best_q, mask=live[:, None])
    tl.store(
        errors + row[:, None] * errors_stride + column[None, :], best_error, mask=live[:, None]
    )
    tl.store(chosen + row, best_code.to(tl.uint8), mask=live)
    tl.store(steps + row, best_step, mask=live)
    tl.store(
        loss + row, tl.load(loss + row, mask=live, other=0.0) + least.to(tl.float64), mask=live
    )


def round_column(state: Sweep, start: int, errors: torch.Tensor) -> None:
    """Round columns start .. start + 15. errors: float32 [N, 16], of any row stride, written."""
    w = state.w
    index = start // 16
    candidates = state.candidates
    outputs = (errors, state.codes, state.chosen[index], state.steps[index], state.loss)
    strides = (w.stride(0), errors.stride(0), state.upper.stride(0))
    round_rows[(triton.cdiv(len(w), ROWS),)](
        w,
        state.upper,
        state.tensor_scale,
        *outputs,
        start,
        len(w),
        *strides,
        candidates.start,
        count=len(candidates),
        rows_of_program=ROWS,
        num_warps=1,
        enable_fp_fusion=False,
    )
