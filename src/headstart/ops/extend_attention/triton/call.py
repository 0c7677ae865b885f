"""One call as launches: the tiles of rows, then what joins rows that were cut into pieces.

Kernels name their arguments alike, so a call collects them once, by name, and every launch takes
those that its kernel names.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch

from headstart.ops.extend_attention import promise
from headstart.ops.extend_attention.kv_cache import FP8, page_strides
from headstart.ops.extend_attention.locate import Consecutive, Listed, Paged
from headstart.ops.extend_attention.merge_spec import MergeCall
from headstart.ops.extend_attention.scratch import Layout, layout_bytes, take
from headstart.ops.extend_attention.spec import ExtendCall
from headstart.ops.extend_attention.tile_table import (
    Cut,
    TileTable,
    key_positions,
    scratch_rows,
    tile_table,
)
from headstart.ops.extend_attention.triton.config import (
    FEW,
    LONG_WINDOW,
    Columns,
    Config,
    columns,
    configuration,
    converts_e4m3,
    order,
    packing,
)
from headstart.ops.extend_attention.write_spec import WriteCall
from headstart.runtime import launcher, tables
from headstart.runtime.dispatch import Implementation
from headstart.runtime.launcher import (
    current,
    declines_tensors,
    padded,
    precision,
    processors,
    reads_descriptors,
    target_of,
)
from headstart.runtime.table_files import order_of_sums
from headstart.runtime.tables import Key, ratio_class
from headstart.runtime.workspace import default_workspace

LOG2E = math.log2(math.e)
MOST = 512
WIDEST = 2**30
"""A window that hides nothing, small enough for differences of positions in 32 bits."""
MULTIPROCESSORS = 132
"""Those of the device that scratch is told for where tensors are on none."""


def declines(call: ExtendCall) -> str | None:
    """Why these kernels cannot run a call, or None."""
    if sentence := declines_tensors(call.device, call.q.dtype):
        return sentence
    if max(call.D, call.DV) > MOST:
        return f"D and DV must be at most {MOST}, got {call.D} and {call.DV}."
    cache = call.cache
    if cache is not None and cache.k.dtype == torch.float64:
        return "it computes in float32; float64 is for the reference."
    if call.device.type == "cpu" and cache is not None and cache.k.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products wrongly."
    return promise.declines(call) if call.reproducible else None


def cut_of(call: ExtendCall, config: Config) -> Cut:
    """How the call's plan is laid out in tables."""
    at_once = programs_at_once(call, config) // blocks_of_heads(call, config)
    short = short_window(call)
    # Cached keys at listed positions follow no order: any piece may be seen.
    bounded = not short and call.plan.key_positions is None
    return Cut(
        part=call.part,
        joined=call.part == "all" and call.plan.new_in_cache and call.custom_mask is None,
        tokens=packing(call.HQ, call.HK, config.BM)[1],
        # Under a short window a row sees few keys, however long its prefix is.
        piece=0 if short else config.piece,
        absolute=call.reproducible,
        at_once=0 if short else at_once,
        window=(call.window or 0) if bounded else 0,
    )


def short_window(call: ExtendCall) -> bool:
    """Whether rows see few keys: they are not cut, and most of their tiles are borders."""
    return call.window is not None and call.window < LONG_WINDOW


