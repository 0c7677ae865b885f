"""The workloads of softmax extend attention.

Where one id stands for several windows, the id itself is the first and each other one a sibling:
`-full` has no window, `-win` has one.
"""

from dataclasses import replace
from functools import partial

from headstart.evidence.cases import trace
from headstart.evidence.cases.extend_attention import AttentionCase
from headstart.evidence.cases.record import drawn_lengths

_gpt_oss = partial(AttentionCase, HQ=64, HK=8, D=64, sinks=True)
_llama = partial(AttentionCase, HQ=32, HK=8, D=128)


def _windows(case: AttentionCase, window: int | None) -> tuple[AttentionCase, AttentionCase]:
    """The case and its sibling under another window."""
    suffix = "-full" if window is None else "-win"
    return case, replace(case, id=case.id + suffix, window=window)


MODELS = (
    *(
        _gpt_oss(
            id=f"oss-16k-{name}",
            lengths=(16384,),
            window=window,
            why=f"gpt-oss-20b, its {kind} layers",
        )
        for name, window, kind in (("full", None, "full"), ("win", 128, "windowed"))
    ),
    *(
        _gpt_oss(
            id=f"oss-chunk-{name}",
            lengths=(2048,),
            prefixes=(14336,),
            window=window,
            why=f"the last chunk of a chunked prefill, {kind} layers",
        )
        for name, window, kind in (("full", None, "full"), ("win", 128, "windowed"))
    ),
    *(
        _gpt_oss(
            id=f"oss-512-on-{name}-win",
            lengths=(512,),
            prefixes=(prefix,),
            window=128,
            why="the cost of a window must be flat in prefix depth",
        )
        for name, prefix in (("8k", 8192), ("512", 512))
    ),
    *_windows(
        AttentionCase(
            id="oss-tp4-8k-on-8k",
            HQ=16,
            HK=2,
            D=64,
            lengths=(8192,) * 8,
            prefixes=(8192,) * 8,
            window=128,
            sinks=True,
            why="gpt-oss-120b on 4 GPUs",
        ),
        None,
    ),
    _llama(id="llama-16k", lengths=(16384,), why="the plain case every peer tunes for"),
    AttentionCase(
        id="next-16k",
        HQ=16,
        HK=2,
        D=256,
        lengths=(16384,),
        why="Qwen3-Next's full-attention layers",
    ),
    AttentionCase(
        id="gemma-win-16k", HQ=16, HK=8, D=256, lengths=(16384,), window=1024, why="a wide window"
    ),
    AttentionCase(
        id="d512-win",
        HQ=16,
        HK=4,
        D=512,
        lengths=(4096,),
        window=1024,
        why="Gemma 4's head size of 512",
    ),
    AttentionCase(
        id="mla-expanded",
        HQ=16,
        HK=16,
        D=192,
        DV=128,
        lengths=(4096,),
        why="latent attention, expanded: DV differs from D",
    ),
)

BATCHES = (
    *_windows(
        _gpt_oss(
            id="ragged-short",
            lengths=drawn_lengths(1, 256, 1, 128),
            prefixes=drawn_lengths(2, 256, 0, 4096),
            window=128,
            why="many short rows",
        ),
        None,
    ),
    _llama(
        id="mixed",
        lengths=(1,) * 60 + (2048, 2048),
        prefixes=drawn_lengths(3, 62, 0, 8192),
        why="decodes packed with prefills",
    ),
    *_windows(
        _gpt_oss(
            id="oss-residual-mix",
            lengths=trace.NEW,
            prefixes=trace.PREFIX,
            window=128,
            layout="pages",
            page_size=16,
            new_in_cache=True,
            why="what service runs: 24 sequences drawn from a trace",
        ),
        None,
    ),
)

RATIOS = tuple(
    case
    for suffix, HQ, HK, D in (("", 5, 1, 128), ("-12x2", 12, 2, 80), ("-24x1", 24, 1, 128))
    for case in _windows(
        AttentionCase(
            id="ratio-odd" + suffix,
            HQ=HQ,
            HK=HK,
            D=D,
            lengths=(1000,),
            prefixes=(777,),
            sinks=True,
            why="ratios and head sizes that are no power of two",
        ),
        100,
    )
)

LAYOUTS = (
    *(
        case
        for size in (1, 16, 64)
        for case in _windows(
            _llama(
                id=f"paged-{size}",
                lengths=(2048,),
                prefixes=(6000,),
                sinks=True,
                layout="slots" if size == 1 else "pages",
                page_size=size,
                new_in_cache=size > 1,
                why="shuffled slots" if size == 1 else "shuffled pages, new keys in the cache",
            ),
            128,
        )
    ),
    *_windows(
        _llama(
            id="paged-none",
            lengths=(2048,),
            prefixes=(6000,),
            sinks=True,
            why="the same in rows side by side: what pages cost",
        ),
        128,
    ),
    _llama(
        id="fp8-cache",
        lengths=(2048,),
        prefixes=(6000,),
        cache_dtype="float8_e4m3fn",
        scale_per_head=True,
        why="fp8 keys and values with a scale per head, new keys unquantised",
    ),
    *_windows(
        _gpt_oss(
            id="oss-fp8-page16",
            lengths=(2048,),
            prefixes=(6000,),
            window=128,
            layout="pages",
            page_size=16,
            new_in_cache=True,
            cache_dtype="float8_e4m3fn",
            why="fp8 pages with one scale, new keys read from them",
        ),
        None,
    ),
    *_windows(
        _gpt_oss(
            id="oss-bf16-page16",
            lengths=(2048,),
            prefixes=(6000,),
            window=128,
            layout="pages",
            page_size=16,
            new_in_cache=True,
            why="oss-fp8-page16 with bfloat16 pages: what fp8 saves",
        ),
        None,
    ),
    *_windows(
        _llama(
            id="tree-verify",
            lengths=(64,),
            prefixes=(4000,),
            mask="tree",
            why="speculative decoding: a custom mask over a tree of drafts",
        ),
        128,
    ),
)

EDGES = tuple(
    AttentionCase(
        id=f"edge-{number}",
        HQ=8,
        HK=2,
        D=64,
        lengths=(new,),
        prefixes=(prefix,),
        window=window,
        sinks=True,
        why=f"borders: {new} on {prefix}, window {window}",
    )
    for number, (window, (new, prefix)) in enumerate(
        (
            (window, step)
            for window in (1, 100, 127, 128, 129, 200_000)
            for step in ((0, 0), (0, 5), (1, 0), (1, 100_000))
        ),
        start=1,
    )
)

_NAMED = (*MODELS, *BATCHES, *RATIOS, *LAYOUTS, *EDGES)
CASES: tuple[AttentionCase, ...] = tuple(
    sibling
    for case in _NAMED
    for sibling in ((case, case.without_sinks()) if case.sinks else (case,))
)
