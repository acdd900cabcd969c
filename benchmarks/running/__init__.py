"""How every benchmark runs: its options, its tasks in several processes, and its report."""
