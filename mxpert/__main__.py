"""`python -m mxpert`: the `mxpert` command where the script is not on the path."""

from __future__ import annotations

from .cli.main import app

if __name__ == "__main__":
    app(prog_name="mxpert")
