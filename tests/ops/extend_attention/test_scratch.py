"""Scratch is what workspace_bytes says, and it grows with neither the prefix nor T squared."""

import pytest
import torch
from tests.ops.extend_attention.oracle import draw

import headstart
from headstart import ExtendPlan, KVCache, Workspace

OPTIONS = [
    {},
    {"window": 1},
    {"window": 100},
    {"window": 2000},
    {"softcap": 3.0},
    {"causal": False},
    {"causal": False, "window": 20},
    {"part": "prefix"},
    {"part": "prefix", "window": 40},
    {"part": "extend"},
    {"reproducible": True},
    {"reproducible": True, "window": 100},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("DV", "dtype"), [(16, torch.float32), (24, torch.float32), (16, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize(
    ("lengths", "prefix"),
    [([70, 0, 3], [0, 4, 300]), ([4200], [0]), ([1], [5000]), ([70], [4500]), ([], [])],
    ids=str,
)
def test_workspace_bytes_is_exact(options, DV, dtype, lengths, prefix):
    batch = draw(lengths, prefix, 2, 1, 16, DV, dtype=dtype)
    arguments = {**batch.arguments(), **options}
    arguments["implementation"] = "torch"  # meta tensors would ask a device's first
    told = headstart.workspace_bytes("extend_attention", **arguments)
    workspace = Workspace("cpu")
    headstart.extend_attention(**arguments, workspace=workspace)
    assert workspace.bytes == told
    headstart.extend_attention(**arguments, workspace=workspace)
    assert workspace.bytes == told
    meta = {
        name: arguments[name].to("meta") if name in "qkv" else arguments[name] for name in arguments
    }
    meta["cache"] = KVCache(batch.prefix_k.to("meta"), batch.prefix_v.to("meta"))
    assert headstart.workspace_bytes("extend_attention", **meta) == told


def scratch(new, prefix, dtype=torch.bfloat16, **options):
    def blank(rows, heads):
        return torch.empty(rows, heads, 64, dtype=dtype, device="meta")

    return headstart.workspace_bytes(
        "extend_attention",
        blank(new, 16),
        blank(new, 2),
        blank(new, 2),
        plan=ExtendPlan.from_lengths([new], [prefix], device="cpu"),
        cache=KVCache(blank(prefix, 2), blank(prefix, 2)),
        implementation="torch",
        **options,
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_scratch_is_bounded(options):
    assert scratch(2**20, 2**20, **options) < 64 * 2**20
    assert scratch(2**20, 2**20, **options) == scratch(2**17, 2**17, **options)


def test_float32_keys_are_read_where_they_are():
    assert scratch(4096, 8192, torch.float32) == 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_workspace_serves_calls_of_every_shape(options):
    workspace = Workspace("cpu")
    for seed, (lengths, prefix, D) in enumerate(
        [([200], [90], 24), ([3, 50], [600, 0], 8), ([64], [64], 16), ([1], [33], 40)]
    ):
        batch = draw(lengths, prefix, 4, 2, D, seed=seed)
        arguments = {**batch.arguments(), **options, "return_lse": True}
        o, lse = headstart.extend_attention(**arguments, workspace=workspace)
        fresh = headstart.extend_attention(**arguments, workspace=Workspace("cpu"))
        assert torch.equal(o, fresh[0])
        assert torch.equal(lse, fresh[1])
