import corpus
import pytest
import torch
from batches import ANSWER, PAIR, STAGES, TEXT, Batches


@pytest.fixture(scope="module")
def text(verses) -> bytes:
    return corpus.load(verses).train


def test_a_batch_depends_on_seed_and_step_alone(text):
    first = [Batches(text, 10, 4096, seed=0)[step] for step in (7, 3)]
    again = [Batches(text, 10, 4096, seed=0)[step] for step in (3, 7)]
    assert torch.equal(first[0][0], again[1][0])
    assert torch.equal(first[1][1], again[0][1])
    other = Batches(text, 10, 4096, seed=1)[3][0]
    assert other.shape != first[1][0].shape or not torch.equal(other, first[1][0])


def test_targets_are_marked_by_what_can_be_learnt_of_them(text):
    ids, kinds = Batches(text, 10, 4096, seed=0)[0]
    rows = ids.shape[0]
    assert kinds.shape == (rows, ids.shape[1] - 1)
    assert (kinds[: rows // 4] == TEXT).all()
    for row, kind in zip(ids[rows // 4 :], kinds[rows // 4 :], strict=True):
        targets = row[1:]
        assert ((targets >= 65) & (targets <= 90))[kind == ANSWER].all()
        assert (kind == ANSWER).sum() % 2 == 0
        assert (kind == ANSWER).any()
        assert (kind == PAIR).any()
        # What follows a `<` is random, unless it repeats a key: then the value is an answer.
        first_key_byte = torch.nonzero(row[:-1] == ord("<"))[:, 0]
        assert (kind[first_key_byte] == PAIR).all()


def test_distances_grow(text):
    data = Batches(text, 200, 32_768, seed=0)
    lengths = [data[step][1].shape[1] for step in (0, 10, 20, 29, *range(100, 200, 12))]
    assert max(lengths[:4]) <= max(STAGES[0][1])
    assert max(lengths[4:]) >= 4096


def test_what_does_not_fit_is_refused(text):
    with pytest.raises(ValueError, match="text: expected more than 16384 bytes, got 100"):
        Batches(text[:100], 10, 4096, seed=0)
    with pytest.raises(ValueError, match="tokens: expected at least 1024, got 64"):
        Batches(text, 10, 64, seed=0)
