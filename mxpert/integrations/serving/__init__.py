"""Shared by the plugins for vLLM and SGLang: layers, their weights, warm-up, version ranges."""
