"""What is traced has no memory of its own to give."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from headstart.runtime.workspace import Workspace


def test_a_workspace_keeps_no_memory_that_is_not_real():
    workspace = Workspace("cpu")
    with FakeTensorMode(), pytest.raises(ValueError, match="workspace: expected real memory"):
        workspace.buffer("x", (4,), torch.float32)
    assert workspace.bytes == 0
    workspace.buffer("x", (4,), torch.float32).fill_(1.0)
