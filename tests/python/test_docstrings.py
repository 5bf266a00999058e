"""The examples in the package's docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import dataparallel
import pytest

MODULES = sorted(
    info.name
    for info in pkgutil.iter_modules(dataparallel.__path__, "dataparallel.")
    if info.name not in ("dataparallel.__main__", "dataparallel._C")
)


@pytest.mark.parametrize("name", ["dataparallel", *MODULES])
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES]
    with_examples = [t for m in modules for t in finder.find(m) if t.examples]
    assert len(with_examples) >= 10
