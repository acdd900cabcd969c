"""What `forward_passes` times: a model of Llama's shape, its attention, and the iterations."""
