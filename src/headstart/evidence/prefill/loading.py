"""A model and a prompt from files, or one clear error."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart import checkpoints

SUPPORTED = {
    "qwen3_next": "Qwen3-Next",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5",
    "qwen3_5_moe_text": "Qwen3.5",
    "gpt_oss": "gpt-oss",
}
"""Model types of transformers with layers that headstart runs."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to run and the two directions of its tokenizer.

    encode: bytes of a prompt -> token ids; any bytes will do.
    decode: token ids -> bytes.
    """

    name: str
    model: Any
    encode: Callable[[bytes], list[int]]
    decode: Callable[[list[int]], bytes]

    @property
    def config(self) -> Any:
        """The text part of the model's configuration."""
        return self.model.config.get_text_config()

    @property
    def kinds(self) -> list[str]:
        """Of each layer: "linear_attention", "full_attention" or "sliding_attention"."""
        return list(self.config.layer_types)


def read_prompt(path: Path | str) -> bytes:
    """The bytes of a prompt file; ValueError if there are none."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"prompt-file: cannot read {path}: {error.strerror}") from error
    if not data:
        raise ValueError(f"prompt-file: {path} is empty")
    return data


def load(
    name: str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Loaded:
    """The shipped checkpoint called `name`, or the one in the folder `name`.

    Raises ValueError for an unknown name, a folder without a readable configuration, a model of
    another family, and weights that are missing, truncated or of the wrong shape.
    """
    folder = checkpoints.path(name) if name in checkpoints.names() else Path(name)
    kind = _model_type(name, folder)
    if kind not in SUPPORTED:
        families = ", ".join(dict.fromkeys(SUPPORTED.values()))
        raise ValueError(
            f"model: expected a model of {families}, got {kind!r} in {folder / 'config.json'}: "
            "it has no layer that headstart supports"
        )
    model = _weights(folder, dtype).to(device).eval()
    encode, decode = _tokenizer(folder)
    return Loaded(name, model, encode, decode)


def tokens(loaded: Loaded, prompt: bytes) -> list[int]:
    """Token ids of a prompt; ValueError where the model has no positions for so many."""
    ids = loaded.encode(prompt)
    most = loaded.config.max_position_embeddings
    if not ids:
        raise ValueError("prompt-file: the prompt has no tokens")
    if len(ids) > most:
        raise ValueError(
            f"prompt-file: expected at most {most} tokens (max_position_embeddings of "
            f"{loaded.name}), got {len(ids)}"
        )
    return ids


def _model_type(name: str, folder: Path) -> str:
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(
            f"model: expected {', '.join(checkpoints.names())} or a folder with a config.json, "
            f"got {name!r}"
        )
    try:
        return str(json.loads(file.read_text())["model_type"])
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"model: cannot read {file}: {error}") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"model: {file} has no field 'model_type'") from error


def _weights(folder: Path, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
            model, report = loaded
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"model: cannot load {folder}: {error}") from error
    for problem in ("missing_keys", "mismatched_keys"):
        if found := sorted(map(str, report.get(problem) or ())):
            words = problem.replace("_keys", "")
            raise ValueError(
                f"model: {folder}: {len(found)} {words} weights, the first is {found[0]}"
            )
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no advice from transformers while a model loads."""
    from transformers.utils import logging as chatter

    bars = chatter.is_progress_bar_enabled()
    level = chatter.get_verbosity()
    chatter.disable_progress_bar()
    chatter.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        chatter.set_verbosity(level)
        if bars:
            chatter.enable_progress_bar()


def _tokenizer(folder: Path) -> tuple[Callable, Callable]:
    from transformers import AutoTokenizer

    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"model: cannot load the tokenizer of {folder}: {error}") from error
    return text_directions(tokenizer)


def text_directions(tokenizer: Any) -> tuple[Callable, Callable]:
    """`encode` and `decode` of a tokenizer; a vocabulary of bytes takes any, others take text."""
    if _is_bytes(tokenizer):
        return list, lambda ids: bytes(token for token in ids if token < 256)

    def encode(prompt: bytes) -> list[int]:
        return tokenizer(prompt.decode("utf-8", errors="replace"))["input_ids"]

    return encode, lambda ids: tokenizer.decode(ids).encode()


def _is_bytes(tokenizer: Any) -> bool:
    """Whether the id of every token is the value of its byte: then no text is needed at all."""
    shown = _shown_bytes()
    return len(tokenizer) < 300 and tokenizer.convert_tokens_to_ids(
        [shown[value] for value in range(256)]
    ) == list(range(256))


def _shown_bytes() -> list[str]:
    """The printable character that byte-level vocabularies write for each byte.

    >>> shown = _shown_bytes()
    >>> shown[65], shown[32], len(set(shown))
    ('A', 'Ġ', 256)
    """
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = 256
    shown = []
    for value in range(256):
        if value in plain:
            shown.append(chr(value))
        else:
            shown.append(chr(shifted))
            shifted += 1
    return shown
