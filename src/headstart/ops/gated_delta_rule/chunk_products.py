"""Chunks of 64 tokens for several heads at once, as fixed sequences of matrix products.

With Gamma_ij = exp(sum of g over j < m <= i) for i >= j, else 0, Gamma_i0 from the chunk's start:
    A = strict_lower(beta_i (k_i . k_j) Gamma_ij)
    v_new = (I + A)^-1 beta (v - Gamma_i0 k S)
    o = Gamma_i0 q S + tril(q k^T Gamma) v_new
    S <- Gamma_C0 S + k^T (Gamma_Ci v_new)
[Gated Delta Networks, arXiv 2412.06464; v_new is U - W S with the inverse applied once.] All that
needs no S is computed for a span of chunks before the first of them reads S. The sums in Gamma are
differences of float64 running sums of max(g, -200): exp of -200 and below is 0 in float32, so a
decay of -316 or -inf outside (j, i] neither enters an entry nor costs it digits. Row i of every
product looks at rows <= i alone.

Arrays: M chunks, U key heads, R value heads to each, L = U R lanes. Library products take one chunk
each and so have one shape; only elementwise operations run over a span. A row's bits therefore
depend neither on what else is in the batch nor on how many chunks a step brings.
"""

from __future__ import annotations

import math

import torch

from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.runtime.workspace import Workspace

BLOCK = 16
"""Rows of a sub-block within which per-channel decays are applied elementwise."""
HALF = CHUNK // 2
"""Rows of the blocks of (I + A)^-1 that are solved for; substitution joins them."""
FORGOTTEN = -200.0
"""A log decay that forgets all in float32, as does every sum with it."""

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def span_shapes(M: int, U: int, R: int, K: int, V: int, per_channel: bool) -> Shapes:
    """Names, shapes and dtypes of the buffers of one group of U key heads over M chunks."""
    C, L, f = CHUNK, U * R, torch.float32
    shapes: Shapes = {
        "keys": ((M, U, 2 * C, K), f),  # rows 0..63 hold k, rows 64..127 hold scale * q
        "squares": ((U, 2 * C, K), f),
        "norms": ((M, U, 2 * C, 1), f),
        "values": ((M, U, R, C, V), f),
        "decay": ((M, U, R, C, K) if per_channel else (M, U, R, C), f),
        "beta": ((M, U, R, C), f),
        "state": ((U, K, R * V), f),
        "lower": ((M, U, R, C, C), f),
        "inner": ((M, U, R, C, C), f),
        "inverse": ((M, U, R, C, C), f),
        "blocks": ((M, L, 2, HALF, HALF), f),
        "solved": ((M, L, 2, HALF, HALF), f),
        "corner": ((L, HALF, HALF), f),
        "corners": ((M, L, HALF, HALF), f),
        "from_start": ((M, U, R, C, K) if per_channel else (M, U, R, C), f),
        "rest": ((U, R, C, V), f),
        "v_new": ((L, C, V), f),
        "within": ((L, C, V), f),
        "out": ((U, R, C, V), f),
        "update": ((U, C, R, V), f),
    }
    if per_channel:
        B = BLOCK
        shapes |= {
            "scaled": ((M, U, R, 2 * C, K), f),
            "read": ((L, 2 * C, V), f),
            "pairs": ((L, B, B, K), f),
            "weighted": ((L, B, B, K), f),
            "left": ((L, 2 * B, K), f),
            "right": ((L, C - B, K), f),
            "cross": ((L, 2 * B, C - B), f),
        }
    else:
        shapes |= {
            "products": ((U, 2 * C, C), f),
            "read": ((U, 2 * C, R * V), f),
            "sums": ((U, R, C, C), torch.float64),
            "gamma": ((U, R, C, C), f),
            "to_end": ((M, U, R, C), f),
        }
    return shapes


