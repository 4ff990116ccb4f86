"""Patch engine: an overlay is probed, planned, applied in a transaction, verified, and can be undone.

Nothing in here knows SGLang.
"""
