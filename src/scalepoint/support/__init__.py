"""Shared helpers below every other package: files, documents, text, progress, plugins, CPU and torch state."""
