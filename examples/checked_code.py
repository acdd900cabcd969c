"""Code that is repaired if it does not compile: native functions between two calls, and a condition on a result.

    plait demo                                          # a gateway with four emulated engines, in another shell
    python examples/checked_code.py --model demo

The program is one request. The client checks the code as soon as it is there. The gateway knows before the first call
runs that somebody waits for what comes after the check. If the code compiles, the repair is skipped.
"""

from __future__ import annotations

import argparse
import ast
import re
from contextlib import suppress

from plait.client import Client, SemanticVariable, Session, SkippedError, Text, native_function, semantic_function


@semantic_function(max_tokens=200)
def write_code(task: Text) -> SemanticVariable:
    """
    You are an expert Python programmer. Write one module.
    The task: {{task}}
    The module: {{module}}
    """
    raise NotImplementedError


@native_function
def extract(answer: str) -> str:
    """The content of the first code block, or the whole answer if it has none."""
    block = re.search(r"^```\w*\n(.*?)^```", answer, re.DOTALL | re.MULTILINE)
    return block[1] if block else answer


@native_function
def check(code: str) -> str:
    """`ok`, or what is wrong with the code."""
    try:
        ast.parse(code)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    return "ok"


@semantic_function(max_tokens=200)
def repair(code: Text, problem: Text) -> SemanticVariable:
    """
    Repair a Python module that does not compile.
    The module: {{code}}
    The compiler says: {{problem}}
    The repaired module: {{repaired}}
    """
    raise NotImplementedError


def checked_code(session: Session, task: str) -> tuple[str, str]:
    """The code, repaired if it has to be, and what the check of its first version said."""
    code = extract(write_code.on(session)(task))
    report = check(code)
    repaired = extract(repair.when(report.differs("ok"))(code, report))
    with suppress(SkippedError):
        session.run(code, report, repaired, objective="latency")
    return repaired.value or code.get(), report.get()


def main() -> None:
    """Write a module and print it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("task", nargs="?", default="a chess clock")
    arguments = parser.parse_args()
    with Client(arguments.base_url, model=arguments.model) as client, client.session() as session:
        code, report = checked_code(session, arguments.task)
        print(f"check: {report}\n{code}")


if __name__ == "__main__":
    main()
