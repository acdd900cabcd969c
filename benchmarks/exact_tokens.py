"""Whether prompts get the ids of the whole tokenization, in bounded memory: `python -m benchmarks exact_tokens`.

`[--prompts N]` prompts are generated: prose, code, numbers and any Unicode, of which many begin alike and none comes
twice. They are encoded part by part, with caches of 0.5 MB, by six kinds of tokenizer in turn, natively where fastokens
reads their files. Each is compared with what `tokenizers` makes of the whole.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from plait.backends.tokenization.loading import load_tokenizer
from tests.backends.tokenization.prompts import KINDS, Checked, prompts
from tests.backends.tokenization.tokenizer_folders import folder_of
from tests.backends.tokenization.trained import files_of


def main() -> int:
    """Check, and print a line for each kind of tokenizer."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks exact_tokens")
    parser.add_argument("--prompts", type=int, default=100_000, help="in all (default: %(default)s)")
    parser.add_argument("--seed", default="", help="other prompts")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report there")
    arguments = parser.parse_args()
    failed: dict[str, str] = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            checked = Checked(load_tokenizer(str(folder_of(Path(folder), kind, files_of(kind)))))
        begun_s, characters, number = time.monotonic(), 0, -1
        try:
            for number, prompt in enumerate(
                islice(prompts(kind + arguments.seed), -(-arguments.prompts // len(KINDS)))
            ):
                checked.check(prompt, f"tenant {number % 2}")
                characters += len(prompt)
        except AssertionError as error:
            failed[kind] = str(error)
        print(
            f"{'FAILS' if kind in failed else 'holds'}: {kind}: {number + 1} prompts, {characters:,} characters, "
            f"{time.monotonic() - begun_s:.0f} s; {checked.encoder.cache}, {checked.native}"
        )
        sys.stdout.flush()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"prompts": arguments.prompts, "failed": failed}, indent=2))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
