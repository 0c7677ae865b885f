"""One vLLM engine in this process: requests of every kind, and what came of them, as JSON.

python engine_run.py '{"model": DIR, "dtype": "float32", "jobs": [...], "options": {...}}' OUT
"""

import contextlib
import itertools
import json
import os
import random
import sys
from pathlib import Path

from headstart import checkpoints
from headstart.integrations.vllm import statistics

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
CHUNK = 256
"""Most tokens of a step: longer prompts come in chunks."""


class Engine:
    """An engine of small steps, which counts the forwards of its model."""

    def __init__(self, model, dtype, options):
        from vllm import LLM

        small = {"max_num_seqs": 16, "max_num_batched_tokens": CHUNK, "enforce_eager": True}
        self.llm = LLM(model, dtype=dtype, max_model_len=4096, **small | options)
        self.forwards = 0
        statistics().reset()
        self.llm.apply_model(self._count_forwards)

    def _count_forwards(self, model):
        def count(*_):
            self.forwards += 1

        model.register_forward_pre_hook(count)

    def generate(self, prompts, tokens):
        from vllm import SamplingParams

        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        how = SamplingParams(temperature=0, max_tokens=tokens, logprobs=2, ignore_eos=True)
        return [found(output) for output in self.llm.generate(given, how, use_tqdm=False)]


def found(output):
    """Tokens, their log-probabilities and margins, and how much of the prompt was cached."""
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    best = [sorted(x.logprob for x in each.values()) for each in completion.logprobs]
    return {
        "prompt": list(output.prompt_token_ids),
        "tokens": tokens,
        "logprobs": [
            each[token].logprob for token, each in zip(tokens, completion.logprobs, strict=True)
        ],
        "margins": [each[-1] - each[-2] for each in best],
        "cached": output.num_cached_tokens,
        "reason": completion.finish_reason,
    }


def prompts(engine, count=50):
    """Fifty prompts from one byte to four chunks long."""
    text, dice = checkpoints.sample_text().read_bytes(), random.Random(3)
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 256, 257] + [
        dice.choice((dice.randrange(1, 100), dice.randrange(100, 900))) for _ in range(40)
    ]
    starts = [dice.randrange(len(text) - length) for length in lengths]
    cut = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return engine.generate(cut[:count], 12)


def few(engine):
    """The first sixteen of these prompts."""
    return prompts(engine, 16)


def prefixes(engine):
    """Prompts that share 1,700 tokens, the first of them alone, then again."""
    text = checkpoints.sample_text().read_bytes()
    tails = [text[2000 + 50 * n : 2040 + 57 * n] for n in range(5)]
    cut = [text[:1700] + tail for tail in tails]
    return [engine.generate(some, 8) for some in (cut[:1], cut[1:], cut)]


def crowd(engine):
    """64 requests at once, most of them short; every eighth is given up on the way."""
    from vllm import SamplingParams

    text, dice = checkpoints.sample_text().read_bytes(), random.Random(4)
    inner = engine.llm.llm_engine
    lengths = [dice.choice((1, 3, 8, 17, 30, 60, 200, 500)) for _ in range(64)]
    for n, length in enumerate(lengths):
        start = dice.randrange(len(text) - length)
        inner.add_request(
            f"crowd-{n}",
            {"prompt_token_ids": list(text[start : start + length])},
            SamplingParams(
                temperature=0, max_tokens=dice.randrange(1, 12), logprobs=2, ignore_eos=True
            ),
        )
    ended, given_up = {}, set()
    for step in itertools.count():
        if not inner.has_unfinished_requests():
            break
        for output in inner.step():
            if output.finished:
                ended[output.request_id] = found(output)
        if step % 2 == 0 and 8 * (step // 2) < 64:  # some wait, some prefill, some decode
            name = f"crowd-{8 * (step // 2)}"
            if name not in ended:
                given_up.add(name)
                inner.abort_request([name])
    return {"ended": ended, "given_up": sorted(given_up), "steps": step}


JOBS = {"prompts": prompts, "few": few, "prefixes": prefixes, "crowd": crowd}


def main(asked, place):
    """Run the jobs asked for, one after another, and write what was found."""
    engine = Engine(asked["model"], asked["dtype"], asked.get("options", {}))
    result = {job: JOBS[job](engine) for job in asked["jobs"]}
    result["forwards"] = engine.forwards
    result["served"] = dict(statistics().served)
    result["calls"] = [[*key, count] for key, count in statistics().calls.items()]
    engine.llm.llm_engine.engine_core.shutdown()
    Path(place).write_text(json.dumps(result))


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        main(json.loads(sys.argv[1]), sys.argv[2])
