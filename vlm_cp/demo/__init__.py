"""The real thing in small: transformers' own models with few random weights, its own processors, real photos.

What `vlm-cp parity` runs on when it is given no model, and what the tests run on. Nothing here reaches a model hub.
"""
