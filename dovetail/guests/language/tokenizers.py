"""Tokenizers: llama2.c's own files, Hugging Face's `tokenizers` and SentencePiece."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from dovetail.errors import DovetailError, MissingExtraError
from dovetail.records import Record

MOST_TOKENS = 1 << 20
"""Most tokens of a vocabulary."""
MOST_BYTES = 1 << 28
"""Bytes of the largest file read."""
_BEGIN, _END, _BYTES = 1, 2, 3
"""Tokens of llama2.c's files that begin and end a text, and the first of the 256 that stand for bytes."""


class Tokenizer(Protocol):
    """Text as tokens, and back."""

    @property
    def begin(self) -> int | None:
        """The token that begins a text; None for none."""

    @property
    def end(self) -> frozenset[int]:
        """The tokens that end one."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without those of its ends."""

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become the replacement character."""


@dataclass(frozen=True)
class PieceTokenizer:
    """Byte pairs as llama2.c has them: the two neighbours whose union scores highest become one, again and again."""

    pieces: tuple[bytes, ...]
    scores: tuple[float, ...]
    begin: int | None = _BEGIN
    end: frozenset[int] = frozenset((_BEGIN, _END))
    _places: dict[bytes, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_places", {piece: at for at, piece in reversed([*enumerate(self.pieces)])})

    def encode(self, text: str) -> list[int]:
        """The tokens of a text behind a space; characters without a token as their bytes."""
        tokens: list[int] = []
        for character in f" {text}" if text else "":
            coded = character.encode()
            known = self._places.get(coded)
            tokens += [_BYTES + byte for byte in coded] if known is None else [known]
        while True:
            pairs = pairwise(tokens)
            unions = [self._places.get(self.pieces[a] + self.pieces[b]) for a, b in pairs]
            scored = ((self.scores[one], -at) for at, one in enumerate(unions) if one is not None)
            best = max(scored, default=None)
            if best is None:
                return tokens
            at = -best[1]
            union = unions[at]
            assert union is not None
            tokens[at : at + 2] = [union]

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, without the space before the first."""
        whole = b"".join(_bytes_of(self.pieces[token]) for token in tokens if token not in self.end)
        return whole.removeprefix(b" ").decode(errors="replace")


def _bytes_of(piece: bytes) -> bytes:
    match = re.fullmatch(rb"<0x([0-9A-Fa-f]{2})>", piece)
    return bytes([int(match[1], 16)]) if match else piece


def _pieces(file: Path, data: bytes) -> PieceTokenizer:
    """The tokenizer of a file of llama2.c: int32 longest piece, then for each token a float32 score, an int32 length
    and its bytes."""
    pieces, scores, at = list[bytes](), list[float](), 4
    while at < len(data):
        if at + 8 > len(data) or len(pieces) >= MOST_TOKENS:
            raise _damaged(file)
        score, length = struct.unpack_from("<fi", data, at)
        at += 8
        if not 0 <= length <= len(data) - at:
            raise _damaged(file)
        pieces.append(data[at : at + length])
        scores.append(score)
        at += length
    if len(pieces) < _BYTES:
        raise _damaged(file)
    return PieceTokenizer(tuple(pieces), tuple(scores))


def _damaged(file: Path) -> DovetailError:
    hint = "give llama2.c's tokenizer .bin, a tokenizer.json of Hugging Face, or a .model of SentencePiece"
    return DovetailError("this is no tokenizer, or it is damaged", where=str(file), hint=hint)


class _HuggingFace(Record):
    """A `tokenizer.json`."""

    inner: Any
    begin: int | None
    end: frozenset[int]

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self.inner.decode(tokens, skip_special_tokens=True))


class _SentencePiece(Record):
    """A `.model` of SentencePiece."""

    inner: Any
    begin: int | None
    end: frozenset[int]

    def encode(self, text: str) -> list[int]:
        return list(self.inner.encode(text))

    def decode(self, tokens: list[int]) -> str:
        return str(self.inner.decode([token for token in tokens if token not in self.end]))


def load_tokenizer(file: Path) -> Tokenizer:
    """Read a tokenizer, recognised by its suffix: .bin of llama2.c, .json of Hugging Face, .model of SentencePiece.

    Raises:
        DovetailError: there is no such file, or it is damaged.
        MissingExtraError: the library that reads it is not installed.
    """
    try:
        if file.stat().st_size > MOST_BYTES:
            raise _damaged(file)
        data = file.read_bytes()
    except OSError as error:
        hint = "check the spelling and the permission to read it"
        raise DovetailError(f"cannot read the tokenizer: {error.strerror}", where=str(file), hint=hint) from error
    if file.suffix == ".json":
        return _hugging_face(file)
    return _sentence_piece(file) if file.suffix == ".model" else _pieces(file, data)


def _hugging_face(file: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer as Library  # type: ignore[import-not-found]
    except ImportError:
        raise MissingExtraError("tokenizers", "language", "reading a tokenizer.json") from None
    try:
        inner = Library.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise _damaged(file) from error
    begin, end = ([inner.token_to_id(name) for name in names] for names in (_BEGINS, _ENDS))
    known = frozenset(token for token in end if token is not None)
    return _HuggingFace(inner, next((token for token in begin if token is not None), None), known)


_BEGINS, _ENDS = ("<s>", "<|begin_of_text|>"), ("</s>", "<|end_of_text|>", "<|endoftext|>")
"""Names of the tokens that begin and end a text in Hugging Face's files."""


def _sentence_piece(file: Path) -> Tokenizer:
    try:
        from sentencepiece import SentencePieceProcessor  # type: ignore[import-not-found]
    except ImportError:
        raise MissingExtraError("sentencepiece", "language", "reading a .model of SentencePiece") from None
    try:
        inner = SentencePieceProcessor(model_file=str(file))
    except Exception as error:  # the library raises RuntimeError and OSError
        raise _damaged(file) from error
    begin = inner.bos_id()
    return _SentencePiece(inner, begin if begin >= 0 else None, frozenset({inner.eos_id()}))
