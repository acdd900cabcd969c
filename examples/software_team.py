"""A team of engineers as semantic functions: an architect, then for each file a coder, a tester, a reviewer, a reviser.

    plait demo                                          # a gateway with four emulated engines, in another shell
    python examples/software_team.py --model demo

All 25 calls are submitted before the first has run. The gateway starts each call when its inputs have values. It sees
which calls begin with the same text, and which values the program waits for.
"""

from __future__ import annotations

import argparse
from typing import Annotated

from plait.client import Argument, Client, Output, SemanticVariable, Session, Text, semantic_function

FILES = ("board.py", "snake.py", "food.py", "score.py", "keys.py", "main.py")


@semantic_function(max_tokens=120)
def design(task: Text) -> SemanticVariable:
    """
    You are a software architect. Say in a few lines which files a program needs and what each offers to the others.
    The program: {{task}}
    The design: {{plan}}
    """
    raise NotImplementedError


@semantic_function(max_tokens=200)
def write_code(task: Text, plan: Text, file: Text) -> Annotated[SemanticVariable, Output("code", transforms="strip")]:
    """
    You are an expert software engineer. You write one file of a program by a given design.
    The program: {{task}}
    The design: {{plan}}
    Write the file {{file}}: {{code}}
    """
    raise NotImplementedError


@semantic_function(max_tokens=150)
def write_tests(task: Text, plan: Text, file: Text, code: Text) -> SemanticVariable:
    """
    You are an experienced QA engineer. You write tests for one file of a program by a given design.
    The program: {{task}}
    The design: {{plan}}
    The file {{file}}: {{code}}
    Your tests: {{tests}}
    """
    raise NotImplementedError


@semantic_function(max_tokens=80)
def review(plan: Text, others: Argument, file: Text, code: Text) -> SemanticVariable:
    """
    You review one file of a program, knowing all of them.
    The design: {{plan}}
    All files: {{others}}
    The file {{file}}: {{code}}
    Your comments: {{comments}}
    """
    raise NotImplementedError


@semantic_function(max_tokens=200)
def revise(plan: Text, code: Text, comments: Text, tests: Text) -> SemanticVariable:
    """
    You are an expert software engineer. You revise a file by the comments of a reviewer, so that its tests pass.
    The design: {{plan}}
    The file: {{code}}
    The comments: {{comments}}
    The tests: {{tests}}
    The revised file: {{revised}}
    """
    raise NotImplementedError


def write_software(session: Session, task: str) -> dict[str, SemanticVariable]:
    """Submit the calls; returns the variable of each file at once."""
    program = session.variable(task)
    plan = design(program)
    codes = {file: write_code(program, plan, file) for file in FILES}
    files = {}
    for file, code in codes.items():
        tests = write_tests(program, plan, file, code)
        comments = review(plan, list(codes.values()), file, code)
        files[file] = revise(plan, code, comments, tests)
    return files


def main() -> None:
    """Write a program and print it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("task", nargs="?", default="a snake game")
    arguments = parser.parse_args()
    with Client(arguments.base_url, model=arguments.model) as client, client.session() as session:
        files = write_software(session, arguments.task)
        for file, code in zip(files, session.run(*files.values(), objective="latency"), strict=True):
            print(f"--- {file}\n{code}")


if __name__ == "__main__":
    main()
