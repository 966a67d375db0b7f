"""Read single tensors of safetensors checkpoints, and write tensors and JSON atomically."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...core.files import exists, is_file, kind_of_file, parse_json, short, write_atomically
from ...errors import Checks, message, require
from .hub import local_checkpoint

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MOST_THREADS = 4
"""A thread for each core, but no more than these."""

TORCH_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""torch's dtypes of quantised matrices, by safetensors' names."""


@dataclass(frozen=True)
class TensorInfo:
    """Header entry of one tensor; `dtype` as safetensors writes it ("BF16", "U8")."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # every dtype but BOOL names its width
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8


class CheckpointReader:
    """The tensors of a safetensors checkpoint, read one at a time.

    A shard is opened when one of its tensors is needed; until a tensor is read, only headers are.

    Args:
        path: a directory with ``model.safetensors.index.json`` and its shards or with one
            ``model.safetensors``; a single safetensors file; or the id of a model on the Hub.
        op: name of the operation that error messages start with.

    Raises:
        ValueError: no such path, no checkpoint in it, an unreadable index, or an index that points
            outside of the directory.
    """

    def __init__(self, path: Path | str, op: str) -> None:
        self.path = local_checkpoint(path, op)
        self.op = op
        self._handles: dict[Path, Any] = {}
        self._entries: dict[str, tuple[TensorInfo, int]] = {}
        require(
            exists(self.path),
            op,
            str(self.path),
            need="an existing checkpoint",
            got="no such file or directory",
        )
        self.directory = self.path if self.path.is_dir() else self.path.parent
        self._files = self._from_directory() if self.path.is_dir() else self._from_file(self.path)

    def _from_directory(self) -> dict[str, Path]:
        index_path = self.directory / INDEX_FILE
        if not exists(index_path):
            single = self.directory / SINGLE_FILE
            require(
                exists(single),
                self.op,
                str(self.directory),
                need=f"{INDEX_FILE} or {SINGLE_FILE} in it",
                got="neither",
                remedy="give the directory of a checkpoint in safetensors format",
            )
            return self._from_file(single)
        index = read_json(index_path, self.op)
        weight_map = index.get("weight_map")
        well_formed = isinstance(weight_map, dict) and all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        )
        require(
            well_formed and bool(weight_map),
            self.op,
            str(index_path),
            need='"weight_map" from tensor names to files in the same directory',
            got=type(weight_map).__name__ if not well_formed else "an empty map",
            remedy="download the index again",
        )
        assert isinstance(weight_map, dict)  # for the type checker
        return {name: self.directory / file for name, file in weight_map.items()}

    def _from_file(self, path: Path) -> dict[str, Path]:
        return dict.fromkeys(self._open(path).keys(), path)

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            require(
                is_file(path),
                self.op,
                str(path),
                need="an existing safetensors file",
                got=kind_of_file(path),
                remedy="download the missing shard",
            )
            with self._damage(path):
                self._handles[path] = safe_open(path, framework="pt", device="cpu")
        return self._handles[path]

    @contextmanager
    def _damage(self, path: Path) -> Iterator[None]:
        """Report what safetensors finds wrong with a file as a ValueError that names the file."""
        try:
            yield
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ValueError(
                message(
                    self.op,
                    str(path),
                    "a complete safetensors file",
                    error,
                    "it is truncated or damaged: download it again",
                )
            ) from error

    @functools.cached_property
    def threads(self) -> ThreadPoolExecutor:
        """Threads whose ops start no others: these would wait for each other and for the cores.

        They last as long as the reader, so that they use memory again.
        """
        count = min(_MOST_THREADS, os.cpu_count() or 1)
        mine, started = torch.get_num_threads(), threading.Barrier(count + 1)

        def start() -> None:
            torch.set_num_threads(1)  # of this thread, and of threads to come
            torch.get_num_threads()  # a thread takes the number when it is first needed
            started.wait()

        threads = ThreadPoolExecutor(count, "mxpert-read")
        for _ in range(count):
            threads.submit(start)
        started.wait()
        torch.set_num_threads(mine)
        return threads

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, in the index's order."""
        return self._files.keys()

    @property
    def files(self) -> list[Path]:
        """The checkpoint's safetensors files, sorted."""
        return sorted(set(self._files.values()))

    def config(self) -> dict[str, Any]:
        """The parsed ``config.json`` beside the tensors; a ValueError if it is missing."""
        return read_json(self.directory / CONFIG_FILE, self.op)

    def info(self, name: str) -> TensorInfo:
        """Header entry of one tensor; a ValueError that names file and tensor if it is missing."""
        return self._entry(name)[0]

    def _entry(self, name: str) -> tuple[TensorInfo, int]:
        """Header entry of one tensor, and where its bytes begin in its file."""
        if name in self._entries:
            return self._entries[name]
        file = self._files.get(name)
        if file is None:
            need, got = "this tensor in the checkpoint", f"no such name in {self.path}"
            raise ValueError(message(self.op, name, need, got, "the checkpoint is incomplete"))
        self._entries |= self._header(file)
        found = self._entries.get(name)
        if found is None:
            need, remedy = "the tensor that the index names", "index and shards differ"
            raise ValueError(message(self.op, f"{file}: {name}", need, "none of this name", remedy))
        return found

    def _header(self, file: Path) -> dict[str, tuple[TensorInfo, int]]:
        """The entries of the tensors that the index has in a file, which safetensors checks."""
        self._open(file)
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            stated = json.loads(stream.read(length))
        return {
            name: (
                TensorInfo(name, file, each["dtype"], tuple(each["shape"])),
                8 + length + each["data_offsets"][0],
            )
            for name, each in stated.items()
            if self._files.get(name) == file
        }

    def check_files(self) -> None:
        """Open every file and find every tensor in it; reads headers only.

        Raises:
            ValueError: a missing, truncated or damaged file, or one without a tensor that the
                index puts into it.
        """
        for name in self.names:
            self.info(name)

    def require(
        self, name: str, *, dtypes: Sequence[str], shape: Sequence[int], remedy: str
    ) -> TensorInfo:
        """Header entry of one tensor, checked for dtype and shape."""
        need = Checks(self.op)
        info = self.info(name)
        where = f"{info.file}: {name}"
        need(info.dtype in dtypes, f"{where}.dtype", " or ".join(dtypes), info.dtype, remedy)
        need(info.shape == tuple(shape), f"{where}.shape", list(shape), list(info.shape), remedy)
        return info

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor on the CPU."""
        file = self.info(name).file
        with self._damage(file):
            tensor: torch.Tensor = self._open(file).get_tensor(name)
        return tensor

    def read_into(self, name: str, memory: torch.Tensor) -> None:
        """Read one whole tensor's bytes into contiguous memory of their size, on the CPU.

        Page faults of a mapped file cost more than the copy. It may run in a thread.
        """
        info, begin = self._entry(name)
        left = memory.view(-1).view(torch.uint8).numpy().data
        with self._damage(info.file), open(info.file, "rb", buffering=0) as stream:
            stream.seek(begin)
            while left:
                count = stream.readinto(left)
                if not count:
                    raise OSError(f"it ends within {name}")
                left = left[count:]

    def read_row(self, name: str, row: int) -> torch.Tensor:
        """``tensor[row]`` along the first dimension, without reading the rest."""
        file = self.info(name).file
        with self._damage(file):
            rows: torch.Tensor = self._open(file).get_slice(name)[row : row + 1]
        return rows[0]

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """``tensor[rows]`` along the first dimension, without reading the rest."""
        first = self.read_row(name, rows[0])
        read = first.new_empty((len(rows), *first.shape))
        read[0] = first
        for place, row in enumerate(rows[1:], start=1):
            read[place] = self.read_row(name, row)
        return read


def read_json(path: Path, op: str) -> dict[str, Any]:
    """Parse a JSON object; a ValueError of the library's form if it is missing or malformed."""
    require(is_file(path), op, str(path), need="an existing JSON file", got=kind_of_file(path))
    try:
        parsed = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or no JSON
        raise ValueError(message(op, str(path), "valid JSON", error)) from error
    require(
        isinstance(parsed, dict), op, str(path), need="a JSON object", got=type(parsed).__name__
    )
    assert isinstance(parsed, dict)  # for the type checker
    return parsed


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file atomically.

    Raises:
        OSError: the file cannot be written, for example on a full disk.
    """
    write_atomically(path, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object atomically. Infinities and NaN are refused (they are no JSON)."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def positive_int(config: dict[str, Any], keys: Sequence[str], where: object, op: str) -> int:
    """The first of `keys` that a config holds, which must be a positive integer."""
    found = next((config[key] for key in keys if config.get(key) is not None), None)
    valid = isinstance(found, int) and not isinstance(found, bool) and found > 0
    require(valid, op, f"{where}: {' or '.join(keys)}", need="a positive integer", got=short(found))
    assert isinstance(found, int)  # for the type checker
    return found


def quantization_method(config: dict[str, Any]) -> object:
    """``quantization_config.quant_method`` of a config, for messages; None without one."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        return quantization.get("quant_method")
    return None if quantization is None else f"no object but {short(quantization)}"
