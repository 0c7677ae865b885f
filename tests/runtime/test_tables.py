"""Tables: what a file may say, whose rows are used on which device, and that launches obey them."""

import json
import logging
import os
import subprocess
import sys
import timeit
from dataclasses import asdict, fields, replace

import pytest
import torch
from tests.implementations import KERNELS as INTERPRETED

import headstart
from headstart import DeltaCache, ExtendPlan, KVCache, Schedule
from headstart.evidence.environment import environment
from headstart.runtime import tables
from headstart.runtime.rehearsal import rehearsing
from headstart.runtime.static import TARGETS
from headstart.runtime.table_files import KERNELS, TILES, Device, Key, Row, RunnerUp, Table
from headstart.runtime.tables import INTERPRETER, configuration, rows_of, using

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are what this process runs")

H200 = Device("NVIDIA H200", "cuda:90")
CPU = torch.device("cpu")
NORM = Key("rms_norm_gated", "norm", (128,), torch.bfloat16)
UNIFIED = Key("extend_attention", "unified", (128, 128), torch.bfloat16)
APART = UNIFIED._replace(switches=("scattered",))
EXTEND = Key("extend_attention", "extend", (64, 64), torch.bfloat16, 8, True, ("scattered",))


ATTENTION = {
    "BM": 128, "BN": 32, "stages": 2, "warps": 8, "piece": 512, "registers": 255, "resident": 4,
}  # fmt: skip


def row(key=NORM, second=True, **changed):
    """A row whose numbers are all different; changed: some of its configuration."""
    names = KERNELS[key.operation, key.kernel].fields
    size = {x: 2 ** (i + 4 * (x in TILES)) for i, x in enumerate(names, 1)}
    first = (ATTENTION if names == tuple(ATTENTION) else size) | changed
    runner_up = RunnerUp(first | {names[0]: 64}, 1.04) if second else None
    return Row(key, first, {"a-case": 0.25}, runner_up, "3.6.0", "2026-11-30")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table.json"


@pytest.fixture
def use(monkeypatch, tmp_path):
    """Makes tables those of this process: the user's by path, the package's in a folder."""
    folder = tmp_path / "packaged"
    folder.mkdir()
    monkeypatch.setattr(tables, "FOLDER", folder)

    def install(*user, packaged=()):
        for table in (*user, *packaged):
            table.write()
        names = os.pathsep.join(str(table.path) for table in user)
        monkeypatch.setenv(tables.VARIABLE, names)
        rows_of.cache_clear()
        return folder

    yield install
    rows_of.cache_clear()


def test_a_file_gives_back_what_was_written(path):
    table = Table(path, H200, (row(), row(EXTEND, second=False)))
    table.write()
    assert Table.read(path) == table
    assert os.listdir(path.parent) == [path.name]


def test_rows_of_a_key_take_the_place_of_older_ones(path):
    table = Table(path, H200, (row(), row(EXTEND)))
    changed = table.changed([row(num_warps=16)])
    assert [found.key for found in changed.rows] == [EXTEND, NORM]
    assert changed.by_key[NORM].fields["num_warps"] == 16


