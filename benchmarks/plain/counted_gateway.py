"""`plait` with a count of what it calls: `python -m benchmarks.plain.counted_gateway FILE serve ...`.

SIGUSR1 begins a count, SIGUSR2 ends it and adds a line to FILE: the functions of Plait that the event loop's thread
`called` in between, in their order, each as its file and its name, and how many `modules` of Plait are imported.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import CodeType, FrameType

import plait
from plait.backends.tokenization.checked_encoder import PROVING_PROMPTS
from plait.backends.tokenization.file_tokenizer import shipped_tokenizer
from plait.gateway.cli import main

_PACKAGE = str(Path(next(iter(plait.__path__))).resolve().parent)


def run() -> None:
    """Take the file's name from the command line, and be `plait` with the rest of it."""
    file, roots = Path(sys.argv.pop(1)), _roots()
    shipped_tokenizer().encoder.equal = PROVING_PROMPTS  # as in a gateway that has run for a while
    called: list[CodeType] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            called.append(frame.f_code)

    def begin(_signal: int, _frame: FrameType | None) -> None:
        called.clear()
        file.with_suffix(".begun").touch()
        sys.setprofile(note)

    def end(_signal: int, _frame: FrameType | None) -> None:
        sys.setprofile(None)
        ours = [[str(path.relative_to(roots)), code.co_qualname] for code in called if (path := _ours(code, roots))]
        with file.open("a") as lines:
            modules = sum(name.partition(".")[0] == "plait" for name in sys.modules)
            lines.write(json.dumps({"called": ours, "modules": modules}) + "\n")

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    main()


def _roots() -> Path:
    """The folder that the package's folders are in: links lead there from the package's own."""
    import plait.gateway  # noqa: PLC0415 - for its place

    return Path(plait.gateway.__path__[0]).resolve().parent


def _ours(code: CodeType, root: Path) -> Path | None:
    path = Path(code.co_filename)
    if not path.is_absolute():
        return None
    path = path.resolve()
    return (
        path
        if path.is_relative_to(root) and path.relative_to(root).parts[0] in {"gateway", "policy", "backends"}
        else None
    )


if __name__ == "__main__":
    run()
