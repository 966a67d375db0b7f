"""The other end of engine.py: starts an engine's process and gives it orders."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.serving.backends import BACKENDS

ENGINE = ("-m", "benchmarks.serving.engine")


class EngineError(RuntimeError):
    """An engine that failed, ended, or did not answer in time."""


class EngineProcess:
    """One engine.

    Args:
        spec: what `benchmarks.serving.engine.Engine` takes. folder: for its log and its caches.
        command: the program, for tests.
    """

    def __init__(
        self, spec: dict[str, Any], folder: Path, command: tuple[str, ...] = ENGINE
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self.log = f"{spec['model']} {spec['backend']}", folder / "log.txt"
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        variables = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process itself
            **BACKENDS[spec["backend"]].environment,
        }
        self._process = subprocess.Popen(
            [sys.executable, *command, json.dumps(spec | {"folder": str(folder / "model")})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("ab"),
            text=True,
            env=os.environ | variables,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def order(self, do: str, **arguments: Any) -> None:
        """Give an order; `answer` waits for it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the process has ended, as its answer says

    def answer(self, deadline: float) -> dict[str, Any]:
        """The answer to the oldest order (the first: that imports are done).

        Raises:
            EngineError: the engine failed or ended; `deadline` (of time.monotonic) has passed.
        """
        try:
            line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise EngineError("out of time") from None
        if not line:
            raise EngineError(f"ended: {self.last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text("utf-8", "replace").splitlines()]
        return next((line for line in reversed(lines) if line), "it said nothing")[:300]

    def stop(self) -> None:
        """End the process and wait until its memory is free."""
        self._process.kill()
        self._process.wait()
