"""Every test that takes `family` runs for each of the families that headstart serves."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.transformers import models


@pytest.fixture(params=models.FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def inference():
    """Inference mode, as serving has it; a test that needs gradients leaves it."""
    with torch.inference_mode():
        yield
