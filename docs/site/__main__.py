"""Build the site in `build/site`: `python -m docs.site`, with the extra `docs`. A broken link is an error."""

from __future__ import annotations

import shutil
import sys
from typing import Final

from sphinx.cmd.build import build_main

from docs.site.pages import ROOT, staged

SOURCE: Final = ROOT / "build" / "site-source"
SITE: Final = ROOT / "build" / "site"


def main() -> int:
    """The status of Sphinx."""
    for folder in (SOURCE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    for path, text in staged().items():
        (SOURCE / path).parent.mkdir(parents=True, exist_ok=True)
        (SOURCE / path).write_text(text, encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "images", SOURCE / "images")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--conf-dir", str(ROOT / "docs" / "site")]
    return build_main([*options, "--doctree-dir", str(ROOT / "build" / "site-doctrees"), str(SOURCE), str(SITE)])


if __name__ == "__main__":
    sys.exit(main())
