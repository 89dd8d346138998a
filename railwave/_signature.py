"""One list of arguments for two functions."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def with_arguments_of(
    other: Callable[_Arguments, Any],
) -> Callable[[Callable[..., _Result]], Callable[_Arguments, _Result]]:
    """Give a function the arguments of another, for type checkers and `help`; it passes them on.

    Example:
        >>> @with_arguments_of(pow)
        ... def logged(*args, **kwargs) -> int:
        ...     return pow(*args, **kwargs)
        >>> list(signature(logged).parameters)
        ['base', 'exp', 'mod']
    """

    def decorate(function: Callable[..., _Result]) -> Callable[_Arguments, _Result]:
        result = signature(function).return_annotation
        shown = signature(other).replace(return_annotation=result)
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return decorate
