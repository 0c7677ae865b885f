"""The workloads of the gated delta rule.

H 16 / HV 32 and K = V = 128 are Qwen3-Next's, and the record's defaults.
"""

from headstart.evidence.cases import trace
from headstart.evidence.cases.delta_block import DeltaBlockCase
from headstart.evidence.cases.gated_delta_rule import DeltaCase
from headstart.evidence.cases.record import drawn_parts

RESTORED = 12_800
"""Where a cached state stands: the 90 % quantile of cached prefixes in the trace."""
DECODES = tuple(RESTORED + tail for tail in range(64))

LONG = (
    DeltaCase(
        id="gdn-next-8k", lengths=(8192,), why="Qwen3-Next-80B-A3B and Qwen3.5-35B on one GPU"
    ),
    DeltaCase(id="gdn-next-2048", lengths=(2048,), why="short prompts must not regress"),
    DeltaCase(
        id="gdn-next-18778",
        lengths=(18778,),
        why="a long real prompt; crosses 36 spans of 512 tokens",
    ),
    DeltaCase(
        id="gdn-next-18778-1x2",
        H=1,
        HV=2,
        lengths=(18778,),
        why="gdn-next-18778 with few heads, for references at full length",
    ),
    DeltaCase(
        id="gdn-fp16-next", dtype="float16", lengths=(18778,), why="checkpoints kept in float16"
    ),
    DeltaCase(id="gdn-next-32k", lengths=(32768,), why="cost must grow linearly"),
    DeltaCase(id="gdn-next-64k", lengths=(65536,), why="cost must grow linearly"),
    *(
        DeltaCase(
            id=f"gdn-397b-tp8-{name}",
            H=2,
            HV=8,
            lengths=(length,),
            why="Qwen3.5-397B on 8 GPUs: few heads, long sequence",
        )
        for name, length in (("8k", 8192), ("16k", 16384), ("32k", 32768), ("64k", 65536))
    ),
    DeltaCase(
        id="gdn-qk8-v16-8k",
        H=8,
        HV=16,
        lengths=(8192,),
        definition="gdn_prefill_qk8_v16_d128_k_last",
        why="a definition of flashinfer-bench",
    ),
    DeltaCase(
        id="gdn-qk4-v8-8k",
        H=4,
        HV=8,
        lengths=(8192,),
        definition="gdn_prefill_qk4_v8_d128_k_last",
        why="a definition of flashinfer-bench",
    ),
    DeltaCase(
        id="gdn-35b-tp2-2500",
        H=8,
        HV=16,
        lengths=(2500,),
        state="none",
        why="no states at all; the one shape where a public tile rule lost to a table",
    ),
    DeltaCase(id="gdn-27b-8k", HV=48, lengths=(8192,), why="Qwen3.5-27B: ratio 3"),
    DeltaCase(
        id="gdn-1m", H=1, HV=1, lengths=(1_048_576,), why="drift, and offsets beyond 32 bits"
    ),
)

PACKED = (
    DeltaCase(
        id="gdn-397b-4x8k",
        HV=64,
        lengths=(8192,) * 4,
        why="Qwen3.5-397B on one GPU, batch",
    ),
    DeltaCase(id="gdn-varlen-4x8k", lengths=(8192,) * 4, why="a packed batch of long prompts"),
    DeltaCase(id="gdn-varlen-8x1k", lengths=(1024,) * 8, why="a packed batch of short prompts"),
    *(
        DeltaCase(
            id=f"gdn-varlen-{count}seq",
            lengths=drawn_parts(count, count, 32768),
            why=f"{count} ragged sequences of 32,768 tokens in all",
        )
        for count in (33, 7, 4)
    ),
    DeltaCase(
        id="gdn-ragged-7seq",
        lengths=(15, 100, 0, 1, 63, 64, 1200),
        why="empty, one-token and odd sequences together",
    ),
    DeltaCase(id="gdn-256x64", lengths=(64,) * 256, why="many short rows"),
    DeltaCase(id="gdn-1x128", lengths=(128,), why="host overhead"),
    DeltaCase(id="gdn-1x1", lengths=(1,), why="host overhead of a single token"),
    DeltaCase(id="gdn-mixed", lengths=(1,) * 64 + (2048, 4000), why="decodes packed with prefills"),
    DeltaCase(
        id="gdn-pool",
        lengths=(8192,) * 4,
        state="pool",
        why="states in 4 scattered slots of 64, in place",
    ),
)

