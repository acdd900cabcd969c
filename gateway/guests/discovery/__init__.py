"""Engines that are found by a DNS name, and the file that `plait serve --save` writes of those that were given."""
