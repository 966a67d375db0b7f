"""`python -m mxpert`: the `mxpert` command where the script is not on the path."""

from __future__ import annotations

from mxpert.cli.main import app

if __name__ == "__main__":
    # Without a specification, ranks (`bench --expert-parallel`) import this file, as they import
    # the script: so mxpert comes before torch and handles interrupts.
    __spec__ = None
    app(prog_name="mxpert")
