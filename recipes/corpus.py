"""The training text: the King James Version, read from the output of Debian's `bible` program.

`bible -f Gen1:1-Rev22:21` (package bible-kjv) prints one verse a line, "Ge1:1 In the beginning
...". The loader turns it into chapters with headings and numbered verses and sets six whole books
aside that are never trained on.
"""

import re
from pathlib import Path
from typing import NamedTuple

# Abbreviations of `bible -f` in their order, and what a heading says instead.
BOOKS = dict(
    pair.split(":")
    for pair in (
        "Ge:Genesis Exo:Exodus Lev:Leviticus Num:Numbers Deu:Deuteronomy Josh:Joshua Jdgs:Judges "
        "Ruth:Ruth 1Sm:1_Samuel 2Sm:2_Samuel 1Ki:1_Kings 2Ki:2_Kings 1Chr:1_Chronicles "
        "2Chr:2_Chronicles Ezra:Ezra Neh:Nehemiah Est:Esther Job:Job Psa:Psalms Prv:Proverbs "
        "Eccl:Ecclesiastes SSol:Song_of_Solomon Isa:Isaiah Jer:Jeremiah Lam:Lamentations "
        "Eze:Ezekiel Dan:Daniel Hos:Hosea Joel:Joel Amos:Amos Obad:Obadiah Jonah:Jonah Mic:Micah "
        "Nahum:Nahum Hab:Habakkuk Zep:Zephaniah Hag:Haggai Zec:Zechariah Mal:Malachi Mat:Matthew "
        "Mark:Mark Luke:Luke John:John Acts:Acts Rom:Romans 1Cor:1_Corinthians 2Cor:2_Corinthians "
        "Gal:Galatians Eph:Ephesians Phi:Philippians Col:Colossians 1Th:1_Thessalonians "
        "2Th:2_Thessalonians 1Tim:1_Timothy 2Tim:2_Timothy Titus:Titus Phmn:Philemon Heb:Hebrews "
        "Jas:James 1Pet:1_Peter 2Pet:2_Peter 1Jn:1_John 2Jn:2_John 3Jn:3_John Jude:Jude "
        "Rev:Revelation"
    ).split()
)
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
        raise ValueError(f"text: expected ASCII, got byte {error.object[error.start]} in {path}") from error

    books: dict[str, list[str]] = {}
    chapter = ""
    for number, line in enumerate(lines, 1):
        match = _VERSE.fullmatch(line)
        if match is None or match[1] not in BOOKS:
            raise ValueError(
                f"text: {path} line {number}: expected a verse such as 'Ge1:1 In the beginning', "
                f"got {line[:40]!r}"
            )
        title = BOOKS[match[1]].replace("_", " ")
        heading = f"{title} {match[2]}"
        book = books.setdefault(title, [])
        if heading != chapter:
            book.append(("\n" if book else "") + heading + "\n")
            chapter = heading
        book.append(f"{match[3]} {match[4]}")
    missing = [title for title in BOOKS.values() if title.replace("_", " ") not in books]
    if missing:
        raise ValueError(f"text: {path}: expected {len(BOOKS)} books, missing {', '.join(missing)}")

    whole = {title: "\n".join(book).encode() + b"\n" for title, book in books.items()}
    return Corpus(
        train=b"\n".join(data for title, data in whole.items() if title not in HELD_OUT),
        held_out=b"\n".join(whole[title] for title in HELD_OUT),
        sample=whole[SAMPLE],
    )
