"""What a call costs in time: how long engines compute, what each has to do, and what delay one more call causes."""
