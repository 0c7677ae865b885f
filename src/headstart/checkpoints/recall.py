"""Associative recall in bytes: pairs hidden in a text, asked for again at its end.

A pair is a key of two lower-case letters and a value of two upper-case ones: `<qkVT>`. The keys of
a prompt are distinct and the text around them holds no `<`, so a question `<qk` has one answer.
Questions have the form of the pairs, hence a model answers by predicting the bytes after the key.

Example::

    >>> prompt = recall_prompt(7, 512, b"And it came to pass in those days, ", pairs=4, questions=2)
    >>> len(prompt.data), prompt.data[-6:]
    (512, b'<elAP>')
    >>> answer = prompt.answers[-1]
    >>> prompt.data[answer.start : answer.start + 2], answer.value
    (b'AP', b'AP')
    >>> prompt.data.count(b"<elAP>")
    2
    >>> answered(prompt, list(prompt.data[1:]))  # predictions that are always right
    [True, True]
"""

import random
import string
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["PAIR_BYTES", "Answer", "RecallPrompt", "answered", "recall_prompt"]

PAIR_BYTES = len(b"<qkVT>")
_KEYS = [(a + b).encode() for a in string.ascii_lowercase for b in string.ascii_lowercase]
_VALUES = [(a + b).encode() for a in string.ascii_uppercase for b in string.ascii_uppercase]


class Answer(NamedTuple):
    """One question of a prompt.

    start: index in the prompt of the first byte of the expected value.
    value: the two bytes expected there.
    distance: bytes between this value and the one it repeats.
    """

    start: int
    value: bytes
    distance: int


class RecallPrompt(NamedTuple):
    """A text with pairs, its questions at the end, each followed by its right answer.

    data: the bytes, which are also the token ids. data[: answers[i].start] asks question i.
    answers: one entry a question, in the order in which they are asked.
    """

    data: bytes
    answers: tuple[Answer, ...]


def recall_prompt(
    seed: int | str, length: int, text: bytes, *, pairs: int = 32, questions: int = 16
) -> RecallPrompt:
    """Draw a prompt of exactly `length` bytes; equal arguments give equal prompts.

    The text is cut at a random place and repeated if it is short. Pair i lies in the i-th of
    `pairs` equal stretches of it, behind a space where the stretch has one. The questions take
    pairs from evenly spread stretches, first and last among them, in random order, so the
    distances cover the prompt.

    Raises ValueError where a number does not fit or the text holds a `<`.
    """
    if not 1 <= pairs <= len(_KEYS):
        raise ValueError(f"pairs: expected 1 to {len(_KEYS)}, got {pairs}")
    if not 1 <= questions <= pairs:
        raise ValueError(f"questions: expected 1 to pairs = {pairs}, got {questions}")
    if not text or b"<" in text:
        raise ValueError(f"text: expected bytes without '<', got {text[:20]!r}")
    text_bytes = length - PAIR_BYTES * (pairs + questions) - 1
    if text_bytes < pairs:
        least = PAIR_BYTES * (pairs + questions) + 1 + pairs
        raise ValueError(f"length: expected at least {least} for these pairs, got {length}")

    rng = random.Random(f"recall {seed}")
    start = rng.randrange(max(1, len(text) - text_bytes))
    hay = (text[start : start + text_bytes] * (text_bytes // len(text) + 1))[:text_bytes]
    keys = rng.sample(_KEYS, pairs)
    values = [rng.choice(_VALUES) for _ in keys]

    data = bytearray()
    value_starts = []
    copied = 0
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        low, high = text_bytes * i // pairs, text_bytes * (i + 1) // pairs
        drawn = rng.randrange(low, high)
        position = hay.find(b" ", drawn, high) + 1 or drawn
        data += hay[copied:position]
        copied = position
        value_starts.append(len(data) + 3)
        data += b"<%b%b>" % (key, value)
    data += hay[copied:] + b"\n"

    spread = max(1, questions - 1)
    asked = [(pairs - 1) * i // spread for i in range(questions)]
    rng.shuffle(asked)
    answers = []
    for i in asked:
        begin = len(data) + 3
        answers.append(Answer(begin, values[i], begin - value_starts[i]))
        data += b"<%b%b>" % (keys[i], values[i])
    return RecallPrompt(bytes(data), tuple(answers))


def answered(prompt: RecallPrompt, predictions: Sequence[int]) -> list[bool]:
    """Which questions a model answers, given its most likely byte after each byte of the prompt.

    predictions: at least len(prompt.data) - 1 ids; entry i is the prediction for byte i + 1.
    A question counts as answered when both bytes of its value are predicted.
    """
    if len(predictions) < len(prompt.data) - 1:
        raise ValueError(
            f"predictions: expected at least {len(prompt.data) - 1}, got {len(predictions)}"
        )
    return [
        all(predictions[start - 1 + j] == byte for j, byte in enumerate(value))
        for start, value, _ in prompt.answers
    ]
