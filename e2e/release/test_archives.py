"""The archives: what an index and a user find in them."""

from __future__ import annotations

import tarfile
from email import message_from_bytes
from zipfile import ZipFile

from e2e.release.environment import DIST, SDIST, VERSION, WHEEL


def test_a_release_is_a_wheel_and_an_sdist() -> None:
    assert {path.name for path in DIST.iterdir()} == {WHEEL.name, SDIST.name}


def test_the_sdist_has_no_tests_that_lack_what_they_need() -> None:
    with tarfile.open(SDIST) as archive:
        folders = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"client", "gateway", "src"} <= folders
    assert not {"tests", "e2e", "benchmarks"} & folders


def test_the_metadata_say_what_a_user_looks_for() -> None:
    with ZipFile(WHEEL) as archive:
        metadata = message_from_bytes(archive.read(f"plait-{VERSION}.dist-info/METADATA"))
    assert metadata["Version"] == VERSION
    assert metadata["Author"] == "The Plait developers"
    assert {url.partition(",")[0] for url in metadata.get_all("Project-URL", [])} == {
        *("Documentation", "Source", "Issues", "Changelog")
    }
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line.partition(">")[0] for line in needed] == ["httpx", "msgspec"]
