"""How Sphinx makes the site of the pages that `docs.site.pages` has prepared."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "Plait"
author = "The Plait developers"
release = PROJECT["version"]
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
nitpicky = True
myst_heading_anchors = 4
"""Links to headings are checked down to this level. Their names are those that a code host gives them."""
myst_url_schemes = ["https", "http", "mailto"]
suppress_warnings = ["misc.highlighting_failure"]
"""Blocks of JSON in the pages may have an ellipsis; tests/test_documented_blocks.py parses what has none."""
pygments_style = "a11y-high-contrast-light"

html_theme = "pydata_sphinx_theme"
html_title = f"Plait {release}"
html_static_path = ["plait.css"]
html_css_files = ["plait.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "navbar_align": "left",
    "header_links_before_dropdown": 5,
    "footer_start": ["copyright"],
    "footer_end": [],
    "icon_links": [{"name": "Source", "url": PROJECT["urls"]["Source"], "icon": "fa-brands fa-github"}],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars: dict[str, list[str]] = {"index": []}
project_copyright = author
