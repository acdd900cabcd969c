"""Which sessions may be live: their contexts together have to fit into the engines' KV caches."""
