"""Prefixes of earlier requests, kept for later ones: pages, canonical states, histories."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch

from headstart.integrations.prefix_tree import Node, PrefixTree
from headstart.integrations.snapshot_policy import SnapshotPolicy
from headstart.integrations.transformers.caches import HybridCache, known_lengths
from headstart.integrations.transformers.delta_layer import DeltaLayer
from headstart.integrations.transformers.forward import Forward
from headstart.integrations.transformers.pages import PAGE, PagePool, Pages
from headstart.ops.gated_delta_rule.schedule import floor_chunk
from headstart.runtime.checks import expect_int, host_ints, shown


class PrefixCache:
    """What requests to one model have in common, computed once: a radix tree over 64-token blocks.

    A request starts behind the longest prefix that is kept and brings the rest of its tokens; what
    it computes is kept for others. Operations give the same bits as for a cold prefill. Of softmax
    layers all keys and values are kept, in pages of 64 tokens that requests share; of linear layers
    the state and the convolution's history at places that `policy` chooses. A model without linear
    layers can be hit at every multiple of 64.

    Any number of requests may be open side by side, but one thread at a time may use them: they
    share memory that grows.

    Parameters
    ----------
    model: a Qwen3-Next, Qwen3.5 or gpt-oss model, or its configuration. All requests run on models
        of equal weights, which `enable` has been called with.
    budget: most bytes kept; beyond it the least recently used places are given up, but none that an
        open request stands on. What open requests have computed themselves is their own and counts
        when they end. Memory of pages that are given up is used again, not returned. None: no
        bound.
    policy: which places of a prompt get states.

    Attributes
    ----------
    requests, tokens, hit_tokens: requests opened, tokens that they asked for, and those found.
    evicted: places given up so far.

    >>> from transformers import GptOssConfig, GptOssForCausalLM
    >>> from headstart.integrations.transformers import enable
    >>> config = GptOssConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=64,
    ...     head_dim=64, num_attention_heads=4, num_key_value_heads=1, num_local_experts=2,
    ...     num_experts_per_tok=1, vocab_size=256,
    ...     rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    >>> model, prefixes = enable(GptOssForCausalLM(config).eval()), PrefixCache(config)
    >>> for prompt in (list(range(150)), list(range(140))):
    ...     with torch.inference_mode(), prefixes.request(prompt) as request:
    ...         rest = torch.tensor([prompt[request.hit :]])
    ...         logits = model(rest, cache=request.cache).logits
    ...     print(request.hit, logits.shape[1])
    0 150
    128 12
    """

    def __init__(
        self,
        model: Any,
        *,
        budget: int | None = None,
        policy: SnapshotPolicy | None = None,
    ) -> None:
        if policy is not None and not isinstance(policy, SnapshotPolicy):
            raise ValueError(f"policy: expected a SnapshotPolicy, got {shown(policy)}")
        if budget is not None:
            expect_int("budget", budget, 0)
        blank = HybridCache(model)  # says what is wrong with a model
        self._model = model
        self._has_states = any(isinstance(layer, DeltaLayer) for layer in blank.layers)
        # Both are made with the first prefix, which shows the sizes.
        self._tree: PrefixTree | None = None
        self._sizes: dict[int, dict[str, Any]] = {}  # of the states of each linear layer
        self._pool = PagePool()
        self.budget, self.policy = budget, policy or SnapshotPolicy()
        self.requests = self.tokens = self.hit_tokens = 0

    def request(self, tokens: Sequence[int] | torch.Tensor) -> PrefixRequest:
        """A request for a prompt of these token ids, as a context manager.

        tokens: one or more, as a list or a tensor [L] or [1, L]. The last one is never part of a
        hit, since its output must be computed.
        """
        if isinstance(tokens, torch.Tensor) and tokens.dim() == 2 and len(tokens) == 1:
            tokens = tokens[0]
        found = host_ints("tokens", tokens)
        if not found:
            raise ValueError("tokens: expected one or more, got none")
        return PrefixRequest(self, found)

    @property
    def bytes(self) -> int:
        """What is kept: pages and snapshots. Requests under way hold their own pages besides."""
        return self._tree.bytes if self._tree else 0

    @property
    def evicted(self) -> int:
        """Places given up so far to stay within the budget."""
        return self._tree.evicted if self._tree else 0

    def clear(self) -> None:
        """Give up everything that no open request stands on."""
        if self._tree is not None:
            for node in self._tree:
                if not node.users:
                    self._tree.drop(node)

    def _open(self, tokens: list[int]) -> tuple[Node | None, int, RequestCache]:
        """Where a request starts: the place in use, its tokens, and a cache that stands there."""
        node: Node | None = None
        hit = shared = 0
        if self._tree is not None:
            node, shared = self._tree.find(_blocks(tokens[:-1]))
            hit = node.end
        places = self.policy.places(hit, shared, len(tokens), PAGE) if self._has_states else []
        cache = RequestCache(
            self._model, [p * PAGE for p in places], hit * PAGE, len(tokens), self.policy
        )
        pages = Pages(self._pool)
        if self._tree is not None and node is not None and hit:
            pages.table.append(self._tree.path_pages(node))
            self._pool.share(pages.table[0])

        def standing(index: int, layer: Any) -> Any:
            if not isinstance(layer, DeltaLayer):
                return layer.restored(pages, hit * PAGE)
            if node is None or not hit:
                return layer
            state, history = node.state[index]
            return DeltaLayer.standing(hit * PAGE, state, history, self._sizes[index])

        cache.stand(pages, [standing(*pair) for pair in enumerate(cache.layers)])
        if self._tree is not None and node is not None:
            self._tree.use(node)
        self.requests += 1
        self.tokens += len(tokens)
        self.hit_tokens += hit * PAGE
        return node, hit * PAGE, cache

    def _leave(self, node: Node | None) -> None:
        """A request no longer stands there."""
        if self._tree is not None and node is not None:
            self._tree.leave(node)

    def _keep(self, tokens: list[int], hit: int, cache: HybridCache) -> None:
        """Keep what a request has computed past its hit."""
        counts = known_lengths(cache) or [0]
        if len(counts) != 1:
            raise ValueError(f"cache: expected one sequence in a request, got {len(counts)}")
        keys = _blocks(tokens[: counts[0]])
        if not keys:
            return
        deltas = {n: one for n, one in enumerate(cache.layers) if isinstance(one, DeltaLayer)}
        if self._tree is None:
            self._sizes = {n: one.sizes for n, one in deltas.items()}
            self._tree = PrefixTree(
                page_bytes=self._pool.page_bytes,
                state_bytes=sum(one.snapshot_bytes for one in deltas.values()),
                budget=self.budget,
                free=self._pool.give_back,
            )
        states: dict[int, dict[int, Any]] = {
            # Copies, since what a step has kept lies in one piece of memory.
            p // PAGE: {n: [x.clone() for x in one.kept[0, p]] for n, one in deltas.items()}
            for p in cache.snapshots()
            if hit < p <= len(keys) * PAGE
        }
        self._pool.share(self._tree.insert(keys, cache.pages.table[0], states))
        self.policy.thin_out(self._tree, keys)


class PrefixRequest:
    """A prompt on its way through a model, made by `PrefixCache.request`.

    On entry `cache` stands behind the longest kept prefix: run the model on tokens[hit:] with it,
    in whatever steps, and decode on if you like. On exit what the cache has seen of `tokens` is
    kept for others; after an error nothing is. One request is one sequence without padding.

    Attributes
    ----------
    tokens: ids of the prompt, and of what was added by `append`.
    hit: tokens found, a multiple of 64 (0 before the request is entered).
    cache: a `HybridCache`, from entry on.
    """

    cache: HybridCache

    def __init__(self, prefixes: PrefixCache, tokens: list[int]) -> None:
        self.tokens, self.hit = tokens, 0
        self._prefixes, self._entered = prefixes, False
        self._node: Node | None = None

    def append(self, tokens: Sequence[int] | torch.Tensor) -> None:
        """Tokens that were decoded after the prompt: they can be hit as well."""
        self.tokens += host_ints("tokens", tokens)

    def __enter__(self) -> Self:
        if self._entered:
            raise ValueError("request: expected one that was not entered before; open another")
        self._entered = True
        self._node, self.hit, self.cache = self._prefixes._open(self.tokens)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._prefixes._keep(self.tokens, self.hit, self.cache)
        finally:
            self._prefixes._leave(self._node)


class RequestCache(HybridCache):
    """The cache of one request: it keeps states at places of the prompt and at the output's end."""

    def __init__(
        self, model: Any, positions: list[int], hit: int, prompt: int, policy: SnapshotPolicy
    ) -> None:
        super().__init__(model, snapshot_positions=positions)
        self._hit, self._prompt, self._outputs = hit, prompt, policy.outputs

    def begin(self, forward: Forward) -> None:
        """A forward of the model begins.

        ValueError where one behind a hit ends past the prompt's end: run on the whole prompt, it
        would be kept as what it is not.
        """
        for start, end in zip(forward.starts, forward.ends, strict=True):
            if 0 < self._hit <= start < self._prompt < end:
                raise ValueError(
                    f"input_ids: expected at most the {self._prompt - start} tokens of the prompt "
                    f"behind position {start} (tokens[hit:]), got {end - start}"
                )
        super().begin(forward)

    def wanted(self, forward: Forward) -> tuple[tuple[int, ...], ...] | None:
        """Positions to be kept that the forward passes; of decoded tokens the last one alone."""
        end = floor_chunk(min(forward.ends))
        if self._outputs and end > max(self._prompt, *forward.starts):
            of_prompt = [p for p in self.snapshot_positions if p <= self._prompt]
            self.snapshot_positions = [*of_prompt, end]
            for layer in self.layers:
                if isinstance(layer, DeltaLayer):
                    layer.forget(self._prompt, end)
        return super().wanted(forward)


def _blocks(tokens: Sequence[int]) -> list[bytes]:
    """Whole blocks of tokens, each as the bytes of its ids."""
    packed = array("q", tokens).tobytes()
    size = PAGE * 8
    return [packed[at : at + size] for at in range(0, len(packed) - size + 1, size)]
