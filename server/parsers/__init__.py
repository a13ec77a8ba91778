"""Parsers of what a model wrote: reasoning, answer text and tool calls, piece by piece."""
