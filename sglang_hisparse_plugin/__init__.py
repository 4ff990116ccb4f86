"""HiSparse for SGLang, made correct and fast on the release you run.

Importing this package imports neither torch nor SGLang.
"""

__version__ = "0.1.0"
