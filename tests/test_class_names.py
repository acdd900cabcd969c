"""One name means one thing: no two classes of a package have the same."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tests.source_tree import SHIPPED, path_of, sources, tree_of


@pytest.mark.parametrize("package", SHIPPED)
def test_no_two_classes_of_a_package_have_one_name(package: str) -> None:
    places = defaultdict(list)
    for file in sources(package):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path_of(file))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
