"""What a chunk needs before its state is known, for NVIDIA Hopper: T and P of each value head.

    A = strict_lower(beta_i (k_i . k_j) Gamma_ij)    T = (I + A)^-1
    P = scale tril((q_i . k_j) Gamma_ij)

[Gated Delta Networks, arXiv 2412.06464.] The definitions, the treatment of rows that are not finite
and what is stored are those of the portable pass (`passes/prepare.py`). What is particular: chunks
that lie whole in the call's rows arrive through the tensor memory accelerator, and T is found
without full products (`inverse.py`). v is not read: the scan looks whether its rows are finite.
Where rows are normalised here, k is rounded before any use, as a cache keeps it, and what each row
was multiplied by is left for the scan, which reads the raw rows again; 1 / |q| joins the scale of
its row, `q_reads`.
"""

# Kernels are written in Gluon, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false
# ruff: noqa: RUF059 (functions unpack what they share, and use a part)

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headstart.ops.gated_delta_rule.hopper.gluon import (
    copy_in,
    copy_out,
    reinterpret,
    thread_barrier,
)
from headstart.ops.gated_delta_rule.hopper.inverse import bounded_inverse, columns_of
from headstart.ops.gated_delta_rule.hopper.scores import (
    inverse_norms,
    normalise,
    products_of,
    scores_of,
)

VARYING = ["first_item", "together"]
SLOTS = ["slots"]
READY = gl.constexpr(128)
"""Is added to `clean` of a tile once a scan that waits may read it."""


@gluon.jit
def gather_keys(
    q, k, tail_k, q_tile, k_tile, source, low, start, end, held, stands, slot, key_head,
    q_token, q_head, k_token, k_head, tail_k_slot, tail_k_head, tail_rows,
    K: gl.constexpr, CACHED: gl.constexpr,
):  # fmt: skip
    """Rows of q and k, those of a tail included, to shared memory."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    columns = gl.arange(0, K, layout=gl.SliceLayout(0, LINES))
    at = low + rows
    new = ((at >= start) & (at < end))[:, None]
    first_row = source.to(gl.int64)
    kk = k + first_row * k_token + key_head * k_head
    kk = gl.load(kk + rows[:, None] * k_token + columns[None, :], mask=new, other=0.0)
    qq = q + first_row * q_token + key_head * q_head
    qq = gl.load(qq + rows[:, None] * q_token + columns[None, :], mask=new, other=0.0)
    if CACHED:
        old = (held & (at >= stands) & (at < start))[:, None]
        kept = tail_k + slot * tail_k_slot + key_head * tail_k_head
        kept += (at % tail_rows)[:, None] * K + columns[None, :]
        kk = gl.where(old, gl.load(kept, mask=old, other=0.0), kk)
    k_tile.store(kk)
    q_tile.store(qq)


@gluon.jit
def scratch(dtype: gl.constexpr, K: gl.constexpr):
    """Shared memory of whoever prepares one tile after another.

    Tiles of q and of k, P and T, the scale of rows of q, and a barrier.
    """
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, K], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    q_tile = gl.allocate_shared_memory(dtype, [64, K], WIDE)
    k_tile = gl.allocate_shared_memory(dtype, [64, K], WIDE)
    made = gl.allocate_shared_memory(dtype, [2, 64, 64], SQUARE)
    reads = gl.allocate_shared_memory(gl.float32, [64], PLAIN)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    return q_tile, k_tile, made, reads, bar


@gluon.jit
def skipped(items, sequences, base, item, head, HV: gl.constexpr, CACHED: gl.constexpr):
    """Whether an item is none, or lies before the state of its slot."""
    n = gl.load(items + item * 3)
    none = n < 0
    if CACHED:
        # The heads of a slot stand at one position.
        stands = gl.load(base + gl.maximum(n, 0) * HV + head)
        none = none | (gl.load(items + item * 3 + 1) + 64 <= stands)
    return none


@gluon.jit
def fetch(rows, shared, local, head, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr):
    """Ask for an item's q and k where its chunk lies whole in the call's rows."""
    q_rows, k_rows, sequences, items, first_item, q_head, k_head = rows
    q_tile, k_tile, _made, _reads, bar = shared
    item = first_item + local
    key_head = head // (HV // H)
    n = gl.load(items + item * 3)
    low = gl.load(items + item * 3 + 1)
    row = gl.load(sequences + n * 8)
    start = gl.load(sequences + n * 8 + 1)
    end = start + gl.load(sequences + n * 8 + 2)
    source = row + low - start
    if (low >= start) & (low + 64 <= end):
        mbarrier.expect(bar, 2 * 64 * K * 2)
        copy_in(k_rows, [source, key_head * k_head], bar, k_tile)
        copy_in(q_rows, [source, key_head * q_head], bar, q_tile)


@gluon.jit
def gates_of(given, local, head, HV: gl.constexpr):
    """What rows of a head are scaled with: clean, beta, and running sums by row and by column."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    sums, strengths, clean = given[9], given[11], given[12]
    tile = local * HV + head
    square = tile.to(gl.int64) * 64
    two = square + (local * HV).to(gl.int64) * 64
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, ROW))
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, ROW))
    return (
        gl.load(clean + tile), gl.load(strengths + square + i),
        gl.load(sums + two + i), gl.load(sums + two + HV * 64 + i),
        gl.load(sums + two + j), gl.load(sums + two + HV * 64 + j),
    )  # fmt: skip


