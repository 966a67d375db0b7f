"""`mxpert doctor`: `command` prints what the other modules find out."""
