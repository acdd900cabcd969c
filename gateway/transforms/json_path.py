"""JSONPath (RFC 9535) without the parts that could take more than linear time or match a pattern by backtracking.

These parts are refused: the functions `match` and `search`, a second `..`, several selectors in one bracket unless they
are different names, and paths to more than one value within a filter. Without them no value is selected twice.
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

from plait.gateway.transforms.errors import ParameterError, RejectedTextError, excerpt

_MAX_PATH_CHARACTERS = 1000
_MAX_DEPTH = 32
"""Limits the recursion that reads and evaluates a filter: each parenthesis and each joined condition adds a level."""

_NAMED_KEYS = 10


class _Environment(JSONPathEnvironment):
    def setup_function_extensions(self) -> None:
        """Set up the standard functions without those that match regular expressions."""
        super().setup_function_extensions()
        del self.function_extensions["match"], self.function_extensions["search"]


_ENVIRONMENT = _Environment()


@lru_cache(maxsize=256)
def compile_path(path: str) -> JSONPathQuery:
    """The query of a path. Raises `ParameterError` if the path is invalid or uses a refused part."""
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
    """The values that a query finds in a JSON value.

    A query for one value, of names and indexes only, raises `RejectedTextError` when that value does not exist.
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
    """Raise unless each segment's work is linear in the document."""
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
    """A value's members that a path could select next, in words."""
    if isinstance(value, dict):
        names = [f'"{excerpt(name)}"' for name in list(value)[:_NAMED_KEYS]]
        more = " and more" if len(value) > _NAMED_KEYS else ""
        return f"is an object with {', '.join(names)}{more}" if names else "is an empty object"
    if isinstance(value, list):
        return f"is an array of {len(value)}"
    return "is neither an object nor an array"


def _path_error(found: str, expected: str) -> ParameterError:
    return ParameterError("path", found, expected=expected)
