"""The gateway in a new environment: without transformers, then with the extra for tokenizer folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from e2e.demo import demo, refused
from e2e.ports import free_ports
from e2e.release.environment import CheckSize, NewEnvironment
from e2e.release.programs import GREET, LOAD
from e2e.server_process import eventually
from plait.backends.tokenization.chat_template import EMBEDDED_FOLDER

MOST_MB = 160
MOST_MB_WITH_FOLDERS = 350

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> NewEnvironment:
    environment = NewEnvironment.create(tmp_path_factory.mktemp("environment") / "gateway")
    environment.install("gateway")
    return environment


@pytest.fixture(scope="module")
def with_folders(gateway: NewEnvironment) -> NewEnvironment:
    """The same environment with the extra. Tests of the gateway alone stand before those that ask for it."""
    gateway.install("huggingface")
    return gateway


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer folder, as a model has one."""
    shutil.copytree(EMBEDDED_FOLDER, tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_it_is_as_large_as_promised(gateway: NewEnvironment, check_size: CheckSize) -> None:
    assert "transformers" not in gateway.distributions()
    check_size("gateway", gateway, MOST_MB)


def test_the_demo_serves_a_program(gateway: NewEnvironment, tmp_path: Path) -> None:
    port, engine_port, *_ = free_ports(5)
    with demo(port, engine_port, plait=gateway.plait, folder=tmp_path) as process:
        eventually(lambda: process.poll() is not None or not refused(port))
        said = gateway.run("-c", GREET, f"http://127.0.0.1:{port}/v1")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.strip()


def test_a_tokenizer_folder_says_which_extra_it_needs(gateway: NewEnvironment, folder: Path) -> None:
    said = gateway.run("-c", LOAD, folder)
    assert said.returncode == 1
    assert said.stderr.splitlines()[-1].endswith("needs: pip install 'plait[huggingface]'")


def test_with_the_extra_a_folder_gives_the_ids_of_the_same_files_without(
    with_folders: NewEnvironment, folder: Path, check_size: CheckSize
) -> None:
    check_size("gateway with tokenizer folders", with_folders, MOST_MB_WITH_FOLDERS)
    of_folder, embedded = (with_folders.run("-c", LOAD, name) for name in (folder, "embedded"))
    assert of_folder.stderr == ""
    assert of_folder.stdout == embedded.stdout != ""
