import itertools

import pytest

from headstart import checkpoints
from headstart.checkpoints.recall import PAIR_BYTES, answered, recall_prompt

TEXT = checkpoints.sample_text().read_bytes()


def test_equal_arguments_give_equal_prompts_and_other_seeds_others():
    first = recall_prompt(3, 2048, TEXT)
    assert first == recall_prompt(3, 2048, TEXT)
    assert first.data != recall_prompt(4, 2048, TEXT).data


@pytest.mark.parametrize(
    ("length", "pairs", "questions"),
    [(256, 8, 8), (512, 12, 1), (2048, 32, 16), (16384, 64, 16), (700, 1, 1)],
)
def test_every_question_has_one_answer(length, pairs, questions):
    prompt = recall_prompt("unambiguous", length, TEXT, pairs=pairs, questions=questions)
    assert len(prompt.data) == length
    assert len(prompt.answers) == questions
    hay_end = length - questions * PAIR_BYTES
    for start, value, distance in prompt.answers:
        question = prompt.data[start - 3 : start]
        assert question[:1] == b"<"
        assert prompt.data[start : start + 3] == value + b">"
        # Before it is asked the key occurs once, in the hay, followed by the same value.
        assert prompt.data[: start - 3].count(question) == 1
        place = prompt.data.index(question)
        assert place < hay_end
        assert prompt.data[place + 3 : place + 5] == value
        assert start - (place + 3) == distance
    assert prompt.data.count(b"<") == pairs + questions


def test_distances_cover_the_prompt():
    distances = sorted(answer.distance for answer in recall_prompt(0, 2048, TEXT).answers)
    assert distances[0] < 300
    assert distances[-1] > 1700
    gaps = [b - a for a, b in itertools.pairwise(distances)]
    assert max(gaps) < 400


def test_a_short_text_is_repeated():
    prompt = recall_prompt(0, 400, b"a b ", pairs=2, questions=1)
    assert prompt.data.startswith(b"a b a b ")


def test_a_question_counts_only_with_its_whole_value():
    prompt = recall_prompt(1, 512, TEXT, pairs=4, questions=2)
    predictions = list(prompt.data[1:])
    assert answered(prompt, predictions) == [True, True]
    predictions[prompt.answers[1].start] = 0  # the second byte of the second value
    assert answered(prompt, predictions) == [True, False]
    with pytest.raises(ValueError, match=r"predictions: expected at least 511, got 3"):
        answered(prompt, [1, 2, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pairs": 0}, "pairs: expected 1 to 676, got 0"),
        ({"pairs": 677}, "pairs: expected 1 to 676, got 677"),
        ({"pairs": 4, "questions": 5}, "questions: expected 1 to pairs = 4, got 5"),
        ({"text": b""}, "text: expected bytes without '<'"),
        ({"text": b"a <b> c"}, "text: expected bytes without '<'"),
        ({"length": 100}, "length: expected at least 321 for these pairs, got 100"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    given = {"seed": 0, "length": 2048, "text": TEXT} | arguments
    with pytest.raises(ValueError, match=message):
        recall_prompt(**given)