class Chunk:
    """Views of one chunk of a span, made once: slicing costs as much as a small product."""

    def __init__(self, buffers: dict[str, torch.Tensor], m: int, per_channel: bool) -> None:
        b = {name: buffers[name][m] for name in PER_CHUNK if name in buffers}
        C = CHUNK
        self.keys = b["keys"]  # [U, 2 C, K]
        self.k_columns = b["keys"][:, :C].mT  # [U, K, C]
        self.norms, self.decay = b["norms"], b["decay"]
        self.lower = b["lower"].flatten(0, 1)  # [L, C, C], and so the next two
        self.inner = b["inner"].flatten(0, 1)
        self.inverse = b["inverse"].flatten(0, 1)
        self.beta = b["beta"].flatten(0, 1)  # [L, C]
        self.corner = self.lower[:, HALF:, :HALF]  # [L, HALF, HALF], and so the next three
        self.first, self.second = b["solved"].unbind(1)
        self.new_corner = b["corners"]
        if per_channel:
            self.from_start = b["from_start"]  # [U, R, C, K]
            self.whole = b["from_start"][:, :, C - 1, :, None]  # [U, R, K, 1]
            self.scaled = b["scaled"]  # [U, R, 2 C, K]
        else:
            self.from_start = b["from_start"][..., None]  # [U, R, C, 1]
            self.whole = b["from_start"][:, None, :, C - 1, None]  # [U, 1, R, 1]
            self.to_end = b["to_end"].transpose(1, 2)[..., None]  # [U, C, R, 1]


PER_CHUNK = (
    *("keys", "norms", "decay", "beta", "lower", "inner", "inverse", "from_start"),
    *("scaled", "to_end", "solved", "corners"),
)


