"""One chunk of 64 tokens for several heads at once, as a fixed sequence of matrix products.

With Gamma_ij = exp(sum of g over j < m <= i) for i >= j, else 0, Gamma_i0 from the chunk's start:
    A = strict_lower(beta_i (k_i . k_j) Gamma_ij)
    v_new = (I + A)^-1 beta (v - Gamma_i0 k S)
    o = Gamma_i0 q S + tril(q k^T Gamma) v_new
    S <- Gamma_C0 S + k^T (Gamma_Ci v_new)
[Gated Delta Networks, arXiv 2412.06464; v_new is U - W S with the inverse applied once.] The sums
in Gamma restart at every column j, so a decay of -316 or -inf outside (j, i] neither enters an
entry nor costs it digits. Row i of every product looks at rows <= i alone.

Arrays: U key heads, R value heads to each, L = U R lanes; every product has one shape, so a row's
bits do not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headstart.ops.gated_delta_rule.schedule import CHUNK
from headstart.runtime.workspace import Workspace

BLOCK = 16
"""Rows of a sub-block within which per-channel decays are applied elementwise."""

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def chunk_shapes(U: int, R: int, K: int, V: int, per_channel: bool) -> Shapes:
    """Names, shapes and dtypes of the buffers of one group of U key heads."""
    C, f = CHUNK, torch.float32
    shapes: Shapes = {
        "keys": ((U, 2 * C, K), f),  # rows 0..63 hold k, rows 64..127 hold scale * q
        "squares": ((U, 2 * C, K), f),
        "norms": ((U, 2 * C, 1), f),
        "values": ((U, C, R, V), f),
        "decay": ((U, R, C, K) if per_channel else (U, R, C), f),
        "beta": ((U, R, C), f),
        "state": ((U, K, R * V), f),
        "lower": ((U, R, C, C), f),
        "inner": ((U, R, C, C), f),
        "rest": ((U, R, C, V), f),
        "out": ((U * R, C, V), f),
        "update": ((U, C, R, V), f),
    }
    if per_channel:
        L, B = U * R, BLOCK
        shapes |= {
            "from_start": ((U, R, 1, C, K), f),
            "scaled": ((U, R, 2, C, K), f),
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
            "gamma": ((U, R, C, C), f),
        }
    return shapes


@dataclass(eq=False)
class Chunk:
    """The buffers of one group and the products over them.

    `keys`, `values`, `decay`, `beta` are filled for a chunk, `state` holds S before it;
    `products()` then leaves o in `out` and, where asked, S after the chunk in `state`.
    """

    buffers: dict[str, torch.Tensor]
    per_channel: bool
    always_careful: bool
    zero: torch.Tensor
    below: torch.Tensor
    """Strictly lower triangle, [C, C]; its leading corner serves the sub-blocks."""

    @staticmethod
    def allocate(workspace: Workspace, U: int, R: int, K: int, V: int, per_channel: bool) -> Chunk:
        """Buffers from a workspace; the inputs and the state start as zeros."""
        shapes = chunk_shapes(U, R, K, V, per_channel)
        buffers = {
            name: workspace.buffer(name, shape, dtype) for name, (shape, dtype) in shapes.items()
        }
        for name in ("keys", "values", "decay", "beta", "state"):
            buffers[name].zero_()
        # Looking at a value on a device would stall it; there the careful form always runs.
        return Chunk(
            buffers,
            per_channel,
            always_careful=workspace.device.type != "cpu",
            zero=torch.zeros((), device=workspace.device),
            below=torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=workspace.device).tril_(-1),
        )

    def normalise(self) -> None:
        """keys <- keys * rsqrt(sum(keys^2) + 1e-6), k and q alike."""
        keys, squares, norms = (self.buffers[name] for name in ("keys", "squares", "norms"))
        torch.mul(keys, keys, out=squares)
        torch.sum(squares, -1, keepdim=True, out=norms)
        norms.add_(1e-6).rsqrt_()
        keys.mul_(norms)

    def products(self, want_out: bool, want_state: bool) -> None:
        """o of the chunk into `out`, and S after it into `state`."""
        gammas = self._channel_products() if self.per_channel else self._head_products()
        b = self.buffers
        U, R, C, V = b["rest"].shape
        rest = b["rest"].view(U * R, C, V)
        torch.linalg.solve_triangular(
            b["lower"].view(U * R, C, C), rest, upper=False, unitriangular=True, out=rest
        )
        spoiled = None
        if self.always_careful or not math.isfinite(float(rest.sum())):
            # 0 * NaN is NaN: keep rows before a spoiled one out of its products.
            spoiled = (~rest.isfinite()).cumsum(1) > 0
        if want_out:
            self._outputs(rest, spoiled)
        if want_state:
            self._new_state(*gammas)

    def _outputs(self, v_new: torch.Tensor, spoiled: torch.Tensor | None) -> None:
        b = self.buffers
        U, R, C, V = b["rest"].shape
        inner, out = b["inner"].view(U * R, C, C), b["out"]
        if spoiled is not None:
            v_new = v_new.masked_fill(spoiled, 0.0)
            inner = inner.tril()
        torch.bmm(inner, v_new, out=out)
        if self.per_channel:
            out += b["read"][:, C:]
        else:
            read = b["read"][:, C:].view(U, C, R, V).transpose(1, 2)
            out.view(U, R, C, V).addcmul_(read, self._from_start)
        if spoiled is not None:
            out.masked_fill_(spoiled, torch.nan)

    def _head_products(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill `lower`, `inner`, `rest`, `read`; return Gamma_Ci and Gamma_C0."""
        b = self.buffers
        U, R, C, V = b["rest"].shape
        keys, decay, beta, gamma = b["keys"], b["decay"], b["beta"], b["gamma"]
        # [2 C, K] @ [K, C] and [2 C, K] @ [K, R V]
        torch.bmm(keys, keys[:, :C].mT, out=b["products"])
        torch.bmm(keys, b["state"], out=b["read"])
        torch.where(self.below, decay[..., None], self.zero, out=gamma)
        gamma.cumsum_(-2).exp_().tril_()
        self._from_start = decay.cumsum(-1).exp_()[..., None]  # [U, R, C, 1]
        torch.mul(b["products"][:, None, :C], gamma, out=b["lower"])
        b["lower"] *= beta[..., None]
        torch.mul(b["products"][:, None, C:], gamma, out=b["inner"])
        read = b["read"][:, :C].view(U, C, R, V).transpose(1, 2)
        torch.addcmul(b["values"].transpose(1, 2), read, self._from_start, value=-1, out=b["rest"])
        b["rest"] *= beta[..., None]
        return gamma[..., C - 1, :], self._from_start[..., C - 1, :]

    def _channel_products(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with a decay per channel: exp(g) scales rows of S, so keys carry Gamma."""
        b = self.buffers
        U, R, C, V = b["rest"].shape
        K, L = b["keys"].shape[-1], U * R
        keys = b["keys"].view(U, 1, 2, C, K)
        decay, beta, scaled = b["decay"], b["beta"], b["scaled"]
        torch.cumsum(decay, -2, out=b["from_start"].view(U, R, C, K))
        from_start = b["from_start"].exp_()
        torch.mul(keys, from_start, out=scaled)
        state = b["state"].view(U, K, R, V).transpose(1, 2).reshape(L, K, V)
        torch.bmm(scaled.view(L, 2 * C, K), state, out=b["read"])
        self._channel_pairs()
        b["lower"] *= beta[..., None]
        torch.sub(
            b["values"].transpose(1, 2), b["read"].view(U, R, 2 * C, V)[:, :, :C], out=b["rest"]
        )
        b["rest"] *= beta[..., None]
        return _sums_after(decay).exp_(), from_start[:, :, 0, C - 1]

    def _channel_pairs(self) -> None:
        """sum_c x_ic k_jc exp(G_ic - G_jc) for x = k (into `lower`) and x = q (into `inner`).

        Within a sub-block of 16 rows elementwise; across sub-blocks through the border b between:
        exp(G_i - G_b) exp(G_b - G_j), both exponents <= 0.
        """
        b = self.buffers
        U, R, C, _ = b["rest"].shape
        K, L, B = b["keys"].shape[-1], U * R, BLOCK
        # [L, 2, C, K]: k and q of every lane
        both = b["keys"].view(U, 1, 2, C, K).expand(U, R, 2, C, K).reshape(L, 2, C, K)
        decay = b["decay"].view(L, C, K)
        targets = (b["lower"].view(L, C, C), b["inner"].view(L, C, C))
        for target in targets:
            target.zero_()
        below = self.below[:B, :B, None]
        above = self.below[:B, :B].mT[..., None]
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

    def _new_state(self, to_end: torch.Tensor, whole: torch.Tensor) -> None:
        b = self.buffers
        U, R, C, V = b["rest"].shape
        K, L = b["keys"].shape[-1], U * R
        if self.per_channel:
            keys = (b["keys"][:, None, :C] * to_end).view(L, C, K)
            state = b["state"].view(U, K, R, V).transpose(1, 2)
            new = torch.bmm(keys.mT, b["rest"].view(L, C, V)).view(U, R, K, V)
            state.mul_(whole[..., None]).add_(new)
            return
        torch.mul(b["rest"].transpose(1, 2), to_end.transpose(1, 2)[..., None], out=b["update"])
        state = b["state"].view(U, K, R, V)
        state.mul_(whole.view(U, 1, R, 1))
        # [K, C] @ [C, R V]
        b["state"].baddbmm_(b["keys"][:, :C].mT, b["update"].view(U, C, R * V))


def _sums_after(decay: torch.Tensor) -> torch.Tensor:
    """For every row j the sum of the rows after it, [..., rows, K]."""
    later = torch.zeros_like(decay)
    later[..., :-1, :] = decay[..., 1:, :]
    return later.flip(-2).cumsum(-2).flip(-2)
