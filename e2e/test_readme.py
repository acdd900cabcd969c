"""The README's Python runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from e2e.servers import Fleet

README = Path(__file__).parents[1] / "README.md"
BEFORE = "from plait.client import Client, SemanticVariable, Text, semantic_function\n"
AFTER = """
with Client("http://127.0.0.1:8000/v1", model="demo") as client, client.session() as session:
    print(write_tests.on(session)("A game", "pass").get())
"""


def test_its_programs_run(fleet: Fleet, tmp_path: Path) -> None:
    plain, semantic = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    for number, program in enumerate((plain, BEFORE + semantic + AFTER)):
        script = tmp_path / f"{number}.py"
        script.write_text(program.replace("http://127.0.0.1:8000", fleet.gateway.url))
        done = subprocess.run([sys.executable, str(script)], check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert "emulated text" in done.stdout
