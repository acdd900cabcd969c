"""The live view: the fleet and its calls, as a stream of events and as a page."""
