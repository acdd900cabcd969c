"""Whether prompts get the ids of the whole tokenization, in bounded memory: `python -m benchmarks exact_tokens`.

`[--prompts N]` prompts are generated: prose, code, numbers and any Unicode, of which many begin alike and none comes
twice. They are encoded part by part, with caches of 0.5 MB, by six kinds of tokenizer in turn, natively where fastokens
reads their files. Each is compared with what `tokenizers` makes of the whole.
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from plait.backends.tokenization.loading import load_tokenizer
from plait.lab.simulation.claim import Claim
from tests.backends.tokenization.prompts import KINDS, Checked, prompts
from tests.backends.tokenization.tokenizer_folders import folder_of
from tests.backends.tokenization.trained import files_of


def main() -> int:
    """Check, and print a line for each kind of tokenizer."""
    parser = timed_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=100_000, help="in all (default: %(default)s)")
    parser.add_argument("--seed", default="", help="other prompts")
    arguments = parser.parse_args()
    claims = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            checked = Checked(load_tokenizer(str(folder_of(Path(folder), kind, files_of(kind)))))
        begun_s, characters, number, failed = time.monotonic(), 0, -1, ""
        try:
            for number, prompt in enumerate(
                islice(prompts(kind + arguments.seed), -(-arguments.prompts // len(KINDS)))
            ):
                checked.check(prompt, f"tenant {number % 2}")
                characters += len(prompt)
        except AssertionError as error:
            failed = str(error)
        print(
            f"{kind}: {number + 1} prompts, {characters:,} characters, {time.monotonic() - begun_s:.0f} s; "
            f"{checked.encoder.cache}, {checked.native}",
            flush=True,
        )
        claims.append(Claim(f"{kind}: prompts with other ids", int(bool(failed)), most=0, where=failed))
    return finish("exact_tokens", Report(lines=[], claims=claims), arguments)


if __name__ == "__main__":
    sys.exit(main())