CACHED = (
    DeltaCase(
        id="gdn-residual-512",
        lengths=(512,),
        starts=(RESTORED,),
        state="cache",
        why="what service runs: new tokens on a restored snapshot",
    ),
    DeltaCase(
        id="gdn-residual-2k",
        lengths=(2048,),
        starts=(RESTORED,),
        state="cache",
        why="what service runs: new tokens on a restored snapshot",
    ),
    DeltaCase(
        id="gdn-residual-mix",
        lengths=trace.NEW,
        starts=trace.PREFIX,
        state="cache",
        why="what service runs, batched: 24 sequences drawn from a trace",
    ),
    *(
        DeltaCase(
            id=f"gdn-snap-2{suffix}",
            lengths=(8192,),
            snapshot_positions=((3072, 8128),),
            snapshot_dtype=dtype,
            why=f"two chosen snapshots for a prefix cache, {dtype}",
        )
        for suffix, dtype in (("", "float32"), ("-bf16", "bfloat16"))
    ),
    *(
        DeltaCase(
            id=f"gdn-snap-64{suffix}",
            lengths=(8192,),
            snapshot_every=64,
            snapshot_dtype=dtype,
            why=f"a snapshot every 64 tokens, {dtype}",
        )
        for suffix, dtype in (("", "float32"), ("-bf16", "bfloat16"))
    ),
    DeltaCase(
        id="gdn-decode-64",
        lengths=(1,) * 64,
        starts=DECODES,
        state="cache",
        why="decode of 64 sequences on tails of 0 to 63 rows",
    ),
    DeltaCase(
        id="gdn-verify-64x4",
        lengths=(4,) * 64,
        starts=DECODES,
        state="cache",
        drafts=True,
        why="speculative verify of 64 sequences on tails of 0 to 63 rows",
    ),
)

LAYERS = (
    DeltaCase(
        id="kda-8k", H=32, lengths=(8192,), per_channel=True, why="Kimi-Linear: decay per channel"
    ),
    DeltaCase(
        id="kda-residual-512",
        H=32,
        lengths=(512,),
        starts=(RESTORED,),
        state="cache",
        per_channel=True,
        why="Kimi-Linear on a restored snapshot",
    ),
    DeltaBlockCase(
        id="block-next-8k", lengths=(8192,), why="what users feel: the layer as an engine calls it"
    ),
    DeltaBlockCase(
        id="block-residual-512",
        lengths=(512,),
        starts=(RESTORED,),
        why="what users feel: the layer on a restored snapshot",
    ),
)

SIZES = tuple(
    DeltaCase(
        id=id,
        H=4,
        HV=4,
        K=K,
        V=V,
        lengths=(1000,),
        why="head sizes other than 128, not all powers of two",
    )
    for id, K, V in (
        ("gdn-dk64-dv64", 64, 64),
        ("gdn-dk96-dv128", 96, 128),
        ("gdn-dk256", 256, 256),
    )
)

NUMERICS = (
    DeltaCase(
        id="gdn-decay-hard",
        lengths=(4096,),
        values="decay-hard",
        why="decay as hard as real models show: -316 every 8th token, four rows of -inf",
    ),
    DeltaCase(
        id="gdn-late-forget",
        lengths=(4096,),
        values="late-forget",
        why="-inf or -316 late in every chunk: earlier rows keep their bits",
    ),
    DeltaCase(
        id="gdn-repeat",
        lengths=(4096,),
        values="repeat",
        why="a run of one token, beta 1, no decay: the inverse must not blow up",
    ),
    DeltaCase(
        id="gdn-raw-keys",
        H=4,
        HV=8,
        lengths=(1000,),
        values="raw-keys",
        why="keys of squared norm 100 that nobody normalised, g -30",
    ),
    DeltaCase(
        id="gdn-flat",
        lengths=(4096,),
        values="flat",
        why="no forgetting, beta 1: errors accumulate",
    ),
)

CASES: tuple[DeltaCase, ...] = (*LONG, *PACKED, *CACHED, *LAYERS, *SIZES, *NUMERICS)
