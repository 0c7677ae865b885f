"""What plans accept, keep and say."""

import pytest
import torch
from tests.ops.extend_attention.oracle import draw, expect_close, expected

import headstart
from headstart import ExtendPlan, KVCache
from headstart.ops.extend_attention.plan import LAST


def test_a_plan_is_built_by_one_of_four_constructors():
    with pytest.raises(TypeError, match="from_lengths, from_slots, from_pages or from_padded"):
        ExtendPlan()


@pytest.mark.parametrize("make", [list, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_lengths_and_pointers_are_lists_or_integer_tensors(make):
    plans = [
        ExtendPlan.from_lengths(make([2, 3]), make([4, 0]), device="cpu"),
        ExtendPlan.from_slots(
            make([2, 3]), make([0, 4, 4]), make([9, 8, 7, 6]), new_in_cache=False
        ),
        ExtendPlan.from_pages(
            make([2, 3]), make([6, 3]), torch.tensor([[1], [0]]), 16, new_in_cache=True
        ),
        ExtendPlan.from_padded(make([2, 3]), make([6, 3]), 8, new_in_cache=True),
    ]
    for plan in plans:
        assert plan.lengths == [2, 3]
        assert plan.prefix == [4, 0]
        assert plan.offsets == [0, 2, 5]
        assert plan.query_start == [4, 0]
        assert (plan.N, plan.T) == (2, 5)
        assert "lengths=[2, 3]" in repr(plan)


def test_the_device_is_that_of_the_indices():
    indices = torch.zeros(4, dtype=torch.int64)
    plan = ExtendPlan.from_slots([1], [0, 4], indices, new_in_cache=True)
    assert plan.device == indices.device
    assert ExtendPlan.from_slots([1], [0, 2], [3, 4], new_in_cache=False).device.type == "cpu"


def test_nothing_is_kept_by_reference():
    """An engine overwrites its buffers as soon as the constructor returns."""
    batch = draw([2], [3])
    lengths, indptr = torch.tensor([2]), torch.tensor([0, 3])
    for dtype in (torch.int32, torch.int64):
        indices = torch.tensor([2, 0, 1], dtype=dtype)
        table = torch.tensor([[0]], dtype=dtype)
        slots = ExtendPlan.from_slots(lengths, indptr, indices, new_in_cache=False)
        pages = ExtendPlan.from_pages(lengths, torch.tensor([5]), table, 3, new_in_cache=False)
        cache = KVCache(batch.prefix_k[[1, 2, 0]], batch.prefix_v[[1, 2, 0]])
        want = headstart.extend_attention(batch.q, batch.k, batch.v, plan=slots, cache=cache)
        indices.fill_(99)
        table.fill_(99)
        assert torch.equal(
            headstart.extend_attention(batch.q, batch.k, batch.v, plan=slots, cache=cache), want
        )
        headstart.extend_attention(batch.q, batch.k, batch.v, plan=pages, cache=cache)


def test_updates_describe_another_forward_in_the_memory_of_the_first():
    batch = draw([2, 1], [3, 2])
    slots = torch.tensor([4, 1, 0, 2, 3])
    room = torch.empty(5, 1, 16), torch.empty(5, 1, 16)
    room[0][slots], room[1][slots] = batch.prefix_k, batch.prefix_v
    cache = KVCache(*room)
    plan = ExtendPlan.from_slots([1], [0, 1], [0], new_in_cache=False, capacity=(4, 8, 16))
    memory = plan.slots.indices.data_ptr()
    buffer = slots.clone()
    assert plan.update_([2, 1], [0, 3, 5], buffer, new_in_cache=False) is plan
    buffer.fill_(99)
    assert plan.slots.indices.data_ptr() == memory
    found = headstart.extend_attention(
        batch.q, batch.k, batch.v, plan=plan, cache=cache, return_lse=True
    )
    expect_close(found, expected(batch))
    before = dict(plan.__dict__)
    for arguments, said in (
        (([9], [0, 1], [0]), "at most 8 tokens, got 9"),
        (([1] * 5, [0] * 6, []), "at most 4 sequences, got 5"),
        (([1], [0, 17], [0] * 17), "at most 16 keys, got 17"),
        (([-1], [0, 1], [0]), "lengths: expected values >= 0"),
    ):
        with pytest.raises(ValueError, match=said):
            plan.update_(*arguments, new_in_cache=False)
        assert plan.__dict__ == before
    with pytest.raises(ValueError, match="capacity: expected at construction only"):
        plan.update_([1], [0, 1], [0], new_in_cache=False, capacity=(1, 1, 1))


def test_updated_pages_and_lengths():
    batch = draw([2, 1], [20, 2])
    table = torch.tensor([[3, 0], [1, 99]], dtype=torch.int32)
    room = torch.full((4, 16, 1, 16), torch.nan), torch.full((4, 16, 1, 16), torch.nan)
    for rows, store in ((batch.prefix_k, room[0]), (batch.prefix_v, room[1])):
        store[3], store[0, :4], store[1, :2] = rows[:16], rows[16:20], rows[20:]
    first = torch.zeros(1, 1, dtype=torch.int32)
    plan = ExtendPlan.from_pages([1], [1], first, 16, new_in_cache=False, capacity=(2, 8, 64))
    memory = plan.slots.table.data_ptr()
    plan.update_([2, 1], [22, 3], table, 16, new_in_cache=False)
    assert plan.slots.table.data_ptr() == memory
    found = headstart.extend_attention(
        batch.q, batch.k, batch.v, plan=plan, cache=KVCache(*room), return_lse=True
    )
    expect_close(found, expected(batch))
    plan = ExtendPlan.from_lengths([1], device="cpu").update_([2, 1], [20, 2])
    found = headstart.extend_attention(
        batch.q,
        batch.k,
        batch.v,
        plan=plan,
        cache=KVCache(batch.prefix_k, batch.prefix_v),
        return_lse=True,
    )
    expect_close(found, expected(batch))


def test_a_plan_made_under_inference_mode_may_be_updated_outside_of_it():
    with torch.inference_mode():
        plan = ExtendPlan.from_slots([1], [0, 1], [0], new_in_cache=False, capacity=(2, 4, 8))
        table = ExtendPlan.from_pages([1], [1], [[0]], 4, new_in_cache=False, capacity=(2, 4, 8))
    plan.update_([1], [0, 2], [3, 1], new_in_cache=False)
    table.update_([1], [5], [[1]], 4, new_in_cache=False)
    assert plan.slots.find(0, 0, 2).tolist() == [3, 1]
    assert table.slots.find(0, 0, 4).tolist() == [4, 5, 6, 7]


SLOTS = {"new_in_cache": False}
WRONG = [
    (lambda: ExtendPlan.from_lengths(3, device="cpu"), "new: expected a list or tensor"),
    (lambda: ExtendPlan.from_lengths([1.5], device="cpu"), "new: expected integers, got 1.5"),
    (lambda: ExtendPlan.from_lengths([-1], device="cpu"), "new: expected values >= 0, got -1"),
    (lambda: ExtendPlan.from_lengths([1], [2, 3], device="cpu"), "prefix: expected one for each"),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="cpu", query_start=-2),
        "query_start: expected positions >= 0",
    ),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="cpu", key_start=[0, 0]),
        "key_start: expected one for each of 1 sequences, got 2",
    ),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="cpu", mask_covers="prefix"),
        r"mask_covers: expected one of \['all', 'new'\]",
    ),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="cpu", key_positions=[0], query_start=9),
        "key_positions: expected one for each of 2 prefix keys, got 1",
    ),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="cpu", key_positions=[0, 2]),
        "query_start: expected positions beside key_positions",
    ),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="cpu", capacity=(1, 2)),
        r"capacity: expected \(sequences, tokens, keys\)",
    ),
    (
        lambda: ExtendPlan.from_lengths([4], [2], device="cpu", capacity=(1, 3, 2)),
        "capacity: expected at most 3 tokens, got 4",
    ),
    (
        lambda: ExtendPlan.from_slots([1, 2], [0, 2], [5, 6], **SLOTS),
        r"kv_indptr: expected \[N \+ 1\] = \[3\] entries",
    ),
    (
        lambda: ExtendPlan.from_slots([1, 1], [0, 2, 1], [5, 6], **SLOTS),
        "kv_indptr: expected a running sum",
    ),
    (
        lambda: ExtendPlan.from_slots([1], [0, 3], [5, 6], **SLOTS),
        r"kv_indices: expected kv_indptr\[-1\] = 3 entries, got 2",
    ),
    (
        lambda: ExtendPlan.from_slots([3], [0, 2], [5, 6], new_in_cache=True),
        r"kv_indptr: expected prefix \+ new >= 3 keys for sequence 0, got 2",
    ),
    (
        lambda: ExtendPlan.from_slots([1], [0, 1], torch.zeros(1), **SLOTS),
        "kv_indices: expected dtype int32 or int64",
    ),
    (
        lambda: ExtendPlan.from_pages([3], [2], [[0]], 16, **SLOTS),
        r"kv_lengths: expected prefix \+ new >= 3 keys",
    ),
    (
        lambda: ExtendPlan.from_pages([1], [40], [[0, 1]], 16, **SLOTS),
        r"page_table: expected at least \[N, pages\] = \[1, 3\], got \[1, 2\]",
    ),
    (
        lambda: ExtendPlan.from_pages([1], [4], [0, 1], 16, **SLOTS),
        r"page_table\[0\]: expected a list or tensor of integers, got 0",
    ),
    (
        lambda: ExtendPlan.from_pages([1], [4], [[0]], 0, **SLOTS),
        r"page_size: expected an integer in \[1,",
    ),
    (
        lambda: ExtendPlan.from_padded([1], [9], 8, new_in_cache=True),
        "kv_lengths: expected at most max_length = 8 rows, got 9",
    ),
    (
        lambda: ExtendPlan.from_padded([1], [8], 8, new_in_cache=True, offsets=[1]),
        "kv_lengths: expected at most max_length = 8 rows, got 9",
    ),
    (
        lambda: ExtendPlan.from_slots([1], [0, 2], [5, 6.5], **SLOTS),
        "kv_indices: expected integers, got 6.5",
    ),
    (
        lambda: ExtendPlan.from_slots([1], [0, 2], [5, True], **SLOTS),
        "kv_indices: expected integers, got True",
    ),
    (
        lambda: ExtendPlan.from_slots([1], [0, 2.0], [5, 6], **SLOTS),
        "kv_indptr: expected integers, got 2.0",
    ),
    (
        lambda: ExtendPlan.from_slots([1], [0, 2], "56", **SLOTS),
        "kv_indices: expected a list or tensor of integers, got '56'",
    ),
    (
        lambda: ExtendPlan.from_slots([1], [0, 2], [2**70, 6], **SLOTS),
        "kv_indices: expected integers <= ",
    ),
    (
        lambda: ExtendPlan.from_pages([1], [4], [[1.5]], 16, **SLOTS),
        r"page_table\[0\]: expected integers, got 1.5",
    ),
    (
        lambda: ExtendPlan.from_pages([1, 1], [4, 4], [[1], [False]], 16, **SLOTS),
        r"page_table\[1\]: expected integers, got False",
    ),
    (
        lambda: ExtendPlan.from_pages([1, 1], [4, 4], [[1], [2, 3]], 16, **SLOTS),
        r"page_table: expected rows of one length, got lengths \[1, 2\]",
    ),
    (
        lambda: ExtendPlan.from_pages([1], [4], torch.zeros(3, dtype=torch.int64), 16, **SLOTS),
        r"page_table: expected 2 dimensions, got shape \[3\]",
    ),
    (
        lambda: ExtendPlan.from_pages([1], [4], None, 16, **SLOTS),
        "page_table: expected a list of lists of integers, got None",
    ),
    (
        lambda: ExtendPlan.from_pages([1], [4], [[0]], 16.0, **SLOTS),
        r"page_size: expected an integer in \[1, .* got 16.0",
    ),
    (
        lambda: ExtendPlan.from_lengths([True], device="cpu"),
        "new: expected integers, got True",
    ),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="cpu", query_start=True),
        "query_start: expected a list or tensor of integers, got True",
    ),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="cpu", key_start=[0.5]),
        "key_start: expected integers, got 0.5",
    ),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="cpu", key_positions=[0, 2.5]),
        "key_positions: expected integers, got 2.5",
    ),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="cpu", query_start=LAST),
        "query_start: expected tokens to end at most at 2147418112, got 2147418113",
    ),
    (
        lambda: ExtendPlan.from_lengths([2**30] * 2, device="cpu"),
        "new: expected tokens to end at most at 2147418112, got 2147483648",
    ),
    (
        lambda: ExtendPlan.from_padded([2**30] * 2, [2**30] * 2, 2**30, new_in_cache=True),
        "lengths: expected tokens to end at most at 2147418112, got 2147483648",
    ),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="cpu", key_start=LAST - 1),
        "key_start: expected tokens to end at most at 2147418112, got 2147418113",
    ),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="toaster"),
        'device: expected a device such as "cpu"',
    ),
    (
        lambda: ExtendPlan.from_slots([1], [0, 2], [5, 6], new_in_cache="no"),
        "new_in_cache: expected True or False, got 'no'",
    ),
    (
        lambda: ExtendPlan.from_pages([1], [4], [[0]], 16, new_in_cache=torch.ones(3)),
        r"new_in_cache: expected True or False, got a float32 tensor \[3\]",
    ),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="cpu").validate([3]),
        "cache: expected a KVCache, got list",
    ),
    (
        lambda: ExtendPlan.from_lengths([1], [2], device="cpu", mask_covers=torch.zeros(9)),
        r"mask_covers: expected one of \['all', 'new'\], got a float32 tensor \[9\]",
    ),
    (
        lambda: ExtendPlan.from_padded([1], [8], 0, new_in_cache=True),
        r"max_length: expected an integer in \[1,",
    ),
]


