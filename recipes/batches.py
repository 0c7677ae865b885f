"""Training batches: a quarter text, the rest recall prompts, short distances first."""

import random

import torch
from torch.utils.data import Dataset

from headstart.checkpoints.recall import PAIR_BYTES, recall_prompt

# Row lengths that are drawn from, up to each share of the run.
STAGES = (
    (0.15, (128, 256)),
    (0.30, (256, 512)),
    (0.50, (256, 512, 1024, 2048)),
    (1.00, (512, 1024, 2048, 4096, 16384)),
)
LONGEST = 16_384
TEXT, PAIR, ANSWER = 1, 0, 2  # what a target is: read for the loss by its kind


class Batches(Dataset):
    """Batch i depends on the seed and i alone, whichever worker draws it.

    An item is (ids [B, L + 1], kinds [B, L]), uint8: ids[:, 1:] are the targets of ids[:, :-1].
    Targets inside a pair are random letters: only the answers among them are learnt.
    """

    def __init__(self, text: bytes, steps: int, tokens: int, seed: int):
        if len(text) <= LONGEST:
            raise ValueError(f"text: expected more than {LONGEST} bytes, got {len(text)}")
        least = 2 * max(min(lengths) for _, lengths in STAGES)  # two rows at every stage
        if tokens < least:
            raise ValueError(f"tokens: expected at least {least}, got {tokens}")
        self.text, self.steps, self.tokens, self.seed = text, steps, tokens, seed

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = random.Random(f"batch {self.seed} {step}")
        share = step / self.steps
        lengths = next(lengths for end, lengths in STAGES if share < end or end == 1.0)
        length = rng.choice([n for n in lengths if 2 * n <= self.tokens])
        rows = self.tokens // length
        ids = torch.empty(rows, length + 1, dtype=torch.uint8)
        kinds = torch.full((rows, length), TEXT, dtype=torch.uint8)
        for row in range(rows):
            if row < max(1, rows // 4):
                start = rng.randrange(len(self.text) - length)
                data = self.text[start : start + length + 1]
            else:
                data = self._recall_row(f"{self.seed} {step} {row}", length, rng, kinds[row])
            ids[row] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return ids, kinds

    def _recall_row(self, seed: str, length: int, rng: random.Random, kinds: torch.Tensor) -> bytes:
        pairs = rng.randint(2, min(64, length // 16))
        prompt = recall_prompt(
            seed, length + 1, self.text, pairs=pairs, questions=rng.randint(pairs // 2, pairs)
        )
        data = prompt.data
        place = data.find(b"<")
        while place >= 0:
            kinds[place : place + PAIR_BYTES - 1] = PAIR  # the target of i is byte i + 1
            place = data.find(b"<", place + 1)
        for start, value, _ in prompt.answers:
            kinds[start - 1 : start - 1 + len(value)] = ANSWER
        return data
