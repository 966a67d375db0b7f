"""The layers of one engine's model: what a refused reload must not leave behind."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from ...moe.weights import MoEWeights
from .layer_weights import poison


class Model:
    """The prepared weights of the layers that one engine serves in this process.

    owner: the engine's configuration, which every layer of it shares.
    """

    def __init__(self, owner: object) -> None:
        self._owner = owner  # keeps its id from being used again
        self._layers: weakref.WeakSet[MoEWeights] = weakref.WeakSet()

    def add(self, weights: MoEWeights) -> None:
        """Count a layer as one of this model's."""
        self._layers.add(weights)

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Poison every layer if the block raises: some have new weights then, others old ones."""
        try:
            yield
        except Exception:
            for weights in self._layers:
                poison(weights)
            raise


_models: weakref.WeakValueDictionary[int, Model] = weakref.WeakValueDictionary()


def model_of(owner: object) -> Model:
    """The model of an engine; its layers keep it alive."""
    found = _models.get(id(owner))
    if found is None:
        found = _models[id(owner)] = Model(owner)
    return found
