"""The host's fast path: cached geometry, launches and replays of calls."""
