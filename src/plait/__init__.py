"""Plait: an OpenAI-compatible gateway that places LLM calls by what each engine has cached.

Beside this file are links to the package's four folders, which stand at the top of the repository.
"""
