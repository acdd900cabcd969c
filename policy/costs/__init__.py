"""What a call costs in time: how long engines compute, how much work waits there, what delay one more call causes."""