def blocks_of_heads(call: ExtendCall, config: Config) -> int:
    """Programs that take the heads of a tile."""
    heads, _ = packing(call.HQ, call.HK, config.BM)
    return call.HK * -(-(call.HQ // call.HK) // heads)


def configured(call: ExtendCall) -> Config:
    """The configuration of a call."""
    masked = call.custom_mask is not None
    # Of a reproducible call first that of the key without switches, whose sums all others share.
    config = _found(call, masked=masked and not call.reproducible)
    scattered = _reads_cache(call) and not _described_cache(call, config)
    if call.reproducible:
        return _like(config, call, scattered, masked) if scattered or masked else config
    return _found(call, scattered=True, masked=masked) if scattered else config


def _like(plain: Config, call: ExtendCall, scattered: bool, masked: bool) -> Config:
    """The configuration of a reproducible call with these switches.

    It gives the bits of `plain`, which is that of calls without any. Where a table has `plain`,
    what the rule says of others gives way to it.
    """

    def rule() -> Config:
        found = replace(_by_rule(call, scattered, masked), piece=plain.piece)
        return found if order_of_sums(vars(found)) == order_of_sums(vars(plain)) else plain

    key = _key(call, scattered, masked)
    found = tables.configuration(key, call.device, rule)
    if order_of_sums(vars(found)) != order_of_sums(vars(plain)):
        raise ValueError(f"tables: {key}: {found} gives other bits than {plain} without switches")
    return found


def _found(call: ExtendCall, *, masked: bool, scattered: bool = False) -> Config:
    """The configuration of a call with these switches."""
    rule = functools.partial(_by_rule, call, scattered, masked)
    return tables.configuration(_key(call, scattered, masked), call.device, rule)


def _by_rule(call: ExtendCall, scattered: bool, masked: bool) -> Config:
    return configuration(
        call.D, call.DV, multiplied_in(call), windowed=short_window(call),
        ratio=ratio_class(call.HQ, call.HK),
        scattered=scattered, listed=scattered and _listed(call), few=scattered and _few(call),
        masked=masked, reproducible=call.reproducible, target=target_of(call.device).name,
    )  # fmt: skip


def _key(call: ExtendCall, scattered: bool, masked: bool) -> Key:
    name, ratio = "unified", 0
    there = [("scattered", scattered), ("few", scattered and _few(call))]
    if not call.reproducible:
        name, ratio = "extend", ratio_class(call.HQ, call.HK)
        there += [
            ("listed", scattered and _listed(call)),
            ("fp8", scattered and _quantised(call)),
        ]
    switches = tuple(switch for switch, on in (*there, ("mask", masked)) if on)
    sizes, windowed = (call.D, call.DV), short_window(call)
    return Key("extend_attention", name, sizes, multiplied_in(call), ratio, windowed, switches)


def _few(call: ExtendCall) -> bool:
    """Whether no sequence brings more than FEW rows, as in decoding; not under a short window.

    Of a plan with a capacity: whether there is room for no more than that on average.
    """
    tokens = packing(call.HQ, call.HK, FEW)[1]
    if short_window(call):
        return False
    if call.plan.capacity is not None:
        sequences, most, _ = call.plan.capacity
        return most <= sequences * tokens
    return max(call.plan.lengths, default=0) <= tokens


def _listed(call: ExtendCall) -> bool:
    """Whether each cached key, of 16 bits or more, has a slot of its own."""
    return isinstance(call.plan.slots, Listed) and not _quantised(call)


def _quantised(call: ExtendCall) -> bool:
    return call.cache is not None and call.cache.k.dtype == FP8


def multiplied_in(call: ExtendCall) -> torch.dtype:
    """The type of products: float32 where cached keys have another than queries, else theirs.

    float8 becomes theirs; so does what a reproducible call reads beside packed new keys, which is
    nothing: the promise declines other calls.
    """
    cache = call.cache
    if not _reads_cache(call) or (call.reproducible and not call.plan.new_in_cache):
        return call.q.dtype
    assert cache is not None
    return call.q.dtype if cache.k.dtype in (FP8, call.q.dtype) else torch.float32


def columns_of(call: ExtendCall) -> Columns:
    """How queries and keys are read; as one tile where cached keys have another dtype."""
    cache = call.cache
    if _reads_cache(call) and cache is not None and cache.k.dtype != call.q.dtype:
        return Columns(padded(call.D))
    target = target_of(call.device).name
    return columns(call.D, call.q.dtype, target, reproducible=call.reproducible)


def layout(call: ExtendCall, config: Config, rows: int) -> Layout:
    """Scratch for the pieces of rows that are cut; at least a row, so that its type is known.

    Beside it what programs of the reproducible kernel may park where rows have several blocks of
    keys.
    """
    if short_window(call):
        return {}
    rows = max(rows, 1)
    found: Layout = {
        "part_acc": ((rows, call.HQ, call.DV), torch.float32),
        "part_m": ((rows, call.HQ), torch.float32),
        "part_l": ((rows, call.HQ), torch.float32),
    }
    plan = call.plan
    ends = [plan.query_start[n] + plan.lengths[n] for n in range(plan.N)]
    if call.reproducible and (plan.capacity is not None or max(ends, default=0) > config.piece):
        shape = (programs_at_once(call, config), config.BM * (padded(call.DV) + 2))
        found["parked"] = (shape, torch.float32)
    if call.reproducible:
        found["drawn"] = ((1,), torch.int32)
    return found


def programs_at_once(call: ExtendCall, config: Config) -> int:
    """Programs that a device holds where rows may be cut; no more of reproducible ones start."""
    there = MULTIPROCESSORS if call.device.type == "meta" else processors(call.device)
    return there * config.resident


def workspace_bytes(call: ExtendCall) -> int:
    """Scratch of `run`, exactly."""
    if not call.q.shape[0]:
        return 0
    config = configured(call)
    return layout_bytes(layout(call, config, scratch_rows(call.plan, cut_of(call, config))))


def run(call: ExtendCall) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the call."""
    from headstart.ops.extend_attention.triton.extend import extend_kernel
    from headstart.ops.extend_attention.triton.pieces import join_kernel
    from headstart.ops.extend_attention.triton.unified import clear_kernel, unified_kernel

    config = configured(call)
    o, lse = outputs(call)
    total = call.q.shape[0]
    if not total:
        return o if lse is None else call.result(o, lse)
    table = tile_table(call.plan, cut_of(call, config))
    given = arguments(call, config, table, o, lse)
    with current(call.device):
        kernel, programs = extend_kernel, given["work"]
        if call.reproducible:
            kernel = unified_kernel
            if not short_window(call) and programs > (most := programs_at_once(call, config)):
                programs = most
                start(clear_kernel, (1,), given, Config(0, 0, 1, 1))
        if programs:
            start(kernel, (programs,), given, config)
        if len(table.joins):
            blocks = -(-call.HQ // given["BH"])
            start(join_kernel, (len(table.joins), blocks), given, Config(0, 0, 1, 4))
    return o if lse is None else call.result(o, lse)


def start(kernel: Any, grid: tuple[int, ...], given: dict[str, Any], config: Config) -> None:
    """Launch a kernel with the arguments it names.

    Without contraction into fused multiply-adds: one loop must give the bits of another.
    """
    options: dict[str, Any] = {"num_warps": config.warps, "num_stages": config.stages}
    options["enable_fp_fusion"] = False
    if config.registers:
        options["maxnreg"] = config.registers
    launcher.start(kernel, grid, given, **options)


def outputs(call: ExtendCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The caller's tensors for o and LSE, or fresh ones; kernels write every row."""
    T, HQ = call.q.shape[:2]
    o, lse = call.out, call.out_lse
    if o is None:
        o = torch.empty(T, HQ, call.DV, dtype=call.out_dtype, device=call.device)
    if lse is None and (call.return_lse or call.part != "all"):
        lse = torch.empty(T, HQ, dtype=torch.float32, device=call.device)
    return o, lse


def arguments(
    call: ExtendCall, config: Config, table: TileTable, o: torch.Tensor, lse: torch.Tensor | None
) -> dict[str, Any]:
    """Every argument of every kernel by its name."""
    plan, q = call.plan, call.q
    heads, tokens = packing(call.HQ, call.HK, config.BM)
    group = call.HQ // call.HK
    read = columns_of(call)
    BDV = padded(call.DV)
    workspace = call.workspace or default_workspace(call.device)
    scratch = take(workspace, layout(call, config, table.scratch_rows))
    # With a capacity the rows of no sequence begin where only the device knows.
    rest = -(-(q.shape[0] - (plan.T if plan.capacity is None else 0)) // tokens)
    blocks = blocks_of_heads(call, config)
    kind = call.D, call.DV, multiplied_in(call)
    place: dict[str, Any] = {
        "windowed": short_window(call),
        "target": target_of(call.device).name,
    }
    given: dict[str, Any] = {
        "q": q, "o": o, "lse": lse,
        "sinks": None if call.sinks is None else call.sinks.contiguous(),
        "part_acc": scratch.get("part_acc", o), "part_m": scratch.get("part_m", o),
        "part_l": scratch.get("part_l", o),
        "parked": scratch.get("parked", scratch.get("part_m", o)),
        "drawn": scratch.get("drawn", table.tiles),
        "sequences": table.sequences, "tiles": table.tiles, "joins": table.joins,
        "work": (len(table.tiles) + rest) * blocks,
        "total": q.shape[0], "listed": len(table.tiles),
        "window": WIDEST if call.window is None else min(call.window, WIDEST),
        "q_token": q.stride(0), "q_head": q.stride(1),
        "o_token": o.stride(0), "o_head": o.stride(1), "o_channel": o.stride(2),
        "lse_token": 0 if lse is None else lse.stride(0),
        "lse_head": 0 if lse is None else lse.stride(1),
        "heads": call.HQ, "blocks": blocks, "HQ": call.HQ, "HEADS": blocks,
        "GROUP": group, "PACK": heads,
        "D": call.D, "DV": call.DV, "BD": read.size, "BDV": BDV,
        "PARTS": read.parts, "AGAIN": read.again,
        "BM": config.BM, "BN": config.BN, "BT": tokens, "STAGES": config.stages,
        "BH": 1024 // BDV,
        "PIECE": 0 if short_window(call) else config.piece,
        "CAUSAL": call.causal, "WINDOWED": call.window is not None,
        "MASK": "" if call.custom_mask is None else plan.mask_covers,
        "HAS_SINKS": call.sinks is not None, "HAS_LSE": lse is not None,
        "PRECISION": precision(multiplied_in(call), target_of(call.device).backend),
        "ORDER": order(*kind, **place, reproducible=call.reproducible),
    }  # fmt: skip
    mask = call.custom_mask
    given["custom_mask"] = None if mask is None else mask.contiguous().view(torch.uint8)
    return given | _scoring(call) | _new_keys(call, config) | _cached_keys(call, config)


def _scoring(call: ExtendCall) -> dict[str, Any]:
    """How scores become exponents of two: FORM and its numbers (see `score` in sweep.py)."""
    if call.softcap is not None:
        return {
            "FORM": "tanh",
            "inner": call.scale / call.softcap,
            "factor": call.softcap * LOG2E,
        }
    if call.scale > 0:
        return {"FORM": "plain", "inner": 1.0, "factor": call.scale * LOG2E}
    return {"FORM": "scaled", "inner": call.scale, "factor": LOG2E}


def _new_keys(call: ExtendCall, config: Config) -> dict[str, Any]:
    """The packed new keys, as pointers and where they allow it as descriptors."""
    k, v = call.k, call.v
    if call.part == "prefix" or k is None or v is None:
        cached = call.part != "prefix" and call.plan.new_in_cache
        return {
            "NEW": "cached" if cached else "", "DESCRIBED": False,
            "k": None, "v": None, "k_tiles": None, "v_tiles": None,
            "k_token": 0, "k_head": 0, "v_token": 0, "v_head": 0,
        }  # fmt: skip
    of_k, of_v = _tiles_of(call)
    described = _describable(k, call, of_k.whole) and _describable(v, call, of_v.whole)
    return {
        "NEW": "packed", "DESCRIBED": described, "k": k, "v": v,
        "k_tiles": _descriptor(k, config.BN, of_k.size) if described else None,
        "v_tiles": _descriptor(v, config.BN, of_v.size) if described else None,
        "k_token": k.stride(0), "k_head": k.stride(1),
        "v_token": v.stride(0), "v_head": v.stride(1),
    }  # fmt: skip


def _cached_keys(call: ExtendCall, config: Config) -> dict[str, Any]:
    """The cached keys: where they are found, pointers, strides, scales, descriptors."""
    plan, cache = call.plan, call.cache
    names = ("page", "row", "head", "channel")
    if not _reads_cache(call):
        absent: dict[str, Any] = {f"cache_{x}_{name}": 0 for x in "kv" for name in names}
        return absent | {
            "FOUND": "", "PAGE": 1, "page_rows": 1, "CACHE_DESCRIBED": False, "SCALES": False,
            "WIDE": False, "LISTED": False, "places": None, "positions": None,
            "cache_k": None, "cache_v": None, "cache_k_tiles": None, "cache_v_tiles": None,
            "k_scale": None, "v_scale": None, "k_number": 1.0, "v_number": 1.0,
            "k_scale_head": 0, "v_scale_head": 0,
        }  # fmt: skip
    assert cache is not None
    assert plan.slots is not None
    k, v, slots = cache.k, cache.v, plan.slots
    page, rows_of_page, strides = _page_of(call)
    quantised = k.dtype == FP8
    on_cpu = call.device.type == "cpu"
    in_bytes = quantised and (on_cpu or not converts_e4m3(target_of(call.device).name))
    described = _described_cache(call, config)
    rows = min(page, config.BN) if isinstance(slots, Paged) else config.BN
    places = None
    if not isinstance(slots, Consecutive):
        places = slots.indices if isinstance(slots, Listed) else slots.table
    listed = plan.key_positions is not None and call.part != "extend"
    given: dict[str, Any] = {
        "FOUND": {Consecutive: "run", Listed: "list", Paged: "pages"}[type(slots)],
        "PAGE": page, "page_rows": rows_of_page, "places": places, "LISTED": listed,
        "positions": plan.on_device(key_positions) if listed else None,
        "SCALES": quantised, "WIDE": multiplied_in(call) != call.q.dtype,
        "CACHE_DESCRIBED": described,
    }  # fmt: skip
    of_k, of_v = _tiles_of(call)
    for x, store, (of_page, of_row), scale, tiles in (
        ("k", k, strides[0], cache.k_scale, of_k),
        ("v", v, strides[1], cache.v_scale, of_v),
    ):
        tensor = isinstance(scale, torch.Tensor)
        given |= {
            f"cache_{x}": store.view(torch.uint8) if in_bytes else store,
            f"cache_{x}_page": of_page, f"cache_{x}_row": of_row,
            f"cache_{x}_head": store.stride(-2), f"cache_{x}_channel": store.stride(-1),
            f"cache_{x}_tiles": _descriptor(store, rows, tiles.size) if described else None,
            f"{x}_scale": scale if tensor else None,
            f"{x}_number": 1.0 if tensor or scale is None else float(scale),
            f"{x}_scale_head": int(tensor and scale.numel() > 1),
        }  # fmt: skip
    return given


def _reads_cache(call: ExtendCall) -> bool:
    """Whether the call may find keys in a cache."""
    plan = call.plan
    there = call.cache is not None and plan.slots is not None
    return there and (call.part != "extend" or plan.new_in_cache)


def _page_of(call: ExtendCall) -> tuple[int, int, list[tuple[int, int]]]:
    """PAGE as for `find`, rows of a page, and for k and v the strides of a page and of a row."""
    cache, slots = call.cache, call.plan.slots
    assert cache is not None
    if isinstance(slots, Paged):
        page = slots.page_size
        return page, page, [page_strides(store, page) for store in (cache.k, cache.v)]
    page = cache.page_size
    strides = [page_strides(store, page) for store in (cache.k, cache.v)]
    if all(of_page == page * of_row for of_page, of_row in strides):
        return 1, 1, [(of_row, 0) for _, of_row in strides]
    return 0, page, strides


def _described_cache(call: ExtendCall, config: Config) -> bool:
    """Whether whole tiles of prefix keys are read through descriptors."""
    plan, cache = call.plan, call.cache
    assert cache is not None
    page, _, strides = _page_of(call)
    if page == 0:
        return False
    if cache.k.dtype != call.q.dtype or isinstance(plan.slots, Listed):
        return False
    if isinstance(plan.slots, Paged):
        # Every whole tile must lie in one page, counted from the prefix or from position 0; the
        # default kernel takes two pages as one tile too, of rows enough for a product (`padded`).
        moved = plan.capacity is not None or any(start % config.BN for start in plan.key_start)
        halves = 2 * page == config.BN and page >= 32 and call.q.element_size() == 2
        paired = halves and not call.reproducible and plan.key_positions is None
        if (page % config.BN and not paired) or (call.reproducible and moved):
            return False
    return all(
        (page == 1 or of_page == page * of_row) and _describable(store, call, tiles.whole)
        for store, (of_page, of_row), tiles in zip(
            (cache.k, cache.v), strides, _tiles_of(call), strict=True
        )
    )


def _tiles_of(call: ExtendCall) -> tuple[Columns, Columns]:
    """How rows of keys and of values are read."""
    return columns_of(call), Columns(padded(call.DV))


def _describable(store: torch.Tensor, call: ExtendCall, whole: int) -> bool:
    """Whether tiles of `whole` columns of [..., HK, D] can be read through a descriptor.

    One row of it is a token.
    """
    fits = whole == store.shape[-1]
    if not (reads_descriptors(target_of(call.device)) and fits and store.numel()):
        return False
    row, head, channel = store.stride()[-3:]
    aligned = all(
        number * store.element_size() % 16 == 0 for number in (row, head, store.storage_offset())
    )
    return (
        channel == 1 and aligned and store.data_ptr() % 16 == 0
        and row >= (store.shape[-2] - 1) * head + store.shape[-1] > 0
    )  # fmt: skip


def _descriptor(store: torch.Tensor, keys: int, size: int) -> Any:
    """Rows of all heads end to end, in tiles of some keys and `size` columns."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows = math.prod(store.shape[:-2])
    row, head, _ = store.stride()[-3:]
    columns = (store.shape[-2] - 1) * head + store.shape[-1]
    flat = store.as_strided((rows, columns), (row, 1))
    return TensorDescriptor.from_tensor(flat, [keys, size])


def _declines_merge(call: MergeCall) -> str | None:
    return declines_tensors(call.device, call.parts[0][0].dtype)


def _merge(call: MergeCall) -> tuple[torch.Tensor, torch.Tensor]:
    from headstart.ops.extend_attention.triton.merge import merge

    return merge(call)


def _declines_write(call: WriteCall) -> str | None:
    if torch.float64 in (call.k.dtype, call.v.dtype, call.cache.k.dtype):
        return "it stores float32 at most; float64 is for the reference."
    if call.device.type == "cpu" and call.cache.k.dtype == torch.bfloat16:
        return "Triton's interpreter truncates what it stores in bfloat16."
    return declines_tensors(call.device, torch.float32)


def _write(call: WriteCall) -> None:
    from headstart.ops.extend_attention.triton.write import write

    write(call)


IMPLEMENTATION = Implementation("triton", declines, run, workspace_bytes)
MERGE = Implementation("triton", _declines_merge, _merge)
WRITE = Implementation("triton", _declines_write, _write)