class Span:
    """One worker's buffers of a group for up to M chunks in a row, and the products over them.

    `keys`, `values`, `decay`, `beta` are filled for some chunks and `prepare()` called; `advance()`
    then takes them in order: each gives o of its chunk and, where asked, moves `state` from before
    the chunk to after it.
    """

    def __init__(
        self, workspace: Workspace, worker: int, M: int, U: int, R: int, K: int, V: int,
        per_channel: bool,
    ) -> None:  # fmt: skip
        shapes = span_shapes(M, U, R, K, V, per_channel)
        self.buffers = {
            name: workspace.buffer(f"{name} of worker {worker}", shape, dtype)
            for name, (shape, dtype) in shapes.items()
        }
        self.per_channel = per_channel
        self.chunks = [Chunk(self.buffers, m, per_channel) for m in range(M)]
        b, C, device = self.buffers, CHUNK, workspace.device
        # Looking at a value on a device would stall it; there the careful form always runs.
        self.always_careful = device.type != "cpu"
        self.zero = torch.zeros((), dtype=torch.float32, device=device)
        self.below = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=device).tril_(-1)
        self.identity = torch.eye(HALF, dtype=torch.float32, device=device)
        self.rest = b["rest"].flatten(0, 1)
        self.state_lanes = b["state"].view(U, K, R, V)
        self.v_new_rows = b["v_new"].view(U, R, C, V).transpose(1, 2)
        self.update = b["update"].flatten(2)
        self.within, self.out = b["within"].view(U, R, C, V), b["out"]
        read = b["read"].view(U, R, 2 * C, V)
        if not per_channel:
            read = b["read"].view(U, 2 * C, R, V).transpose(1, 2)
        self.read_k, self.read_q = read[:, :, :C], read[:, :, C:]

    def clear(self) -> None:
        """Zero the inputs, the state and what stays zero above the inverses' diagonals."""
        for name in ("keys", "values", "decay", "beta", "state", "inverse"):
            self.buffers[name].zero_()

    def normalise(self, count: int) -> None:
        """keys <- keys * rsqrt(sum(keys^2) + 1e-6), k and q alike."""
        squares = self.buffers["squares"]
        for chunk in self.chunks[:count]:
            torch.mul(chunk.keys, chunk.keys, out=squares)
            torch.sum(squares, -1, keepdim=True, out=chunk.norms)
        norms = self.buffers["norms"][:count].add_(1e-6).rsqrt_()
        self.buffers["keys"][:count].mul_(norms)

    def prepare(self, count: int) -> None:
        """What the first `count` chunks need beside S: `inner`, the inverses and the decays."""
        if self.per_channel:
            for chunk in self.chunks[:count]:
                self._channel_products(chunk)
        else:
            self._head_products(count)
        beta = self.buffers["beta"][:count]
        self.buffers["lower"][:count] *= beta[..., None]
        self._invert(slice(count), beta)

    def advance(
        self, m: int, values: torch.Tensor, out: torch.Tensor | None, want_state: bool
    ) -> None:
        """o of chunk m into `out`, if given, and S after it into `state`.

        values, out: [U, R, C, V], v and o of the chunk.
        """
        b, chunk = self.buffers, self.chunks[m]
        if self.per_channel:
            L, _, K = chunk.scaled.flatten(0, 1).shape
            state = self.state_lanes.transpose(1, 2).reshape(L, K, -1)
            torch.bmm(chunk.scaled.flatten(0, 1), state, out=b["read"])
            torch.sub(values, self.read_k, out=b["rest"])
        else:
            torch.bmm(chunk.keys, b["state"], out=b["read"])  # [2 C, K] @ [K, R V]
            torch.addcmul(values, self.read_k, chunk.from_start, value=-1, out=b["rest"])
        torch.bmm(chunk.inverse, self.rest, out=b["v_new"])
        spoiled = None
        if self.always_careful or not math.isfinite(float(b["v_new"].sum())):
            # 0 * NaN is NaN: keep rows before a spoiled one out of its products.
            spoiled = self._spare_earlier_rows(m)
        if out is not None:
            torch.bmm(chunk.inner, b["v_new"], out=b["within"])
            if self.per_channel:
                torch.add(self.within, self.read_q, out=out)
            else:
                torch.addcmul(self.within, self.read_q, chunk.from_start, out=out)
            if spoiled is not None:
                out.masked_fill_(spoiled.view(out.shape), torch.nan)
        if spoiled is not None:
            b["v_new"].masked_fill_(spoiled, torch.nan)
        if want_state:
            self._new_state(chunk)

    def _spare_earlier_rows(self, m: int) -> torch.Tensor:
        """v_new again, with zeros from the first row on that is not finite; which rows these are.

        A lane spoiled by its keys or gates loses whole rows, one spoiled by v or S single columns.
        """
        chunk = self.chunks[m]
        chunk.inner.tril_()
        chunk.lower.tril_(-1)
        rows = ~(chunk.lower.isfinite().all(-1) & chunk.beta.isfinite())
        rows = (rows.cumsum(1) > 0)[..., None]  # [L, C, 1]
        spoiled = (~self.rest.isfinite() | rows).cumsum(1) > 0
        chunk.lower.masked_fill_(rows, 0.0)
        beta = self.buffers["beta"][m : m + 1]
        self._invert(slice(m, m + 1), beta.masked_fill(rows.view(beta.shape), 0.0))
        v_new = self.buffers["v_new"]
        torch.bmm(chunk.inverse, self.rest.masked_fill_(spoiled, 0.0), out=v_new)
        spoiled |= (~v_new.isfinite()).cumsum(1) > 0
        v_new.masked_fill_(spoiled, 0.0)
        return spoiled

    def _invert(self, chunks: slice, beta: torch.Tensor) -> None:
        """inverse <- (I + A)^-1 diag(beta) on and below the diagonal, A the lower triangle.

        [[P, 0], [X, Q]]^-1 = [[P^-1, 0], [-Q^-1 X P^-1, Q^-1]]
        """
        names = ("lower", "inverse", "blocks", "solved", "corners")
        b = {name: self.buffers[name][chunks] for name in names}
        lower, inverse = b["lower"].flatten(1, 2), b["inverse"].flatten(1, 2)  # [M, L, C, C]
        b["blocks"].copy_(_diagonal(lower))
        torch.linalg.solve_triangular(
            b["blocks"], self.identity, upper=False, unitriangular=True, out=b["solved"]
        )
        for chunk in self.chunks[chunks]:
            torch.bmm(chunk.corner, chunk.first, out=self.buffers["corner"])
            torch.bmm(chunk.second, self.buffers["corner"], out=chunk.new_corner)
        columns = beta.flatten(1, 2).unflatten(2, (2, 1, HALF))  # [M, L, 2, 1, HALF]
        torch.mul(b["solved"], columns, out=_diagonal(inverse))
        torch.mul(b["corners"], -columns[:, :, 0], out=inverse[..., HALF:, :HALF])

    def _head_products(self, count: int) -> None:
        """Fill `lower` (without beta), `inner`, `from_start` and `to_end`."""
        names = ("decay", "from_start", "to_end", "lower", "inner")
        b, C = {name: self.buffers[name][:count] for name in names}, CHUNK
        products, exponents, gamma = (self.buffers[name] for name in ("products", "sums", "gamma"))
        sums = b["decay"].double().clamp_(min=FORGOTTEN).cumsum(-1)
        b["from_start"].copy_(sums).exp_()
        # Chunk by chunk, since Gamma and both products then stay in the second-level cache.
        for m, chunk in enumerate(self.chunks[:count]):
            torch.bmm(chunk.keys, chunk.k_columns, out=products)  # [2 C, K] @ [K, C]
            torch.sub(sums[m, ..., None], sums[m, ..., None, :], out=exponents)
            gamma.copy_(exponents).exp_().tril_()
            b["to_end"][m] = gamma[:, :, C - 1]
            torch.mul(products[:, None, :C], gamma, out=b["lower"][m])
            torch.mul(products[:, None, C:], gamma, out=b["inner"][m])

    def _channel_products(self, chunk: Chunk) -> None:
        """The same with a decay per channel: exp(g) scales rows of S, so keys carry Gamma."""
        U, R, C, K = chunk.decay.shape
        torch.cumsum(chunk.decay, -2, out=chunk.from_start)
        chunk.from_start.exp_()
        torch.mul(
            chunk.keys.view(U, 1, 2, C, K),
            chunk.from_start[:, :, None],
            out=chunk.scaled.view(U, R, 2, C, K),
        )
        self._channel_pairs(chunk)

    def _channel_pairs(self, chunk: Chunk) -> None:
        """sum_c x_ic k_jc exp(G_ic - G_jc) for x = k (into `lower`) and x = q (into `inner`).

        Within a sub-block of 16 rows elementwise; across sub-blocks through the border b between:
        exp(G_i - G_b) exp(G_b - G_j), both exponents <= 0.
        """
        b = self.buffers
        U, R, C, K = chunk.decay.shape
        L, B = U * R, BLOCK
        # [L, 2, C, K]: k and q of every lane
        both = chunk.keys.view(U, 1, 2, C, K).expand(U, R, 2, C, K).reshape(L, 2, C, K)
        decay = chunk.decay.view(L, C, K)
        targets = (chunk.lower, chunk.inner)
        for target in targets:
            target.zero_()
        below = self.below[..., None]
        above = self.below.mT[..., None]
        for begin in range(0, C, B):
            rows = slice(begin, begin + B)
            torch.where(below, decay[:, rows, None], self.zero, out=b["pairs"])
            b["pairs"].cumsum_(1).exp_()
            b["pairs"].mul_(both[:, 0, None, rows])
            b["pairs"].masked_fill_(above, 0.0)
            for x, target in enumerate(targets):
                torch.mul(b["pairs"], both[:, x, rows, None], out=b["weighted"])
                target[:, rows, rows] = b["weighted"].sum(-1).tril_()
            if begin == 0:
                continue
            inside = decay[:, rows].cumsum(1).exp_()  # exp(G_i - G_b), b the row before `begin`
            left = b["left"].view(L, 2, B, K)
            torch.mul(both[:, :, rows], inside[:, None], out=left)
            right = b["right"]
            right[:, begin:].zero_()
            torch.mul(
                both[:, 0, :begin], _sums_after(decay[:, :begin]).exp_(), out=right[:, :begin]
            )
            torch.bmm(b["left"], right.mT, out=b["cross"])  # [2 B, K] @ [K, C - B]
            cross = b["cross"].view(L, 2, B, C - B)
            for x, target in enumerate(targets):
                target[:, rows, :begin] = cross[:, x, :, :begin]

    def _new_state(self, chunk: Chunk) -> None:
        b = self.buffers
        if self.per_channel:
            U, R, C, K = chunk.decay.shape
            keys = (chunk.keys[:, None, :C] * _sums_after(chunk.decay).exp_()).view(U * R, C, K)
            new = torch.bmm(keys.mT, b["v_new"]).view(U, R, K, -1)
            self.state_lanes.transpose(1, 2).mul_(chunk.whole).add_(new)
            return
        torch.mul(self.v_new_rows, chunk.to_end, out=b["update"])
        self.state_lanes.mul_(chunk.whole)
        b["state"].baddbmm_(chunk.k_columns, self.update)  # [K, C] @ [C, R V]


def _sums_after(decay: torch.Tensor) -> torch.Tensor:
    """For every row j the sum of the rows after it, [..., rows, K]."""
    later = torch.zeros_like(decay)
    later[..., :-1, :] = decay[..., 1:, :]
    return later.flip(-2).cumsum(-2).flip(-2)


def _diagonal(matrices: torch.Tensor) -> torch.Tensor:
    """The two diagonal blocks of [M, L, C, C], as [M, L, 2, HALF, HALF]."""
    tiles = matrices.unflatten(3, (2, HALF)).unflatten(2, (2, HALF))
    return tiles.diagonal(dim1=2, dim2=4).movedim(-1, 2)