def test_a_file_that_cannot_be_written_stays_as_it_was(path, monkeypatch):
    table = Table(path, H200, (row(),))
    table.write()
    monkeypatch.setattr(
        "pathlib.Path.replace", lambda *names: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(ValueError, match=r"tables: cannot write .*table.json"):
        table.changed([row(num_warps=1)]).write()
    assert Table.read(path) == table
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("format", 2, "format: expected 1, got 2"),
        ("device", None, "device: expected a value of type str, got None"),
        ("rows", {}, "rows: expected a value of type list"),
        ("author", "me", "author: expected no such field"),
        ("rows.0", 5, r"rows\[0\]: expected an object, got 5"),
        ("rows.0.kernel", "extend", r"rows\[0\].kernel: expected one of .*rms_norm_gated/extend"),
        ("rows.0.sizes.D", "128", r"rows\[0\].sizes.D: expected a value of type int, got '128'"),
        ("rows.0.sizes.D", 0, r"rows\[0\].sizes.D: expected at least 1, got 0"),
        ("rows.0.sizes.T", 4096, r"rows\[0\].sizes.T: expected no such field"),
        ("rows.0.tokens", 4096, r"rows\[0\].tokens: expected no such field"),
        ("rows.0.dtype", "float64", r"rows\[0\].dtype: expected one of .*got 'float64'"),
        ("rows.0.ratio", 2, r"rows\[0\].ratio: expected 0, got 2"),
        ("rows.0.windowed", True, r"rows\[0\].windowed: expected false"),
        ("rows.0.switches", ["fp8"], r"rows\[0\].switches: expected some of \[\]"),
        ("rows.0.configuration.rows", True, r"rows\[0\].configuration.rows: .*int, got True"),
        ("rows.0.configuration.rows", 0, r"rows\[0\].configuration.rows: expected at least 1"),
        ("rows.0.configuration.rows", 48, r"rows\[0\].configuration.rows: .* power of two"),
        ("rows.0.configuration.num_warps", 64, r"rows\[0\].configuration.num_warps: .* at most 32"),
        ("rows.1.configuration.piece", 1023, r"rows\[1\].configuration.piece: .* whole tiles"),
        ("rows.1.configuration.BM", 8, r"rows\[1\].configuration.BM: expected at least 16"),
        ("rows.1.configuration.BN", 2**30, r"rows\[1\].configuration.BN: expected at most 256"),
        ("rows.1.configuration.registers", 256, r"rows\[1\].configuration.registers: .* most 255"),
        ("rows.0.milliseconds.a-case", "1", r"rows\[0\].milliseconds.a-case: .* type float"),
        ("rows.0.milliseconds.a-case", -1, r"rows\[0\].milliseconds.a-case: .* above 0"),
        ("rows.0.milliseconds.a-case", float("nan"), "is no JSON: NaN is no number"),
        ("rows.0.runner_up", 1, r"rows\[0\].runner_up: expected a value of type dict"),
        ("rows.0.date", "today", r"rows\[0\].date: expected a day"),
        ("rows.1.ratio", 3, r"rows\[1\].ratio: expected a power of two, got 3"),
        ("rows.1.switches", ["mask", "fp8"], r"rows\[1\].switches: expected .* in order"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(path, place, value, words):
    Table(path, H200, (row(), row(EXTEND))).write()
    data = json.loads(path.read_text())
    *parents, name = place.split(".")
    at = data
    for parent in parents:
        at = at[int(parent) if isinstance(at, list) else parent]
    at[int(name) if isinstance(at, list) else name] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"^tables: {path}: {words}"):
        Table.read(path)


def test_blocks_of_no_keys_are_refused(path):
    """Of the default kernel 0 says that no row is cut."""
    Table(path, H200, (row(EXTEND, piece=0),)).write()
    assert Table.read(path).rows[0].fields["piece"] == 0
    Table(path, H200, (row(UNIFIED, piece=0),)).write()
    with pytest.raises(ValueError, match=r"rows\[0\].configuration.piece: expected at least 32"):
        Table.read(path)


def test_a_time_without_end_is_refused(path):
    Table(path, H200, (row(),)).write()
    path.write_text(path.read_text().replace("0.25", "1e999"))
    with pytest.raises(ValueError, match=r"milliseconds.a-case: .* above 0, got inf"):
        Table.read(path)


def test_what_is_nested_without_end_is_no_table(path):
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"table.json: is no JSON"):
        Table.read(path)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_what_is_no_table_is_named(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"^tables: {path}: "):
        Table.read(path)
    with pytest.raises(ValueError, match="cannot be read"):
        Table.read(path.with_name("none.json"))


