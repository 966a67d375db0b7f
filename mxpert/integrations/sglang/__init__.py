"""SGLang plugin: quantised experts of a served model run on mxpert's kernels.

    python -m sglang.launch_server --model-path openai/gpt-oss-20b --moe-runner-backend mxpert

SGLang finds `register` through the entry point group ``sglang.srt.plugins``. Without one of the
backends in `BACKENDS` every layer gets the method that SGLang's own config gives it.
"""

from ._plugin import BACKENDS, BELOW, OLDEST, OP, register

__all__ = ["BACKENDS", "BELOW", "OLDEST", "OP", "register"]
