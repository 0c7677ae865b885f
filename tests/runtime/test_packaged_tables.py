"""The tables that the package ships: what they say, and that calls ask for it."""

from dataclasses import asdict

import pytest

pytest.importorskip("triton")

from tests.implementations import KERNELS

from headstart.evidence.cases.profiles import reach
from headstart.runtime import tables
from headstart.runtime.static import TARGETS
from headstart.runtime.table_files import Table

pytestmark = pytest.mark.skipif(KERNELS, reason="kernels are what this process runs")
WITHIN = 1.05
"""How much longer the rule's may take than the fastest, as a ratio."""


def test_one_is_for_the_h200():
    found = {file.name: Table.read(file).device for file in tables.FOLDER.glob("*.json")}
    assert {name: str(device) for name, device in found.items()} == {
        "nvidia-h200.json": "NVIDIA H200 (cuda:90)"
    }
    for device in found.values():
        assert tables.packaged_table(device) is not None  # its name is its device's


@pytest.mark.parametrize("table", tables.packaged_tables(), ids=lambda table: table.path.stem)
def test_calls_ask_for_each_row_and_the_rule_is_nearly_as_fast(table):
    rule = reach(TARGETS[table.device.target], tables=[{}]).answers
    for key, row in table.by_key.items():
        assert key in rule, key
        assert row.milliseconds, key
        second = row.runner_up
        if row.fields == asdict(rule[key]):
            assert second.ratio > 1 / WITHIN, key
        elif second.fields == asdict(rule[key]):
            assert second.ratio < WITHIN, key
