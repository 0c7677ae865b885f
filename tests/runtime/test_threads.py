"""Threads with their own workspaces and caches compute what one thread computes, bit for bit."""

import contextlib
import threading

import pytest
import torch
from tests.implementations import DEVICE

import headstart
from headstart import DeltaCache, ExtendPlan, Gate, KVCache, Schedule, Workspace

H, HV, K, V, CHANNELS = 1, 2, 16, 16, 8
THREADS, CALLS = 8, 1000
STEPS = (3, 64, 1, 9, 40)
"""Tokens of the steps of a sequence, before it begins again."""


class Service:
    """One sequence after another, each step through a convolution, the rule, attention and norm."""

    def __init__(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        total = sum(STEPS)

        def some(*shape):
            return torch.randn(shape, generator=source).to(DEVICE)

        self.x, self.weight = some(total, CHANNELS), some(CHANNELS, 4)
        self.q, self.k, self.v = some(total, H, K), some(total, H, K), some(total, HV, V)
        self.g, self.beta, self.norm = -some(total, HV).abs(), some(total, HV), some(V)
        self.kv = KVCache(*(torch.zeros(total, H, K, device=DEVICE) for _ in "kv"))
        sizes = {"H": H, "HV": HV, "K": K, "V": V, "conv_channels": CHANNELS}
        self.cache = DeltaCache(2, **sizes, dtype=torch.float32, device=DEVICE)
        self.workspace, self.slot = Workspace(DEVICE), self.cache.at([1])

    def step(self, begin: int, length: int) -> list[torch.Tensor]:
        rows = slice(begin, begin + length)
        schedule = Schedule([length], start_positions=[begin], device=DEVICE)
        y = headstart.causal_conv1d(self.x[rows], self.weight, schedule=schedule, state=self.slot).y
        o = headstart.gated_delta_rule(
            self.q[rows], self.k[rows], self.v[rows], self.g[rows], self.beta[rows],
            schedule=schedule, state=self.slot, gate=Gate.log(beta="logit"), qk_l2norm=True,
            workspace=self.workspace,
        ).o  # fmt: skip
        plan = ExtendPlan.from_lengths([length], [begin], device=DEVICE)
        key = self.k[rows]
        seen = headstart.extend_attention(
            self.q[rows], key, key, plan=plan, cache=self.kv, window=50, workspace=self.workspace
        )
        headstart.write_kv(key, key, self.kv, list(range(begin, begin + length)))
        return [y, o, seen, headstart.rms_norm_gated(o, self.norm, self.v[rows])]

    def run(self, calls: int) -> list[list[torch.Tensor]]:
        """Results of at least so many calls (five a step), of every sequence."""
        results, made = [], 0
        while made < calls:
            begin, found = 0, []
            for length in STEPS:
                found += self.step(begin, length)
                begin += length
                made += 5
            results.append(found)
        return results


@pytest.fixture
def spread():
    """The number of PyTorch's threads is put back."""
    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)


def same(results: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(results, others, strict=True))


def own_stream():
    """On a GPU: what follows is on a stream of its own, and done when it ends."""
    if DEVICE == "cpu":
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def entered():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()

    return entered()


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize(("operation_threads", "calls"), [(1, CALLS), (2, CALLS // 5)])
def test_threads_do_not_meet(spread, operation_threads, calls):
    spread(operation_threads)
    with torch.inference_mode():
        wanted = [Service(seed).run(1)[0] for seed in range(THREADS)]
        if DEVICE != "cpu":
            torch.cuda.synchronize()
    wrong: list[str] = []
    began = threading.Barrier(THREADS)

    def serve(seed: int) -> None:
        try:
            with torch.inference_mode(), own_stream():
                service = Service(seed)
                began.wait()
                for i, results in enumerate(service.run(calls)):
                    if not same(results, wanted[seed]):
                        wrong.append(f"sequence {i} of thread {seed}")
        except BaseException as error:
            wrong.append(repr(error))
            raise

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_service_computes_what_float64_does():
    """So that threads are compared with what is right, not with each other's mistake."""
    service = Service(0)
    with torch.inference_mode():
        results = service.run(1)[0]
        o = torch.cat(results[1::4])
        wide = [x.double() for x in (service.q, service.k, service.v, service.g, service.beta)]
        want = headstart.gated_delta_rule(
            *wide, gate=Gate.log(beta="logit"), qk_l2norm=True, implementation="reference"
        ).o
    assert (o - want).norm() < 1e-5 * want.norm()
