"""What servers import and load at their start. The process that is forked for each of them has done so."""

import encodings.idna  # noqa: F401
import importlib.resources.readers  # noqa: F401

import uvicorn.lifespan.on
import uvicorn.loops.uvloop  # noqa: F401
import uvloop  # noqa: F401

from plait.backends.tokenization.file_tokenizer import shipped_tokenizer

LOADED = shipped_tokenizer(), shipped_tokenizer().encoder, shipped_tokenizer().fingerprint
