"""What the plugins for vLLM and SGLang share: layers, their weights, warm-up, version ranges."""
