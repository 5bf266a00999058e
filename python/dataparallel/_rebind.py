"""Binds what is bound to a module to one of its replicas."""

import functools
import types
from typing import Any


def rebind(value: Any, replicas: dict[Any, Any]) -> Any:
    """Give `value` with the modules in it replaced by their replicas.

    Looks into bound methods, `functools.partial`, functions that close over a
    module, and wrappers of such (`__wrapped__`). `forward` methods that users and
    libraries put on an instance are of these kinds.
    """
    if isinstance(value, types.MethodType):
        bound = rebind(value.__self__, replicas)
        function = rebind(value.__func__, replicas)
        if bound is value.__self__ and function is value.__func__:
            return value
        return types.MethodType(function, bound)
    if type(value) is functools.partial:
        parts = [value.func, *value.args, *value.keywords.values()]
        ours = [rebind(part, replicas) for part in parts]
        if all(a is b for a, b in zip(parts, ours, strict=True)):
            return value
        last = len(value.args) + 1
        named = dict(zip(value.keywords, ours[last:], strict=True))
        result = functools.partial(ours[0], *ours[1:last], **named)
        vars(result).update(vars(value))
        return result
    if isinstance(value, types.FunctionType):
        return _rebind_function(value, replicas)
    try:
        return replicas.get(value, value)
    except TypeError:  # not hashable
        return value


def _rebind_function(function: Any, replicas: dict[Any, Any]) -> Any:
    cells = function.__closure__ or ()
    ours = []
    for cell in cells:
        try:
            content = cell.cell_contents
        except ValueError:  # empty
            ours.append(cell)
            continue
        replaced = content if content is function else rebind(content, replicas)
        ours.append(cell if replaced is content else types.CellType(replaced))
    if all(a is b for a, b in zip(cells, ours, strict=True)):
        return function
    result = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(ours),
    )
    result.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(result, function)
