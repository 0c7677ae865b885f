"""Whatever comes in an argument's place is taken, or refused with one line that names what came.

Every argument of the public surface is given every odd value in turn. What an argument accepts is
the matter of its operation's own tests; here nothing may end in an error of Python's or torch's.
"""

import warnings

import pytest
import torch

import headstart
from headstart import DeltaCache, ExtendPlan, Gate, KVCache, Pool, Schedule, Workspace

T, H, HV, K, V = 66, 1, 2, 4, 3
FP8 = torch.float8_e4m3fn


class Thing:
    """Something that nobody expects."""


ODD = [
    None, True, False, 0, -1, 1.5, float("nan"), float("inf"), 10**30, 2**31, 2**63, 1j, "x", "",
    b"b", [], [None], [1.5], ["a"], [True], [-1], [[1]], (), (1, 2, 3, 4, 5), {}, {"a": 1}, {1},
    range(3), Thing(), object, len, torch.float32, torch.int8, torch.device("cpu"),
    torch.zeros(0), torch.zeros(3), torch.tensor(1.5), torch.tensor([1]), torch.tensor([[1]]),
    torch.zeros(2, 2, dtype=torch.bool), torch.zeros(T, H, K, dtype=torch.complex64),
    torch.zeros(T, H, K).to_sparse(), torch.zeros(T, H, K, device="meta"),
]  # fmt: skip


def rule_inputs():
    keys = torch.nn.functional.normalize(torch.randn(T, H, K), dim=-1)
    return {
        "q": torch.randn(T, H, K),
        "k": keys,
        "v": torch.randn(T, HV, V),
        "g": -torch.rand(T, HV),
        "beta": torch.rand(T, HV),
    }


RULE = rule_inputs()
SIZES = {"slots": 4, "H": H, "HV": HV, "K": K, "V": V, "dtype": torch.float32, "device": "cpu"}
CACHE = DeltaCache(**SIZES, conv_channels=6)
X, WEIGHT, BIAS = torch.randn(T, 6), torch.randn(6, 4), torch.randn(6)
NEW = {"q": torch.randn(5, 4, 8), "k": torch.randn(5, 2, 8), "v": torch.randn(5, 2, 8)}
KEYS = KVCache(torch.randn(9, 2, 8), torch.randn(9, 2, 8))
EIGHT = torch.zeros(4, 2, 8).to(FP8)
MAP = torch.eye(3), torch.ones(3, 5)
PLACES = {"query_start": None, "key_start": 0, "key_positions": None, "mask_covers": "all",
          "capacity": None}  # fmt: skip


def stepped(**arguments):
    return Schedule([T], snapshot_every=64, device="cpu", **arguments)


def in_cache(slots, kept):
    headstart.gated_delta_rule(
        **RULE, schedule=stepped(), state=CACHE.at(slots), snapshots=CACHE.at(kept)
    )
    headstart.causal_conv1d(
        X, WEIGHT, schedule=stepped(), state=CACHE.at(slots), snapshots=CACHE.at(kept)
    )


def in_pool(state, history, **slots):
    headstart.gated_delta_rule(**RULE, state=Pool(state, **slots))
    headstart.causal_conv1d(X, WEIGHT, state=Pool(history, **slots | {"layout": "kv"}))


def attended(**arguments):
    headstart.extend_attention(**arguments)


