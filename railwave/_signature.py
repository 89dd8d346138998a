"""One list of arguments, and one docstring, for two functions."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

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


def as_method(
    method: Callable[Concatenate[Any, _Arguments], _Result],
) -> Callable[[Callable[..., _Result]], Callable[_Arguments, _Result]]:
    """Give a function the arguments, the result and the docstring of a method, which it calls.

    Its own docstring, a line, comes first.

    Example:
        >>> @as_method(str.join)
        ... def joined(*args, **kwargs):
        ...     "Join with a comma."
        ...     return ",".join(*args, **kwargs)
        >>> list(signature(joined).parameters), joined.__doc__.splitlines()[0]
        (['iterable'], 'Join with a comma.')
    """

    def decorate(function: Callable[..., _Result]) -> Callable[_Arguments, _Result]:
        whole = signature(method)
        own = [p for p in list(whole.parameters.values())[1:] if p.kind != Parameter.VAR_POSITIONAL]
        function.__signature__ = whole.replace(parameters=own)  # type: ignore[attr-defined]
        function.__doc__ = f"{function.__doc__}\n\n        {method.__doc__}"
        return function

    return decorate
