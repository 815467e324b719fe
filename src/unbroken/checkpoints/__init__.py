"""Positions in files: read, shown, compared, checked, and taken over from other loaders."""
