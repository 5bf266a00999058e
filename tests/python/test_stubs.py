"""The type stub `_C.pyi` says what the extension has, no more and no less."""

import ast
import inspect
import re
from pathlib import Path

import dataparallel
from dataparallel import _C

PACKAGE = Path(dataparallel.__file__).parent


def is_public(name):
    return not name.startswith("_")


def of_stub(body):
    """Name → parameters of a function, members of a class."""
    names = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            arguments = [a.arg for a in node.args.posonlyargs + node.args.args]
            names[node.name] = [a for a in arguments if a != "self"]
        elif isinstance(node, ast.ClassDef):
            names[node.name] = of_stub(node.body)
        elif isinstance(node, ast.AnnAssign):
            names[node.target.id] = []
    return {name: said for name, said in names.items() if is_public(name)}


def of_module(holder):
    names = {}
    for name, value in vars(holder).items():
        if not is_public(name):
            continue
        if inspect.isclass(value) or inspect.ismodule(value):
            names[name] = of_module(value)
        elif callable(value):
            signature = re.search(r"\((.*)\) ->", value.__doc__).group(1)
            arguments = re.findall(r"(\w+): ", signature)
            names[name] = [a for a in arguments if a not in ("self", "arg0")]
        else:
            names[name] = []
    return names


def test_the_stub_and_the_extension_have_the_same_names():
    stub = of_stub(ast.parse((PACKAGE / "_C.pyi").read_text()).body)
    module = of_module(_C)
    for error in ("CheckpointError", "LoadStateDictError"):  # set on each object
        assert stub.pop(error) and module.pop(error) == {}
    assert stub == module


def test_the_package_is_typed_and_its_names_are_all_documented():
    assert (PACKAGE / "py.typed").is_file()
    for module in (dataparallel, dataparallel.simulated):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                assert inspect.getdoc(value), name
