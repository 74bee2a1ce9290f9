"""Parts without a strategy that several plugins need: loss, recomputation, parameters, device streams.

Public, and outside the hour that reading core takes.
"""
