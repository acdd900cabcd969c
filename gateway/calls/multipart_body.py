"""A form with files, as engines get it: as it came, but for a model under another name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from plait.backends.http.body import Body
from plait.gateway.intake.multipart import FormField
from plait.gateway.intake.uploads import Upload

BYTES_PER_TOKEN: Final = 640
"""Of audio and images, to guess the work. Whisper computes 50 tokens for a second, which in 16 kHz are 32,000 bytes."""


class Form(msgspec.Struct, frozen=True):
    """The bytes of a form, and its field `model`, if it has one."""

    upload: Upload
    model: FormField | None = None

    @property
    def guessed_tokens(self) -> int:
        """About what an engine has to compute."""
        return len(self.upload) // BYTES_PER_TOKEN


class MultipartBody(msgspec.Struct, frozen=True):
    """The body of a call that is a form. With `renamed`, this takes the place of its model."""

    form: Form
    renamed: str | None = None
    withholds_usage: bool = False

    @property
    def original(self) -> bytes:
        """The hash of the form, which tells two requests apart as its bytes would."""
        return self.form.upload.digest

    def for_engine(self, *_call: object, **_agreement: object) -> Body:
        upload, model = self.form.upload, self.form.model
        return upload if self.renamed is None or model is None else _Renamed(upload, model, self.renamed.encode())


class _Renamed(msgspec.Struct, frozen=True):
    """An upload with another value in the place of its model."""

    upload: Upload
    model: FormField
    value: bytes

    @property
    def _ends_at(self) -> int:
        return self.model.at + len(self.model.value.encode())

    def __len__(self) -> int:
        return len(self.upload) - (self._ends_at - self.model.at) + len(self.value)

    def slices(self) -> Iterator[bytes]:
        yield from self.upload.slices(0, self.model.at)
        yield self.value
        yield from self.upload.slices(self._ends_at)
