"""A multipart form for engines: the uploaded bytes, in which only the model's name may be replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from plait.backends.http.body import Body
from plait.gateway.guests.forms.multipart import FormField
from plait.gateway.guests.forms.uploads import Upload

BYTES_PER_TOKEN: Final = 640
"""To guess the work for audio and images: Whisper computes 50 tokens a second; a second at 16 kHz has 32,000 bytes."""


class Form(msgspec.Struct, frozen=True):
    upload: Upload
    model: FormField | None = None

    @property
    def guessed_tokens(self) -> int:
        return len(self.upload) // BYTES_PER_TOKEN

    def renamed(self, model: str | None) -> MultipartBody:
        """The body for engines, with another name of its model; None: with its own."""
        return MultipartBody(self, model)


class MultipartBody(msgspec.Struct, frozen=True):
    """The body of a call that is a form. `renamed` replaces the value of its field `model`."""

    form: Form
    renamed: str | None = None
    withholds_usage: bool = False
    own_fields: Mapping[str, object] = {}

    @property
    def original(self) -> bytes:
        """A digest of the form, which may be on disk: `original` serves only to compare requests."""
        return self.form.upload.digest

    def for_engine(self, _to: object) -> Body:
        upload, model = self.form.upload, self.form.model
        return upload if self.renamed is None or model is None else _Renamed(upload, model, self.renamed.encode())


class _Renamed(msgspec.Struct, frozen=True):
    """An upload in which the field `model` has another value."""

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