def test_rows_that_contradict_each_other_are_named(path):
    Table(path, H200, (row(), row(EXTEND), row())).write()
    assert len(Table.read(path).by_key) == 2  # the same twice is no contradiction
    Table(path, H200, (row(), row(EXTEND), row(num_warps=16))).write()
    with pytest.raises(ValueError, match=r"rows\[0\] and rows\[2\] contradict .*norm 128 bfloat16"):
        Table.read(path)


def test_files_that_contradict_each_other_are_named(path, use):
    other = path.with_name("other.json")
    use(Table(path, INTERPRETER, (row(),)), Table(other, INTERPRETER, (row(num_warps=16),)))
    with pytest.raises(ValueError, match=rf"{path} and {other} contradict each other"):
        rows_of(CPU)


NARROW = {"BM": 64, "BN": 64, "stages": 3, "warps": 4, "piece": 2048, "registers": 0, "resident": 2}
DIFFERENT = [{"BN": 32}, {"piece": 4096}, {"warps": 8}, {"BM": 32, "warps": 2}]


@pytest.mark.parametrize("changed", DIFFERENT, ids=str)
def test_rows_of_scattered_keys_have_the_order_of_sums_of_others(path, use, changed):
    """Within a file, of two files of the user's, of the package's and the user's."""
    mine, wide = row(UNIFIED, **NARROW), row(APART, **NARROW | {"BM": 128, "warps": 8, "stages": 4})
    Table(path, H200, (mine, row(), wide)).write()
    assert Table.read(path).by_key == {UNIFIED: mine, NORM: row(), APART: wide}
    wrong = row(APART, **NARROW | changed)
    Table(path, H200, (mine, row(), wrong)).write()
    said = rf"rows\[0\] and rows\[2\] contradict each other: {UNIFIED} and {APART}: BM 64, BN 64"
    with pytest.raises(ValueError, match=rf"^tables: {path}: {said}"):
        Table.read(path)
    other = path.with_name("other.json")
    use(Table(path, INTERPRETER, (wrong,)), Table(other, INTERPRETER, (mine,)))
    with pytest.raises(ValueError, match=rf"{path} and {other} contradict each other"):
        rows_of(CPU)
    packaged = Table(tables.FOLDER / "interpreter.json", INTERPRETER, (mine,))
    use(Table(path, INTERPRETER, (wrong,)), packaged=[packaged])
    with pytest.raises(ValueError, match=rf"{path} and {packaged.path} contradict each other"):
        rows_of(CPU)
    use(Table(path, INTERPRETER, (wrong, row(UNIFIED, **NARROW | changed))), packaged=[packaged])
    assert rows_of(CPU)[APART] == wrong


@pytest.mark.parametrize("changed", DIFFERENT, ids=str)
def test_the_packages_row_of_scattered_keys_gives_way_to_a_users_of_others(
    path, use, caplog, changed
):
    """As the rule does: whoever tuned calls on packed keys alone may use what was found."""
    place = tables.FOLDER / "interpreter.json"
    packaged = Table(place, INTERPRETER, (row(UNIFIED, **NARROW), row(APART, **NARROW), row()))
    mine = row(UNIFIED, **NARROW | changed)
    with caplog.at_level(logging.INFO, "headstart"):
        use(Table(path, INTERPRETER, (mine,)), packaged=[packaged])
        assert rows_of(CPU) == {UNIFIED: mine, NORM: row()}
    assert f"in place of {APART}: BM 64" in caplog.text
    # One that gives the same bits stays.
    mine = row(UNIFIED, **NARROW | {"stages": 2})
    use(Table(path, INTERPRETER, (mine,)), packaged=[packaged])
    assert rows_of(CPU) == {UNIFIED: mine, APART: row(APART, **NARROW), NORM: row()}


