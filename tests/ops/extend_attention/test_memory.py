"""What a call writes has memory of its own: nothing of its inputs, no element twice."""

import pytest
import torch
from tests.ops.extend_attention.oracle import draw

from headstart import KVCache, extend_attention

HQ, HK, D = 4, 2, 8


def call(**changes):
    """A call of five new tokens on prefixes of four and one, with some arguments changed."""
    arguments = draw([3, 2], [4, 1], HQ, HK, D).arguments() | changes
    return extend_attention(**arguments)


def views(name, memory):
    """Changes to the call that let an input lie in `memory`, which its output takes too."""
    if name == "q":
        return {"q": memory[D:][: 5 * HQ * D].view(5, HQ, D)}
    if name in ("k", "v"):
        return {name: memory[: 5 * HK * D].view(5, HK, D)}
    batch = draw([3, 2], [4, 1], HQ, HK, D)
    held = {"k": batch.prefix_k, "v": batch.prefix_v}
    held[name[-1]] = memory[: 5 * HK * D].view(5, HK, D)
    return {"cache": KVCache(**held)}


@pytest.mark.parametrize("name", ["q", "k", "v", "the cache's k", "the cache's v"])
def test_out_lies_in_no_other_memory_of_the_call(name):
    memory = torch.randn(6 * HQ * D)
    before = memory.clone()
    given = views(name, memory) | {"out": memory[: 5 * HQ * D].view(5, HQ, D)}
    with pytest.raises(ValueError, match=rf"^out: expected memory of its own, got that of {name}"):
        call(**given)
    lse = memory[: 5 * HQ].view(5, HQ)
    with pytest.raises(ValueError, match=rf"^out\[1\]: expected memory .* got that of {name}"):
        call(**views(name, memory) | {"out": (torch.zeros(5, HQ, D), lse)})
    assert torch.equal(memory, before)


def test_o_and_lse_do_not_share_memory():
    memory = torch.zeros(5 * HQ * D)
    pair = memory.view(5, HQ, D), memory[: 5 * HQ].view(5, HQ)
    with pytest.raises(ValueError, match=r"^out: expected memory of its own, got that of out\[1\]"):
        call(out=pair)
    assert not memory.any()


def test_out_may_be_other_columns_of_the_rows_of_q():
    batch = draw([3, 2], [4, 1], HQ, HK, D)
    rows = torch.zeros(5, HQ, 2 * D)
    rows[..., :D] = batch.q
    expected = call()
    call(q=rows[..., :D], out=rows[..., D:])
    assert torch.equal(rows[..., D:], expected)


@pytest.mark.parametrize("place", [0, 1])
def test_an_expansion_is_no_place_for_results(place):
    pair = [torch.zeros(5, HQ, D), torch.zeros(5, HQ)]
    pair[place] = pair[place][:1].expand_as(pair[place])
    name = ("out", r"out\[1\]")[place]
    with pytest.raises(ValueError, match=rf"^{name}: expected memory of its own for every element"):
        call(out=tuple(pair))
    assert not pair[place].any()
