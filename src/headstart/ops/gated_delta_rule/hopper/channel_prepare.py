"""`prepare` for a decay per channel on NVIDIA Hopper: T, P and decayed rows of a head's chunk.

    A = strict_lower(beta_i sum_c k_ic k_jc Gamma_ijc)    T = (I + A)^-1
    P = scale tril(sum_c q_ic k_jc Gamma_ijc)

[Kimi Linear, arXiv 2510.26692.] What is stored is what the portable pass stores
(`passes/channel.py`), but for rows of v, which the scan looks at. What is particular: a warp has a
block of 16 rows, a thread 8 of them for a few channels, so sums of log decays stay in registers.
G_i is the sum from the block's start to row i. Where row j is in an earlier block,

    Gamma_ij = exp(G_i) exp(sum of what is left of j's block and of the blocks between)

and both factors are at most 1. Within a block Gamma_ij = exp(G_i + s) exp(-s - G_j): the second
factor grows as the first shrinks, and bfloat16 has exponents for both while G is above -REACH. Rows
past that, of which those before them do not know, take blocks of 1, 2, 4 and 8 rows with borders
between, as the portable pass does.
"""

# Kernels are written in Gluon, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false
# ruff: noqa: SIM102 (an outer test of a constant is decided when the kernel is compiled)
# ruff: noqa: RUF005 (kernels cannot unpack into a tuple)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mma_v2, tma

from headstart.ops.gated_delta_rule.hopper.gluon import copy_out, reinterpret, thread_barrier
from headstart.ops.gated_delta_rule.hopper.inverse import TAME, beside, bounded_inverse
from headstart.ops.gated_delta_rule.passes.gates import log_decay, strength

VARYING = ["first_item"]
SLOTS = ["slots"]
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def exp2(x):
    """2^x; what float32 holds with fewer digits only is 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def apart(x):
    """x, of which the compiler knows nothing: what is formed of it is formed anew."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def tile_of(rows, BC: gl.constexpr):
    """[4, 16, BC] of 8 rows [8, BC] of half blocks."""
    found = rows
    for n in gl.static_range(3):
        joined = ()
        for m in gl.static_range(4 // 2**n):
            joined = joined + (gl.join(found[2 * m], found[2 * m + 1]),)
        found = joined
    return found[0].permute((0, 4, 3, 2, 1)).reshape([4, 16, BC])


@gluon.jit
def eight(x):
    """The same for each of 8 rows."""
    return x, x, x, x, x, x, x, x


@gluon.jit
def of_other_half(x, BC: gl.constexpr):
    """x [8, BC] of half blocks, of the other half of each block."""
    halves = x.reshape([4, 2, BC])
    HALVES: gl.constexpr = halves.type.layout
    ROWS: gl.constexpr = x.type.layout
    own = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))[None, :, None]
    _, other = gl.broadcast(halves, own ^ 1)
    return gl.convert_layout(gl.gather(halves, other, 1).reshape([8, BC]), ROWS)


