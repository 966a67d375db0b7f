"""The releases of Transformers that mxpert works with."""

from __future__ import annotations

import functools
import re
import warnings

from ..errors import UnsupportedError, message

OLDEST, NEWEST_TESTED, LIMIT = (5, 7), (5, 24), (6, 0)
"""pyproject.toml has the same bounds. Releases between NEWEST_TESTED and LIMIT get a warning."""

_OP = "mxpert.integrations.transformers"


def _shown(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


INSTALL = f"pip install 'transformers>={_shown(OLDEST)},<{LIMIT[0]}'"


def installed() -> str:
    """The version of Transformers that runs."""
    import transformers

    version: str = transformers.__version__
    return version


def check_version() -> None:
    """Refuse an absent Transformers, and a release outside of the range.

    Raises:
        UnsupportedError: the message names the range.
    """
    need = f"transformers >= {_shown(OLDEST)} and < {LIMIT[0]}"
    try:
        version = installed()
    except ImportError as error:
        raise UnsupportedError(message(_OP, "transformers", need, error, INSTALL)) from error
    if not OLDEST <= _release(version) < LIMIT:
        raise UnsupportedError(message(_OP, "transformers", need, version, INSTALL))


@functools.cache
def warn_of_newer() -> None:
    """Warn once where Transformers is newer than the tests are."""
    if _release(installed()) > NEWEST_TESTED:
        warnings.warn(
            f"mxpert is tested with Transformers {_shown(OLDEST)} to {_shown(NEWEST_TESTED)}, this "
            f"is {installed()}: should a load fail, install "
            f"'transformers=={_shown(NEWEST_TESTED)}.*'",
            stacklevel=2,
        )


def _release(version: str) -> tuple[int, int]:
    """Major and minor number.

    >>> _release("5.24.0.dev0")
    (5, 24)
    """
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return numbers[0], numbers[1] if len(numbers) > 1 else 0
