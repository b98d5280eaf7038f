"""What trace, cluster and plan files have in common: frozen values with a JSON text each.

Unknown fields, wrong types and damaged files are refused with the file and the field named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipstream.durable import write_text_atomic
from slipstream.errors import SlipstreamError

MAX_FILE_BYTES = 64 * 2**20
MAX_SECONDS = 1e6
"""The longest time in a file of measurements, eleven days; sums over what is longer overflow."""

Measured = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
"""Seconds that somebody has measured or stated."""


class Frozen(BaseModel):
    """A part of a document: cannot be changed, has no unknown fields, converts no types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Document(Frozen):
    """A value with a file format of its own.

    Subclasses say what they are called in errors (`_kind`) and which error they raise (`_error`).
    Built in place, a wrong field raises pydantic's ValidationError; read from text, `_error`.
    """

    _kind: ClassVar[str]
    _error: ClassVar[type[SlipstreamError]]

    def to_json(self) -> str:
        """The document as the text of its file."""
        return self.model_dump_json(indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Writes the file whole, over an old one: a reader finds either text, never a part.

        Raises the document's own error when that fails.
        """
        try:
            write_text_atomic(path, self.to_json())
        except OSError as error:
            raise self._error(
                f"The {self._kind} file {path} cannot be written: {error}."
            ) from error

    @classmethod
    def from_json(cls, text: str, where: str = "") -> Self:
        """Reads the text of a file; `where` names it in errors.

        Raises the document's own error, which names the file and the first field that is wrong.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "the document"
            wrong = first["msg"].removeprefix("Value error, ")
            raise cls._error(
                f"{where or 'the ' + cls._kind} is not a {cls._kind} that this version reads: "
                f"{field}: {wrong}."
            ) from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file. Raises the document's own error when it is missing, too large, damaged."""
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise cls._error(f"{path} is larger than any {cls._kind} ({MAX_FILE_BYTES} bytes).")
            return cls.from_json(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise cls._error(f"The {cls._kind} file {path} cannot be read: {error}.") from error
