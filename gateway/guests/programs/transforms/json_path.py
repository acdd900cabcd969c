"""JSONPath (RFC 9535) without the parts that could take more than linear time or match a pattern by backtracking.

Plait refuses the functions `match` and `search`, a second `..`, several selectors in one bracket unless they are
different names, and a path within a filter that may lead to more than one value. So a query selects no value twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from jsonpath_rfc9535 import JSONPathEnvironment, JSONPathError, JSONPathNode, JSONPathQuery
from jsonpath_rfc9535.filter_expressions import (
    ComparisonExpression,
    Expression,
    FilterExpression,
    FilterQuery,
    FunctionExtension,
    LogicalExpression,
    PrefixExpression,
)
from jsonpath_rfc9535.segments import JSONPathRecursiveDescentSegment, JSONPathSegment
from jsonpath_rfc9535.selectors import FilterSelector, NameSelector

from plait.gateway.guests.programs.transforms.errors import ParameterError, RejectedTextError, excerpt

_MAX_PATH_CHARACTERS = 1000
_MAX_DEPTH = 32
"""Limits the recursion that reads and evaluates a filter. Each parenthesis and each `&&` or `||` adds a level."""

_NAMED_KEYS = 10


class _Environment(JSONPathEnvironment):
    def setup_function_extensions(self) -> None:
        """Set up the standard functions, except those that match regular expressions."""
        super().setup_function_extensions()
        del self.function_extensions["match"], self.function_extensions["search"]


_ENVIRONMENT = _Environment()


@lru_cache(maxsize=256)
def compile_path(path: str) -> JSONPathQuery:
    """Compile a path. Raises `ParameterError` if the path is invalid or uses a part that Plait refuses."""
    if len(path) > _MAX_PATH_CHARACTERS:
        raise _path_error(f"a path of {len(path):,} characters", f"at most {_MAX_PATH_CHARACTERS:,}")
    if path.count("(") > _MAX_DEPTH:
        raise _path_error("a path of too many parentheses", f"at most {_MAX_DEPTH}")
    try:
        query = _ENVIRONMENT.compile(path)
    except JSONPathError as error:
        raise _path_error(f"an invalid JSONPath ({error})", "one as RFC 9535 defines, such as $.items[0]") from None
    except (RecursionError, OverflowError) as error:
        raise _path_error(f"a JSONPath that cannot be read ({error})", "a simpler one") from None
    _check_segments(query.segments)
    return query


def select(query: JSONPathQuery, document: object) -> list[object]:
    """The values that a query selects in a JSON value.

    Raises `RejectedTextError` if a query of only names and indexes, which selects one value, finds none.
    """
    nodes = [JSONPathNode(value=document, location=(), parent=None, root=document)]  # type: ignore[arg-type]
    for segment in query.segments:
        before = nodes
        try:
            nodes = list(segment.resolve(before))
        except JSONPathError as error:
            raise RejectedTextError(f"the path cannot be followed: {error}") from None
        if not nodes and query.singular_query():
            raise RejectedTextError(f"the path ends at {excerpt(before[0].path())}, which {_holds(before[0].value)}")
    return [node.value for node in nodes]


def _check_segments(segments: tuple[JSONPathSegment, ...]) -> None:
    """Raise `ParameterError` unless each segment takes linear time in the document's size."""
    if sum(isinstance(segment, JSONPathRecursiveDescentSegment) for segment in segments) > 1:
        raise _path_error("a second ..", "one at most")
    for segment in segments:
        names = {selector.name for selector in segment.selectors if isinstance(selector, NameSelector)}
        if len(names) < len(segment.selectors) and len(segment.selectors) > 1:
            raise _path_error(
                f"{segment}, where several selectors may find the same", "different names, or one selector"
            )
        for selector in segment.selectors:
            if isinstance(selector, FilterSelector):
                _check_expression(selector.expression, 0)


def _check_expression(expression: Expression, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise _path_error("a filter of too many conditions", f"at most {_MAX_DEPTH}")
    if isinstance(expression, FilterQuery) and not expression.query.singular_query():
        raise _path_error(f"{expression} in a filter", "a path of names and indexes, to one value at most")
    for operand in _operands(expression):
        _check_expression(operand, depth + 1)


def _operands(expression: Expression) -> Iterator[Expression]:
    match expression:
        case FilterExpression():
            yield expression.expression
        case PrefixExpression():
            yield expression.right
        case LogicalExpression() | ComparisonExpression():
            yield from (expression.left, expression.right)
        case FunctionExtension():
            yield from expression.args


def _holds(value: object) -> str:
    """The members of a value that a path could select, in words for an error message."""
    if isinstance(value, dict):
        names = [f'"{excerpt(name)}"' for name in list(value)[:_NAMED_KEYS]]
        more = " and more" if len(value) > _NAMED_KEYS else ""
        return f"is an object with {', '.join(names)}{more}" if names else "is an empty object"
    if isinstance(value, list):
        return f"is an array of {len(value)}"
    return "is neither an object nor an array"


def _path_error(found: str, expected: str) -> ParameterError:
    return ParameterError("path", found, expected=expected)
