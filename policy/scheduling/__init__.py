"""What an engine computes next: the local schedulers and the parts that they are composed of."""