@gluon.jit
def rows_of(
    given, shared, local, head, together, phase,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    NORMALISE: gl.constexpr, CACHED: gl.constexpr,
):  # fmt: skip
    """Rows of q and k of an item, which were asked for or are gathered; k is normalised.

    What rows are normalised by is left for the scan of `together` heads. Returns the phase of the
    barrier after it.
    """
    WIDE_LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    (
        T, P, T_rows, P_rows, q, k, tail_k, k_norms, q_reads,
        sums, from_start, strengths, clean, base, sequences, items, slots,
        first_item, scale, q_token, q_head, k_token, k_head,
        tail_k_slot, tail_k_head, tail_rows,
    ) = given  # fmt: skip
    q_tile, k_tile, made, reads, bar = shared
    item = first_item + local
    n = gl.load(items + item * 3)
    low = gl.load(items + item * 3 + 1)
    row = gl.load(sequences + n * 8)
    start = gl.load(sequences + n * 8 + 1)
    end = start + gl.load(sequences + n * 8 + 2)
    whole = (low >= start) & (low + 64 <= end)
    if whole:
        mbarrier.wait(bar, phase)
        phase = phase ^ 1
    else:
        held = False
        slot = gl.to_tensor(0).to(gl.int64)
        stands = start
        if CACHED:
            slot = gl.load(slots + n).to(gl.int64)
            held = (slot >= 0) & (start > 0)
            slot = gl.maximum(slot, 0)
            stands = gl.load(base + n * HV + head)
        gather_keys(
            q, k, tail_k, q_tile, k_tile, row + low - start, low, start, end, held, stands, slot,
            head // (HV // H), q_token, q_head, k_token, k_head,
            tail_k_slot, tail_k_head, tail_rows, K, CACHED,
        )  # fmt: skip
    if NORMALISE:
        by = normalise(k_tile, low, start, WIDE_LINES)
        scaled = inverse_norms(q_tile.load(WIDE_LINES)) * scale
        reads.store(scaled)
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE_LINES))
        for tile in range(local * HV + head, local * HV + head + together):
            gl.store(k_norms + tile.to(gl.int64) * 64 + rows, by)
            gl.store(q_reads + tile.to(gl.int64) * 64 + rows, scaled)
        fence_async_shared()
        thread_barrier()
    elif not whole:
        fence_async_shared()
        thread_barrier()
    return phase


