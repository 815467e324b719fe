"""The speed table: what the loader costs beside its peers, and whether that meets the targets.

``python -m benchmarks`` runs it; README.md in this folder says what each row measures.
"""
