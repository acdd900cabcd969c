"""Parts of the benchmark of full fleets."""
