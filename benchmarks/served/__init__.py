"""vLLM engines under load: models, backends, engine processes, gate, rows."""

import harness  # noqa: F401 - finds the library