@gluon.constexpr_function
def crossed(n, BC):
    """Sixteen tiles [16, BC] in memory, numbered so that the first four are those `met` returns.

    Within a tile eights of a row lie as in SwizzledSharedLayout(8, 1, 8).
    """
    eights = [[0, 0, 8 * 2**bit] for bit in range((BC // 8).bit_length() - 1)]
    rows = [[0, 1, 8], [0, 2, 16], [0, 4, 32], [0, 8, 0]]
    # The numbers, to be combined by xor, of the tiles 1, 2, 4 and 8 after the first.
    numbers = {1: [4, 2, 1, 8], 2: [1, 8, 4, 2], 3: [1, 8, 4, 7]}[n]
    tiles = [[number, 0, 0] for number in numbers]
    return gl.SharedLinearLayout([[0, 0, 1], [0, 0, 2], [0, 0, 4]] + eights + rows + tiles)


@gluon.jit
def met(space, n: gl.constexpr):
    """[4, BC, 16] of space [4, 4, 16, BC]: for each block b, block b ^ n of the n-th four.

    Where b ^ n is after b it is another block. So each block meets all before it once, by n of 1,
    2 and 3. (b - n would do too, but no layout says that.)
    """
    BC: gl.constexpr = space.shape[3]
    tiles = reinterpret(space, space.dtype, [16, 16, BC], crossed(n, BC))
    return tiles.permute((0, 2, 1)).slice(0, 4)


@gluon.jit
def with_columns(A, P, keys, queries, columns):
    """A + k c and P + q c of four blocks of 16 rows; columns [4, BC, 16] in shared memory."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, A.type.layout, 2)
    right = columns.load(RIGHT)
    return mma_v2(keys, right, A), mma_v2(queries, right, P)


@gluon.jit
def products_within(k_tile, q_tile, BLOCK: gl.constexpr):
    """k k^T and q k^T of four blocks of 16 rows in shared memory."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, BLOCK, 2)
    nothing = gl.zeros([4, 16, 16], gl.float32, BLOCK)
    columns = k_tile.permute((0, 2, 1))
    return with_columns(nothing, nothing, k_tile.load(LEFT), q_tile.load(LEFT), columns)


@gluon.jit
def decayed(rows, by, dtype: gl.constexpr, BC: gl.constexpr):
    """[4, 16, BC] of 8 rows, each of them times its own of `by`."""
    found = ()
    for r in gl.static_range(8):
        found = found + ((rows[r].to(gl.float32) * by[r]).to(dtype),)
    return tile_of(found, BC)


@gluon.jit
def to_borders(d, late, size: gl.constexpr):
    """Decay between rows and the border in their pair of blocks of `size` rows, 8 at most.

    d: 8 rows of half blocks, which are `late` in their block or not. Left of its border a row
    decays up to it, right of it from it on.
    """
    nothing = gl.zeros_like(d[0])
    found = ()
    for b in gl.static_range(0, 8, 2 * size):
        running = nothing
        left = (nothing,)
        for m in gl.static_range(size - 1):
            running = running + d[b + size - 1 - m]
            left = (running,) + left
        running = nothing
        right = ()
        for m in gl.static_range(size):
            running = running + d[(b + size + m) % 8]
            right = right + (running,)
        if size < 8:
            for m in gl.static_range(size):
                found = found + (exp2(left[m]),)
            for m in gl.static_range(size):
                found = found + (exp2(right[m]),)
        else:
            for m in gl.static_range(8):
                found = found + (exp2(gl.where(late, right[m], left[m])),)
    return found


@gluon.jit
def norms_of(
    x, first_row, x_token, low, start, end, K: gl.constexpr, BC: gl.constexpr,
    NORMALISE: gl.constexpr,
):  # fmt: skip
    """What 8 rows of half blocks are multiplied by to be of length 1: 8 times [8]."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, BC // 16], [2, 16], [4, 1], [1, 0])
    half = 8 * gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS))
    channels = gl.arange(0, BC, layout=gl.SliceLayout(0, ROWS))[None, :]
    rows = x + first_row.to(gl.int64) * x_token + (half * x_token)[:, None] + channels
    found = ()
    for r in gl.static_range(8):
        squares = gl.zeros([8], gl.float32, gl.SliceLayout(1, ROWS))
        if NORMALISE:
            at = low + half + r
            new = ((at >= start) & (at < end))[:, None]
            for c in gl.static_range(0, K, BC):
                wide = gl.load(rows + c, mask=new, other=0.0).to(gl.float32)
                squares += gl.sum(wide * wide, 1)
            rows += x_token
        found = found + (gl.rsqrt(squares + 1e-6),)
    return found


@gluon.jit
def normalised(x, by, NORMALISE: gl.constexpr):
    """Rows times what makes them of length 1, if that is asked for."""
    if NORMALISE:
        x = (x.to(gl.float32) * by[:, None]).to(x.dtype)
    return x


@gluon.jit
def rows_of(
    given, c, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, BC: gl.constexpr,
    GATE: gl.constexpr, HAS_G: gl.constexpr, HAS_BIAS: gl.constexpr, NORMALISE: gl.constexpr,
    CACHED: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Channels c and on of k, q and log decays (in powers of two): 8 rows [8, BC] each.

    KEEP: store what the chunk's tail will take.
    """
    (
        q, k, g, a_log, dt_bias, tail_k, tail_decay, keys, log_decays, head, key_head, local,
        first_row, low, start, end, held, stands, slot, fold, lower_bound, q_norms, k_norms,
        q_token, q_head, k_token, k_head, g_token, g_head, g_channel, bias_head, bias_channel,
        tail_k_slot, tail_k_head, tail_decay_slot, tail_decay_head, tail_rows,
    ) = given  # fmt: skip
    if not KEEP:
        # Again, in a rare branch: addresses and masks would take registers until then.
        low = apart(low)
        first_row = apart(first_row)
    ROWS: gl.constexpr = gl.BlockedLayout([1, BC // 16], [2, 16], [4, 1], [1, 0])
    half = 8 * gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS))
    channel = c + gl.arange(0, BC, layout=gl.SliceLayout(0, ROWS))[None, :]
    rate = 0.0
    bias = gl.zeros([1, BC], gl.float32, ROWS)
    if GATE == "raw" or GATE == "bounded":
        rate = gl.exp(gl.load(a_log + head).to(gl.float32))
        if HAS_BIAS:
            bias = gl.load(dt_bias + head * bias_head + channel * bias_channel).to(gl.float32)
    k_rows = k + first_row.to(gl.int64) * k_token + key_head * k_head
    k_rows = k_rows + (half * k_token)[:, None] + channel
    q_rows = q + first_row.to(gl.int64) * q_token + key_head * q_head
    q_rows = q_rows + (half * q_token)[:, None] + channel
    g_rows = g + first_row.to(gl.int64) * g_token + head * g_head + (half * g_token)[:, None]
    g_rows += channel * g_channel
    kk = ()
    qq = ()
    d = ()
    for r in gl.static_range(8):
        at = low + half + r
        # At or past the start, and before the end.
        new = ((at - start).to(gl.uint32) < (end - start).to(gl.uint32))[:, None]
        decay = gl.zeros([8, BC], gl.float32, ROWS)
        if HAS_G:
            decay = gl.load(g_rows, mask=new, other=0.0).to(gl.float32)
            if GATE != "log":
                decay = gl.where(new, log_decay(decay, rate, bias, lower_bound, GATE), 0.0)
        key = normalised(gl.load(k_rows, mask=new, other=0.0), k_norms[r], NORMALISE)
        if CACHED:
            old = (held & (at >= stands) & (at < start))[:, None]
            ring = (at % tail_rows)[:, None] * K + channel
            kept = tail_decay + slot * tail_decay_slot + head * tail_decay_head + ring
            decay = gl.where(old, gl.load(kept, mask=old, other=0.0), decay)
            kept_k = tail_k + slot * tail_k_slot + key_head * tail_k_head + ring
            key = gl.where(old, gl.load(kept_k, mask=old, other=0.0), key)
            if KEEP:
                if low >= fold:
                    square = (half + r)[:, None] * K + channel
                    tile = (local * HV + head).to(gl.int64) * (64 * K)
                    gl.store(log_decays + tile + square, decay)
                    if head % (HV // H) == 0:
                        key_tile = (local * H + key_head).to(gl.int64) * (64 * K)
                        gl.store(keys + key_tile + square, key)
        kk = kk + (key,)
        query = gl.load(q_rows, mask=new, other=0.0)
        qq = qq + (normalised(query, q_norms[r], NORMALISE),)
        d = d + (decay * LOG2E,)
        k_rows += k_token
        q_rows += q_token
        g_rows += g_token
    return kk, qq, d


@gluon.jit
def out_of_the_ordinary(
    A, P, first, given, space, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    BC: gl.constexpr, GATE: gl.constexpr, HAS_G: gl.constexpr, HAS_BIAS: gl.constexpr,
    NORMALISE: gl.constexpr, CACHED: gl.constexpr, REACH: gl.constexpr,
):  # fmt: skip
    """A and P of blocks of 16 rows, anew from each one's first row past REACH on.

    Also the first row that is not finite, `first` at most.
    """
    BLOCK: gl.constexpr = A.type.layout
    ROWS: gl.constexpr = gl.BlockedLayout([1, BC // 16], [2, 16], [4, 1], [1, 0])
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCK)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCK)))[None, None, :]
    half = 8 * gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS))
    nothing = gl.zeros([4, 16, 16], gl.float32, BLOCK)
    far_A = nothing
    far_P = nothing
    late = (half % 16 == 8)[:, None]
    least = gl.full([8], 16.0, gl.float32, gl.SliceLayout(1, ROWS))
    for c in range(0, K, BC):
        kk, qq, d = rows_of(given, c, H, HV, K, BC, GATE, HAS_G, HAS_BIAS, NORMALISE, CACHED, False)
        dtype: gl.constexpr = kk[0].dtype
        total = d[0]
        for r in gl.static_range(1, 8):
            total = total + d[r]
        running = gl.where(late, of_other_half(total, BC), 0.0)
        near = gl.zeros_like(d[0])
        for r in gl.static_range(8):
            running = running + d[r]
            near = near + gl.where(running >= -REACH, 1.0, 0.0)
            bad = (d[r] != d[r]) | (kk[r].to(gl.float32) * 0.0 != 0.0)
            first = gl.minimum(first, gl.min(gl.min(gl.where(bad, half[:, None] + r, 64), 1), 0))
        near += of_other_half(near, BC)
        least = gl.minimum(least, gl.min(near, 1))
        k_tile = space.index(0)
        q_tile = space.index(1)
        k_tile.store(tile_of(kk, BC))
        q_tile.store(tile_of(qq, BC))
        more_A, more_P = products_within(k_tile, q_tile, BLOCK)
        far_A += gl.where(i == j, more_A, 0.0)
        far_P += gl.where(i == j, more_P, 0.0)
        for level in gl.static_range(4):
            reach = to_borders(d, late, 2**level)
            k_tile.store(decayed(kk, reach, dtype, BC))
            q_tile.store(decayed(qq, reach, dtype, BC))
            more_A, more_P = products_within(k_tile, q_tile, BLOCK)
            pairs = ((i ^ j) >> level) == 1
            far_A += gl.where(pairs, more_A, 0.0)
            far_P += gl.where(pairs, more_P, 0.0)
    least = gl.min(least.reshape([4, 2]), 1)
    least = gl.convert_layout(least, gl.SliceLayout(1, gl.SliceLayout(2, BLOCK)))
    far = i.to(gl.float32) >= least[:, None, None]
    return gl.where(far, far_A, A), gl.where(far, far_P, P), first


