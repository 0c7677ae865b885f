"""What the scan stores: rows of o, states, and the tail of a cache's slot."""

# Kernels are written in Gluon, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportFunctionMemberAccess=false
# ruff: noqa: SIM102 (an outer test of a constant is decided when the kernel is compiled)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from headstart.ops.gated_delta_rule.hopper.gluon import copy_out, reinterpret, thread_barrier


@gluon.jit
def halved(x):
    """The halves of the columns of x."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def beside(x, y):
    """[x, y] of two tensors with as many columns."""
    return gl.join(x, y).permute((0, 2, 1)).reshape([x.shape[0], 2 * x.shape[1]])


@gluon.jit
def load_state(tensor, first_column, sk, sv, there, S):
    """A state like S [BV, K] from `tensor`; zeros unless it is `there`.

    By quarters, whose addresses are a constant apart. An address for each of a thread's 64 numbers
    takes as many registers, and where these were short ptxas of CUDA 12.8 made some of them wrong.
    """
    BV: gl.constexpr = S.shape[0]
    K: gl.constexpr = S.shape[1]
    half, _half = halved(S)
    quarter, _quarter = halved(half)
    PART: gl.constexpr = quarter.type.layout
    k = gl.arange(0, K // 4, layout=gl.SliceLayout(0, PART))
    v = first_column + gl.arange(0, BV, layout=gl.SliceLayout(1, PART))
    part = tensor + k[None, :] * sk + v[:, None] * sv
    a = gl.load(part, mask=there, other=0.0).to(gl.float32)
    b = gl.load(part + K // 4 * sk, mask=there, other=0.0).to(gl.float32)
    c = gl.load(part + K // 2 * sk, mask=there, other=0.0).to(gl.float32)
    d = gl.load(part + 3 * K // 4 * sk, mask=there, other=0.0).to(gl.float32)
    return gl.convert_layout(beside(beside(a, b), beside(c, d)), S.type.layout)


@gluon.jit
def store_state(S, tensor, first_column, sk, sv):
    """Store S [BV, K] at `tensor`, rounded to its dtype: by quarters, as `load_state`."""
    K: gl.constexpr = S.shape[1]
    left, right = halved(S.to(tensor.dtype.element_ty))
    a, b = halved(left)
    c, d = halved(right)
    k = gl.arange(0, K // 4, layout=gl.SliceLayout(0, a.type.layout))
    v = first_column + gl.arange(0, S.shape[0], layout=gl.SliceLayout(1, a.type.layout))
    part = tensor + k[None, :] * sk + v[:, None] * sv
    gl.store(part, a)
    gl.store(part + K // 4 * sk, b)
    gl.store(part + K // 2 * sk, c)
    gl.store(part + 3 * K // 4 * sk, d)


@gluon.jit
def store_part(part, tile, state, first: gl.constexpr, sk: gl.constexpr, sv: gl.constexpr):
    """Store columns of S from `first` on, as `store_state`, through a tile in shared memory."""
    BV: gl.constexpr = part.shape[0]
    K: gl.constexpr = part.shape[1]
    dtype: gl.constexpr = state.dtype.element_ty
    SHAPE: gl.constexpr = [K, BV] if sv == 1 else [BV, K]
    LINES: gl.constexpr = gl.BlockedLayout(
        [1, 128 // dtype.primitive_bitwidth], [4, 8], [4, 1], [1, 0]
    )
    lines = reinterpret(tile, dtype, SHAPE, gl.NVMMASharedLayout.get_default_for(SHAPE, dtype))
    by_v = lines.permute((1, 0)) if sv == 1 else lines
    by_v.store(part.to(dtype))
    thread_barrier()
    i = gl.arange(0, SHAPE[0], layout=gl.SliceLayout(1, LINES))[:, None]
    j = gl.arange(0, SHAPE[1], layout=gl.SliceLayout(0, LINES))[None, :]
    gl.store(state + first * sk + i * (sk if sv == 1 else sv) + j, lines.load(LINES))
    thread_barrier()


@gluon.jit
def store_lines(S, o_tile, state, sk: gl.constexpr, sv: gl.constexpr):
    """As `store_state` at the first of S's columns of V, in whole lines, where o leaves room."""
    K: gl.constexpr = S.shape[1]
    tma.store_wait(0)
    left, right = halved(S)
    if state.dtype.element_ty.primitive_bitwidth == 16:
        store_part(left, o_tile, state, 0, sk, sv)
        store_part(right, o_tile, state, K // 2, sk, sv)
    else:
        a, b = halved(left)
        c, d = halved(right)
        store_part(a, o_tile, state, 0, sk, sv)
        store_part(b, o_tile, state, K // 4, sk, sv)
        store_part(c, o_tile, state, K // 2, sk, sv)
        store_part(d, o_tile, state, 3 * K // 4, sk, sv)


@gluon.jit
def keep_snapshot(
    S, kept, position, tile, given,
    K: gl.constexpr, V: gl.constexpr, snap_k: gl.constexpr, snap_v: gl.constexpr,
    CACHED: gl.constexpr, BULK: gl.constexpr,
):  # fmt: skip
    """Store a state at `position` in slot `kept` of the snapshots, unless that is negative.

    By one bulk copy from a tile of its own where BULK: the chain does not wait for it, and the tile
    is free again where `send_rows` has waited for what was sent before.
    """
    (
        snapshots, snapshot_tiles, snapshot_position, snapshot_end, head, first_column,
        snap_n, snap_h, snap_position,
    ) = given  # fmt: skip
    if kept >= 0:
        target = kept.to(gl.int64)
        if BULK:
            SHAPE: gl.constexpr = [K, S.shape[0]] if snap_v == 1 else [S.shape[0], K]
            dtype: gl.constexpr = tile.dtype
            lines = reinterpret(
                tile, dtype, SHAPE, gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
            )
            by_v = lines.permute((1, 0)) if snap_v == 1 else lines
            by_v.store(S.to(dtype))
            fence_async_shared()
            if snap_v == 1:
                copy_out(snapshot_tiles, [kept, head * K, first_column], tile)
            else:
                copy_out(snapshot_tiles, [kept, head * V + first_column, 0], tile)
        else:
            state = snapshots + target * snap_n + head * snap_h
            if (snap_k == 1) | (snap_v == 1):
                store_lines(S, tile, state + first_column * snap_v, snap_k, snap_v)
            else:
                store_state(S, state, first_column, snap_k, snap_v)
        if CACHED:
            if first_column == 0:
                gl.store(snapshot_position + target * snap_position + head, position)
                gl.store(snapshot_end + target * snap_position + head, position)


@gluon.jit
def send_rows(
    ob, o_tile, o, o_rows, source, lower, upper, head, block, o_token, o_head,
    V: gl.constexpr, BV: gl.constexpr,
):  # fmt: skip
    """Rows [lower, upper) of a chunk's o^T [BV, 64]: whole chunks by one bulk copy."""
    tma.store_wait(0)
    o_tile.permute((1, 0)).store(ob)
    if (lower == 0) & (upper == 64):
        fence_async_shared()
        copy_out(o_rows, [source, head * o_head + block * BV], o_tile)
    else:
        LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        thread_barrier()
        lines = o_tile.load(LINES)
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
        columns = block * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, LINES))
        gl.store(
            o + (source + rows).to(gl.int64)[:, None] * o_token + head * o_head + columns[None, :],
            lines,
            mask=((rows >= lower) & (rows < upper))[:, None],
        )
        thread_barrier()


@gluon.jit
def keep_tail(
    v, log_decays, strengths, position, tail_end,
    tail_v, tail_decay, tail_beta, n, head, block, write,
    row, start, end, first, begins, last, first_low, first_item, fold, closes,
    v_token, v_head, position_slot, tail_v_slot, tail_v_head,
    tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    HV: gl.constexpr, V: gl.constexpr, BV: gl.constexpr,
):  # fmt: skip
    """Rows past the state are the tail; it lies in the last two chunks. Keys: see `tails.py`."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    in_block = block * BV + gl.arange(0, BV, layout=gl.SliceLayout(0, LINES))
    for back in gl.static_range(2):
        item = last - 2 + back
        low = first_low + (item - first) * 64
        if (item >= begins) & (low >= fold):
            at = low + rows
            new = (at >= start) & (at < end)
            local = item - first_item
            tile = (local * HV + head).to(gl.int64)
            ring = (at % tail_rows).to(gl.int64)
            source = (row + at - start).to(gl.int64)
            there = new[:, None]
            values = gl.load(
                v + source[:, None] * v_token + head * v_head + in_block[None, :],
                mask=there, other=0.0,
            )  # fmt: skip
            kept_v = tail_v + write * tail_v_slot + head * tail_v_head
            gl.store(kept_v + ring[:, None] * V + in_block[None, :], values, mask=there)
            if block == 0:
                decays = tail_decay + write * tail_decay_slot + head * tail_decay_head
                gl.store(decays + ring, gl.load(log_decays + tile * 64 + rows), mask=new)
                betas = tail_beta + write * tail_beta_slot + head * tail_beta_head
                gl.store(betas + ring, gl.load(strengths + tile * 64 + rows), mask=new)
    if (block == 0) & closes:
        gl.store(position + write * position_slot + head, fold)
        gl.store(tail_end + write * position_slot + head, end)
