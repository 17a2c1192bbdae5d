"""Every public name says what it is, and shows it in an example that the tests run as a doctest."""

import ast
import builtins
import doctest
import inspect
from importlib import import_module, util

import pytest

import numbsparse as ns
from numbsparse import distributed
from numbsparse.compat import blocksparse
from numbsparse.kernels.matmul import add_rung

MODULES = [
    *(ns, ns.nn, ns.nn.functional, ns.nn.init, ns.nn.optim, ns.nn.utils, ns.patterns, ns.testing),
    *(blocksparse, distributed),
]
# Those that need no example of their own, and why.
SHOWN_ELSEWHERE = {
    "numbsparse.distributed.RankLost": "what the methods of a `Group` raise",
    "numbsparse.nn.functional.lstm_step_by_step": "the arguments and results of `lstm`",
    "numbsparse.nn.functional.repeated_norm": "the loop of `repeated_product`",
    "numbsparse.testing.Count": "what `count` gives",
    "numbsparse.testing.Race": "what `races` gives",
    "numbsparse.testing.Trace": "what `trace` gives",
}


def public():
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value):
                yield f"{module.__name__}.{name}", value
    yield "numbsparse.kernels.matmul.add_rung", add_rung
    yield "numbsparse.device.device", ns.device.device  # which `ns.device(...)` calls


def for_other_libraries():
    """The same of those that are installed."""
    for library in filter(util.find_spec, ("torch", "jax")):
        module = import_module(f"numbsparse.{library}")
        yield from ((f"{module.__name__}.{name}", getattr(module, name)) for name in module.__all__)


NAMES = dict(public())
ALL = NAMES | dict(for_other_libraries())


@pytest.mark.parametrize("name", ALL)
def test_shows_an_example(name):
    said = ALL[name].__doc__ or ""
    assert said.strip(), "no docstring"
    shown = ">>> " in said
    assert shown != (name in SHOWN_ELSEWHERE), "an example, or a reason for none, but not both"


@pytest.mark.parametrize("name", ALL)
def test_examples_can_be_pasted(name):
    """Each name in them is imported or made there: doctest alone finds those of the module, too."""
    shown = doctest.DocTestParser().get_examples(ALL[name].__doc__ or "")
    used, known = set(), set(dir(builtins))
    for node in ast.walk(ast.parse("".join(example.source for example in shown))):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else known).add(node.id)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
    assert not used - known


def test_the_reasons_are_of_public_names():
    assert SHOWN_ELSEWHERE.keys() <= NAMES.keys()


def methods():
    """Of public classes, by name; what a layer's `forward` does is said by its class."""
    for name, kind in NAMES.items():
        for method, value in inspect.getmembers(kind, inspect.isfunction) * inspect.isclass(kind):
            if method[0] != "_" and method != "forward" and value.__module__[:10] == "numbsparse":
                yield f"{name}.{method}", value


@pytest.mark.parametrize(("name", "method"), list(methods()))
def test_methods_say_what_they_do(name, method):
    assert inspect.getdoc(method), f"{name} has no docstring"
