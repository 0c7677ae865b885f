"""`headstart bench trace`: what it prints and writes, and one line for mistakes."""

import re

import pytest
from click.testing import CliRunner

from headstart.cli.commands import headstart
from headstart.evidence import runs
from headstart.evidence.traffic.records import HitBits, HitShare, Replayed, Workload

pytest.importorskip("transformers")


def run(*arguments):
    return CliRunner().invoke(
        headstart, ["bench", "trace", *map(str, arguments)], prog_name="headstart"
    )


def test_all_parts(tmp_path):
    file = tmp_path / "trace.json"
    result = run(
        *("--trace", "seed:1", "--requests", 2, "--seed", 18),
        *("--parts", "bookkeeping,replay,workloads"),
        *("--sizes", "tiny-qwen3-next", "--budgets", "0.01,none", "--policies", "ends,geometric"),
        *("--rounds", 3, "--step-tokens", 2048, "--json", file),
    )
    assert result.exit_code == 0, result.output
    for words in (
        "synthetic +64 +geometric +none", "ids +512 +ends", "10.2 MiB", "0 of [1-9]",
        "lengths divided by 8", "saved", "no hits", "8 x all layers",
        r"linear attention +torch +[\d,]+ +0",
    ):  # fmt: skip
        assert re.search(words, result.stdout), words
    found = runs.load(file, HitShare | Replayed | HitBits | Workload, kind="trace")
    kinds = [HitShare] * 20 + [Replayed] + [HitBits] * 2 + [Workload] * 12
    assert [type(one) for one in found.results] == kinds
    assert found.options["requests"] == "2"
    shown = CliRunner().invoke(headstart, ["report", str(file), "-o", str(tmp_path / "r.html")])
    assert shown.exit_code == 0, shown.output


def test_a_differing_bit_is_exit_code_1(monkeypatch):
    from headstart.integrations.transformers import HybridCache

    stand = HybridCache.stand

    def spoilt(self, pages, layers):
        stand(self, pages, layers)
        if pages.table:
            pages.table[0].reverse()

    monkeypatch.setattr(HybridCache, "stand", spoilt)
    result = run("--trace", "seed:1", "--requests", 4, "--parts", "replay", "--model",
                 "tiny-gpt-oss")  # fmt: skip
    assert result.exit_code == 1, result.output
    assert "rows differ" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing option '--trace'"),
        (["--trace", "none.jsonl"], "trace: cannot read none.jsonl"),
        (["--trace", "seed:1", "--parts", "all"], "parts: expected"),
        (["--trace", "seed:1", "--policies", "ends,best"], "policies: expected"),
        (["--trace", "seed:1", "--budgets", "8,-1"], "budgets: expected GiB or none, got '-1'"),
        (["--trace", "seed:1", "--budgets", "nan"], "budgets: expected GiB or none, got 'nan'"),
        (["--trace", "seed:1", "--replay-budget", "x"], "replay-budget: expected GiB or none"),
        (["--trace", "seed:1", "--requests", "0"], "requests: expected a positive number or all"),
        (["--trace", "seed:1", "--sizes", "gpt-4"], "sizes: expected"),
        (["--trace", "seed:1", "--model", "nowhere"], "model: expected tiny-gpt-oss"),
        (["--trace", "seed:1", "--device", "toaster"], "device: toaster"),
        (["--trace", "seed:1", "--json", "/"], "json: expected a file to write"),
        (["--trace", "seed:1", "--shorten", "3"], "Invalid value for '--shorten'"),
    ],
)
def test_mistakes_are_one_line(arguments, words):
    result = run(*arguments, *(["--parts", "replay"] if "--model" in arguments else []))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("headstart: ")
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr
