"""What the rounds of `bench serve` say, without a server."""

import pytest
from click.testing import CliRunner

from headstart.cli import bench_serve
from headstart.cli.bench import command
from headstart.cli.commands import Commands
from headstart.evidence.serving.rounds import BASE, LATENCIES, ORDER, Sitting, comparisons


def sittings(*rounds):
    """Sittings whose latencies and layers all take as long as given, round by round."""
    return [
        Sitting(
            arm=arm, round=index, latencies=dict.fromkeys(LATENCIES, ms), completed=1, queried=9,
            hit=5, forwards=3, layer_ms={"model": 2 * ms, "feed_forward": 1.0}, served={},
        )
        for index, each in enumerate(rounds)
        for arm, ms in zip(ORDER, each, strict=True)
    ]  # fmt: skip


def test_ours_is_compared_with_the_base_around_it():
    found = {one.quantity: one for one in comparisons(sittings((10, 6, 14), (20, 15, 20)))}
    assert set(found) == {*LATENCIES, "model, a forward", "feed_forward, a forward"}
    ttft = found["p50_ttft_ms"]
    assert (ttft.base, ttft.ours) == (17, 10.5)
    assert ttft.ratio.ratio == pytest.approx((0.5 + 0.75) / 2)
    assert ttft.spread.ratio == pytest.approx((1.4 + 1.0) / 2)
    assert found["model, a forward"].ours == 21
    assert found["feed_forward, a forward"].ratio.ratio == 1


def test_the_base_frames_the_other_arm():
    assert ORDER[0] == ORDER[2] == BASE != ORDER[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--python", "nowhere/python"], "python: no file nowhere/python"),
        (["--model", "tiny-llama"], "model: expected tiny-gpt-oss or tiny-qwen3-next, or a folder"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_wrong_arguments_are_told_before_a_server_starts(arguments, words, tmp_path):
    (tmp_path / "python").touch()
    if "--python" not in arguments:
        arguments = ["--python", str(tmp_path / "python"), *arguments]
    group = Commands("headstart", commands={"bench": command})
    ended = CliRunner().invoke(group, ["bench", "serve", *arguments])
    assert ended.exit_code == 2
    assert words in ended.output
    assert len(ended.output.strip().splitlines()) == 1


def test_a_failing_server_is_one_message(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no vllm here; exit 3\n")
    python.chmod(0o755)
    ended = CliRunner().invoke(bench_serve.serve, ["--python", str(python), "--rounds", "1"])
    assert ended.exit_code == 1
    assert "vLLM's server did not start" in ended.output
    assert "no vllm here" in ended.output