@pytest.mark.parametrize(("make", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_a_wrong_plan_is_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_the_first_token_of_the_padded_cache_with_one_row_to_spare():
    plan = ExtendPlan.from_padded([1], [9], 8, new_in_cache=False)
    assert plan.prefix == [8]


@pytest.mark.parametrize(("slot", "said"), [(-1, "got -1"), (8, "got 8")])
def test_slots_outside_the_cache_are_found(slot, said):
    plan = ExtendPlan.from_slots([1], [0, 2], [3, slot], new_in_cache=False)
    cache = KVCache(torch.zeros(8, 1, 4), torch.zeros(8, 1, 4))
    with pytest.raises(ValueError, match=rf"plan: expected slots in \[0, 8\), {said}"):
        plan.validate(cache)
    new = torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match=f"plan: expected slots .*{said}"):
        headstart.extend_attention(new, new, new, plan=plan, cache=cache)
    if slot < 0:
        with pytest.raises(ValueError, match="expected slots >= 0"):
            plan.validate()


@pytest.mark.parametrize(
    ("table", "keys", "lowest", "highest"),
    [
        ([2**62], 3, 2**66, 2**66 + 2),  # 0 in 64 bits
        ([1, 2**60 + 1], 20, 16, 2**64 + 19),
        ([2**59, 1], 20, 16, 2**63 + 15),
        ([-(2**60), 1], 20, -(2**64), 19),
        ([7, 0, 3], 33, 0, 7 * 16 + 15),
        ([7, 0, 9], 33, 0, 9 * 16),
    ],
)
def test_pages_are_found_outside_the_cache_whatever_they_are(table, keys, lowest, highest):
    plan = ExtendPlan.from_pages([1], [keys + 1], [table], 16, new_in_cache=False)
    assert plan.slots.bounds(0, keys) == (lowest, highest)
    new = torch.zeros(1, 1, 4)
    cache = KVCache(torch.zeros(7, 16, 1, 4), torch.zeros(7, 16, 1, 4))
    said = rf"plan: expected slots in \[0, 112\), got {lowest if lowest < 0 else highest} in"
    with pytest.raises(ValueError, match=said):
        headstart.extend_attention(new, new, new, plan=plan, cache=cache)
