"""The poison of conftest.py is really there; without it half of the suite proves nothing."""

import pytest
import torch

from headstart.runtime import fresh
from headstart.runtime.workspace import Workspace


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_fresh_floats_are_nan(dtype):
    like = torch.zeros(3, 5, dtype=dtype)
    found = [
        torch.empty(3, 5, dtype=dtype),
        torch.empty_like(like),
        torch.empty_strided((3, 5), (5, 1), dtype=dtype),
        like.new_empty(3, 5),
        fresh.cpu((3, 5), (5, 1), dtype),
    ]
    assert all(tensor.isnan().all() for tensor in found)


def test_fresh_integers_are_out_of_any_range():
    assert torch.empty(4, dtype=torch.int64).min() > 2**40
    assert torch.empty(4, dtype=torch.int32).min() > 2**30


def test_memory_given_as_out_is_left_alone():
    mine = torch.ones(2)
    assert torch.empty(2, out=mine).tolist() == [1.0, 1.0]


def test_a_workspace_buffer_is_poison_every_time_it_is_handed_out():
    workspace = Workspace("cpu")
    workspace.buffer("scratch", (4,), torch.float32).fill_(1.0)
    again = workspace.buffer("scratch", (4,), torch.bfloat16)
    assert again.isnan().all()


def test_meta_tensors_still_work():
    assert torch.empty(4, device="meta").is_meta
