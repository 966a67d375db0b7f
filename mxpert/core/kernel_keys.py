"""Keys of kernels in Triton's cache that do not depend on what a process did before.

Triton's key of a kernel contains the hash of each function that it calls, and a hash is computed
once in a process. Releases 3.6 and 3.7 leave the constants of a function's callees out of its hash
if the function is hashed ahead of them. So the key of a kernel depends on which kernels were hashed
before it: a second process that makes its calls in another order would compile again what is in the
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from triton.runtime.jit import JITCallable


def hash_callees_first(kernel: JITCallable) -> None:
    """Hash a kernel, after all functions that it calls.

    Call it ahead of the kernel's first use as a key: its `hash()` is that of the cache key.
    """
    _hash(kernel, set())


def _hash(function: JITCallable, entered: set[int]) -> None:
    """`hash_callees_first`; `entered` has the ids of functions that must not be entered again."""
    if function.hash is not None or id(function) in entered:
        return
    entered.add(id(function))
    for callee in _callees(function):
        _hash(callee, entered)
    _ = function.cache_key  # a property that keeps what it computes


def _callees(function: JITCallable) -> Iterator[JITCallable]:
    """Functions that a function may call: what its names stand for, and attributes of modules."""
    names, values = function.fn.__code__.co_names, function.fn.__globals__
    for name in names:
        value = values.get(name)
        if isinstance(value, ModuleType):
            for attribute in names:
                yield from _functions(getattr(value, attribute, None))
        else:
            yield from _functions(value)


def _functions(value: object) -> Iterator[JITCallable]:
    """The function that a name stands for, or the methods of an aggregate."""
    if isinstance(value, JITCallable):
        yield value
    for attribute in getattr(value, "hash_attrs", ()) if isinstance(value, type) else ():
        yield from _functions(attribute)