@gluon.jit
def made_of(
    gates, products, p, scale, reads, made, from_start, square, NORMALISE: gl.constexpr
):  # fmt: skip
    """P and T in shared memory; the first row that is not finite, from which on rows are empty."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    dtype: gl.constexpr = made.dtype
    first_spoiled, strength, high_i, rest_i, high_j, rest_j = gates
    if NORMALISE:
        scale = reads.load(gl.SliceLayout(1, ROW))[:, None]
    scores, A, wild, clean_row = scores_of(
        products, p, 0.0, strength, first_spoiled, high_i, rest_i, high_j, rest_j, scale
    )
    made.index(0).store(scores.to(dtype))
    # Blocks of A and of its diagonal's inverse lie where T will.
    blocks = reinterpret(made.index(1), gl.float16, [4, 64, 16], BLOCKS)
    inverse, grown = bounded_inverse(columns_of(A), blocks, blocks.index(3), wild, dtype)
    # All have read them.
    thread_barrier()
    made.index(1).store(inverse.to(dtype))
    clean_row = gl.minimum(clean_row, grown)
    if clean_row < 64:
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, ROW))
        gl.store(from_start + square + i, float("nan"), mask=i >= clean_row)
    fence_async_shared()
    thread_barrier()
    return clean_row


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLOTS)
def prepare_kernel(
    q_rows, k_rows, T, P, q, k, tail_k, k_norms, q_reads,
    sums, from_start, strengths, clean, base, sequences, items, slots,
    first_item, together, scale, q_token, q_head, k_token, k_head,
    tail_k_slot, tail_k_head, tail_rows,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    NORMALISE: gl.constexpr, CACHED: gl.constexpr,
):  # fmt: skip
    """One program per (`together` value heads of a key head, item); q_rows .. P are descriptors."""
    gdc_wait()
    gdc_launch_dependents()
    first_head = gl.program_id(0) * together
    local = gl.program_id(1)
    if skipped(items, sequences, base, first_item + local, first_head, HV, CACHED):
        return
    shared = scratch(k.dtype.element_ty, K)
    thread_barrier()
    q_tile, k_tile, made, reads, bar = shared
    rows = q_rows, k_rows, sequences, items, first_item, q_head, k_head
    given = (
        T, P, q, q, q, k, tail_k, k_norms, q_reads,
        sums, from_start, strengths, clean, base, sequences, items, slots,
        first_item, scale, q_token, q_head, k_token, k_head,
        tail_k_slot, tail_k_head, tail_rows,
    )  # fmt: skip
    fetch(rows, shared, local, first_head, H, HV, K)
    # What does not change in the loop is formed anew: it would fill the registers.
    for head in tl.range(first_head, first_head + together, disable_licm=True):
        # Gates arrive while tiles do.
        gates = gates_of(given, local, head, HV)
        if head == first_head:
            rows_of(
                given, shared, local, first_head, together, gl.to_tensor(0),
                H, HV, K, NORMALISE, CACHED,
            )  # fmt: skip
        products, p = products_of(q_tile, k_tile)
        tma.store_wait(0)
        tile = local * HV + head
        clean_row = made_of(
            gates, products, p, scale, reads, made, from_start, tile.to(gl.int64) * 64, NORMALISE
        )
        copy_out(P, [tile * 64, 0], made.index(0))
        copy_out(T, [tile * 64, 0], made.index(1))
        if clean_row < 64:
            gl.store(clean + tile, clean_row)
    tma.store_wait(0)


@gluon.jit
def ask(
    rows, shared, base, unit, total, together,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, CACHED: gl.constexpr,
):  # fmt: skip
    """Ask for rows of a unit, if there is one and it is not passed over."""
    _q_rows, _k_rows, sequences, items, first_item, _q_head, _k_head = rows
    units = HV // together
    if unit < total:
        local = unit // units
        head = unit % units * together
        if not skipped(items, sequences, base, first_item + local, head, HV, CACHED):
            fetch(rows, shared, local, head, H, HV, K)


@gluon.jit
def prepare_items(
    rows, given, shared, first, step, count, together,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    NORMALISE: gl.constexpr, CACHED: gl.constexpr,
):  # fmt: skip
    """Units of `together` heads of `count` items, every step-th from `first` on.

    Beside a scan that waits for them, see READY; rows of the next unit are asked for as soon as
    there is room.
    """
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    _q_rows, _k_rows, sequences, items, first_item, _q_head, _k_head = rows
    T_rows, P_rows, from_start, clean, base = given[2], given[3], given[10], given[12], given[13]
    scale = given[18]
    q_tile, k_tile, made, reads, bar = shared
    units = HV // together
    phase = gl.to_tensor(0)
    total = count * units
    ask(rows, shared, base, first, total, together, H, HV, K, CACHED)
    for unit in tl.range(first, total, step, disable_licm=True):
        local = unit // units
        first_head = unit % units * together
        if skipped(items, sequences, base, first_item + local, first_head, HV, CACHED):
            # Told all the same, as empty: no scan waits forever, whatever its slot holds.
            for head in tl.range(first_head, first_head + together, disable_licm=True):
                gl.atomic_xchg(clean + local * HV + head, READY, sem="release", scope="gpu")
            ask(rows, shared, base, unit + step, total, together, H, HV, K, CACHED)
        else:
            for head in tl.range(first_head, first_head + together, disable_licm=True):
                gates = gates_of(given, local, head, HV)
                if head == first_head:
                    phase = rows_of(
                        given, shared, local, head, together, phase, H, HV, K, NORMALISE, CACHED
                    )
                products, p = products_of(q_tile, k_tile)
                thread_barrier()
                if head == first_head + together - 1:
                    ask(rows, shared, base, unit + step, total, together, H, HV, K, CACHED)
                tile = local * HV + head
                square = tile.to(gl.int64) * 64
                clean_row = made_of(
                    gates, products, p, scale, reads, made, from_start, square, NORMALISE
                )
                # Ordinary stores: those of the copy engine end at a time that nobody is told.
                lines = gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))[:, None] * 64
                lines += gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))[None, :]
                gl.store(P_rows + square * 64 + lines, made.index(0).load(LINES))
                gl.store(T_rows + square * 64 + lines, made.index(1).load(LINES))
                fence_async_shared()
                thread_barrier()
                gl.atomic_xchg(clean + tile, clean_row + READY, sem="release", scope="gpu")
