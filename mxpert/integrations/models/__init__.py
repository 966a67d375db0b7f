"""Transformers models in memory: experts found, converted, evaluated.

Import the module that you need. None of them imports Transformers before a model does, so
`import mxpert` stays light.
"""