@pytest.mark.parametrize("changed", DIFFERENT, ids=str)
def test_a_row_of_scattered_keys_alone_has_the_rules_order_of_sums(changed):
    scattered = {"reproducible": True, "prefix": 300, "D": 128, "page": 16}
    by_rule, launches = asked(attend, **scattered)
    assert list(by_rule) == [UNIFIED, APART]
    narrow, wide = by_rule.values()
    assert (narrow.BM, wide.BM) == (64, 128)
    assert launches[-1].options["num_warps"] == wide.warps
    table = {APART: replace(wide, stages=2, resident=3)}
    assert asked(attend, table, **scattered)[1][-1].options["num_stages"] == 2
    with pytest.raises(ValueError, match=f"^tables: {APART}: .* gives other bits than"):
        asked(attend, {APART: replace(narrow, **changed)}, **scattered)


@pytest.mark.parametrize("changed", DIFFERENT, ids=str)
def test_scattered_keys_follow_what_a_table_says_of_others(changed):
    scattered = {"reproducible": True, "prefix": 300, "D": 128, "page": 16}
    narrow, wide = asked(attend, **scattered)[0].values()
    own = replace(narrow, **changed)
    answers, _ = asked(attend, {UNIFIED: own}, **scattered)
    follows = replace(wide, piece=own.piece) if "piece" in changed else own
    assert answers == {UNIFIED: own, APART: follows}


def test_a_users_rows_go_before_the_packages_and_that_is_told(path, use, caplog):
    folder = tables.FOLDER
    packaged = Table(folder / "interpreter.json", INTERPRETER, (row(), row(EXTEND)))
    with caplog.at_level(logging.INFO, "headstart"):
        use(Table(path, INTERPRETER, (row(num_warps=16),)), packaged=[packaged])
        found = rows_of(CPU)
    assert found == {NORM: row(num_warps=16), EXTEND: row(EXTEND)}
    assert "norm 128 bfloat16" in caplog.text


def test_another_devices_table_is_not_used(path, use, monkeypatch):
    use(Table(path, H200, (row(),)))
    with pytest.raises(ValueError, match=r"HEADSTART_TABLES: expected a table for interpreter"):
        rows_of(CPU)
    # One that fits is enough: a process may have devices of several kinds.
    other = path.with_name("other.json")
    use(Table(path, H200, (row(num_warps=16),)), Table(other, INTERPRETER, (row(),)))
    assert rows_of(CPU) == {NORM: row()}
    # A package's file under a name that is not its device's is damaged.
    folder = use(packaged=[Table(tables.FOLDER / "interpreter.json", H200, (row(),))])
    with pytest.raises(ValueError, match=rf"{folder}/interpreter.json: expected a table for inter"):
        rows_of(CPU)


def test_the_environment_tells_which_there_are(path, use):
    folder = use(
        Table(path, H200, (row(),)),
        packaged=[Table(tables.FOLDER / "interpreter.json", INTERPRETER, (row(), row(EXTEND)))],
    )
    assert environment()["table"] == {
        f"{folder}/interpreter.json": "interpreter (interpreter), 2 rows",
        str(path): "NVIDIA H200 (cuda:90), 1 rows",
    }
    path.write_text("{")
    assert environment()["table"]["damaged"].startswith(f"tables: {path}: is no JSON")


def test_architecture_counts_beside_the_name(path, use):
    use(Table(path, Device(INTERPRETER.name, "cuda:100"), (row(),)))
    with pytest.raises(ValueError, match="expected a table for"):
        rows_of(CPU)


def test_every_packaged_table_is_whole_and_named_for_its_device():
    for file in tables.FOLDER.glob("*.json"):
        assert tables.packaged_table(Table.read(file).device) is not None


