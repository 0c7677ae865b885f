"""A model and a prompt from files, or one clear error."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart import checkpoints
from headstart.evidence.prefill.configuration import expect_sound, read_configuration
from headstart.runtime.checks import shown

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

    Raises ValueError for an unknown name, a folder without a readable and sound configuration, a
    model of another family, and weights that are missing, left over, truncated or of the wrong
    shape.
    """
    folder = checkpoints.path(name) if name in checkpoints.names() else Path(name)
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(
            f"model: expected {', '.join(checkpoints.names())} or a folder with a config.json, "
            f"got {name!r}"
        )
    supported_configuration(file)
    model = _weights(folder, dtype).to(device).eval()
    encode, decode = _tokenizer(folder)
    return Loaded(name, model, encode, decode)


def supported_configuration(file: Path) -> dict[str, Any]:
    """The fields of a config.json of a supported family, looked over; else a ValueError."""
    configuration = read_configuration(file)
    if "model_type" not in configuration:
        raise ValueError(f"model: {file} has no field 'model_type'")
    kind = configuration["model_type"]
    if not isinstance(kind, str) or kind not in SUPPORTED:
        families = ", ".join(dict.fromkeys(SUPPORTED.values()))
        raise ValueError(
            f"model: expected a model of {families}, got {shown(kind)} in {file}: "
            "it has no layer that headstart supports"
        )
    expect_sound(file, configuration)
    return configuration


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
    if max(ids) >= loaded.config.vocab_size:
        raise ValueError(
            f"model: {loaded.name}: expected tokens below vocab_size = {loaded.config.vocab_size}, "
            f"got {max(ids)} from its tokenizer"
        )
    return ids


def _weights(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True
            )
            model, report = loaded
    except Exception as error:  # no list of types covers what a spoilt folder makes it raise
        found = _wrong_shape(folder) or _told(error)
        raise ValueError(f"model: cannot load {folder}: {found}") from error
    for problem in ("missing_keys", "mismatched_keys"):
        if found := sorted(map(str, report.get(problem) or ())):
            words = problem.replace("_keys", "")
            raise ValueError(
                f"model: {folder}: {len(found)} {words} weights, the first is {found[0]}"
            )
    layers = model.config.get_text_config().num_hidden_layers
    left = [name for name in report["unexpected_keys"] if _layer(name) >= layers]
    if left:
        raise ValueError(
            f"model: {folder}: expected weights of num_hidden_layers = {layers} layers, "
            f"got {len(left)} of later ones, the first is {min(left)}"
        )
    return model


def _layer(name: str) -> int:
    """Which layer of the text model a weight belongs to; -1 for all others.

    >>> _layer("model.layers.12.mlp.up_proj.weight"), _layer("mtp.layers.0.norm.weight")
    (12, -1)
    """
    found = re.match(r"model\.(?:language_model\.)?layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _told(error: Exception) -> str:
    """What an exception says, in at most a few lines; with its type where it says little."""
    text = " ".join(str(error).split())
    told = (ValueError, OSError, ImportError)
    if type(error).__module__ == "builtins" and not isinstance(error, told):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 300 else f"{text[:297]}..."


def _wrong_shape(folder: Path) -> str | None:
    """A weight whose shape is not what the configuration makes of it; None if none is found."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with quiet(), torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            expected = AutoModelForCausalLM.from_config(config).state_dict()
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (no mapping)
                    shape = weights.get_slice(name).get_shape()
                    if name in expected and list(expected[name].shape) != shape:
                        return (
                            f"{name}: expected {list(expected[name].shape)} as config.json says, "
                            f"got {shape} in {file.name}"
                        )
    except Exception:  # whatever made loading fail may do so again: then that is what is told
        return None
    return None


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
        return text_directions(tokenizer)
    except Exception as error:  # as for the weights
        raise ValueError(f"model: cannot load the tokenizer of {folder}: {_told(error)}") from error


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
