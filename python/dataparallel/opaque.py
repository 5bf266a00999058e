"""What stands for an object whose class a file names and nobody runs."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Opaque:
    """An object of a class unknown to the library, as the file describes it.

    Nothing of it was run. `dataparallel.opaque_entries` lists those in a value,
    with their paths.

    Attributes:
        class_name: Module and qualified name, as "mylib.Config".
        args: What the class was called with.
        kwargs: The same by keyword.
        state: What the object was restored from, often its `__dict__`.
        items: The (key, value) pairs that were put into it.
        elements: The elements that were appended to it.
    """

    class_name: str
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)
    elements: list[Any] = field(default_factory=list)
