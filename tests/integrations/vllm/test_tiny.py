"""The checkpoints that vLLM loads compute what those of the package compute."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart import checkpoints
from headstart.integrations.vllm.tiny import write


@pytest.mark.parametrize("name", checkpoints.names())
def test_vllms_form_is_the_same_function(name, tmp_path):
    tokens = torch.tensor([list(checkpoints.sample_text().read_bytes()[:300])])
    with torch.inference_mode():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
            for folder in (checkpoints.path(name), write(name, tmp_path))
        )
    torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=0)


def test_another_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="name: expected one of tiny-gpt-oss, tiny-qwen3-next"):
        write("tiny", tmp_path)
