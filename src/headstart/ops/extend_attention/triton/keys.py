"""Where keys lie and how a tile of them is read.

A key is row `row` of page `page` of a tensor, at page * page_stride + row * row_stride in 64 bits;
a packed tensor of new keys is one of pages of a single row. Rows beyond the keys at hand are zeros,
whatever lies there.
"""

# Kernels are written in Triton's language, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl


@triton.jit
def read_table(p_entry, m_key):
    """Entries [BN] of a table, 0 where there is no key."""
    return tl.load(p_entry) if m_key is None else tl.load(p_entry, mask=m_key, other=0)


@triton.jit
def look_up(places, where, o_key, m_key, FOUND: tl.constexpr, PAGE: tl.constexpr):
    """What the table of a sequence says of keys [BN]: the page or slot of each; 0 without a table.

    m_key: which of them are keys; None: all. FOUND: "run", key j lies in slot where + j; "list", in
    slot places[where + j]; "pages", in page places[where + j // PAGE], of PAGE rows.
    """
    found = o_key * 0
    if FOUND == "pages":
        # Without a sign a division by a power of two is one shift.
        found = read_table(places + where + o_key.to(tl.uint32) // PAGE, m_key)
    elif FOUND == "list":
        found = read_table(places + where + o_key, m_key)
    return found


@triton.jit
def find(found, where, o_key, page_rows, FOUND: tl.constexpr, PAGE: tl.constexpr):
    """Page and row of keys [BN] of a sequence; found: what `look_up` says.

    PAGE of slots: 1, or 0 for pages of page_rows rows, which no program is compiled for: a cache
    that grows has other pages each time.
    """
    page, row = found, o_key * 0
    if FOUND == "pages":
        row = (o_key.to(tl.uint32) % PAGE).to(tl.int32)
    elif FOUND == "run":
        page = where + o_key
        if PAGE == 0:
            row = (where % page_rows).to(tl.int32) + o_key
            page = where // page_rows + row // page_rows
            row = row % page_rows
    elif PAGE == 0:
        page, row = found // page_rows, found % page_rows
    return page, row


@triton.jit
def widened(x):
    """A number that is not negative in 64 bits; where it had 32, the upper half is known to be 0.

    The product of two such takes one multiplication; with signs it takes four.
    """
    found = x
    if isinstance(x, tl.tensor):
        if x.dtype == tl.int32:
            found = x.to(tl.uint32)
        found = found.to(tl.int64)
    return found


@triton.jit
def offsets(page, row, strides, PAGE: tl.constexpr):
    """Offsets [BN] of keys in a tensor; strides: of a page, of a row, of a channel."""
    found = widened(page) * widened(strides[0])
    if PAGE != 1:
        found += widened(row) * widened(strides[1])
    return found


@triton.jit
def read(p_row, m_key, channel, SIZE: tl.constexpr, BD: tl.constexpr, first=0):
    """Columns first, first + 1, ... of rows of SIZE that begin at p_row [BN], as a tile [BN, BD].

    m_key: which rows are read; None: all. channel: stride, or one a row.
    """
    o_d = first + tl.arange(0, BD)
    pointers = p_row[:, None] + o_d[None, :] * channel
    if SIZE % BD != 0:
        mask = (o_d < SIZE)[None, :]
        if m_key is not None:
            mask = mask & m_key[:, None]
        b_x = tl.load(pointers, mask=mask, other=0.0)
    elif m_key is not None:
        b_x = tl.load(pointers, mask=m_key[:, None], other=0.0)
    else:
        b_x = tl.load(pointers)
    return b_x


@triton.jit
def read_either(places, SIZE: tl.constexpr, BD: tl.constexpr, dtype: tl.constexpr, first=0):
    """The same as an operand of `dtype`, of keys that lie in one tensor or in one of two.

    places: for each tensor (p_row, m_key, channel). It has loads of its own: AMD's compiler follows
    no pointer into one of two tensors.
    """
    b_x = operand(read(places[0][0], places[0][1], places[0][2], SIZE, BD, first), dtype)
    if len(places) > 1:
        p_row, m_key, channel = places[1]
        b_other = operand(read(p_row, m_key, channel, SIZE, BD, first), dtype)
        b_x = tl.where(m_key[:, None], b_other, b_x)
    return b_x


@triton.jit
def parts_of(b_x):
    """A tile [., BD] as a tuple of its parts; parts as they are."""
    found = b_x
    if isinstance(b_x, tl.tensor):
        found = (b_x,)
    return found


@triton.jit
def read_parts(
    p_row, m_key, channel, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """The D channels of a tile of keys as operands of `dtype` in parts of BD columns.

    Where there are several parts all are full; the rest as for `read`.
    """
    SIZE: tl.constexpr = D if PARTS == 1 else BD
    found = ()
    for part in tl.static_range(PARTS):
        b_x = read(p_row + part * BD * channel, m_key, channel, SIZE, BD)
        found += (operand(b_x, dtype),)
    return found


@triton.jit
def load_parts(tiles, row, column, PARTS: tl.constexpr):
    """The same through a descriptor, whose columns are those of a part."""
    found = ()
    for part in tl.static_range(PARTS):
        found += (tiles.load([row, column + part * tiles.block_shape[1]]),)
    return found


@triton.jit
def row_of_tile(places, where, number, FOUND: tl.constexpr, PAGE: tl.constexpr):
    """Row of a tensor at which a tile lies whole, by the number of its first key in a sequence."""
    if FOUND == "pages":
        page = tl.load(places + where + number // PAGE).to(tl.int32)
        row = page * PAGE + number % PAGE
    else:
        row = (where + number).to(tl.int32)
    return row


@triton.jit
def read_scale(scale, number, entry):
    """The scale of a float8 cache: an entry of a tensor if there is one, else a number."""
    found = number
    if scale is not None:
        found = tl.load(scale + entry)
    return found


@triton.jit
def _widened(b_x, bits: tl.constexpr, shift: tl.constexpr, sign: tl.constexpr):
    """Sign, exponent and mantissa of a byte at their places in a wider float."""
    b_bits = b_x.to(bits)
    return ((b_bits & 0x7F) << shift) | ((b_bits & 0x80) << sign)


@triton.jit
def operand(b_x, dtype: tl.constexpr):
    """A tile of a cache as an operand of `dtype`; float8 e4m3 without its scale.

    Targets without conversions of e4m3 are given its bytes: the four bits of exponent and three of
    mantissa are put where `dtype` has its own, which leaves a power of two to multiply with.
    """
    b_value = b_x
    if b_x.dtype == tl.uint8:
        if dtype == tl.float32:
            b_value = _widened(b_x, tl.uint32, 20, 24).to(tl.float32, bitcast=True) * 2.0**120
        elif dtype == tl.bfloat16:
            b_value = _widened(b_x, tl.uint16, 4, 8).to(tl.bfloat16, bitcast=True) * 2.0**120
        else:
            b_value = _widened(b_x, tl.uint16, 7, 8).to(tl.float16, bitcast=True) * 2.0**8
        b_value = tl.where((b_x & 0x7F) == 0x7F, float("nan"), b_value)
    return b_value.to(dtype)


@triton.jit
def beside_float8(b_q):
    """Queries [BM, BD] to multiply with float8 keys, and what the scores then lack: [BM] or 1.

    float16 holds every e4m3 exactly and is the cheapest to turn it into. Rows of bfloat16 are
    divided by a power of two near their largest size, which leaves all digits above 2**-24 of it.
    """
    b_near, power = b_q, 1.0
    if b_q.dtype == tl.bfloat16:
        b_wide = b_q.to(tl.float32)
        size = tl.max(tl.abs(b_wide), 1)
        exponent = size.to(tl.uint32, bitcast=True) & 0x7F800000
        exponent = tl.minimum(tl.maximum(exponent, 0x00800000), 0x7E000000)
        power = exponent.to(tl.float32, bitcast=True)
        inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
        b_near = (b_wide * inverse[:, None]).to(tl.float16)
    return b_near, power


@triton.jit
def scaled_numbers(window, inner, factor, scale, FORM: tl.constexpr):
    """(window, inner, factor) of scores whose products lack `scale`, a number or one a row [BM]."""
    if FORM == "plain":
        factor = factor * scale
    else:
        inner = inner * scale
    return window, inner, factor
