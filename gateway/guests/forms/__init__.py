"""Calls whose bodies are forms with files, such as audio to transcribe."""