def test_reading_a_table_imports_no_kernel(path):
    """A first call waits for it: 42 rows took 2.3 ms where this was written."""
    sizes = {"K": 1, "V": 1, "D": 1, "DV": 1, "channels": 1, "width": 1}
    rows = []
    for (operation, name), kernel in KERNELS.items():
        for i in range(6):
            given = tuple(sizes[size] << i for size in kernel.sizes)
            rows.append(row(Key(operation, name, given, torch.bfloat16, 4 * kernel.grouped)))
    Table(path, INTERPRETER, tuple(rows)).write()
    program = (
        "import sys, time, torch\n"
        "from headstart.runtime.tables import rows_of\n"
        "began, before = time.perf_counter(), set(sys.modules)\n"
        "found = rows_of(torch.device('cpu'))\n"
        "took = time.perf_counter() - began\n"
        "print(len(found), took < 0.03, sorted(set(sys.modules) - before), 'triton' in before)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {tables.VARIABLE: str(path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.stdout == f"{len(rows)} True [] False\n", run.stderr


def test_a_look_costs_a_call_next_to_nothing(use, path):
    """0.6 microseconds on the machine that it was written on."""
    use(Table(path, INTERPRETER, (row(EXTEND),)))

    def look():
        switches = ("scattered",)
        key = Key("extend_attention", "extend", (64, 64), torch.bfloat16, 8, True, switches)
        return configuration(key, CPU, dict)

    assert look() == row(EXTEND).configuration
    assert min(timeit.repeat(look, number=1000, repeat=50)) < 2e-3


def norm(rows=64):
    x = torch.empty(rows, 128, dtype=torch.bfloat16, device="meta")
    headstart.rms_norm_gated(x, x[0], x)


def convolve(tokens=64):
    x = torch.empty(tokens, 256, dtype=torch.bfloat16, device="meta")
    headstart.causal_conv1d(x, torch.empty(256, 4, dtype=x.dtype, device="meta"))


def rule(tokens=200, channels=False, cached=False):
    q = torch.empty(tokens, 2, 64, dtype=torch.bfloat16, device="meta")
    v = torch.empty(tokens, 4, 64, dtype=torch.bfloat16, device="meta")
    g = torch.empty(tokens, 4, *[64] * channels, device="meta")
    more = {}
    if cached:
        sizes = {"H": 2, "HV": 4, "K": 64, "V": 64, "dtype": q.dtype, "device": "meta"}
        state = DeltaCache(1, **sizes, per_channel=channels).at([0])
        more = {"state": state, "schedule": Schedule([tokens], device="meta")}
    headstart.gated_delta_rule(q, q, v, g, None, **more)


def attend(new=100, prefix=0, window=None, reproducible=False, fp8=False, HQ=8, D=64, page=None):
    q = torch.empty(new, HQ, D, dtype=torch.bfloat16, device="meta")
    k = torch.empty(new, 1, D, dtype=torch.bfloat16, device="meta")
    plan, cache = ExtendPlan.from_lengths([new], [prefix] if prefix else None, device="meta"), None
    if page:
        table = torch.zeros(1, -(-(new + prefix) // page), dtype=torch.int32)
        plan = ExtendPlan.from_pages(
            [new], [new + prefix], table, page, new_in_cache=False, device="meta"
        )
    if prefix:
        kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
        shape = (prefix, 1, D) if page is None else (-(-prefix // page), page, 1, D)
        stores = (torch.empty(shape, dtype=kind, device="meta") for _ in "kv")
        cache = KVCache(*stores, **{"k_scale": 1.0, "v_scale": 1.0} if fp8 else {})
    headstart.extend_attention(
        q, k, k, plan=plan, cache=cache, window=window, reproducible=reproducible
    )


def asked(call, table=None, **options):
    """What a call asks for, with which answers, and what it launches."""
    with using(table or {}), rehearsing(TARGETS["cuda:90"], 132) as rehearsal:
        call(**options)
    return rehearsal.asked, rehearsal.launches


CALLS = [
    (norm, {}), (convolve, {}), (rule, {}), (rule, {"channels": True}), (attend, {}),
    (attend, {"reproducible": True}), (attend, {"window": 64, "prefix": 300}),
    (attend, {"fp8": True, "prefix": 300}), (attend, {"reproducible": True, "window": 64}),
]  # fmt: skip


def _name(value: object) -> str:
    """Of a parameter, without an address: workers must agree about a test's name."""
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("call", "options"), CALLS, ids=_name)
def test_a_row_is_what_is_launched(call, options):
    by_rule, before = asked(call, **options)
    assert by_rule
    # Attention asks once more where cached keys cannot be copied as the first answer would.
    for key, found in list(by_rule.items())[-1 if call is attend else 0 :]:
        # Half the keys, columns, rows or channels of a tile, and twice the warps.
        names = found.__dataclass_fields__
        wider = next(name for name in ("BN", "BC", "BV", "rows", "channels") if name in names)
        warps = next(name for name in ("warps", "num_warps") if name in names)
        size = {wider: getattr(found, wider) // 2, warps: 2 * getattr(found, warps)}
        other = type(found)(**{name: size.get(name, getattr(found, name)) for name in names})
        answers, after = asked(call, {key: other}, **options)
        assert answers == by_rule | {key: other}
        (mine,) = [
            i for i, run in enumerate(after) if run.kernel.__name__ == f"{key.kernel}_kernel"
        ]
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            same = old.options == new.options
            assert same == (i != mine)
        assert after[mine].options["num_warps"] == size[warps]
        constants = after[mine].arguments
        name = {"rows": "BR", "channels": "BC"}.get(wider, wider)
        assert constants[name] == size[wider]


@pytest.mark.parametrize("name", KERNELS, ids="/".join)
def test_fields_are_those_of_the_class(name):
    kernel = KERNELS[name]
    assert kernel.fields == tuple(field.name for field in fields(kernel.configuration))


def test_every_kernel_of_the_list_is_asked_for():
    found = set()
    for call, options in CALLS:
        found |= {(key.operation, key.kernel) for key in asked(call, **options)[0]}
    assert found == set(KERNELS)


@pytest.mark.parametrize(("call", "options"), CALLS, ids=_name)
def test_a_key_tells_decoding_from_prompts_and_no_other_lengths(call, options):
    name = call.__code__.co_varnames[0]
    decoding, prompts = (
        {frozenset(asked(call, **options | {name: n})[0]) for n in lengths}
        for lengths in ((1, 2, 8), (63, 64, 1000, 20_000))
    )
    assert len(decoding) == len(prompts) == 1
    assert {key._replace(switches=_without_few(key)) for found in decoding for key in found} == {
        key for found in prompts for key in found
    }


def _without_few(key):
    return tuple(switch for switch in key.switches if switch != "few")


@pytest.mark.parametrize("window", [None, 64])
def test_where_bits_are_promised_neither_heads_nor_the_cache_count(window):
    options = {"reproducible": True, "window": window}
    plain = set(asked(attend, **options)[0])
    assert plain == set(asked(attend, **options, prefix=300, HQ=2)[0])
    assert set(asked(rule)[0]) == set(asked(rule, cached=True)[0])


def test_a_users_table_is_what_the_interpreter_runs(path):
    key = Key("extend_attention", "extend", (16, 16), torch.float32, 2)
    kind = KERNELS["extend_attention", "extend"].configuration
    found = Row(key, asdict(kind(16, 16, 1, 4, 32)), {}, None, "3.6.0", "2026-11-30")
    Table(path, INTERPRETER, (found,)).write()
    program = (
        "import torch, headstart\n"
        "from headstart.runtime.record import recording\n"
        "q, k = torch.randn(40, 4, 16), torch.randn(40, 2, 16)\n"
        "plan = headstart.ExtendPlan.from_lengths([40], device='cpu')\n"
        "with recording() as record:\n"
        "    o = headstart.extend_attention(q, k, k, plan=plan, implementation='triton')\n"
        "run = record.launches[0]\n"
        "given = dict(zip(run.kernel.arg_names, run.arguments))\n"
        "other = headstart.extend_attention(q, k, k, plan=plan)\n"
        "print(given['BM'], given['BN'], given['PIECE'], float((o - other).abs().max()) < 1e-5)\n"
    )
    settings = {"TRITON_INTERPRET": "1", tables.VARIABLE: str(path)}
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.stdout == "16 16 32 True\n", run.stderr
