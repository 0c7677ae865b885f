"""Keys of a cache's tail, kept in a launch of their own.

Value heads of a key head, and blocks of V, are programs of the scan that all read the keys of the
old tail. Its rows lie in a ring, so a new row may take an old one's place: no program of the scan
may write them.
"""

# Kernels are written in Gluon, which reads other types than Python's.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from headstart.ops.gated_delta_rule.hopper.scores import inverse_norms

SLOTS = ["write_slots"]


@gluon.jit(do_not_specialize_on_alignment=SLOTS)
def keep_keys_kernel(
    k, sequences, write_slots, tail_k, k_token, k_head, tail_k_slot, tail_k_head, tail_rows,
    K: gl.constexpr, NORMALISE: gl.constexpr,
):  # fmt: skip
    """One program per (key head, sequence): rows of k past the state, in at most two chunks."""
    # As `prepare` has them: sums of squares in another order would be other bits.
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    gdc_wait()
    key_head = gl.program_id(0)
    n = gl.program_id(1)
    row = gl.load(sequences + n * 8)
    start = gl.load(sequences + n * 8 + 1)
    end = start + gl.load(sequences + n * 8 + 2)
    fold = gl.load(sequences + n * 8 + 6)
    if gl.load(sequences + n * 8 + 5) < 0:
        return
    write = gl.load(write_slots + n).to(gl.int64)
    if write < 0:
        return
    columns = gl.arange(0, K, layout=gl.SliceLayout(0, LINES))[None, :]
    for chunk in gl.static_range(2):
        at = fold + chunk * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
        new = ((at >= start) & (at < end))[:, None]
        rows = k + (row + at - start).to(gl.int64)[:, None] * k_token + key_head * k_head
        keys = gl.load(rows + columns, mask=new, other=0.0)
        if NORMALISE:
            keys = (keys.to(gl.float32) * inverse_norms(keys)[:, None]).to(keys.dtype)
        kept = tail_k + write * tail_k_slot + key_head * tail_k_head
        gl.store(kept + (at % tail_rows)[:, None] * K + columns, keys, mask=new)
