"""The local schedulers, which decide what an engine computes next, and the parts that they are composed of."""
