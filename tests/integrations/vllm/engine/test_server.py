"""vLLM's server with the plugin: three processes, one of which computes."""

import sys
from pathlib import Path

import pytest

from headstart import checkpoints
from headstart.evidence.serving.server import Server

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make vllm-test")

OPTIONS = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8",
    "--max-num-batched-tokens", "256", "--enable-prompt-tokens-details",
)  # fmt: skip


def test_a_server_serves_is_left_and_stops(models, tmp_path):
    text = list(checkpoints.sample_text().read_bytes()[:1500])
    body = {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    model, log = models["tiny-qwen3-next"], tmp_path / "log"
    python = Path(sys.executable)
    with Server(python, model, log, plugin=True, options=OPTIONS) as server:
        assert server.worker("headstart_time_layers")["linear_attention"] == 6
        first, again = (server.post("/v1/completions", body) for _ in range(2))
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        assert first["usage"]["completion_tokens"] == 8
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 1024
        assert server.counter("vllm:prefix_cache_hits_total") >= 1024
        server.leave(body | {"max_tokens": 400, "prompt": text[7:600]})
        third = server.post("/v1/completions", body)
        assert third["choices"][0]["text"] == first["choices"][0]["text"]

        served = server.worker("headstart_statistics")["served"]
        times = server.worker("headstart_layer_times")
        assert times["forwards"] >= 6 + 7 + 1 + 7
        # The one request given up may still have run between the two questions.
        assert served["full_attention"] % 2 == 0
        assert served["linear_attention"] == 3 * served["full_attention"]
        assert 0 <= 2 * times["forwards"] - served["full_attention"] <= 4
        parts = sum(seconds for kind, seconds in times["seconds"].items() if kind != "model")
        assert 0 < parts < times["seconds"]["model"]
    assert not server.alive()
    assert server.process.returncode == 0
