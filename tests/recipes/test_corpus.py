import corpus
import pytest


def test_held_out_books_are_not_in_the_training_text(verses):
    text = corpus.load(verses)
    for title in corpus.HELD_OUT:
        assert f"{title} 1\n\n1 ".encode() in text.held_out
        assert f"{title} 1\n".encode() not in text.train
    assert text.train.count(b" 2\n\n") == len(corpus.BOOKS) - len(corpus.HELD_OUT)
    assert text.sample in text.held_out
    assert text.sample.startswith(b"Jonah 1\n\n1 ")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"text: cannot read .*nowhere: No such file"):
        corpus.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:4], "a line", *lines[5:]], "line 5: expected a verse .* 'a line'"),
        (lambda lines: [*lines, "Foo1:1 words"], "expected a verse .* got 'Foo1:1 words'"),
        (
            lambda lines: [line for line in lines if not line.startswith("Obad")],
            "expected 66 books, missing Obadiah",
        ),
        (lambda lines: [*lines, "Rev3:1 naïve"], "text: expected ASCII, got byte 195"),
    ],
)
def test_what_is_no_such_text_is_refused(verses, tmp_path, change, message):
    path = tmp_path / "text"
    path.write_bytes("\n".join(change(verses.read_text().splitlines())).encode())
    with pytest.raises(ValueError, match=message):
        corpus.load(path)