HOW = {"scale": None, "qk_l2norm": False, "implementation": None, "workspace": None, "out": None}
CALLS = {
    "Schedule": (
        Schedule,
        {"lengths": [T], "start_positions": 0, "drafts": False, "snapshot_positions": None,
         "snapshot_every": 0, "device": "cpu", "capacity": None},
    ),
    "Schedule of sums": (Schedule, {"cu_seqlens": [0, T], "device": "cpu"}),
    "DeltaCache": (
        DeltaCache,
        SIZES | {"per_channel": False, "conv_channels": 6, "conv_width": 4, "draft_tokens": 16,
                 "tensors": None},
    ),
    "load": (
        CACHE.load,
        {"slots": [1], "positions": [64], "states": torch.zeros(1, HV, K, V),
         "histories": torch.zeros(1, 3, 6)},
    ),
    "copy": (CACHE.copy, {"src": [1], "dst": [2]}),
    "export": (CACHE.export, {"slots": [1]}),
    "reset": (CACHE.reset, {"slots": [1]}),
    "Gate": (Gate, {"kind": "log", "beta": "value", "lower_bound": None}),
    "raw gate": (
        lambda **raw: headstart.gated_delta_rule(**RULE, gate=Gate.raw(**raw)),
        {"a_log": torch.zeros(HV), "dt_bias": torch.zeros(HV), "lower_bound": -5.0,
         "beta": "logit"},
    ),
    "Pool": (
        in_pool,
        {"state": torch.zeros(4, HV, K, V), "history": torch.zeros(4, 3, 6), "read_slots": [0],
         "write_slots": [1], "present": None, "layout": "kv"},
    ),
    "at": (in_cache, {"slots": [0], "kept": [1]}),
    "gated_delta_rule": (
        headstart.gated_delta_rule,
        RULE | HOW | {"schedule": [T], "state": None, "gate": Gate.log(), "snapshots": None,
                      "return_state": False, "reproducible": None},
    ),
    "recurrent_gated_delta_rule": (
        headstart.recurrent_gated_delta_rule,
        RULE | HOW | {"schedule": [T], "state": None, "gate": Gate.log(), "return_state": False},
    ),
    "chunk_map": (
        headstart.chunk_map,
        {name: RULE[name] for name in ("k", "v", "g", "beta")}
        | {"schedule": [T], "gate": Gate.log(), "qk_l2norm": False},
    ),
    "compose": (headstart.compose, {"first": MAP, "second": MAP}),
    "causal_conv1d": (
        headstart.causal_conv1d,
        {"x": X, "weight": WEIGHT, "bias": BIAS, "schedule": [T], "state": None, "snapshots": None,
         "return_state": False, "activation": "silu", "implementation": None, "out": None},
    ),
    "rms_norm_gated": (
        headstart.rms_norm_gated,
        {"x": X, "weight": BIAS, "gate": X, "eps": 1e-6, "activation": "silu",
         "implementation": None},
    ),
    "extend_attention": (
        attended,
        NEW | {"plan": ExtendPlan.from_lengths([5], [4], device="cpu"), "cache": KEYS,
               "scale": None, "window": None, "sinks": None, "softcap": None,
               "custom_mask": None, "causal": True,
               "part": "all", "return_lse": False, "reproducible": False, "implementation": None,
               "workspace": None, "out": None},
    ),
    "merge_attention": (
        headstart.merge_attention,
        {"parts": [(torch.zeros(3, 2, 5), torch.zeros(3, 2))], "sinks": None,
         "implementation": None, "out": None},
    ),
    "write_kv": (
        headstart.write_kv,
        {"k": NEW["k"], "v": NEW["v"], "cache": KEYS, "slots": [3, 1, -1, 0, 2],
         "implementation": None},
    ),
    "KVCache": (KVCache, {"k": NEW["k"], "v": NEW["v"], "k_scale": None, "v_scale": None}),
    "KVCache of float8": (KVCache, {"k": EIGHT, "v": EIGHT, "k_scale": 1.0, "v_scale": 2.0}),
    "from_lengths": (
        ExtendPlan.from_lengths, PLACES | {"new": [3], "prefix": [2], "device": "cpu"}
    ),
    "from_slots": (
        ExtendPlan.from_slots,
        PLACES | {"lengths": [3], "kv_indptr": [0, 2], "kv_indices": [1, 2], "new_in_cache": False,
                  "device": None},
    ),
    "from_pages": (
        ExtendPlan.from_pages,
        PLACES | {"lengths": [3], "kv_lengths": [5], "page_table": [[0]], "page_size": 16,
                  "new_in_cache": False, "device": None},
    ),
    "from_padded": (
        ExtendPlan.from_padded,
        PLACES | {"lengths": [3], "kv_lengths": [5], "max_length": 8, "new_in_cache": False,
                  "offsets": None, "device": None},
    ),
    "validate": (ExtendPlan.from_lengths([3], [2], device="cpu").validate, {"cache": KEYS}),
    "Workspace": (Workspace, {"device": "cpu"}),
    "explain": (lambda name: headstart.explain(name, **RULE), {"name": "gated_delta_rule"}),
    "workspace_bytes": (
        lambda name: headstart.workspace_bytes(name, **RULE), {"name": "gated_delta_rule"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_are_taken_or_named(name):
    function, good = CALLS[name]
    function(**good)
    for argument in good:
        for odd in ODD:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    function(**good | {argument: odd})
                except headstart.Declined:
                    pass
                except ValueError as error:
                    words = str(error)
                    assert ": expected " in words, (argument, odd, words)
                    assert ", got " in words, (argument, odd, words)
                    assert len(words.splitlines()[0]) == len(words) <= 200, (argument, odd, words)
