import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # the recipe is a folder of scripts, no package

WORDS = b"and the king of israel said unto them, behold, I have seen a vision by night; "


@pytest.fixture(scope="session")
def recipes() -> Path:
    return RECIPES


@pytest.fixture(scope="session")
def verses(tmp_path_factory) -> Path:
    """A text in the form that the loader reads: all books, long enough to train on."""
    import corpus

    lines = []
    for number, book in enumerate(corpus.BOOKS):
        for verse in range(1, 11):
            turn = (7 * number + 13 * verse) % len(WORDS)
            words = (WORDS[turn:] + WORDS[:turn]).decode().strip()
            lines.append(f"{book}{1 + verse // 6}:{verse} {words}")
    path = tmp_path_factory.mktemp("text") / "verses.txt"
    path.write_text("\n".join(lines) + "\n")
    return path
