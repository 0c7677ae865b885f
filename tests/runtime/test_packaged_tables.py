"""The tables that the package ships: what they say, and that calls ask for it."""

from dataclasses import asdict
from functools import cache

import pytest

pytest.importorskip("triton")

from tests.implementations import KERNELS

from headstart.evidence import cases
from headstart.evidence.cases.profiles import PROCESSORS, calls
from headstart.evidence.tuning.results import WITHIN, PointResult
from headstart.runtime import tables
from headstart.runtime.declined import Declined
from headstart.runtime.rehearsal import rehearsing
from headstart.runtime.static import TARGETS
from headstart.runtime.table_files import Table

pytestmark = pytest.mark.skipif(KERNELS, reason="kernels are what this process runs")


def test_one_is_for_the_h200():
    found = {file.name: Table.read(file).device for file in tables.FOLDER.glob("*.json")}
    assert {name: str(device) for name, device in found.items()} == {
        "nvidia-h200.json": "NVIDIA H200 (cuda:90)"
    }
    for device in found.values():
        assert tables.packaged_table(device) is not None  # its name is its device's


@cache
def by_rule(case, target):
    """Keys that decide what a case's calls launch -> what the rule says of them."""
    found = {}
    for call in calls(cases.get(case)):
        with tables.using({}), rehearsing(TARGETS[target], PROCESSORS[target]) as run:
            try:
                call()
            except Declined:
                continue
        # Attention asks for scattered keys once it has seen that they cannot be copied otherwise.
        scattered = {key: one for key, one in run.asked.items() if "scattered" in key.switches}
        found |= scattered or run.asked
    return found


@pytest.mark.parametrize("table", tables.packaged_tables(), ids=lambda table: table.path.stem)
def test_calls_ask_for_each_row_and_the_rule_is_nearly_as_fast(table):
    """Where this fails, sweep the key anew: its row is of another rule, or of calls of before."""
    for key, row in table.by_key.items():
        assert row.milliseconds, key
        assert row.runner_up, key
        for point in row.milliseconds:
            rule = by_rule(PointResult.model_construct(point=point).case, table.device.target)
            assert key in rule, (key, point)
            second, own = row.runner_up, asdict(rule[key])
            if row.fields == own:
                assert second.ratio > 1 / (1 + WITHIN), key
            else:
                assert second.fields == own, key
                assert second.ratio < 1 + WITHIN, key