@gluon.jit
def columns_of(d0, d1, d2, d3, FLAT: gl.constexpr):
    """Three columns [64, 16] of blocks of a square whose blocks are those of d0 to d3.

    Block b of dn [4, 16, 16] is in column b ^ n of blocks; where that is above the diagonal it is
    whatever it is.
    """
    d0 = gl.convert_layout(d0.reshape([64, 16]), FLAT)
    d1 = gl.convert_layout(d1.reshape([64, 16]), FLAT)
    d2 = gl.convert_layout(d2.reshape([64, 16]), FLAT)
    d3 = gl.convert_layout(d3.reshape([64, 16]), FLAT)
    own = (gl.arange(0, 64, layout=gl.SliceLayout(1, FLAT)) // 16)[:, None]
    c0 = gl.where(own == 0, d0, gl.where(own == 1, d1, gl.where(own == 2, d2, d3)))
    c1 = gl.where(own == 1, d0, gl.where(own == 2, d3, d2))
    c2 = gl.where(own == 2, d0, d1)
    return c0, c1, c2, d0


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLOTS)
def prepare_channels_kernel(
    q, k, g, beta, a_log, dt_bias, sequences, items, slots, position,
    tail_k, tail_decay, tail_beta,
    T, P, q_tiles, k_tiles, k_starts, clean, from_start, whole_decay, keys, log_decays,
    strengths, base,
    first_item, scale, lower_bound, q_token, q_head, k_token, k_head,
    g_token, g_head, g_channel, beta_token, beta_head, bias_head, bias_channel,
    position_slot, tail_k_slot, tail_k_head,
    tail_decay_slot, tail_decay_head, tail_beta_slot, tail_beta_head, tail_rows,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, HAS_G: gl.constexpr, HAS_BETA: gl.constexpr,
    HAS_BIAS: gl.constexpr, NORMALISE: gl.constexpr, CACHED: gl.constexpr,
    BC: gl.constexpr, SHIFT: gl.constexpr, REACH: gl.constexpr,
):  # fmt: skip
    """One program per (value head, item); T and P are descriptors.

    SHIFT: s, in powers of two. REACH: powers of two that G may fall by.
    """
    ROWS: gl.constexpr = gl.BlockedLayout([1, BC // 16], [2, 16], [4, 1], [1, 0])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, ROWS)
    BY_CHANNEL: gl.constexpr = gl.SliceLayout(0, ROWS)
    BLOCK: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    FLAT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, BLOCK, 2)
    TILES: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dtype: gl.constexpr = k.dtype.element_ty
    DOWN: gl.constexpr = 2.0**-SHIFT
    head = gl.program_id(0)
    local = gl.program_id(1)
    item = first_item + local
    key_head = head // (HV // H)
    n = gl.load(items + item * 3)
    if n < 0:
        return
    low = gl.load(items + item * 3 + 1)
    row = gl.load(sequences + n * 8)
    start = gl.load(sequences + n * 8 + 1)
    end = start + gl.load(sequences + n * 8 + 2)
    slot = gl.to_tensor(0).to(gl.int64)
    held = False
    stands = start
    if CACHED:
        slot = gl.load(slots + n).to(gl.int64)
        held = (slot >= 0) & (start > 0)
        slot = gl.maximum(slot, 0)
        stands = start // 64 * 64
        if held:
            stands = gl.load(position + slot * position_slot + head)
        if item == gl.load(sequences + n * 8 + 4):
            gl.store(base + n * HV + head, stands)
        if low + 64 <= stands:
            return
    tile = (local * HV + head).to(gl.int64)
    begins = tile * (64 * K)
    # Of the chunk, so it may lie before the first of this call.
    first_row = row + low - start
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, FLAT))
    at = low + rows
    new = (at >= start) & (at < end)
    b = gl.where(new, 1.0, 0.0)
    if HAS_BETA:
        b = beta + first_row.to(gl.int64) * beta_token + head * beta_head + rows * beta_token
        b = gl.load(b, mask=new, other=0.0).to(gl.float32)
        b = gl.where(new, strength(b, BETA), 0.0)
    if CACHED:
        old = held & (at >= stands) & (at < start)
        tail = tail_beta + slot * tail_beta_slot + head * tail_beta_head + at % tail_rows
        b = gl.where(old, gl.load(tail, mask=old, other=0.0), b)
    gl.store(strengths + tile * 64 + rows, b)
    first = gl.min(gl.where(b * 0.0 != 0.0, rows, 64), 0)
    unusual = gl.where(first < 64, 1, 0)

    half = gl.arange(0, 8, layout=BY_ROW)[:, None]
    block = half // 2
    late = half % 2 == 1
    q_norms = norms_of(q + key_head * q_head, first_row, q_token, low, start, end, K, BC, NORMALISE)
    k_norms = norms_of(k + key_head * k_head, first_row, k_token, low, start, end, K, BC, NORMALISE)
    given = (
        q, k, g, a_log, dt_bias, tail_k, tail_decay, keys, log_decays, head, key_head, local,
        first_row, low, start, end, held, stands, slot, gl.load(sequences + n * 8 + 6),
        lower_bound, q_norms, k_norms, q_token, q_head, k_token, k_head, g_token, g_head, g_channel,
        bias_head, bias_channel, tail_k_slot, tail_k_head, tail_decay_slot, tail_decay_head,
        tail_rows,
    )  # fmt: skip
    sums = gl.allocate_shared_memory(gl.float32, [8, BC], PLAIN)
    own = gl.allocate_shared_memory(dtype, [2, 4, 16, BC], TILES)
    k_tile = own.index(0)
    q_tile = own.index(1)
    space = gl.allocate_shared_memory(dtype, [4, 4, 16, BC], TILES)
    A0 = gl.zeros([4, 16, 16], gl.float32, BLOCK)
    A1 = A0
    A2 = A0
    A3 = A0
    P0 = A0
    P1 = A0
    P2 = A0
    P3 = A0
    strange = gl.zeros([8], gl.int32, BY_ROW)
    for c in range(0, K, BC):
        kk, qq, d = rows_of(given, c, H, HV, K, BC, GATE, HAS_G, HAS_BIAS, NORMALISE, CACHED, True)
        channel = c + gl.arange(0, BC, layout=BY_CHANNEL)
        square = half * (8 * K) + channel[None, :]
        # Sums of blocks, and whether anything is out of the ordinary.
        total = d[0]
        for r in gl.static_range(1, 8):
            total = total + d[r]
        other = of_other_half(total, BC)
        total = total + other
        strange |= gl.max(gl.where((total != total) | (total < -REACH), 1, 0), 1)
        reinterpret(sums, gl.float32, [8, BC], TABLE).store(total)
        s0 = sums.index(0).load(BY_CHANNEL)
        s1 = sums.index(2).load(BY_CHANNEL)
        s2 = sums.index(4).load(BY_CHANNEL)
        s3 = sums.index(6).load(BY_CHANNEL)
        gl.store(whole_decay + tile * K + channel, exp2((s0 + s1) + (s2 + s3)))
        s0, s1, s2, s3 = s0[None, :], s1[None, :], s2[None, :], s3[None, :]
        since = gl.where(block == 1, s0, gl.where(block == 2, s0 + s1, s0 + s1 + s2))
        since = exp2(gl.where(block == 0, 0.0, since))
        until = gl.where(block == 2, s3, gl.where(block == 1, s2 + s3, s1 + s2 + s3))
        until = exp2(gl.where(block == 3, 0.0, until))

        running = gl.where(late, other, 0.0)
        keys_to = ()
        queries_to = ()
        for r in gl.static_range(8):
            running = running + d[r]
            e = exp2(running + SHIFT)
            key = kk[r].to(gl.float32)
            query = qq[r].to(gl.float32)
            keys_to = keys_to + ((key * e).to(dtype),)
            queries_to = queries_to + ((query * e).to(dtype),)
            e = (e * DOWN) * since
            gl.store(k_starts + begins + r * K + square, (key * e).to(dtype))
            gl.store(q_tiles + begins + r * K + square, (query * e).to(dtype))
        k_tile.store(tile_of(keys_to, BC))
        q_tile.store(tile_of(queries_to, BC))
        running = gl.where(late, 0.0 - other, 0.0) - SHIFT
        downward = ()
        for r in gl.static_range(8):
            running = running - d[r]
            downward = downward + (exp2(running),)
        space.index(0).store(decayed(kk, downward, dtype, BC))
        running = gl.where(late, 0.0, other)
        left = ()
        for r in gl.static_range(8):
            left = (kk[7 - r].to(gl.float32) * exp2(running),) + left
            running = running + d[7 - r]
        for r in gl.static_range(8):
            gl.store(k_tiles + begins + r * K + square, (left[r] * until).to(dtype))
        # What rows of a block are to the one that meets it: the next, the one after it, the last.
        one = gl.full([8, BC], 1.0, gl.float32, ROWS)
        next_but_one = exp2(gl.where(block == 0, s1, s2))
        last_or_next = exp2(gl.where(block == 0, s1 + s2, 0.0))
        space.index(1).store(decayed(left, eight(one), dtype, BC))
        space.index(2).store(decayed(left, eight(next_but_one), dtype, BC))
        space.index(3).store(decayed(left, eight(last_or_next), dtype, BC))
        those_keys = k_tile.load(LEFT)
        those_queries = q_tile.load(LEFT)
        # Block b meets itself, and those before it in the order of b ^ 1, b ^ 2 and b ^ 3.
        itself = space.index(0).permute((0, 2, 1))
        A0, P0 = with_columns(A0, P0, those_keys, those_queries, itself)
        A1, P1 = with_columns(A1, P1, those_keys, those_queries, met(space, 1))
        A2, P2 = with_columns(A2, P2, those_keys, those_queries, met(space, 2))
        A3, P3 = with_columns(A3, P3, those_keys, those_queries, met(space, 3))
    # All is as it should be where the squares of keys are finite and rows did not reach too far.
    ri = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCK)))[None, :, None]
    rj = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCK)))[None, None, :]
    squares = gl.sum(gl.where(ri == rj, A0, 0.0), 2)
    unusual |= gl.max(gl.max(gl.where(squares * 0.0 != 0.0, 1, 0), 1), 0) | gl.max(strange, 0)
    b3 = gl.convert_layout(b.reshape([4, 16]), gl.SliceLayout(2, BLOCK))
    if unusual > 0:
        A0, P0, first = out_of_the_ordinary(
            A0, P0, first, given, space, H, HV, K, BC, GATE, HAS_G, HAS_BIAS, NORMALISE, CACHED,
            REACH,
        )  # fmt: skip
        # From the first row that is not finite on, rows count as empty.
        squares = gl.sum(gl.where(ri == rj, A0, 0.0), 2)
        rb = 16 * gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, BLOCK)))[:, None, None]
        clean_i = rb + ri < first
        A0 = gl.where(clean_i, A0, 0.0)
        A1 = gl.where(clean_i, A1, 0.0)
        A2 = gl.where(clean_i, A2, 0.0)
        A3 = gl.where(clean_i, A3, 0.0)
        P0 = gl.where(rb + rj < first, P0, 0.0)
        P1 = gl.where((rb ^ 16) + rj < first, P1, 0.0)
        P2 = gl.where((rb ^ 32) + rj < first, P2, 0.0)
        P3 = gl.where((rb ^ 48) + rj < first, P3, 0.0)
        b3 = gl.where(b3 * 0.0 == 0.0, b3, 0.0)
    wild = gl.max(gl.max(gl.where(squares * b3 <= TAME, 0, 1), 1), 0)
    by = b3[:, :, None]
    A0 = gl.where(ri > rj, A0 * by, 0.0)
    by = by * DOWN
    P0 = gl.where(ri >= rj, P0 * scale, 0.0)
    down = scale * DOWN
    c0, c1, c2, c3 = columns_of(P0, P1 * down, P2 * down, P3 * down, FLAT)
    at_block = (rows // 16)[:, None]
    c1 = gl.where(at_block >= 1, c1, 0.0)
    c2 = gl.where(at_block >= 2, c2, 0.0)
    c3 = gl.where(at_block == 3, c3, 0.0)
    thread_barrier()
    made = reinterpret(space, dtype, [2, 64, 64], T.layout)
    blocks = reinterpret(own, gl.float16, [4, 64, 16], BLOCKS)
    made.index(0).store(beside(beside(c0, c1), beside(c2, c3)).to(dtype))
    columns = columns_of(A0, A1 * by, A2 * by, A3 * by, FLAT)
    inverse, grown = bounded_inverse(columns, blocks, blocks.index(3), wild, dtype)
    made.index(1).store(inverse.to(dtype))
    fence_async_shared()
    thread_barrier()
    copy_out(P, [local * HV * 64 + head * 64, 0], made.index(0))
    copy_out(T, [local * HV * 64 + head * 64, 0], made.index(1))
    first = gl.minimum(first, grown)
    gl.store(clean + tile, first)
    gl.store(from_start + tile * 64 + rows, gl.where(rows < first, 1.0, float("nan")))
    tma.store_wait(0)
