"""The members of the fleet: which engines there are, how they are reached, watched and tried again."""
