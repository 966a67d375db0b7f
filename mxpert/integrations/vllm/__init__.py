"""vLLM plugin: quantised experts of a served model run on mxpert's kernels.

    vllm serve openai/gpt-oss-20b --additional-config '{"mxpert": "a16w4"}'

vLLM finds `register` through the entry point group ``vllm.general_plugins``. Registration adds a
check of the engine's options. Where they ask for mxpert, the check puts a light class in front of
each quantisation config that can hold such experts. Without the option vLLM keeps its own.
"""

from ._plugin import PROBE, register, serve
from .options import NAMES

__all__ = ["NAMES", "PROBE", "register", "serve"]
