"""The training text: the King James Version, read from the output of Debian's `bible` program.

`bible -f Gen1:1-Rev22:21` (package bible-kjv) prints one verse a line, "Ge1:1 In the beginning
...". The loader turns it into chapters with headings and numbered verses and sets six whole books
aside that are never trained on.
"""

import re
from pathlib import Path
from typing import NamedTuple

# Abbreviations of `bible -f` in their order, and what a heading says instead.
BOOKS = {
    "Ge": "Genesis",
    "Exo": "Exodus",
    "Lev": "Leviticus",
    "Num": "Numbers",
    "Deu": "Deuteronomy",
    "Josh": "Joshua",
    "Jdgs": "Judges",
    "Ruth": "Ruth",
    "1Sm": "1 Samuel",
    "2Sm": "2 Samuel",
    "1Ki": "1 Kings",
    "2Ki": "2 Kings",
    "1Chr": "1 Chronicles",
    "2Chr": "2 Chronicles",
    "Ezra": "Ezra",
    "Neh": "Nehemiah",
    "Est": "Esther",
    "Job": "Job",
    "Psa": "Psalms",
    "Prv": "Proverbs",
    "Eccl": "Ecclesiastes",
    "SSol": "Song of Solomon",
    "Isa": "Isaiah",
    "Jer": "Jeremiah",
    "Lam": "Lamentations",
    "Eze": "Ezekiel",
    "Dan": "Daniel",
    "Hos": "Hosea",
    "Joel": "Joel",
    "Amos": "Amos",
    "Obad": "Obadiah",
    "Jonah": "Jonah",
    "Mic": "Micah",
    "Nahum": "Nahum",
    "Hab": "Habakkuk",
    "Zep": "Zephaniah",
    "Hag": "Haggai",
    "Zec": "Zechariah",
    "Mal": "Malachi",
    "Mat": "Matthew",
    "Mark": "Mark",
    "Luke": "Luke",
    "John": "John",
    "Acts": "Acts",
    "Rom": "Romans",
    "1Cor": "1 Corinthians",
    "2Cor": "2 Corinthians",
    "Gal": "Galatians",
    "Eph": "Ephesians",
    "Phi": "Philippians",
    "Col": "Colossians",
    "1Th": "1 Thessalonians",
    "2Th": "2 Thessalonians",
    "1Tim": "1 Timothy",
    "2Tim": "2 Timothy",
    "Titus": "Titus",
    "Phmn": "Philemon",
    "Heb": "Hebrews",
    "Jas": "James",
    "1Pet": "1 Peter",
    "2Pet": "2 Peter",
    "1Jn": "1 John",
    "2Jn": "2 John",
    "3Jn": "3 John",
    "Jude": "Jude",
    "Rev": "Revelation",
}
# Books with no long parallel elsewhere in the text, from both testaments.
HELD_OUT = ("Ruth", "Esther", "Ecclesiastes", "Jonah", "Philippians", "James")
SAMPLE = "Jonah"

_VERSE = re.compile(r"((?:[1-3])?[A-Za-z]+)(\d+):(\d+) (\S.*)")


class Corpus(NamedTuple):
    """train, held_out: ASCII bytes; sample: the held-out book that ships with the package."""

    train: bytes
    held_out: bytes
    sample: bytes


def load(path: Path) -> Corpus:
    """Read and split the verses; ValueError says which line or book is not as expected."""
    try:
        lines = path.read_bytes().decode("ascii").splitlines()
    except OSError as error:
        raise ValueError(f"text: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text: expected ASCII, got byte {error.object[error.start]} in {path}"
        ) from error

    books: dict[str, list[str]] = {}
    chapter = ""
    for number, line in enumerate(lines, 1):
        match = _VERSE.fullmatch(line)
        if match is None or match[1] not in BOOKS:
            raise ValueError(
                f"text: {path} line {number}: expected a verse such as 'Ge1:1 In the beginning', "
                f"got {line[:40]!r}"
            )
        title = BOOKS[match[1]]
        heading = f"{title} {match[2]}"
        book = books.setdefault(title, [])
        if heading != chapter:
            book.append(("\n" if book else "") + heading + "\n")
            chapter = heading
        book.append(f"{match[3]} {match[4]}")
    missing = [title for title in BOOKS.values() if title not in books]
    if missing:
        raise ValueError(f"text: {path}: expected {len(BOOKS)} books, missing {', '.join(missing)}")

    whole = {title: "\n".join(book).encode() + b"\n" for title, book in books.items()}
    return Corpus(
        train=b"\n".join(data for title, data in whole.items() if title not in HELD_OUT),
        held_out=b"\n".join(whole[title] for title in HELD_OUT),
        sample=whole[SAMPLE],
    )
