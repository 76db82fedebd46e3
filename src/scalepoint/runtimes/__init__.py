"""Runtimes, one room each: a file is run in a child process, whose crash or hang is a finding of ours."""

from scalepoint.runtimes.process import Status

__all__ = ["Status"]
