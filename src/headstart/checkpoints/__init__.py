"""Two tiny trained checkpoints in Hugging Face format, a sample text and a recall task.

`tiny-qwen3-next` and `tiny-gpt-oss` read bytes: the id of a token is the value of its byte, so any
byte string is a prompt, valid UTF-8 or not. How they were made and what they score:
docs/checkpoints.md.

Example::

    >>> from headstart import checkpoints
    >>> checkpoints.names()
    ('tiny-gpt-oss', 'tiny-qwen3-next')
    >>> (checkpoints.path("tiny-gpt-oss") / "config.json").is_file()
    True
    >>> checkpoints.sample_text().read_bytes()[:7]
    b'Jonah 1'
"""

from pathlib import Path

__all__ = ["names", "path", "sample_text"]

_NAMES = ("tiny-gpt-oss", "tiny-qwen3-next")
_FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Names that `path` takes, in alphabetical order."""
    return _NAMES


def path(name: str) -> Path:
    """Folder of the checkpoint called `name` (config, tokenizer and weights), as installed.

    Raises ValueError for a name that is not one of `names()`.
    """
    if name not in _NAMES:
        raise ValueError(f"name: expected one of {', '.join(_NAMES)}, got {name!r}")
    return _FOLDER / name


def sample_text() -> Path:
    """Plain ASCII text of a few thousand bytes that neither checkpoint was trained on."""
    return _FOLDER / "sample.txt"
