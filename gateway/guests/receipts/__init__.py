"""Receipts: for each call the engines that were compared, what the call waited for, and how it ended."""
