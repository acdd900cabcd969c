"""In which order the lines of a batch run."""
